"""What looks at answered requests beside the request path: keeping, drift, feedback.

An observer is offered every answered request. It never waits, never raises and never costs a request its answer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.model import AnsweredRow
from serving.payload import Payload
from slipway.bundle import SCORE_NAME, LoadedBundle
from slipway.certificate import Execution


class Answered(NamedTuple):
    """A request that the model answered, as it is at hand then."""

    request_id: str
    payload: Payload
    is_list: bool
    inputs: NDArray[Any]  # (rows, ...) as the model took them
    bundle: LoadedBundle
    execution: Execution
    rows: Sequence[AnsweredRow]
    answers: list[dict[str, Any]]

    @property
    def outputs(self) -> dict[str, NDArray[np.float32]]:
        """(rows, ...) float32 by the graph's output name."""
        values, scores = (np.array([row[place] for row in self.rows], np.float32) for place in (0, 1))
        return {self.bundle.manifest.output_name: values, SCORE_NAME: scores}

    @property
    def bundle_digest(self) -> str:
        """Hex SHA-256 of the model's bundle.json."""
        return self.bundle.digest


class Observer(Protocol):
    """Something that is offered every answered request, on the event loop."""

    def offer(self, answered: Answered) -> None:
        """Take note of it, or leave it. Never waits, never raises."""

    def close(self) -> None:
        """Finish, within seconds; called on a thread when the worker ends."""
