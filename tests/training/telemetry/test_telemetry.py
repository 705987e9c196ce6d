"""Telemetry of trainings in real processes: TensorBoard's files, the run log, the epoch lines."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slipway.training.assembly import image_changes
from slipway.training.augmentation.batch import augment_batch
from slipway.training.batches.batches import TrainingBatches, cut_step
from slipway.training.job import PROJECT_PATHS, TrainingData, open_data
from slipway.training.telemetry.progress import seconds_left
from slipway.training.telemetry.run_log import RunLog, read_log
from tests.training.conftest import write_project
from tests.training.real_runs import kill_after, run_training

pytestmark = pytest.mark.process
STEP_TAGS = {
    f"step/{name}"
    for name in (
        "loss",
        "learning_rate",
        "gradient_norm",
        "rows_per_second",
        "data_wait_fraction",
        "memory_bytes",
    )
}
EPOCH_TAGS = {"skipped_steps", "train/loss", "val/loss", "val/accuracy", "learning_rate", "epoch"}


def board(project: Path) -> EventAccumulator:
    """Return the TensorBoard events of the project's only training, read by TensorBoard itself."""
    (folder,) = (project / ".work/tensorboard").iterdir()
    events = EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0}
    )
    events.Reload()
    return events


def steps(events: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in events.Scalars(tag)]


def values(events: EventAccumulator, tag: str) -> list[float]:
    return [event.value for event in events.Scalars(tag)]


