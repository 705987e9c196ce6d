"""A training that was killed or stopped anywhere ends with the bits of one that was not."""

from pathlib import Path

import pytest

from tests.training.conftest import write_project
from tests.training.forked_runs import kill_after_save, run_forked
from tests.training.real_runs import weights_digest

pytestmark = pytest.mark.slow
EVERY_STEP = {"checkpoint_every_minutes": 1e-9}
ACCUMULATED = {"epochs": 3, "max_batch_per_device": 16}  # 4 steps of 2 batches in an epoch


def result(project: Path) -> tuple[str, ...]:
    """Digest of the weights, metrics of the kept epoch, and the curves of all."""
    curves = [(project / f"reports/live/plots/metrics/{name}.tsv").read_text() for name in ("train/loss", "val/loss")]
    return weights_digest(project), (project / "metrics/train.json").read_text(), *curves


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str, str]:
    project = write_project(tmp_path_factory.mktemp("whole"), **ACCUMULATED)
    assert run_forked(project)[0] == 0
    return result(project)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_after_any_step_it_goes_on_with_the_next_batch(tmp_path: Path, uninterrupted: tuple[str, ...], num_workers: int) -> None:
    project = write_project(tmp_path, **ACCUMULATED, **EVERY_STEP, num_workers=num_workers)
    places = []
    for _ in range(20):  # each run dies after its first save; an epoch has 4 steps, and the validation's end saves again
        code, output = run_forked(project, kill_after_save, 1)
        places += [line for line in output.splitlines() if line.startswith("resumed")]
        if code == 0:
            break
        assert code == -9, output
    assert "resumed   after epoch 1 and 3 steps of the next" in places
    assert "resumed   after epoch 1 and 4 steps of the next" in places
    assert len(places) == len(set(places)) >= 14
    assert result(project) == uninterrupted
