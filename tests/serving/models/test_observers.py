"""What was answered is told to all observers, once for each turn of the event loop, model by model."""

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np

from serving.models.model import AnsweredRow, ServedModel
from serving.models.observers import (
    Answered,
    Noted,
    Observers,
    id_of,
    inputs_of,
    model_of,
    rows_of,
)
from serving.requests.payload import Payload

MODELS = [cast(ServedModel, SimpleNamespace(name=name)) for name in ("one", "other")]
PAYLOAD, INPUTS = Payload("images", (b"",)), np.zeros((1, 2))
ROWS: list[AnsweredRow] = []


class Noting:
    """Writes down the ids that it was told of at once."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.moments: list[float] = []
        self.closed_after = -1

    def offer(self, answered: Sequence[Noted], moment: float) -> None:
        assert len({id(model_of(one)) for one in answered}) == 1
        self.moments.append(moment)
        self.told.append([id_of(one) for one in answered])

    def close(self) -> None:
        self.closed_after = len(self.told)


def noted(request_id: str, model: ServedModel) -> Noted:
    return (request_id, PAYLOAD, False, INPUTS, model, ROWS, [])


def test_a_turn_is_told_at_once_to_all_and_by_model() -> None:
    async def work() -> None:
        first, second, observers = Noting(), Noting(), Observers()
        observers.add(first)
        observers.add(second)
        before = time.time()
        for request_id, model in (("a", 0), ("b", 0), ("c", 1), ("d", 0)):
            observers.note(noted(request_id, MODELS[model]))
        after = time.time()
        assert first.told == []  # the answers go out before
        time.sleep(0.01)
        await asyncio.sleep(0)
        assert first.told == second.told == [["a", "b"], ["c"], ["d"]]
        assert len(set(first.moments)) == 1
        assert before <= first.moments[0] <= after  # nobody can have told a truth before
        observers.remove(second)
        observers.note(noted("e", MODELS[0]))
        await asyncio.sleep(0)
        assert first.told[3:] == [["e"]]
        assert len(second.told) == 3

    asyncio.run(work())


def test_what_is_noted_last_is_told_before_the_end() -> None:
    async def work() -> None:
        noting, observers = Noting(), Observers()
        observers.add(noting)
        observers.note(noted("a", MODELS[0]))
        await observers.close()
        assert noting.told == [["a"]]
        assert noting.closed_after == 1

    asyncio.run(work())


def test_a_field_is_the_same_of_what_was_noted_and_of_what_is_made_of_it() -> None:
    one = noted("a", MODELS[1])
    answered = Answered._make(one)
    assert answered.request_id == id_of(one) == id_of(answered) == "a"
    assert answered.inputs is inputs_of(one) is INPUTS
    assert answered.model is model_of(one) is MODELS[1]
    assert answered.rows is rows_of(one) is ROWS
