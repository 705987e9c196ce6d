from pathlib import Path
from typing import Any

import pytest

from slipway.config.params import load_params
from slipway.system import files
from slipway.training.checkpoints.fingerprint import Fingerprint, code_of_stage, take_fingerprint
from slipway.training.distributed.strategies import Machine, place

PIPELINE = "stages:\n  train:\n    cmd: python -m stages.train\n    deps:\n      - data/packed\n      - code.py\n"


def _take(project: Path, **train: Any) -> Fingerprint:
    params = load_params(project / "params.yaml").train.model_copy(update=train)
    placement = place(params, Machine(num_gpus=0, has_bfloat16=True, launch=None))
    return take_fingerprint(7, params, placement, project / "data/packed", project / "data/augmented", project)


def test_nothing_changed_is_the_same_training(project: Path) -> None:
    assert _take(project).digest == _take(project).digest


@pytest.mark.parametrize("train", [{"learning_rate": 0.5}, {"batch_size": 16}, {"precision": "bf16-mixed"}])
def test_a_changed_parameter_is_another_training(project: Path, train: dict[str, Any]) -> None:
    assert _take(project, **train).digest != _take(project).digest


@pytest.mark.parametrize(
    "train",
    [{"devices": 2}, {"strategy": "ddp"}, {"num_workers": 3}, {"max_batch_per_device": 8}, {"checkpoint_every_minutes": None}],
)
def test_how_a_training_is_cut_over_processes_is_not_what_it_is(project: Path, train: dict[str, Any]) -> None:
    assert _take(project, **train).digest == _take(project).digest


def test_another_kind_of_device_is_another_training(project: Path) -> None:
    params = load_params(project / "params.yaml").train.model_copy(
        update={"accelerator": "auto", "strategy": "ddp", "precision": "32-true"}
    )
    digests = set()
    for num_gpus in (0, 1):
        placement = place(params, Machine(num_gpus=num_gpus, has_bfloat16=True, launch=None))
        digests.add(take_fingerprint(7, params, placement, project / "data/packed", project / "data/augmented", project).digest)
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["data/packed/manifest.json", "data/augmented/plan.json", "code.py"])
def test_a_changed_file_is_another_training_and_is_named(project: Path, name: str) -> None:
    files.write_text(project / "dvc.yaml", PIPELINE)
    files.write_text(project / "code.py", "ONE = 1\n")
    before = _take(project)
    files.write_text(project / name, (project / name).read_text() + " ")
    after = _take(project)
    assert after.digest != before.digest
    (difference,) = before.differences(after)
    assert difference.endswith(name)


def test_a_pipeline_without_code_is_no_error(tmp_path: Path) -> None:
    assert code_of_stage(tmp_path / "dvc.yaml", "train") == []
