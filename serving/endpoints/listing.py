"""All of them together."""

from serving.endpoints import describing, explaining, health, page, predicting, status
from serving.inference import Inference
from serving.routes import Routes


def all_routes(inference: Inference) -> Routes:
    """Every path that leads anywhere, by path."""
    routes = predicting.routes(inference) | explaining.routes(inference) | describing.routes(inference) | health.routes(inference)
    asking = {path for path, route in routes.items() if "POST" in route.methods} | {"other"}
    return page.routes(inference) | routes | status.routes(inference, asking)
