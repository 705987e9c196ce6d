"""The running service asked once more, over HTTP, with the very bytes that were kept."""

import json
import secrets
import urllib.error
import urllib.request
from typing import Any

import numpy as np

from slipway.artifacts.bundle import SCORE_NAME, Bundle, LoadedBundle
from slipway.artifacts.certificate import Execution
from slipway.replay.comparison import Answer
from slipway.system.errors import ParityError, UnavailableError
from slipway.traffic.request_log import REPLAYED, LoggedRequest

_TIMEOUT_S = 30.0
_SHOWN = 300


def served_execution(url: str, bundle: LoadedBundle) -> Execution:
    """How the service at `url` runs; UnavailableError if it does not answer, or serves another model."""
    card = _ask(urllib.request.Request(f"{url.rstrip('/')}/model"))
    try:
        version, actual = (
            card["model_version"],
            Execution.model_validate(card["execution"]["actual"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnavailableError(
            f"{url}/model does not say what runs there ({error!r}); is it a service of this Slipway?"
        ) from error
    if version != bundle.version:
        raise UnavailableError(
            f"the service at {url} runs model {version}, the request was answered by {bundle.version}"
        )
    return actual


def ask_again(url: str, request: LoggedRequest, manifest: Bundle) -> Answer:
    """What the service answers now; ParityError if it refuses what it answered before, or answers in another form."""
    headers = {
        "content-type": request.content_type,
        "x-request-id": REPLAYED + secrets.token_hex(8),
    }
    try:
        answer = _ask(
            urllib.request.Request(
                f"{url.rstrip('/')}/predict", request.payload, headers, method="POST"
            )
        )
    except _RefusedError as error:
        raise ParityError(f"it refused the request: {error}") from error
    return outputs_of(answer.get("predictions", []) if request.is_list else [answer], manifest)


def outputs_of(answers: list[dict[str, Any]], manifest: Bundle) -> Answer:
    """The numbers in answers as callers get them; ParityError if they have another form, or do not go together."""
    try:
        rows = [_row(answer, manifest) for answer in answers]
        scores = [_score(answer, manifest) for answer in answers]
    except (KeyError, TypeError, ValueError) as error:
        raise ParityError(
            f"it answered {str(answers)[:_SHOWN]}, which is not of this bundle's form ({error!r})"
        ) from error
    return {
        manifest.output.kind: np.array(rows, np.float32).reshape(len(rows), -1),
        SCORE_NAME: np.array(scores, np.float32),
    }


def _row(answer: dict[str, Any], manifest: Bundle) -> list[float]:
    labels, calibration = manifest.output.labels, manifest.calibration
    if not labels:
        interval = calibration.interval(answer["value"])
        if answer["interval"] != (interval and list(interval)):
            raise ValueError("value and interval do not go together")
        return [float(answer["value"])]
    numbers = [float(answer["probabilities"][label]) for label in labels]
    if len(answer["probabilities"]) != len(numbers) or answer["probabilities"][
        answer["label"]
    ] != max(numbers):
        raise ValueError("label and probabilities do not go together")
    inside = calibration.prediction_sets(np.array(numbers, np.float32))
    if sorted(answer["prediction_set"]) != sorted(
        label for label, is_inside in zip(labels, inside, strict=True) if is_inside
    ):
        raise ValueError("probabilities and prediction_set do not go together")
    return numbers


def _score(answer: dict[str, Any], manifest: Bundle) -> np.float32:
    score = np.float32(answer["outlier_score"])
    if answer["is_outlier"] is not bool(manifest.calibration.is_outlier(score)):
        raise ValueError("outlier_score and is_outlier do not go together")
    return score


class _RefusedError(UnavailableError):
    """An answer with an error in it."""


def _ask(request: urllib.request.Request) -> dict[str, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            content = json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise _RefusedError(
            f"{error.code} {error.read(_SHOWN).decode(errors='replace')}"
        ) from error
    except (OSError, ValueError) as error:  # no connection; or no URL, or no JSON
        raise UnavailableError(f"{request.full_url} gave no answer ({error})") from error
    if not isinstance(content, dict):
        raise UnavailableError(
            f"{request.full_url} answered {type(content).__name__}, expected an object"
        )
    return content
