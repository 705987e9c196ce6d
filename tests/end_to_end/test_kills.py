"""`kill -9` of the trainer, of dvc or of both, then `dvc repro`: `python -m bench.kills` does it 25 times."""

from pathlib import Path

import pytest

from bench.kills import digests, run_killed, small_project

pytestmark = pytest.mark.slow


def test_killed_within_and_before_stages_a_project_ends_with_equal_digests(tmp_path: Path) -> None:
    whole, killed = (small_project(tmp_path / name) for name in ("whole", "killed"))
    whole.shell("dvc repro evaluate")
    kills = run_killed(killed, 3, ("split", "train", "evaluate"), targets="evaluate")
    assert len(kills.moments) == 6
    assert any("steps of the next" in place for place in kills.resumed)
    assert digests(killed) == digests(whole)
