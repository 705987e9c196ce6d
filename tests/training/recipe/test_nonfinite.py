"""Non-finite steps change nothing, are reported, and are skipped or fail as params.yaml says."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor

from slipway.config.params import load_params
from slipway.data.store import packed
from slipway.system import files
from slipway.system.errors import TrainingError
from slipway.training.batches.batches import (
    Batch,
    TrainingBatches,
    ValidationBatches,
    batch_loader,
    cut_step,
    training_loader,
)
from slipway.training.module import TrainingModule, _derived_seed
from slipway.training.networks.networks import build_network
from slipway.training.telemetry.progress import silence_chatter
from tests.training import test_table_runs
from tests.training.conftest import ROOT, spec, split_of
from tests.training.real_runs import kill_after, run_training, weights_digest

LOGGED = "tests.training.logged_training"
EPOCH = 3  # steps
SPLIT = split_of(8 * EPOCH)


class _StepChanges(pl.Callback):
    """Records for each step if it changed weights, moments or running statistics."""

    def __init__(self) -> None:
        self.changed: list[bool] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._before = _lasting(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        after = _lasting(pl_module)
        self.changed.append(
            after.keys() != self._before.keys()
            or any(not torch.equal(after[key], self._before[key]) for key in after)
        )


def _lasting(module: TrainingModule) -> dict[str, torch.Tensor]:
    states = module.trainer.optimizers[0].state.values()
    moments = {
        f"{index} {name}": value
        for index, state in enumerate(states)
        for name, value in state.items()
    }
    return {
        name: value.clone() for name, value in {**module.network.state_dict(), **moments}.items()
    }


def _module(split: packed.PackedSplit = SPLIT, **changes: Any) -> TrainingModule:
    params = load_params(ROOT / "params.yaml").train.model_copy(
        update={"on_nonfinite": "skip", "label_smoothing": 0.0, **changes}
    )
    torch.manual_seed(0)
    return TrainingModule(
        build_network(spec()), params, seed=3, steps_per_epoch=EPOCH, ids=split.ids
    )


def _fit(
    module: TrainingModule,
    split: packed.PackedSplit = SPLIT,
    accumulated: int = 1,
    **arguments: Any,
) -> tuple[list[bool], pl.Trainer]:
    """Train an epoch of three steps; return for each batch if it changed anything."""
    silence_chatter()
    changes = _StepChanges()
    batches = TrainingBatches(
        [split], cut_step(8, 1, 8 // accumulated), 0, seed=3, changes=None, target_dtype="int64"
    )
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        callbacks=[changes],
        log_every_n_steps=1,
        **quiet,
        **arguments,
    )
    trainer.fit(
        module,
        training_loader(batches, 0),
        batch_loader(ValidationBatches(SPLIT, 8, 1, 0, target_dtype="int64"), 0),
    )
    return changes.changed, trainer


def _spoiled(step: int, weight: float = np.nan) -> packed.PackedSplit:
    """Return the split with a non-finite weight in one row of `step`, counted from 0."""
    first = TrainingBatches(
        [SPLIT], cut_step(8, 1, 8), 0, seed=3, changes=None, target_dtype="int64"
    )[0, step].rows[0]
    weights = SPLIT.weights.copy()
    weights[int(first)] = weight
    return packed.PackedSplit(
        SPLIT.inputs, SPLIT.targets, SPLIT.ids, SPLIT.sources, weights, SPLIT.leaked
    )


def _guilty(split: packed.PackedSplit) -> str:
    return split.ids[int(np.flatnonzero(~np.isfinite(split.weights))[0])]


def _with_bad_gradient(
    module: TrainingModule, steps: set[int], value: float = np.nan
) -> TrainingModule:
    parameter = next(module.network.parameters())
    parameter.register_hook(
        lambda gradient: gradient * value if module.global_step in steps else gradient
    )  # type: ignore[no-untyped-call]
    return module


@pytest.mark.parametrize("weight", [np.nan, np.inf])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_step_with_a_nonfinite_loss_changes_no_lasting_state(step: int, weight: float) -> None:
    split = _spoiled(step, weight)
    module = _module(split)
    changed, trainer = _fit(module, split)
    assert changed == [number != step for number in range(EPOCH)]
    assert module.nonfinite_guard.num_skipped == 1
    assert trainer.global_step == EPOCH


def test_a_step_with_a_nonfinite_gradient_changes_no_lasting_state() -> None:
    module = _with_bad_gradient(_module(), {1})
    changed, _ = _fit(module)
    assert changed == [True, False, True]
    assert module.nonfinite_guard.num_skipped == 1


def test_a_step_with_an_infinite_loss_and_a_finite_gradient_changes_no_state() -> None:
    module = _module()
    plain = module.nonfinite_guard.checked_mean

    def infinite_in_step_1(losses: Tensor, batch: Batch, num_accumulated: int = 1) -> Tensor:
        added = torch.inf if module.global_step == 1 else 0.0
        return plain(losses + added, batch, num_accumulated)

    module.nonfinite_guard.checked_mean = infinite_in_step_1  # type: ignore[method-assign]
    assert _fit(module)[0] == [True, False, True]


def test_a_nonfinite_batch_skips_all_batches_accumulated_with_it() -> None:
    split = _spoiled(1)
    before, after = _state_around_step(split, accumulated=2)
    assert all(torch.equal(before[name], after[name]) for name in before)


def _state_around_step(
    split: packed.PackedSplit, accumulated: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the lasting state before and after the second step."""
    module, states = _module(split), {}
    plain_start, plain_end = module.nonfinite_guard.start_batch, module.nonfinite_guard.after_step

    def start_batch() -> None:
        if module.global_step == 1 and "before" not in states:
            states["before"] = _lasting(module)
        plain_start()

    def after_step(trainer: pl.Trainer) -> Any:
        counted = plain_end(trainer)
        if module.global_step == 1:
            states["after"] = _lasting(module)
        return counted

    module.nonfinite_guard.start_batch = start_batch  # type: ignore[method-assign]
    module.nonfinite_guard.after_step = after_step  # type: ignore[method-assign]
    _fit(module, split, accumulated=accumulated)
    return states["before"], states["after"]


