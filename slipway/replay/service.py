"""Sends a logged request to a running service again, with the same bytes."""

import json
import secrets
import urllib.error
import urllib.request
from typing import Any

import numpy as np

from slipway.artifacts.bundle import SCORE_NAME, Bundle, LoadedBundle
from slipway.artifacts.certificate import Execution
from slipway.artifacts.uncertainty import decided_classes
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
    """Extract the outputs of answers. ParityError if fields are missing or inconsistent."""
    try:
        rows = [_row(answer, manifest) for answer in answers]
        scores = [_score(answer, manifest) for answer in answers]
    except (KeyError, TypeError, ValueError) as error:
        raise ParityError(
            f"the answer {str(answers)[:_SHOWN]} is not an answer of this bundle ({error!r})"
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
            raise ValueError(
                f"value and interval are inconsistent: {answer['value']} has {interval}"
            )
        return [float(answer["value"])]
    numbers = [float(answer["probabilities"][label]) for label in labels]
    if len(answer["probabilities"]) != len(numbers):
        raise ValueError(
            f"the answer has probabilities of {len(answer['probabilities'])} labels, "
            f"the model has {len(numbers)} labels"
        )
    if calibration.decision is not None:
        shares = np.array(numbers, np.float32)
        if answer["label"] != labels[int(decided_classes(shares, calibration.thresholds))]:
            raise ValueError("label and probabilities are inconsistent")
    elif calibration.thresholds is not None:
        given = calibration.given(np.array(numbers, np.float32))
        if answer["labels"] != [name for name, own in zip(labels, given, strict=True) if own]:
            raise ValueError("labels and probabilities are inconsistent")
    elif answer["probabilities"][answer["label"]] != max(numbers):
        raise ValueError("label and probabilities are inconsistent")
    inside = calibration.prediction_sets(np.array(numbers, np.float32))
    if sorted(answer["prediction_set"]) != sorted(
        label for label, is_inside in zip(labels, inside, strict=True) if is_inside
    ):
        raise ValueError("probabilities and prediction_set are inconsistent")
    return numbers


def _score(answer: dict[str, Any], manifest: Bundle) -> np.float32:
    score = np.float32(answer["ood_score"])
    if answer["is_ood"] is not bool(manifest.calibration.is_ood(score)):
        raise ValueError("ood_score and is_ood are inconsistent")
    return score


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
