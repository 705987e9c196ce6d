"""What looks at answered requests beside the request path: keeping, drift, feedback.

An observer is offered every answered request. It never waits, never raises and never costs a request its answer.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.models.model import AnsweredRow, ServedModel
from serving.requests.payload import Payload
from slipway.artifacts.bundle import SCORE_NAME, LoadedBundle

if TYPE_CHECKING:
    from slipway.artifacts.certificate import Execution


class Answered(NamedTuple):
    """A request that the model answered, as it is at hand then."""

    request_id: str
    payload: Payload
    is_list: bool
    inputs: NDArray[Any]  # (rows, ...) as the model took them
    model: ServedModel
    rows: Sequence[AnsweredRow]
    answers: list[dict[str, Any]]

    @property
    def bundle(self) -> LoadedBundle:
        """Of the model."""
        return self.model.bundle

    @property
    def execution(self) -> "Execution":
        """How the model ran."""
        return self.model.selection.actual

    @property
    def outputs(self) -> dict[str, NDArray[np.float32]]:
        """(rows, ...) float32 by the graph's output name."""
        values, scores = (
            np.array([row[place] for row in self.rows], np.float32) for place in (0, 1)
        )
        return {self.bundle.manifest.output_name: values, SCORE_NAME: scores}

    @property
    def bundle_digest(self) -> str:
        """Hex SHA-256 of the model's bundle.json."""
        return self.bundle.digest


# The fields of Answered in their order. Most requests are only counted, and never become one: to make it takes as long as counting.
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
    """Something that is offered every answered request, on the event loop."""

    def offer(self, answered: Sequence[Noted], moment: float) -> None:
        """Take note of them, or leave them: one or more, all of one model, none answered before `moment`, in seconds since 1970.

        Never waits, never raises.
        """

    def close(self) -> None:
        """Finish, within seconds; called on a thread when the worker ends."""


class Observers:
    """All of them. What was answered in one turn of the event loop they are told at once, after the answers went out.

    To tell each request on its own takes half as long again.
    """

    def __init__(self) -> None:
        self.all: Sequence[Observer] = ()
        self._answered: list[Noted] = []  # in this turn
        self._moment = 0.0  # when it began to answer, before any caller has an answer of it

    def add(self, observer: Observer) -> None:
        """Offer it every answered request from now on."""
        self.all = [*self.all, observer]

    def remove(self, observer: Observer) -> None:
        """No longer."""
        self.all = [one for one in self.all if one is not observer]

    def note(self, answered: Noted) -> None:
        """Have a request told in the next turn."""
        if not self._answered:
            self._moment = time.time()
            asyncio.get_running_loop().call_soon(self._tell)
        self._answered.append(answered)

    async def close(self) -> None:
        """Tell what is still to be told, and have each finish."""
        self._tell()
        for observer in self.all:
            await asyncio.to_thread(observer.close)

    def _tell(self) -> None:
        noted, self._answered = self._answered, []
        for _, answered in groupby(noted, model_of):
            of_one_model = list(answered)
            for observer in self.all:
                observer.offer(of_one_model, self._moment)