def test_a_finite_step_changes_the_lasting_state() -> None:
    before, after = _state_around_step(SPLIT, accumulated=2)
    assert not all(torch.equal(before[name], after[name]) for name in before)


def test_on_nonfinite_fail_names_the_step_and_row_and_changes_nothing() -> None:
    split = _spoiled(1)
    module = _module(split, on_nonfinite="fail")
    with pytest.raises(
        TrainingError,
        match=r"loss is not finite in step 2 \(epoch 1\) for 1 of 8 rows, "
        rf"with the ids {_guilty(split)}\. No",
    ):
        _fit(module, split)


def test_on_nonfinite_fail_names_all_rows_if_only_the_gradient_is_nonfinite() -> None:
    with pytest.raises(
        TrainingError, match=r"gradient is not finite in step 3 .*their ids are"
    ) as raised:
        _fit(_with_bad_gradient(_module(on_nonfinite="fail"), {2}))
    rows = TrainingBatches(
        [SPLIT], cut_step(8, 1, 8), 0, seed=3, changes=None, target_dtype="int64"
    )[0, 2].rows.tolist()
    assert all(SPLIT.ids[row] in str(raised.value) for row in rows)


def test_the_training_fails_after_max_skipped_steps() -> None:
    with pytest.raises(
        TrainingError, match=r"in step 2 .* has skipped 2 steps, expected at most 1 \(train"
    ):
        _fit(_with_bad_gradient(_module(max_skipped_steps=1), {0, 1}))
    module = _with_bad_gradient(_module(max_skipped_steps=2), {0, 1})
    _fit(module)
    assert module.nonfinite_guard.num_skipped == 2


def test_the_number_of_skipped_steps_is_in_the_checkpoint() -> None:
    module = _module(max_skipped_steps=1)
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    assert checkpoint["guard"] == {"num_skipped": 0, "losses": []}
    module.on_load_checkpoint({"guard": {"num_skipped": 1, "losses": []}})
    with pytest.raises(TrainingError, match="has skipped 2 steps"):
        _fit(_with_bad_gradient(module, {0}))