def data_of(project: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingData:
    monkeypatch.chdir(project)
    return open_data(PROJECT_PATHS.packed, PROJECT_PATHS.augmented)


def test_tensorboard_holds_steps_epochs_and_the_exact_pixels_of_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write_project(tmp_path, log_every_steps=2, epochs=2)
    done = run_training(project)
    assert done.returncode == 0, done.stderr
    events = board(project)
    assert set(events.Tags()["scalars"]) == STEP_TAGS | EPOCH_TAGS
    assert steps(events, "step/loss") == [1, 2, 4, 6, 8]
    assert steps(events, "val/loss") == [4, 8]
    assert values(events, "step/learning_rate")[:2] == pytest.approx(
        [0.0025, 0.005]
    )  # the warm-up of 4 steps to 0.01
    assert all(0 <= share <= 1 for share in values(events, "step/data_wait_fraction"))
    assert events.Tags()["histograms"] == []
    data = data_of(project, monkeypatch)
    changes = image_changes(data.plan, data.manifest.input, False)
    batch = TrainingBatches(data.train, cut_step(32, 1, 1024), 0, 7, changes, target_dtype="int64")[
        0, 0
    ]
    expected = (
        batch.inputs if batch.changes is None else augment_batch(batch.inputs, batch.changes)
    ).numpy()
    (shown,) = events.Images("first_batch")
    picture = np.asarray(Image.open(io.BytesIO(shown.encoded_image_string)).convert("L"))
    tiles = (
        picture.reshape(4, 10, 8, 10).transpose(0, 2, 1, 3).reshape(32, 10, 10)
    )  # 32 framed images of 8 px in rows of 8
    assert np.array_equal(tiles[:, 1:-1, 1:-1], expected[..., 0])


def test_tensorboard_shows_each_step_once_although_the_training_was_killed(tmp_path: Path) -> None:
    whole, killed = (
        write_project(tmp_path / "whole", log_every_steps=1),
        write_project(tmp_path / "killed", log_every_steps=1),
    )
    assert run_training(whole).returncode == 0
    kill_after(killed, "epoch 2/4")
    kill_after(killed, "epoch 3/4")
    assert run_training(killed).returncode == 0
    expected, found = board(whole), board(killed)
    for tag in ("step/loss", "step/gradient_norm", "step/learning_rate", "val/loss"):
        assert steps(found, tag) == steps(expected, tag), tag
        assert values(found, tag) == values(expected, tag), tag
    assert len(found.Images("first_batch")) == 1
    log = read_log(killed / ".work/log")
    assert len({event["run"] for event in log}) == 1
    assert [event["attempt"] for event in log if event["event"] == "started"] == [1, 2, 3]
    assert [event["attempt"] for event in log if event["event"] == "finished"] == [3]


def test_a_resumed_training_rewrites_earlier_epochs_if_the_tensorboard_folder_is_gone(
    tmp_path: Path,
) -> None:
    project = write_project(tmp_path)
    kill_after(project, "epoch 3/4")
    for path in (project / ".work/tensorboard").rglob("events*"):
        path.unlink()
    assert run_training(project).returncode == 0
    assert steps(board(project), "val/loss") == [4, 8, 12, 16]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "precision"),
    [(2, "bf16-mixed"), (3, "16-mixed")],
)
def test_deepspeed_telemetry_has_gradient_norm_loss_scale_and_whole_histograms(
    tmp_path: Path, stage: int, precision: str
) -> None:
    settings: dict[str, Any] = {
        "log_every_steps": 1,
        "log_histograms_every_epochs": 1,
        "epochs": 2,
        "devices": 2,
    }
    wide = {
        "width": 64,
        "blocks": [1, 1],
        "dropout": 0.0,
        "stochastic_depth": 0.0,
        "normalisation": "group",
    }  # with layers that ZeRO-3 really cuts
    settings |= {"network_arguments": wide}
    plain, sharded = (
        write_project(tmp_path / "plain", **settings, strategy="ddp"),
        write_project(
            tmp_path / "sharded",
            **settings,
            strategy=f"deepspeed_stage_{stage}",
            precision=precision,
        ),
    )
    for project in (plain, sharded):
        done = run_training(project)
        assert done.returncode == 0, done.stderr
    expected, found = board(plain), board(sharded)
    assert ("step/loss_scale" in found.Tags()["scalars"]) is (precision == "16-mixed")
    assert found.Tags()["histograms"] == expected.Tags()["histograms"] != []
    assert steps(found, "step/loss") == steps(expected, "step/loss") == list(range(1, 9))
    # Those before clipping: of the same weights in the first step, in another precision.
    assert values(found, "step/gradient_norm")[0] == pytest.approx(
        values(expected, "step/gradient_norm")[0], rel=0.1
    )
    for name in found.Tags()["histograms"]:
        ours, theirs = (
            found.Histograms(name)[0].histogram_value,
            expected.Histograms(name)[0].histogram_value,
        )
        assert ours.num == theirs.num, name
        if name.startswith("weights/"):
            assert ours.sum_squares == pytest.approx(theirs.sum_squares, rel=0.2, abs=0.05), name


def test_epoch_lines_show_throughput_data_wait_memory_and_the_time_left(tmp_path: Path) -> None:
    done = run_training(write_project(tmp_path, epochs=2))
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert len(lines) == 2
    for line, left in zip(lines, (r"  \d+ s left", ""), strict=True):
        assert re.search(rf"[\d,]+ rows/s  data wait \d+%  memory [\d.]+ [MG]B{left}$", line)


def test_the_time_left_does_not_count_the_first_epoch_once_there_is_another() -> None:
    assert seconds_left([0.0, 5.0], 3) == 15.0
    assert seconds_left([0.0, 5.0, 7.0, 9.0], 3) == 6.0
    assert seconds_left([0.0, 5.0, 7.0], 0) is None


def test_the_run_log_records_a_refused_training(tmp_path: Path) -> None:
    project = write_project(tmp_path, batch_size=151)
    assert run_training(project).returncode == 1
    refused = read_log(project / ".work/log")[-1]
    assert (refused["event"], refused["error"]) == ("refused", "ParamsError")
    assert "there are only 150 training rows" in refused["text"]


def test_a_truncated_line_of_the_run_log_is_skipped(tmp_path: Path) -> None:
    log = RunLog(tmp_path, rank=0)
    log.name_run("a")
    log.write("step", loss=float("nan"))
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"event": "st')
    assert [event["loss"] for event in read_log(tmp_path)] == ["nan"]
