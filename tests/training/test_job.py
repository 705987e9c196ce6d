"""Tests of decisions before the first step: threads, layouts, and folds that members leave out."""

import errno
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.artifacts.training_setup import RunSegment
from slipway.data.engine.randomness import id_keys
from slipway.system.cores import num_cores
from slipway.training.distributed.placement import Placement
from slipway.training.job import LeftOut, _initial_network, can_have, open_data, own_threads
from slipway.training.networks.mapped_weights import MappedWeights
from slipway.training.networks.networks import read_model_manifest
from tests.project_params import PROJECT
from tests.training.conftest import spec, write_project
from tests.training.forked_runs import kill_after_checkpoint, run_forked
from tests.training.real_runs import weights_digest

EVERY_STEP = {"checkpoint_every_minutes": 1e-9}
needs_two_cores = pytest.mark.skipif(num_cores() < 2, reason="needs two cores")


def placement(accelerator: str, devices: int) -> Placement:
    return Placement("single", "32-true", accelerator, devices, 1, None, None, ())


def test_the_processes_of_a_node_divide_its_cores_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipway.training.job.num_cores", lambda: 8)
    assert [own_threads(placement("cpu", devices)) for devices in (1, 3, 16)] == [8, 2, 1]
    assert own_threads(placement("gpu", 1)) is None


@pytest.mark.parametrize(("limit", "taken"), [("", 8), ("0", 8), ("none", 8), ("4", 4), ("64", 8)])
def test_recorded_threads_respect_the_limit_of_openmp(
    monkeypatch: pytest.MonkeyPatch, limit: str, taken: int
) -> None:
    monkeypatch.setattr("slipway.training.job.num_cores", lambda: 8)
    monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
    assert own_threads(placement("cpu", 1)) == taken
    assert can_have(5) is (taken == 8)


def test_the_initial_weights_are_mapped_beside_a_folder_of_checkpoints_that_cannot_map_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket, work = tmp_path / "bucket", tmp_path / "project/.work"
    bucket.mkdir()
    work.mkdir(parents=True)
    (work / "train").symlink_to(bucket)
    refuses = partial(_refusing, bucket)
    monkeypatch.setattr(os, "ftruncate", refuses(os.ftruncate))
    monkeypatch.setattr(mmap, "mmap", refuses(mmap.mmap))
    with pytest.raises(OSError, match="not supported"):
        MappedWeights(work / "train")
    sharded = replace(placement("cpu", 2), strategy="fsdp")
    network = _initial_network(7, PROJECT.train, spec(), sharded, work / "train")
    assert network.mapped is not None
    assert all(map(network.mapped._is_mapped, network.parameters()))
    assert list(bucket.iterdir()) == []


def _refusing(folder: Path, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, which takes a descriptor first, but refuses files in `folder`."""

    def checked(descriptor: int, *arguments: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/"):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return call(descriptor, *arguments)

    return checked


def test_a_changed_number_of_threads_is_another_process_layout() -> None:
    saved = RunSegment(first_step=0, strategy="single", world_size=1, per_device=32, threads=2)
    assert saved.has_same_layout(saved.model_copy(update={"first_step": 7}))
    assert not saved.has_same_layout(saved.model_copy(update={"threads": 4}))
    assert not saved.model_copy(update={"threads": None}).has_same_layout(saved)
    assert str(saved) == "single on 1 process with 32 rows a batch and 2 threads each"


def test_each_row_is_left_out_by_exactly_one_member_chosen_by_id_and_seed() -> None:
    keys = id_keys([f"{number * 2**50:016x}" for number in range(1000)])
    keeps = np.stack([LeftOut(fold, 4, seed=7).keeps(keys) for fold in range(4)])
    assert (keeps.sum(axis=0) == 3).all()
    assert ((~keeps).sum(axis=1) > 200).all()
    assert (LeftOut(1, 4, seed=7).keeps(keys[::-1])[::-1] == keeps[1]).all()
    assert (LeftOut(1, 4, seed=8).keeps(keys) != keeps[1]).any()


def test_a_member_trains_without_the_rows_and_offline_copies_of_its_left_out_fold(
    tmp_path: Path,
) -> None:
    project = write_project(tmp_path / "project")
    whole = open_data(project / "data/packed", project / "data/augmented", verify=False)
    left_out = LeftOut(0, 3, seed=7)
    part = open_data(
        project / "data/packed", project / "data/augmented", None, left_out, verify=False
    )
    keeps = left_out.keeps(whole.train[0].keys)
    assert part.train[0].ids == [
        name for name, kept in zip(whole.train[0].ids, keeps, strict=True) if kept
    ]
    assert 0 < part.num_train < whole.num_train
    assert part.val.ids == whole.val.ids
    position = int(np.flatnonzero(keeps)[0])
    assert np.array_equal(part.train[0].inputs[0], whole.train[0].inputs[position])


def on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def with_one_thread_at_most() -> None:
    os.environ["OMP_THREAD_LIMIT"] = "1"


@pytest.fixture(name="killed")
def _killed(tmp_path: Path) -> Path:
    project = write_project(tmp_path / "killed", epochs=2, **EVERY_STEP)
    assert run_forked(project, kill_after_checkpoint, 3)[0] == -9
    newest = sorted((project / ".work/train").glob("*/step-*/checkpoint.json"))[-1]
    assert json.loads(newest.read_bytes())["segments"][-1]["threads"] == num_cores()
    return project


@needs_two_cores
@pytest.mark.process
def test_a_training_resumed_on_fewer_cores_keeps_its_threads_and_weights(
    tmp_path: Path, killed: Path
) -> None:
    whole = write_project(tmp_path / "whole", epochs=2)
    assert run_forked(whole)[0] == 0
    code, output = run_forked(killed, on_one_core)
    assert code == 0, output
    assert (
        f"note      runs with {num_cores()} threads each as before, for the same bits; "
        "a new training takes 1" in output
    )
    assert "last bits" not in output
    assert weights_digest(killed) == weights_digest(whole)


@needs_two_cores
@pytest.mark.process
def test_resuming_with_fewer_available_threads_starts_a_new_segment_with_a_note(
    killed: Path,
) -> None:
    code, output = run_forked(killed, with_one_thread_at_most)
    assert code == 0, output
    assert (
        f"and {num_cores()} threads each, resumed by single on 1 process with 32 rows a batch "
        "and 1 thread each" in output
    )
    assert "same batches, but results may differ in the last bits" in output
    segments = read_model_manifest(killed / "artifacts/model").segments
    assert [segment.threads for segment in segments] == [num_cores(), 1]
