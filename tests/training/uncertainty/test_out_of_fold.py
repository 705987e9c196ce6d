"""Out-of-fold predictions: no network sees the fold that it predicts, or copies of it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from slipway.config.params import load_params
from slipway.config.training import AuditParams, TrainParams
from slipway.data.augmentation.plan import plan_from_params, write_plan
from slipway.data.engine.rows import PACKED_ROWS, SPLIT_ROWS, read_table, write_table
from slipway.data.splits.audit_folds import audited_rows
from slipway.data.store.packed import open_split, read_manifest
from slipway.system.errors import SchemaError, UnavailableError
from slipway.training.augmentation.offline_copies import copy_id, original_rows, write_copies
from slipway.training.uncertainty.out_of_fold import (
    FoldTraining,
    plan_folds,
    predict_out_of_fold,
)
from tests.project_params import augment_params
from tests.training.conftest import write_project

NUM_FOLDS = 3
AUDIT = AuditParams(folds=NUM_FOLDS, epochs=2)
NUM_COPIES = 2


def split_rows(packed: Path) -> pa.Table:
    """Return SPLIT_ROWS of a packed store with two classes and without groups."""
    manifest, rows = read_manifest(packed), []
    for name in ("train", "val"):
        split = open_split(packed, manifest, name)
        for sample_id, target in zip(split.ids, split.targets, strict=True):
            facts = {
                "source": sample_id,
                "label": manifest.classes[int(target)],
                "bytes": 1,
                "sha256": sample_id,
            }
            rows.append(
                {
                    "id": sample_id,
                    **facts,
                    "flags": [],
                    "corrections": [],
                    "split": name,
                    "leaked": False,
                }
            )
    return pa.Table.from_pylist(rows, schema=SPLIT_ROWS)


def write_sorted_project(root: Path) -> Path:
    """Write a project with rows ordered by id as in `precompute`, and two copies of each one."""
    write_project(root)
    packed, manifest = root / "data/packed", read_manifest(root / "data/packed")
    for name in ("train", "val"):
        split = open_split(packed, manifest, name)
        order = np.argsort(split.ids)
        np.save(packed / name / "inputs.npy", np.asarray(split.inputs)[order])
        write_table(
            packed / name / "rows.parquet",
            read_table(packed / name / "rows.parquet", PACKED_ROWS).sort_by("id"),
            PACKED_ROWS,
        )
    write_table(root / "data/split/rows.parquet", split_rows(packed), SPLIT_ROWS)
    train = open_split(packed, manifest, "train")
    plan = plan_from_params(augment_params(rotation_deg=10.0), 7)
    copies = write_copies(train, plan, NUM_COPIES, 8, root / "data/augmented/train")
    write_plan(root / "data/augmented", plan.model_copy(update={"offline": copies}))
    return root


@pytest.fixture(name="project", scope="module")
def _project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sorted_project(tmp_path_factory.mktemp("folds"))


def planned(project: Path, train: TrainParams | None = None) -> FoldTraining:
    params = train or load_params(project / "params.yaml").train
    return plan_folds(
        7, params, AUDIT, audited_rows(split_rows(project / "data/packed")), **paths_of(project)
    )


def paths_of(project: Path) -> dict[str, Path]:
    packed, augmented = project / "data/packed", project / "data/augmented"
    return {"packed": packed, "augmented": augmented, "root": project}


def copied_ids(ids: list[str]) -> set[str]:
    return {copy_id(sample_id, copy) for sample_id in ids for copy in range(1, NUM_COPIES + 1)}


@pytest.mark.parametrize("fold", range(NUM_FOLDS))
def test_the_network_of_a_fold_trains_on_all_rows_and_copies_outside_that_fold(
    project: Path, fold: int
) -> None:
    training = planned(project)
    held_out, learnt = training.held_out(fold).ids, training.others(fold).ids
    assert len(held_out) + len(learnt) - len(copied_ids(learnt) & set(learnt)) == len(
        training.rows()
    )
    assert not set(learnt) & (set(held_out) | copied_ids(held_out))
    assert len(set(learnt) & copied_ids(learnt)) > 100


def test_offline_copies_assigned_to_other_rows_would_leak_between_folds(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: copies of the next row would show a network the rows of its own fold."""
    monkeypatch.setattr(
        "slipway.training.uncertainty.out_of_fold.original_rows",
        lambda *sizes: np.roll(original_rows(*sizes), 1),
    )
    training = planned(project)
    assert set(training.others(0).ids) & copied_ids(training.held_out(0).ids)


def test_every_row_is_held_out_in_exactly_one_fold(project: Path) -> None:
    training = planned(project)
    assert sorted(
        sample_id for fold in range(NUM_FOLDS) for sample_id in training.held_out(fold).ids
    ) == sorted(training.rows().ids)


def test_an_audit_runs_in_one_process_whatever_the_training_requests(project: Path) -> None:
    params = load_params(project / "params.yaml").train.model_copy(
        update={"strategy": "deepspeed_stage_2", "devices": 2}
    )
    settings = planned(project, params).settings()
    assert (settings["requested"]["strategy"], settings["actual"]["strategy"]) == (
        "deepspeed_stage_2",
        "single",
    )
    assert settings["actual"]["world_size"] == 1


def test_an_audit_started_by_torchrun_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    for name, value in {**started, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UnavailableError, match="an audit runs in one process, but torchrun started 2"
    ):
        planned(project)


def test_an_audit_refuses_a_packed_store_with_other_rows(project: Path) -> None:
    rows = audited_rows(split_rows(project / "data/packed"))
    train = load_params(project / "params.yaml").train
    with pytest.raises(SchemaError, match="does not hold the rows of the split"):
        plan_folds(7, train, AUDIT, rows.slice(1), **paths_of(project))


def test_changed_folds_labels_or_params_start_a_new_audit(project: Path) -> None:
    params = load_params(project / "params.yaml").train
    assert planned(project).key == planned(project).key
    assert (
        planned(project, params.model_copy(update={"learning_rate": 0.5})).key
        != planned(project).key
    )


def test_a_resumed_audit_reads_a_finished_fold_instead_of_training_it_again(
    project: Path, tmp_path: Path
) -> None:
    training = planned(project)
    for fold in range(NUM_FOLDS):
        np.save(
            tmp_path / f"fold-{fold}.npy",
            np.full((len(training.held_out(fold)), 2), fold, np.float32),
        )
    answers = predict_out_of_fold(training, tmp_path)
    assert np.array_equal(answers[:, 0], training.folds.astype(np.float32))
