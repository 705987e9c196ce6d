"""What looks at answered requests beside the request path: keeping, drift, feedback.

An observer is offered every answered request. It never waits, never raises and never costs a request its answer.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.payload import Payload
from slipway.bundle import LoadedBundle
from slipway.certificate import Execution


@dataclass(frozen=True)
class Answered:
    """A request that the model answered, as it is at hand then."""

    request_id: str
    payload: Payload
    is_list: bool
    inputs: NDArray[Any]  # (rows, ...) as the model took them
    bundle: LoadedBundle
    execution: Execution
    outputs: dict[str, list[NDArray[np.float32]]]  # by the graph's output name, of each row
    answers: list[dict[str, Any]]

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
