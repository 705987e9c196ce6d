"""A training that was killed or stopped anywhere ends with the bits of one that was not."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slipway.system import files
from slipway.training.checkpoints.resuming import Resumption
from tests.training.conftest import write_project
from tests.training.forked_runs import kill_after_save, run_forked
from tests.training.real_runs import weights_digest

pytestmark = pytest.mark.process
EVERY_STEP = {"checkpoint_every_minutes": 1e-9}
ACCUMULATED = {
    "epochs": 3,
    "max_batch_per_device": 16,
    "ema_decay": 0.9,
}  # 4 steps of 2 batches in an epoch


def result(project: Path) -> tuple[str, ...]:
    """Digest of the weights, metrics of the kept epoch, and the curves of all."""
    curves = [
        (project / f"reports/live/plots/metrics/{name}.tsv").read_text()
        for name in ("train/loss", "val/loss")
    ]
    return weights_digest(project), (project / "metrics/train.json").read_text(), *curves


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    project = write_project(tmp_path_factory.mktemp("whole"), **ACCUMULATED)
    assert run_forked(project)[0] == 0
    return result(project)


@pytest.mark.parametrize(
    ("num_workers", "num_saves"), [pytest.param(0, 1, marks=pytest.mark.nightly), (2, 4)]
)
def test_killed_after_any_step_it_goes_on_with_the_next_batch(
    tmp_path: Path, uninterrupted: tuple[str, ...], num_workers: int, num_saves: int
) -> None:
    project = write_project(tmp_path, **ACCUMULATED, **EVERY_STEP, num_workers=num_workers)
    places = []
    for _ in range(
        20
    ):  # each run dies after `num_saves` saves; an epoch has 4 steps, and the validation's end saves again
        code, output = run_forked(project, kill_after_save, num_saves)
        places += [line for line in output.splitlines() if line.startswith("resumed")]
        assert "not resumable" not in output  # Lightning's warning about loaders that have state
        if code == 0:
            break
        assert code == -9, output
    assert len(places) == len(set(places)) == 15 // num_saves
    assert num_saves > 1 or {
        f"resumed   after epoch 1 and {step} steps of the next" for step in (1, 2, 3, 4)
    } <= set(places)
    assert result(project) == uninterrupted


def test_without_its_offset_a_resumed_epoch_would_repeat_batches(
    tmp_path: Path, uninterrupted: tuple[str, ...]
) -> None:
    project = write_project(tmp_path, **ACCUMULATED, **EVERY_STEP)
    assert run_forked(project, kill_after_save, 2)[0] == -9
    assert run_forked(project, forget_the_first_batch)[0] == 0
    assert result(project) != uninterrupted


def forget_the_first_batch() -> None:
    Resumption.first_place = property(lambda self: {"first_epoch": self.position.epoch})  # type: ignore[method-assign, assignment]


def test_the_last_epoch_is_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    project = write_project(
        tmp_path, **ACCUMULATED, **EVERY_STEP, keep="last", checkpoint_every_epochs=3
    )
    assert run_forked(project, kill_after_save, 6)[0] == -9
    (newest, _) = sorted((project / ".work/train").glob("*/step-*/save.json"), reverse=True)
    assert '"kept_epoch": 0' in newest.read_text()
    assert run_forked(project)[0] == 0
    assert '"kept_epoch": 3' in (project / "metrics/train.json").read_text()


def test_the_same_training_twice_has_equal_bits(
    tmp_path: Path, uninterrupted: tuple[str, ...]
) -> None:
    project = write_project(tmp_path, **ACCUMULATED, num_workers=1)
    assert run_forked(project)[0] == 0
    assert result(project) == uninterrupted


def _flip_a_byte(save: Path) -> None:
    content = bytearray((save / "state").read_bytes())
    content[len(content) // 2] ^= 1
    (save / "state").write_bytes(content)


def _truncate(save: Path) -> None:
    (save / "state").write_bytes((save / "state").read_bytes()[:-1])


def _lose_a_rank(save: Path) -> None:
    (save / "rank-00000.safetensors").unlink()


def _lose_the_manifest(save: Path) -> None:
    (save / "save.json").unlink()


def _exchange(save: Path) -> None:
    older = sorted(save.parent.glob("step-*"))[-2]
    shutil.rmtree(save)
    shutil.copytree(older, save)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_flip_a_byte, "state missing, foreign or altered"),
        pytest.param(_truncate, "state missing, foreign or altered", marks=pytest.mark.nightly),
        (_lose_a_rank, "rank-00000.safetensors missing, foreign or altered"),
        (_lose_the_manifest, "No such file or directory: .*save.json"),
        pytest.param(
            _exchange, "it is the save step-00000002 under another name", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_damaged_save_is_named_and_the_one_before_it_is_taken(
    tmp_path: Path, uninterrupted: tuple[str, ...], damage: Callable[[Path], None], named: str
) -> None:
    project = write_project(tmp_path, **ACCUMULATED, **EVERY_STEP)
    assert run_forked(project, kill_after_save, 3)[0] == -9
    newest = sorted((project / ".work/train").glob("*/step-*"))[-1]
    damage(newest)
    code, output = run_forked(project)
    assert code == 0, output
    assert re.search(rf"{newest.name} is damaged and skipped: .*{named}", output)
    assert "resumed   after epoch 0 and 2 steps of the next" in output
    assert result(project) == uninterrupted


def _another_parameter(project: Path) -> None:
    _replace(project / "params.yaml", "learning_rate: 0.01", "learning_rate: 0.02")


def _other_data(project: Path) -> None:
    _replace(project / "data/augmented/plan.json", "}", "} ")


def _other_code(project: Path) -> None:
    files.write_text(project / "stages/train.py", "TWO = 2\n")


def _replace(path: Path, old: str, new: str) -> None:
    files.write_text(path, path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_another_parameter, "train.learning_rate: 0.01 -> 0.02"),
        (_other_data, "data/augmented/plan.json"),
        (_other_code, "stages/train.py"),
    ],
)
def test_what_would_become_other_weights_starts_at_the_first_step_and_says_why(
    tmp_path: Path, change: Callable[[Path], None], named: str
) -> None:
    project = write_project(tmp_path, epochs=1, warmup_epochs=0.0, **EVERY_STEP)
    files.write_text(project / "stages/train.py", "ONE = 1\n")
    assert run_forked(project, kill_after_save, 3)[0] == -9
    (abandoned,) = (project / ".work/train").glob("*/")
    change(project)
    code, output = run_forked(project)
    assert code == 0, output
    assert f"not resumed: .work/train/{abandoned.name} differs in {named}" in output
    assert re.search(
        rf"they stay until you remove them \(\d+\.\d MB\): rm -r .work/train/{abandoned.name}",
        output,
    )
    assert "resumed   " not in output
    assert len(list(abandoned.glob("step-*"))) == 2
