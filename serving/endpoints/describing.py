"""What is served: the model card."""

from serving.api_docs.schemas import ANYTHING
from serving.http.responses import Response, json_response
from serving.http.routes import READING, Operation, Request, Route, Routes, always
from serving.http.server_paths import without_server_paths
from serving.worker import ModelWorker

# What says why; the rest of the card is the model's own: labels, columns and categories may look like paths.
_REASONS = (
    "execution",
    "choice",
    "left_out",
    "certificate",
    "target_certificate",
    "lineage",
    "rebuild",
    "rolled_out",
)
_MODEL = Operation(
    "The model card, with the certificate.",
    answers={"application/json": ANYTHING},
    errors=("not_ready",),
)


def routes(worker: ModelWorker) -> Routes:
    """`/model`."""

    async def model(request: Request) -> Response:
        card = worker.card()
        return json_response(
            card
            | {
                part: without_server_paths(card[part], worker.settings)
                for part in _REASONS
                if part in card
            }
        )

    return {"/model": Route(READING, model, "caller", always(_MODEL))}
