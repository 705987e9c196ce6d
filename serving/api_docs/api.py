"""The method that BentoML describes and its clients call: `predict(image=...)`, or `predict(rows=[...])` for a table.

Which of the two is decided by the manifest of the bundle, when the service's module is imported; no model is loaded for that. HTTP
itself is answered by the front, so this runs only behind another service (`bentoml.depends`).
"""

import json
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import bentoml
from bentoml.exceptions import BentoMLException
from bentoml.validators import ContentType
from pydantic import WithJsonSchema

from serving.api_docs.description import row_schema
from serving.http.responses import Refusal
from serving.requests.payload import Payload
from slipway.artifacts.bundle import load_bundle
from slipway.inputs.columns import ColumnContract
from slipway.system.errors import SlipwayError

Predict = Callable[[Payload, str], Awaitable[dict[str, Any]]]  # a payload and the id of its request


def read_columns(bundle: Path) -> ColumnContract | None:
    """The columns of a table's bundle. None for images, and where there is no bundle: loading it says why."""
    with suppress(SlipwayError):
        contract = load_bundle(bundle).manifest.input
        return contract if isinstance(contract, ColumnContract) else None
    return None


def predict_method(columns: ColumnContract | None, predict: Predict) -> Any:
    """BentoML's method; `predict` answers to a payload, as the front reads it from a request."""
    return bentoml.api(_of_rows(columns, predict) if columns else _of_image(predict))


def summary(columns: ColumnContract | None) -> str:
    """The text above the description of the API."""
    if columns:
        what = 'Send one row to /predict as a JSON object, or several as {"rows": [...]}, which are answered by {"predictions": [...]}.'
        what += (
            f" Columns that are ignored: {', '.join(columns.ignored)}." if columns.ignored else ""
        )
    else:
        what = 'Send one image to /predict, or several as files of a form, which are answered by {"predictions": [...]}.'
    return (
        what
        + " Errors have one shape: {error: {code, message, field, request_id}}. See docs/serving.md."
    )


def _of_image(predict_payload: Predict) -> Any:
    async def predict(self: Any, image: Annotated[Path, ContentType("image/*")]) -> dict[str, Any]:
        """For one image: `label`, `probabilities`, `prediction_set`, or `value`, `interval`; and `outlier_score`, `is_outlier`."""
        return await _answer(predict_payload, Payload("images", (image.read_bytes(),)))

    return predict


def _of_rows(columns: ColumnContract, predict_payload: Predict) -> Any:
    schema = WithJsonSchema({"type": "array", "items": row_schema(columns), "minItems": 1})

    async def predict(self: Any, rows: Annotated[list[dict[str, Any]], schema]) -> dict[str, Any]:
        """For each row: `label`, `probabilities`, `prediction_set`, or `value`, `interval`; and `outlier_score`, `is_outlier`."""
        return await _answer(
            predict_payload, Payload("columns", (json.dumps({"rows": rows}).encode(),))
        )

    return predict


async def _answer(predict: Predict, payload: Payload) -> dict[str, Any]:
    request_id = secrets.token_hex(8)
    try:
        return await predict(payload, request_id)
    except Refusal as refusal:
        raise BentoMLException(refusal.message, error_code=HTTPStatus(refusal.status)) from None
