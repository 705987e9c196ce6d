"""All of them together."""

from serving.endpoints import describing, health, predicting, v2
from serving.inference import Inference
from serving.routes import Routes


def all_routes(inference: Inference) -> Routes:
    """Every path that leads anywhere, by path."""
    return describing.routes(inference) | predicting.routes(inference) | health.routes(inference) | v2.routes(inference)
