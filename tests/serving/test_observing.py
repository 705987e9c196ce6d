"""What was answered is told to all observers, once for each turn of the event loop, model by model."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np

from serving.model import ServedModel
from serving.observing import Answered, Fields, Observers
from serving.payload import Payload

MODELS = [cast(ServedModel, SimpleNamespace(name=name)) for name in ("one", "other")]
PAYLOAD, INPUTS = Payload("images", (b"",)), np.zeros((1, 2))


class Noting:
    """Writes down the ids that it was told of at once."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.closed_after = -1

    def offer(self, answered: Sequence[Answered]) -> None:
        assert len({id(one.model) for one in answered}) == 1
        self.told.append([one.request_id for one in answered])

    def close(self) -> None:
        self.closed_after = len(self.told)


def fields(request_id: str, model: ServedModel) -> Fields:
    return (request_id, PAYLOAD, False, INPUTS, model, [], [])


def test_a_turn_is_told_at_once_to_all_and_by_model() -> None:
    async def work() -> None:
        first, second, observers = Noting(), Noting(), Observers()
        observers.add(first)
        observers.add(second)
        for request_id, model in (("a", 0), ("b", 0), ("c", 1), ("d", 0)):
            observers.note(fields(request_id, MODELS[model]))
        assert first.told == []  # the answers go out before
        await asyncio.sleep(0)
        assert first.told == second.told == [["a", "b"], ["c"], ["d"]]
        observers.remove(second)
        observers.note(fields("e", MODELS[0]))
        await asyncio.sleep(0)
        assert first.told[3:] == [["e"]]
        assert len(second.told) == 3

    asyncio.run(work())


def test_what_is_noted_last_is_told_before_the_end() -> None:
    async def work() -> None:
        noting, observers = Noting(), Observers()
        observers.add(noting)
        observers.note(fields("a", MODELS[0]))
        await observers.close()
        assert noting.told == [["a"]]
        assert noting.closed_after == 1

    asyncio.run(work())


def test_what_is_told_has_all_that_was_noted_by_name() -> None:
    async def work() -> None:
        told: list[Answered] = []
        observers = Observers()
        observers.add(cast(Noting, SimpleNamespace(offer=told.extend)))
        noted = fields("a", MODELS[1])
        observers.note(noted)
        await asyncio.sleep(0)
        (answered,) = told
        assert answered == noted
        assert type(answered) is Answered
        assert answered.request_id == "a"
        assert answered.inputs is INPUTS
        assert answered.model is MODELS[1]

    asyncio.run(work())
