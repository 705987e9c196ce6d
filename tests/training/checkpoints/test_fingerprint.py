from pathlib import Path
from typing import Any

import pytest

from slipway.config.params import load_params
from slipway.system import files
from slipway.system.errors import IntegrityError
from slipway.training.checkpoints.fingerprint import Fingerprint, take_fingerprint
from slipway.training.distributed.placement import TrainingHost, place


def _take(project: Path, seed: int = 7, **train: Any) -> Fingerprint:
    params = load_params(project / "params.yaml").train.model_copy(update=train)
    placement = place(params, TrainingHost(num_gpus=0, has_bfloat16=True, launch=None))
    return take_fingerprint(
        seed, params, placement, project / "data/packed", project / "data/augmented", project
    )


def test_equal_inputs_of_a_training_have_equal_fingerprints(project: Path) -> None:
    assert _take(project).digest == _take(project).digest


def test_another_seed_changes_the_fingerprint_and_is_listed(project: Path) -> None:
    assert _take(project).differences(_take(project, seed=8)) == ["seed: 7 -> 8"]
    assert _take(project).digest != _take(project, seed=8).digest


@pytest.mark.parametrize(
    "train",
    [
        {"learning_rate": 0.5},
        {"batch_size": 16},
        {"precision": "bf16-mixed"},
        {"shuffle": "blocks", "shuffle_buffer_mib": 64},
    ],
)
def test_a_changed_parameter_changes_the_fingerprint(project: Path, train: dict[str, Any]) -> None:
    assert _take(project, **train).digest != _take(project).digest


@pytest.mark.parametrize(
    "train",
    [
        {"devices": 2},
        {"strategy": "ddp"},
        {"num_workers": 3},
        {"max_batch_per_device": 8},
        {"checkpoint_every_minutes": None},
        {"repeat_every_steps": 5},
    ],
)
def test_the_process_layout_does_not_change_the_fingerprint(
    project: Path, train: dict[str, Any]
) -> None:
    assert _take(project, **train).digest == _take(project).digest


def test_another_kind_of_device_changes_the_fingerprint(project: Path) -> None:
    params = load_params(project / "params.yaml").train.model_copy(
        update={"accelerator": "auto", "strategy": "ddp", "precision": "32-true"}
    )
    digests = set()
    for num_gpus in (0, 1):
        placement = place(params, TrainingHost(num_gpus=num_gpus, has_bfloat16=True, launch=None))
        digests.add(
            take_fingerprint(
                7, params, placement, project / "data/packed", project / "data/augmented", project
            ).digest
        )
    assert len(digests) == 2


def _own_code(project: Path) -> None:
    """Give the project its own code of the stage `train`."""
    files.write_text(project / "slipway/stages/train.py", "from slipway.training import run\n")


@pytest.mark.parametrize(
    "name", ["data/packed/manifest.json", "data/augmented/plan.json", "slipway/stages/train.py"]
)
def test_a_changed_source_file_changes_the_fingerprint_and_is_listed(
    project: Path, name: str
) -> None:
    _own_code(project)
    before = _take(project)
    files.write_text(
        project / name, (project / name).read_text() + ("x = 1" if name.endswith(".py") else " ")
    )
    after = _take(project)
    assert after.digest != before.digest
    (difference,) = before.differences(after)
    assert difference.endswith(name)


def test_a_changed_comment_does_not_change_the_fingerprint(project: Path) -> None:
    _own_code(project)
    before = _take(project)
    files.write_text(
        project / "slipway/stages/train.py",
        (project / "slipway/stages/train.py").read_text() + "# why\n",
    )
    assert _take(project).digest == before.digest


def test_a_stale_code_yaml_does_not_hide_changed_code(project: Path) -> None:
    _own_code(project)
    files.write_text(project / "code.yaml", f'train: "{"00" * 32}"\n')
    before = _take(project)
    files.write_text(project / "slipway/stages/train.py", "x = 1\n")
    assert _take(project).digest != before.digest


def test_the_fingerprint_covers_all_code_that_the_train_stage_imports(project: Path) -> None:
    assert {
        "slipway/stages/train.py",
        "slipway/training/module.py",
        "slipway/system/cores.py",
    } <= set(_take(project).code)


def test_a_project_without_the_code_of_train_is_refused(project: Path) -> None:
    (project / "slipway/stages").mkdir(parents=True)
    with pytest.raises(
        IntegrityError, match=r"train has no digest: slipway/stages/train\.py is missing"
    ):
        _take(project)
