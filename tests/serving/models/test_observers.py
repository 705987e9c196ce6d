"""Observers receive the predicted requests once per turn of the event loop, grouped by model."""

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np

from slipway.predictor.model import AnsweredRow
from slipway.serving.models.model import ServedModel
from slipway.serving.models.observers import (
    Answered,
    Noted,
    Observers,
    id_of,
    inputs_of,
    model_of,
    rows_of,
)
from slipway.serving.requests.payload import Payload

MODELS = [cast(ServedModel, SimpleNamespace(name=name)) for name in ("one", "other")]
PAYLOAD, INPUTS = Payload("images", (b"",)), np.zeros((1, 2))
ROWS: list[AnsweredRow] = []


class RecordingObserver:
    """Records the ids of each batch that it received."""

    def __init__(self) -> None:
        self.received: list[list[str]] = []
        self.moments: list[float] = []
        self.closed_after = -1

    def offer(self, answered: Sequence[Noted], moment: float) -> None:
        assert len({id(model_of(one)) for one in answered}) == 1
        self.moments.append(moment)
        self.received.append([id_of(one) for one in answered])

    def close(self) -> None:
        self.closed_after = len(self.received)


def noted(request_id: str, model: ServedModel) -> Noted:
    return (request_id, PAYLOAD, False, INPUTS, model, ROWS, [])


def test_observers_receive_the_requests_of_one_turn_grouped_by_model() -> None:
    async def work() -> None:
        first, second, observers = RecordingObserver(), RecordingObserver(), Observers()
        observers.add(first)
        observers.add(second)
        before = time.time()
        for request_id, model in (("a", 0), ("b", 0), ("c", 1), ("d", 0)):
            observers.note(noted(request_id, MODELS[model]))
        after = time.time()
        assert first.received == []  # the answers go out before
        time.sleep(0.01)
        await asyncio.sleep(0)
        assert first.received == second.received == [["a", "b"], ["c"], ["d"]]
        assert len(set(first.moments)) == 1
        assert before <= first.moments[0] <= after  # no label can have arrived before
        observers.remove(second)
        observers.note(noted("e", MODELS[0]))
        await asyncio.sleep(0)
        assert first.received[3:] == [["e"]]
        assert len(second.received) == 3

    asyncio.run(work())


def test_close_passes_the_last_requests_to_the_observers() -> None:
    async def work() -> None:
        noting, observers = RecordingObserver(), Observers()
        observers.add(noting)
        observers.note(noted("a", MODELS[0]))
        await observers.close()
        assert noting.received == [["a"]]
        assert noting.closed_after == 1

    asyncio.run(work())


def test_accessors_of_plain_tuples_agree_with_the_fields_of_answered() -> None:
    one = noted("a", MODELS[1])
    answered = Answered._make(one)
    assert answered.request_id == id_of(one) == id_of(answered) == "a"
    assert answered.inputs is inputs_of(one) is INPUTS
    assert answered.model is model_of(one) is MODELS[1]
    assert answered.rows is rows_of(one) is ROWS
