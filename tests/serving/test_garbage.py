"""The search for reference cycles does not walk over what stays, and that is settled before the first request."""

import asyncio
import subprocess
import sys
from pathlib import Path

from serving.inference import Inference
from serving.model import ServedModel
from tests.serving.conftest import MakeSettings

CODE = """
import gc
import numpy, pydantic
before = len(gc.get_objects())
from serving.garbage import put_aside_what_stays
put_aside_what_stays()
assert gc.get_freeze_count() > 0.9 * before, (gc.get_freeze_count(), before)
assert len(gc.get_objects()) < 0.1 * before, (len(gc.get_objects()), before)
cycle = []
cycle.append(cycle)
del cycle
assert gc.collect() == 1
"""


def test_what_is_there_is_walked_over_no_more_and_new_cycles_are_found(root: Path) -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, cwd=root)  # in a process of its own: it is for good


def test_it_is_settled_once_when_the_model_is_there_and_takes_no_request_yet(make_settings: MakeSettings) -> None:
    seen: list[ServedModel | None] = []

    async def main() -> None:
        inference = Inference(make_settings(), settle=lambda: seen.append(inference.model))
        inference.start()
        await inference.loaded()
        assert inference.model is not None
        await inference.swap(inference.model)
        await inference.stop()

    asyncio.run(main())
    assert seen == [None]
