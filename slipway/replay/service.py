"""Sends a logged request to a running service again, with the same bytes."""

import json
import secrets
import urllib.error
import urllib.request
from typing import Any

import numpy as np

from slipway.artifacts.bundle import SCORE_NAME, Bundle, LoadedBundle
from slipway.artifacts.certificate import Execution
from slipway.artifacts.predictions import prediction_columns
from slipway.replay.comparison import Answer
from slipway.system.errors import ParityError, UnavailableError
from slipway.traffic.request_log import REPLAYED, LoggedRequest

_TIMEOUT_S = 30.0
_SHOWN = 300


def served_execution(url: str, bundle: LoadedBundle) -> Execution:
    """Return how the service runs; UnavailableError without an answer or for another model."""
    card = _fetch(urllib.request.Request(f"{url.rstrip('/')}/model"))
    try:
        version, actual = (
            card["model_version"],
            Execution.model_validate(card["execution"]["actual"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnavailableError(
            f"{url}/model does not describe its model ({error!r}); is it a service of this Slipway?"
        ) from error
    if version != bundle.version:
        raise UnavailableError(
            f"the service at {url} runs model {version}, but {bundle.version} answered the request"
        )
    return actual


def request_again(url: str, request: LoggedRequest, manifest: Bundle) -> Answer:
    """Return the service's answer now; ParityError if it refuses or answers in another form."""
    headers = {
        "content-type": request.content_type,
        "x-request-id": REPLAYED + secrets.token_hex(8),
    }
    try:
        answer = _fetch(
            urllib.request.Request(
                f"{url.rstrip('/')}/predict", request.payload, headers, method="POST"
            )
        )
    except _RefusedError as error:
        raise ParityError(f"the service refused the request: {error}") from error
    return outputs_of(answer.get("predictions", []) if request.is_list else [answer], manifest)


def outputs_of(answers: list[dict[str, Any]], manifest: Bundle) -> Answer:
    """Return the outputs in answers; ParityError if fields are missing or contradict each other."""
    labels, calibration = manifest.output.labels, manifest.calibration
    num_columns = (len(labels) or 1) + 1  # the last one is the OOD score
    try:
        rows = [prediction_columns(answer, labels, calibration) for answer in answers]
    except (KeyError, TypeError, ValueError) as error:
        raise ParityError(
            f"the answer {str(answers)[:_SHOWN]} is not an answer of this bundle ({error!r})"
        ) from error
    columns = np.array(rows, np.float32).reshape(len(rows), num_columns)
    return {manifest.output.kind: columns[:, :-1], SCORE_NAME: columns[:, -1]}


class _RefusedError(UnavailableError):
    """The service answered with an error status."""


def _fetch(request: urllib.request.Request) -> dict[str, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            content = json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise _RefusedError(
            f"{error.code} {error.read(_SHOWN).decode(errors='replace')}"
        ) from error
    except (OSError, ValueError) as error:  # no connection; or no URL, or no JSON
        raise UnavailableError(
            f"{request.full_url} gave no answer ({error}); start it, or correct the address"
        ) from error
    if not isinstance(content, dict):
        raise UnavailableError(
            f"{request.full_url} answered {type(content).__name__}, expected an object"
        )
    return content
