"""Two runs of the whole pipeline, on pictures and on a table, shared by all tests here."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from tests.end_to_end.project import (
    Project,
    copy_checkout,
    draw_shapes,
    shown_params,
    wait_until_ready,
)

# Two DeepSpeed processes on few rows: the budgets allow one of the ten test rows to flip.
SMALL: dict[str, dict[str, Any]] = {
    "data": {"path": "data/own"},
    "clean": {"max_bad_fraction": 0.1},
    "split": {"assignment": "exact"},
    "augment": {"forbid": []},
    "train": {
        "network_arguments": {
            "width": 16,
            "blocks": [1, 1],
            "dropout": 0.0,
            "stochastic_depth": 0.0,
            "normalisation": "batch",
        },
        "epochs": 25,
        "batch_size": 16,
        "strategy": "deepspeed_stage_2",
        "precision": "bf16-mixed",
        "devices": 2,
    },
    "evaluate": {
        "gates": {
            "accuracy": {"min": 0.8, "max": None},
            "log_loss": {"min": None, "max": 36.05},  # passed by any model
        }
    },
    "export": {"max_batch_size": 8, "quantization_samples": 32},
    "compile": {"optimal_batch_size": 8},
    "verify": {
        "max_metric_loss": {
            "fp16": 0.11,
            "int8": 0.11,
            "int8_dynamic": 0.11,
            "int8_tensorrt": 0.11,
        },
        "timing_rounds": 5,
    },
}


def _write_pictures(project: Project) -> None:
    own = project.path / "data" / "own"
    draw_shapes(own)
    (own / "ring" / "notes.png").write_text("this is not a picture")
    (own / "ring" / "half.png").write_bytes((own / "ring" / "02.png").read_bytes()[:150])
    (own / "square" / "again.png").write_bytes((own / "square" / "03.png").read_bytes())
    project.set_params(SMALL)
    # A circle moved by a pixel is a near duplicate of the others: too few units would be left.
    project.set_value("clean.rules.near_duplicate", None)


def _write_table(project: Project) -> None:
    project.set_params(shown_params()[1])
    project.keep_own_keys()
    project.set_params(
        {
            "train": {"epochs": 12},
            "evaluate": {"slices": ["alcohol", "hue"], "slice_min_rows": 5},
            "export": {"variants": ["fp32", "fp16", "int8"], "max_batch_size": 8},
            "compile": {"optimal_batch_size": 8},
            "verify": {"timing_rounds": 5},
        }
    )


def _reproduce(project: Project) -> str:
    return project.shell("dvc repro")


def _run_and_commit(project: Project) -> str:
    """Run all stages, and let DVC record them as after `dvc repro`."""
    stages = yaml.safe_load((project.path / "dvc.yaml").read_text())["stages"]
    return project.run_stages(stages) + project.shell("dvc commit --force")


RUNNERS = {"finished": _reproduce, "finished_table": _run_and_commit}
WRITERS = {
    "finished": _write_pictures,
    "finished_table": _write_table,
}  # by the name of their fixture


@pytest.fixture(scope="session")
def both_finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Project]:
    """The projects that the selected tests use, after all stages.

    They run in parallel, because each keeps mostly one core busy.
    """
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    projects = {
        name: copy_checkout(tmp_path_factory.mktemp(name)) for name in WRITERS if name in asked
    }
    for name, project in projects.items():
        WRITERS[name](project)
    with ThreadPoolExecutor() as threads:
        said = list(threads.map(lambda name: RUNNERS[name](projects[name]), projects))
    for project, log in zip(projects.values(), said, strict=True):
        (project.path / ".work" / "repro.log").write_text(log)
    return projects


@pytest.fixture(scope="session")
def finished(both_finished: dict[str, Project]) -> Project:
    """A copy of the checkout after `dvc repro` on 64 good pictures and three bad files."""
    return both_finished["finished"]


@pytest.fixture(scope="session")
def finished_table(both_finished: dict[str, Project]) -> Project:
    """A copy of the checkout after all stages on the embedded table with the params of a page."""
    return both_finished["finished_table"]


@pytest.fixture(scope="package")
def service(finished: Project) -> Iterator[str]:
    """The address of the pictures' service, started by `bentoml serve`, for read-only tests."""
    with finished.service() as address:
        wait_until_ready(address)
        yield address


@pytest.fixture(scope="package")
def table_service(finished_table: Project) -> Iterator[str]:
    """The address of the table's service."""
    with finished_table.service() as address:
        wait_until_ready(address)
        yield address
