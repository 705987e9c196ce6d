"""Results after `kill -9` of the trainer, of dvc or of both, then `dvc repro`.

`python -m bench.kills` repeats it 25 times.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.kills import EQUAL, digests, run_killed, small_project

pytestmark = pytest.mark.process


@pytest.mark.nightly(seconds=100)
def test_a_training_killed_three_ways_ends_with_the_digests_of_an_uninterrupted_training(
    tmp_path: Path,
) -> None:
    whole, killed = (small_project(tmp_path / name) for name in ("whole", "killed"))
    with ThreadPoolExecutor() as thread:
        uninterrupted = thread.submit(whole.shell, "dvc repro train")
        kills = run_killed(killed, 2, ("train",), targets="train")
        uninterrupted.result()
    assert [moment.split(",")[0] for moment in kills.moments] == ["trainer", "dvc", "both"]
    assert kills.resumed
    names = [name for name in EQUAL if name != "metrics/evaluate.json"]
    assert digests(killed, names) == digests(whole, names)


@pytest.mark.nightly(seconds=150)
def test_killed_and_resumed_stages_end_with_the_digests_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    whole, killed = (small_project(tmp_path / name) for name in ("whole", "killed"))
    whole.shell("dvc repro evaluate")
    kills = run_killed(killed, 3, ("split", "train", "evaluate"), targets="evaluate")
    assert len(kills.moments) == 6
    assert any("steps of the next" in place for place in kills.resumed)
    assert digests(killed) == digests(whole)
