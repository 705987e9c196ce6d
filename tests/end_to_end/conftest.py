"""One run of the whole pipeline, shared by all tests of this folder."""

from typing import Any

import pytest

from tests.end_to_end.project import Project, copy_checkout, draw_shapes, readme_params

# Two DeepSpeed processes on few rows: the budgets allow one of the ten test rows to flip.
SMALL: dict[str, dict[str, Any]] = {
    "data": {"path": "data/own"},
    "clean": {"max_bad_share": 0.1},
    "split": {"assignment": "exact"},
    "augment": {"forbid": []},
    "train": {
        "network_arguments": {"width": 16, "blocks": [1, 1], "dropout": 0.0, "stochastic_depth": 0.0, "normalisation": "batch"},
        "epochs": 25,
        "batch_size": 16,
        "strategy": "deepspeed_stage_2",
        "precision": "bf16-mixed",
        "devices": 2,
    },
    "evaluate": {"gates": {"accuracy": {"min": 0.8, "max": None}}},
    "export": {"max_batch_size": 8, "calibration_rows": 32},
    "compile": {"optimal_batch_size": 8},
    "verify": {"max_metric_loss": {"fp16": 0.11, "int8": 0.11, "int8_dynamic": 0.11, "int8_tensorrt": 0.11}, "timing_rounds": 5},
}


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A fresh copy of the checkout with 64 pictures, three of them joined by a bad file each; nothing has run yet."""
    project = copy_checkout(tmp_path_factory.mktemp("project"))
    own = project.path / "data" / "own"
    draw_shapes(own)
    (own / "ring" / "notes.png").write_text("this is not a picture")
    (own / "ring" / "half.png").write_bytes((own / "ring" / "02.png").read_bytes()[:150])
    (own / "square" / "again.png").write_bytes((own / "square" / "03.png").read_bytes())
    project.set_params(SMALL)
    # A circle moved by a pixel is a near duplicate of the other circles: too few units would be left to split.
    project.set_value("clean.rules.near_duplicate", "off")
    return project


@pytest.fixture(scope="session")
def finished(project: Project) -> Project:
    """The same project after `dvc repro`."""
    (project.path / ".work" / "repro.log").write_text(project.shell("dvc repro"))
    return project


@pytest.fixture(scope="session")
def finished_table(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A fresh copy of the checkout after `dvc repro` on the embedded table, with the params that the README shows for it."""
    project = copy_checkout(tmp_path_factory.mktemp("table"))
    project.set_params(readme_params()[1])
    project.set_params({"evaluate": {"slices": ["alcohol", "hue"], "slice_min_rows": 5}})
    (project.path / ".work" / "repro.log").write_text(project.shell("dvc repro"))
    return project
