"""A shadow: the candidate answers copies of live requests, and how often it agrees with what the callers got is counted.

It costs them nothing: copies wait in a short queue, are dropped where it is full, and are answered on one thread with a low priority, long
after the answer went out. Nothing that happens here reaches a request.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.http.responses import Refusal
from serving.models.live_model import LiveModel
from serving.models.model import InvalidAnswerError
from serving.models.observers import Answered, Noted, id_of, model_of
from serving.rollout.canary import is_chosen
from serving.rollout.evidence import Evidence
from serving.rollout.low_priority import be_nice
from slipway.artifacts.uncertainty import Answers
from slipway.inputs.columns import ColumnContract
from slipway.traffic.request_log import REPLAYED

logger = logging.getLogger("bentoml.slipway")

MAX_WAITING = 32  # requests: a shadow that falls behind drops what it cannot see
_RELATIVE_DIFFERENCE = (
    0.05  # guess: between two values, where there is neither a bound nor an interval
)
_CLOSE_S = 5.0

Count = Callable[[str], None]


class Shadow:
    """An observer that asks `live` about a share of what the stable model answered. `difference` makes two values equal.

    Which requests are of the share is drawn with a salt that no caller knows.
    """

    def __init__(
        self,
        live: LiveModel,
        share: float,
        salt: str,
        difference: float | None,
        evidence: Evidence,
        count: Count,
    ) -> None:
        self._live = live
        self._share = share
        self._salt = f"shadow:{salt}"
        self._difference = difference
        self._evidence = evidence
        self._count = count
        self._waiting: queue.Queue[Answered | None] = queue.Queue(MAX_WAITING)
        self._is_closing = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name="slipway-shadow", daemon=True)
        self._thread.start()

    def offer(self, answered: Sequence[Noted], moment: float) -> None:
        """Take copies, but of nothing that is not of the sample, the candidate's own answer or a replay. Never waits, never raises."""
        model = self._live.model
        if model_of(answered[0]).bundle.digest == model.bundle.digest:
            return
        for one in answered:
            request_id = id_of(one)
            if not request_id.startswith(REPLAYED) and is_chosen(
                request_id, self._share, self._salt
            ):
                try:
                    self._waiting.put_nowait(Answered._make(one))
                except queue.Full:
                    self._note("dropped")

    def close(self) -> None:
        """End the thread; copies that wait are not answered any more."""
        self._is_closing = True
        with contextlib.suppress(queue.Full):  # then it is awake, and sees that it has to end
            self._waiting.put_nowait(None)
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        be_nice()
        with asyncio.Runner() as runner:
            while (answered := self._waiting.get()) is not None and not self._is_closing:
                self._answer(answered, runner)

    def _answer(self, answered: Answered, runner: asyncio.Runner) -> None:
        model = self._live.model
        try:
            inputs = self._inputs(answered, runner)
            outputs, scores = self._run(inputs)
            answers = [model.answer(row, score) for row, score in zip(outputs, scores, strict=True)]
            agrees = len(answers) == len(answered.answers) and all(
                map(self._agree, answers, answered.answers)
            )
        except InvalidAnswerError as error:
            self._evidence.fault(f"it gave an answer that is none to a shadowed request: {error}")
            self._note("failed")
        except Exception as error:
            if not self._has_failed and not isinstance(error, Refusal):
                logger.exception(
                    "the candidate %s failed on a shadowed request; others are only counted",
                    model.version,
                )
                self._has_failed = True
            self._note("failed")
        else:
            self._note("agrees" if agrees else "differs")

    def _inputs(self, answered: Answered, runner: asyncio.Runner) -> NDArray[Any]:
        """What the candidate takes: images are decoded as they were; how a row is encoded is its own affair."""
        if isinstance(self._live.model.bundle.manifest.input, ColumnContract):
            return runner.run(self._live.decoder.decode(*answered.payload.items)).inputs
        return answered.inputs

    def _run(self, inputs: NDArray[Any]) -> Answers:
        """In batches that the model was warmed up for."""
        size, run = self._live.model.max_batch_size, self._live.model.run
        parts = [run(inputs[start : start + size]) for start in range(0, len(inputs), size)]
        return Answers(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def _agree(self, found: dict[str, Any], expected: dict[str, Any]) -> bool:
        if "label" in expected:
            return bool(found.get("label") == expected["label"])
        value, stable = found["value"], expected["value"]
        if self._difference is not None:
            return bool(abs(value - stable) <= self._difference)
        if expected["interval"]:
            low, high = expected["interval"]
            return bool(low <= value <= high)
        return bool(abs(value - stable) <= _RELATIVE_DIFFERENCE * max(abs(value), abs(stable)))

    def _note(self, outcome: str) -> None:
        self._evidence.shadow(outcome)
        self._count(outcome)
