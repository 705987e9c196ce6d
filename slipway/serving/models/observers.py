"""Passes completed predictions to observers: request log, monitoring, shadow model.

An observer receives every request after its prediction is known. It must not wait or raise, so it
cannot delay or change a response.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import SCORE_NAME, LoadedBundle
from slipway.predictor.model import AnsweredRow
from slipway.serving.models.model import ServedModel
from slipway.serving.requests.payload import Payload

if TYPE_CHECKING:
    from slipway.artifacts.certificate import Execution


class Answered(NamedTuple):
    """A request with a prediction for each row, and its inputs and outputs."""

    request_id: str
    payload: Payload
    is_list: bool
    inputs: NDArray[Any]  # (rows, ...) inputs of the network
    model: ServedModel
    rows: Sequence[AnsweredRow]
    answers: list[dict[str, Any]]

    @property
    def bundle(self) -> LoadedBundle:
        return self.model.bundle

    @property
    def execution(self) -> "Execution":
        return self.model.selection.actual

    @property
    def outputs(self) -> dict[str, NDArray[np.float32]]:
        """The model's outputs and OOD scores, by the graph's output names: float32 (rows, ...)."""
        values, scores = (
            np.array([row[place] for row in self.rows], np.float32) for place in (0, 1)
        )
        return {self.bundle.manifest.output_name: values, SCORE_NAME: scores}

    @property
    def bundle_digest(self) -> str:
        """Hex SHA-256 of the model's bundle.json."""
        return self.bundle.digest


# The fields of Answered in order. Most requests are only counted, and creating an Answered takes as
# long as counting.
Noted = tuple[
    str, Payload, bool, NDArray[Any], ServedModel, Sequence[AnsweredRow], list[dict[str, Any]]
]


def _field(name: str) -> Callable[[Noted], Any]:
    return itemgetter(Answered._fields.index(name))


id_of: Callable[[Noted], str] = _field("request_id")
inputs_of: Callable[[Noted], NDArray[Any]] = _field("inputs")
model_of: Callable[[Noted], ServedModel] = _field("model")
rows_of: Callable[[Noted], Sequence[AnsweredRow]] = _field("rows")


class Observer(Protocol):
    """Receives every request for which the model made a prediction. Called on the event loop."""

    def offer(self, answered: Sequence[Noted], moment: float) -> None:
        """Receive one or more requests with predictions of one model. Never waits, never raises.

        All were predicted at `moment` or later, in seconds since 1970.
        """

    def close(self) -> None:
        """Finish the observer's work within seconds. Called on a thread when the worker ends."""


class Observers:
    """The observers of one worker. Requests of one turn of the event loop are passed on together.

    Passing on each request separately would take half as long again.
    """

    def __init__(self) -> None:
        self.all: Sequence[Observer] = ()
        self._answered: list[Noted] = []  # requests answered in this turn
        self._moment = 0.0  # time before the first of these responses

    def add(self, observer: Observer) -> None:
        self.all = [*self.all, observer]

    def remove(self, observer: Observer) -> None:
        self.all = [one for one in self.all if one is not observer]

    def note(self, answered: Noted) -> None:
        """Pass an answered request to the observers in the next turn of the event loop."""
        if not self._answered:
            self._moment = time.time()
            asyncio.get_running_loop().call_soon(self._pass_on)
        self._answered.append(answered)

    async def close(self) -> None:
        """Pass on the last requests, and close all observers."""
        self._pass_on()
        for observer in self.all:
            await asyncio.to_thread(observer.close)

    def _pass_on(self) -> None:
        noted, self._answered = self._answered, []
        for _, answered in groupby(noted, model_of):
            of_one_model = list(answered)
            for observer in self.all:
                observer.offer(of_one_model, self._moment)
