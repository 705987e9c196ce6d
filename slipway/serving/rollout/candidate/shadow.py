"""Sends copies of live requests to the candidate, and counts how often the predictions agree.

Callers do not notice. A copy is made after the caller's response is known, and waits in a short
queue for one low-priority thread; if the queue is full, it is dropped. No error here reaches a
request.
"""

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.label_sets import named_label
from slipway.artifacts.uncertainty import Answers
from slipway.kinds.registry import input_kind
from slipway.predictor.model import InvalidAnswerError
from slipway.serving.http.responses import Refusal
from slipway.serving.models.live_model import LiveModel
from slipway.serving.models.observers import Answered, Noted, id_of, model_of
from slipway.serving.rollout.candidate.canary import is_chosen
from slipway.serving.rollout.evidence import Evidence
from slipway.traffic.request_log import REPLAYED

logger = logging.getLogger("bentoml.slipway")

MAX_WAITING = 32  # most waiting requests; a shadow that falls behind drops the others
# Guess: between two values that count as equal, if there is neither a bound nor an interval.
_RELATIVE_DIFFERENCE = 0.05
_CLOSE_S = 5.0
_NICENESS = 19


def lower_priority() -> None:
    """Give this thread, and the threads that it starts, the lowest priority, permanently.

    Only Linux has a priority for each thread; on other systems this does nothing.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class Shadow:
    """An observer that copies a fraction of the stable model's requests to the candidate `live`.

    Predicted values that differ by at most `difference` count as equal. Requests are drawn by their
    id and the secret `salt`.
    """

    def __init__(
        self,
        live: LiveModel,
        fraction: float,
        salt: str,
        difference: float | None,
        evidence: Evidence,
        count: Callable[[str], None],
    ) -> None:
        self._live = live
        self._fraction = fraction
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
        """Queue copies of the drawn requests. Never waits, never raises.

        Skips replayed requests and those that the candidate itself answered.
        """
        model = self._live.model
        if model_of(answered[0]).bundle.digest == model.bundle.digest:
            return
        for one in answered:
            request_id = id_of(one)
            if not request_id.startswith(REPLAYED) and is_chosen(
                request_id, self._fraction, self._salt
            ):
                try:
                    self._waiting.put_nowait(Answered._make(one))
                except queue.Full:
                    self._record("dropped")

    def close(self) -> None:
        """End the thread and drop the waiting copies."""
        self._is_closing = True
        with contextlib.suppress(queue.Full):  # if full, the thread is awake and sees the flag
            self._waiting.put_nowait(None)
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        lower_priority()
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
            self._evidence.fault(f"it gave an invalid answer to a shadowed request: {error}")
            self._record("failed")
        except Exception as error:
            if not self._has_failed and not isinstance(error, Refusal):
                logger.exception(
                    "the candidate %s failed on a shadowed request; "
                    "further failures are only counted",
                    model.version,
                )
                self._has_failed = True
            self._record("failed")
        else:
            self._record("agrees" if agrees else "differs")

    def _inputs(self, answered: Answered, runner: asyncio.Runner) -> NDArray[Any]:
        """Return the inputs for the candidate, (rows, ...).

        Decoded images are reused. Rows and texts are encoded again by the candidate's contract.
        """
        if not input_kind(self._live.model.input_kind).has_pixels:
            return runner.run(self._live.decoder.decode(*answered.payload.items)).inputs
        return answered.inputs

    def _run(self, inputs: NDArray[Any]) -> Answers:
        """Run the candidate on inputs (rows, ...), in batches up to its maximum size."""
        size, run = self._live.model.max_batch_size, self._live.model.run
        parts = [run(inputs[start : start + size]) for start in range(0, len(inputs), size)]
        return Answers(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def _agree(self, found: dict[str, Any], expected: dict[str, Any]) -> bool:
        if "value" not in expected:
            return named_label(found) == named_label(expected)
        value, stable = found["value"], expected["value"]
        if self._difference is not None:
            return bool(abs(value - stable) <= self._difference)
        if expected["interval"]:
            low, high = expected["interval"]
            return bool(low <= value <= high)
        return bool(abs(value - stable) <= _RELATIVE_DIFFERENCE * max(abs(value), abs(stable)))

    def _record(self, outcome: str) -> None:
        self._evidence.shadow(outcome)
        self._count(outcome)