def test_the_nonfinite_guard_changes_no_bit_of_a_training_without_nonfinite_steps() -> None:
    """The reference is a plain training loop with torch's own clipping."""
    module = _module(gradient_clip_norm=0.05)
    _fit(module)
    plain = _module(gradient_clip_norm=0.05)
    configured: Any = plain.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    batches = TrainingBatches(
        [SPLIT], cut_step(8, 1, 8), 0, seed=3, changes=None, target_dtype="int64"
    )
    plain.train()
    for index in range(EPOCH):
        torch.manual_seed(_derived_seed(3, 0, index, 0))
        batch = batches[0, index]
        loss = plain._losses(plain.network(batch.inputs), batch.targets).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(
            [value for group in optimizer.param_groups for value in group["params"]], 0.05
        )
        optimizer.step()
        schedule.step()
    assert all(
        torch.equal(value, found)
        for value, found in zip(
            plain.network.state_dict().values(), module.network.state_dict().values(), strict=True
        )
    )


def _half(scale: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


def _scale(trainer: pl.Trainer) -> float:
    return float(trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]


def test_a_float16_overflow_lowers_the_loss_scale_without_counting_as_skipped() -> None:
    module = _with_bad_gradient(_module(on_nonfinite="fail"), {1}, np.inf)
    changed, trainer = _fit(module, plugins=[_half(64.0)])
    assert changed == [True, False, True]
    assert (module.nonfinite_guard.num_skipped, _scale(trainer)) == (0, 32.0)


def test_a_float16_overflow_at_the_lowest_loss_scale_fails_with_the_reason() -> None:
    module = _with_bad_gradient(_module(), {0, 1, 2}, np.inf)
    with pytest.raises(
        TrainingError, match=r"overflows float16 in step 3 .* it is at 1\. No weight"
    ):
        _fit(module, plugins=[_half(4.0)])


def test_a_nonfinite_loss_in_float16_skips_the_step_and_keeps_the_loss_scale() -> None:
    split = _spoiled(1)
    module = _module(split)
    changed, trainer = _fit(module, split, plugins=[_half(64.0)])
    assert changed == [True, False, True]
    assert (module.nonfinite_guard.num_skipped, _scale(trainer)) == (1, 64.0)


def _spoil_table(project: Path, row: int = 7) -> str:
    """Put a NaN into one training row of a packed table, and return its id."""
    path, manifest = (
        project / "data/packed/train/inputs.npy",
        json.loads((project / "data/packed/manifest.json").read_bytes()),
    )
    inputs = np.load(path)
    inputs[row, 0] = np.nan
    np.save(path, inputs)
    manifest["splits"]["train"]["files"]["inputs.npy"] = files.sha256_file(path)
    files.write_json(project / "data/packed/manifest.json", manifest)
    return packed.open_split(
        project / "data/packed", packed.read_manifest(project / "data/packed"), "train"
    ).ids[row]


def _changes(output: str) -> dict[int, set[str]]:
    """Return the lines of the ranks in `output`, by step."""
    found: dict[int, set[str]] = {}
    for step, change in re.findall(r"step (\d+) changed (\w+) on rank \d", output):
        found.setdefault(int(step), set()).add(change)
    return found


PLACES = [
    pytest.param("single", 1, "32-true", 1024, marks=pytest.mark.nightly),
    ("ddp", 2, "32-true", 1024),
    pytest.param("ddp", 2, "bf16-mixed", 8, marks=pytest.mark.nightly),
    pytest.param("fsdp", 2, "32-true", 1024, marks=pytest.mark.nightly),
    pytest.param("fsdp", 2, "bf16-mixed", 8, marks=pytest.mark.nightly),
    pytest.param("deepspeed_stage_1", 2, "32-true", 1024, marks=pytest.mark.nightly),
    pytest.param("deepspeed_stage_1", 2, "bf16-mixed", 8, marks=pytest.mark.nightly),
    pytest.param("deepspeed_stage_2", 2, "16-mixed", 8, marks=pytest.mark.nightly),
    pytest.param("deepspeed_stage_2", 2, "bf16-mixed", 1024, marks=pytest.mark.nightly),
    pytest.param("deepspeed_stage_3", 2, "32-true", 8, marks=pytest.mark.nightly),
    pytest.param("deepspeed_stage_3", 2, "bf16-mixed", 1024, marks=pytest.mark.nightly),
    ("deepspeed_stage_3", 2, "16-mixed", 1024),
]


@pytest.mark.process
@pytest.mark.parametrize(("strategy", "devices", "precision", "max_batch_per_device"), PLACES)
def test_all_ranks_skip_a_step_with_a_nonfinite_row(
    tmp_path: Path, strategy: str, devices: int, precision: str, max_batch_per_device: int
) -> None:
    placed: dict[str, Any] = {
        "strategy": strategy,
        "devices": devices,
        "precision": precision,
        "max_batch_per_device": max_batch_per_device,
    }
    project = test_table_runs.write_project(tmp_path / "project", on_nonfinite="skip", **placed)
    guilty = _spoil_table(project)
    done = run_training(project, LOGGED)
    assert done.returncode == 0, done.stderr
    named = re.findall(
        r"skipped   the loss is not finite in step (\d+) \(epoch (\d)\) for 1 of 64 rows, "
        r"with the ids (\w+)\.",
        done.stdout,
    )
    assert [(epoch, row) for _, epoch, row in named] in (
        [("1", guilty)],
        [("2", guilty)],
        [("1", guilty), ("2", guilty)],
    )
    skipped = {int(step) for step, _, _ in named}
    changes = _changes(done.stdout)
    assert {step for step in changes if changes[step] == {"nothing"}} >= skipped
    assert (
        len([step for step in changes if changes[step] == {"something"}]) >= 6
    )  # of 12; the others may be overflows of float16
    if precision != "16-mixed":
        assert {step for step in changes if changes[step] == {"something"}} == set(
            range(1, 13)
        ) - skipped
    assert json.loads((project / "metrics/train.json").read_text())["skipped_steps"] == len(named)
    assert json.loads((project / "artifacts/model/model.json").read_text())["metrics"][
        "skipped_steps"
    ] <= len(named)


@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("ddp", "32-true"),
        pytest.param("fsdp", "32-true", marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_1", "bf16-mixed", marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_2", "32-true", marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_3", "bf16-mixed", marks=pytest.mark.nightly),
    ],
)
def test_a_nonfinite_gradient_of_one_rank_stops_all_ranks_with_one_message(
    tmp_path: Path, strategy: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAD_GRADIENT", "5:1")
    project = test_table_runs.write_project(
        tmp_path / "project", devices=2, strategy=strategy, precision=precision
    )
    done = run_training(project, LOGGED)
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1
    assert (
        "error: the gradient is not finite in step 5 (epoch 1), while the losses of all its 64 "
        "rows are; " in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert not (project / "artifacts").exists()


@pytest.mark.process
@pytest.mark.parametrize(
    "placed",
    [
        pytest.param({}, id="single"),
        pytest.param(
            {"devices": 2, "strategy": "deepspeed_stage_2", "precision": "bf16-mixed"},
            id="zero 2",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_resumed_run_continues_counting_skipped_steps_and_ends_with_equal_weights(
    tmp_path: Path, placed: dict[str, Any]
) -> None:
    settings = {"on_nonfinite": "skip", "epochs": 5, "checkpoint_every_epochs": 1, **placed}
    whole, killed = (
        test_table_runs.write_project(tmp_path / name, **settings) for name in ("whole", "killed")
    )
    for project in (whole, killed):
        _spoil_table(project)
    assert run_training(whole).returncode == 0
    kill_after(killed, "epoch 4/5")
    done = run_training(killed)
    assert "resumed   after epoch" in done.stdout
    assert weights_digest(killed) == weights_digest(whole)
    found = [
        json.loads((project / "metrics/train.json").read_text())["skipped_steps"]
        for project in (whole, killed)
    ]
    assert found[0] == found[1] > 2
