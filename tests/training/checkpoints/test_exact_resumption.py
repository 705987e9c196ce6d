"""A training that is killed at any point ends with the same bits as an uninterrupted one."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slipway.system import files
from slipway.system.errors import UnavailableError
from slipway.training.checkpoints.checkpoints import newest_manifest
from slipway.training.checkpoints.resumption import Resumption
from slipway.training.distributed.stop_signals import PAUSE, PAUSED, pause_epoch
from tests.training.conftest import write_project
from tests.training.forked_runs import kill_after_checkpoint, run_forked
from tests.training.real_runs import weights_digest

pytestmark = pytest.mark.process
EVERY_STEP = {"checkpoint_every_minutes": 1e-9}
# 4 steps of 2 batches per epoch
ACCUMULATED = {"epochs": 3, "max_batch_per_device": 16, "ema_decay": 0.9}


def result(project: Path) -> tuple[str, ...]:
    """Return the digest of the weights, the metrics of the exported epoch, and all curves."""
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


def test_a_training_paused_at_the_ends_of_epochs_ends_with_the_same_bits(
    tmp_path: Path, uninterrupted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write_project(tmp_path, **ACCUMULATED)
    for epoch in (1, 2):
        monkeypatch.setenv(PAUSE, str(epoch))
        code, output = run_forked(project)
        assert code == PAUSED, output
        assert f"paused    after epoch {epoch}" in output
        saved = newest_manifest(project / ".work/train")
        assert saved is not None
        assert saved.epoch == epoch
    monkeypatch.setenv(PAUSE, "3")  # the last one: the training ends
    assert run_forked(project)[0] == 0
    assert result(project) == uninterrupted


@pytest.mark.parametrize("text", ["", "0", "x"])
def test_an_invalid_epoch_to_pause_after_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAUSE, text)
    with pytest.raises(UnavailableError, match=f"unset {PAUSE}"):
        pause_epoch()


@pytest.mark.parametrize(
    ("num_workers", "num_saves"), [pytest.param(0, 1, marks=pytest.mark.nightly), (2, 4)]
)
def test_a_training_killed_after_any_step_resumes_with_the_next_batch(
    tmp_path: Path, uninterrupted: tuple[str, ...], num_workers: int, num_saves: int
) -> None:
    project = write_project(tmp_path, **ACCUMULATED, **EVERY_STEP, num_workers=num_workers)
    places = []
    # Each run dies after `num_saves` checkpoints; an epoch has 4 steps and the end of validation.
    for _ in range(20):
        code, output = run_forked(project, kill_after_checkpoint, num_saves)
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


def test_a_resumed_epoch_would_repeat_batches_without_its_first_batch(
    tmp_path: Path, uninterrupted: tuple[str, ...]
) -> None:
    project = write_project(tmp_path, **ACCUMULATED, **EVERY_STEP)
    assert run_forked(project, kill_after_checkpoint, 2)[0] == -9
    assert run_forked(project, forget_the_first_batch)[0] == 0
    assert result(project) != uninterrupted


def forget_the_first_batch() -> None:
    only_epoch = property(lambda self: {"first_epoch": self.position.epoch})
    Resumption.first_batch = only_epoch  # type: ignore[method-assign, assignment]


def test_a_resumed_training_with_keep_last_writes_the_weights_of_the_last_epoch(
    tmp_path: Path,
) -> None:
    project = write_project(
        tmp_path, **ACCUMULATED, **EVERY_STEP, keep="last", checkpoint_every_epochs=3
    )
    assert run_forked(project, kill_after_checkpoint, 6)[0] == -9
    (newest, _) = sorted((project / ".work/train").glob("*/step-*/checkpoint.json"), reverse=True)
    assert '"kept_epoch": 0' in newest.read_text()
    assert run_forked(project)[0] == 0
    assert '"kept_epoch": 3' in (project / "metrics/train.json").read_text()


def test_equal_trainings_end_with_equal_bits(
    tmp_path: Path, uninterrupted: tuple[str, ...]
) -> None:
    project = write_project(tmp_path, **ACCUMULATED, num_workers=1)
    assert run_forked(project)[0] == 0
    assert result(project) == uninterrupted


def _flip_a_byte(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "state").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / "state").write_bytes(content)


def _truncate(checkpoint: Path) -> None:
    (checkpoint / "state").write_bytes((checkpoint / "state").read_bytes()[:-1])


def _lose_a_rank(checkpoint: Path) -> None:
    (checkpoint / "rank-00000.safetensors").unlink()


def _lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "checkpoint.json").unlink()


def _exchange(checkpoint: Path) -> None:
    older = sorted(checkpoint.parent.glob("step-*"))[-2]
    shutil.rmtree(checkpoint)
    shutil.copytree(older, checkpoint)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_flip_a_byte, "state missing, foreign or altered"),
        pytest.param(_truncate, "state missing, foreign or altered", marks=pytest.mark.nightly),
        (_lose_a_rank, "rank-00000.safetensors missing, foreign or altered"),
        (_lose_the_manifest, "No such file or directory: .*checkpoint.json"),
        pytest.param(
            _exchange,
            "it is the checkpoint step-00000002 under another name",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_resumed(
    tmp_path: Path, uninterrupted: tuple[str, ...], damage: Callable[[Path], None], named: str
) -> None:
    project = write_project(tmp_path, **ACCUMULATED, **EVERY_STEP)
    assert run_forked(project, kill_after_checkpoint, 3)[0] == -9
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
    files.write_text(project / "slipway/stages/train.py", "TWO = 2\n")


def _replace(path: Path, old: str, new: str) -> None:
    files.write_text(path, path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_another_parameter, "train.learning_rate: 0.01 -> 0.02"),
        (_other_data, "data/augmented/plan.json"),
        (_other_code, "slipway/stages/train.py"),
    ],
)
def test_changed_inputs_start_a_new_training_and_list_the_differences(
    tmp_path: Path, change: Callable[[Path], None], named: str
) -> None:
    project = write_project(tmp_path, epochs=1, warmup_epochs=0.0, **EVERY_STEP)
    files.write_text(project / "slipway/stages/train.py", "ONE = 1\n")
    assert run_forked(project, kill_after_checkpoint, 3)[0] == -9
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
