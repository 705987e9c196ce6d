"""A small project on disk, whose targets are made from an untrained network's own answers."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray

from slipway.config.params import Params, parse_params
from slipway.data.engine.rows import SPLIT_ROWS, SPLITS, write_table
from slipway.data.store import packed
from slipway.data.store.packed import PackedManifest, TargetScale
from slipway.inputs.images import ImageContract
from slipway.kinds.registry import Task
from slipway.training.networks.networks import Network, NetworkSpec, build_network, save_model
from slipway.training.uncertainty.prediction import predict
from tests.model_manifests import model_manifest
from tests.packed_rows import packed_rows
from tests.project_params import of_kind, own_content

ROOT = Path(__file__).resolve().parents[2]
INPUT = ImageContract(
    kind="images",
    transform=None,
    size_px=8,
    channels=1,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=10_000,
)
NUM_TEST_ROWS = 21
CLASSES = ["ape", "bee", "<script>alert(1)</script>"]


def spec(task: Task) -> NetworkSpec:
    classes = CLASSES if task == "image_classification" else []
    arguments = {
        "width": 16,
        "blocks": [1],
        "dropout": 0.0,
        "stochastic_depth": 0.0,
        "normalisation": "group",
    }
    scale = None if classes else TargetScale(mean=3.0, std=2.0)
    return NetworkSpec(
        task=task,
        name="small_resnet",
        arguments=arguments,
        classes=classes,
        input=INPUT,
        mean=[0.5],
        std=[0.25],
        target_scale=scale,
    )


def network(task: Task) -> Network:
    torch.manual_seed(4)
    return build_network(spec(task)).eval()


def images(num_rows: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, size=(num_rows, *INPUT.shape), dtype=np.uint8)


@cache
def targets(task: Task) -> NDArray[np.float64]:
    """The network's answers, but every fifth row has the next class or is larger by 1."""
    answers = predict(network(task), images(NUM_TEST_ROWS), NUM_TEST_ROWS, "cpu")
    wrong = np.arange(NUM_TEST_ROWS) % 5 == 0
    changed = (
        answers[:, 0] + wrong
        if task == "image_regression"
        else (answers.argmax(axis=1) + wrong) % len(CLASSES)
    )
    return np.asarray(changed, dtype=np.float64)


def write_project(task: Task) -> None:
    """Write everything that the evaluate stage reads, below the current directory."""
    splits, wanted = {}, spec(task)
    for split in SPLITS:
        folder = Path("data/packed", split)
        folder.mkdir(parents=True)
        np.save(folder / "inputs.npy", images(NUM_TEST_ROWS))
        ids = [f"{row:032x}" for row in range(NUM_TEST_ROWS)]
        splits[split] = packed.write_split(
            folder,
            packed_rows(ids, [f"digits/{row}.png" for row in range(NUM_TEST_ROWS)], targets(task)),
            wanted.input.shape,
        )
    manifest = PackedManifest(
        format_version=3,
        task=task,
        input=INPUT,
        classes=wanted.classes,
        mean=wanted.mean,
        std=wanted.std,
        target_scale=wanted.target_scale,
        splits=splits,
    )
    packed.write_manifest(Path("data/packed"), manifest)
    write_table(Path("data/split/rows.parquet"), split_rows(task), SPLIT_ROWS)
    save_model(Path("artifacts/model"), model_manifest(wanted), network(task).state_dict())
    for name in ("train/loss", "val/loss", "val/accuracy", "learning_rate"):
        curve = Path("reports/live/plots/metrics", f"{name}.tsv")
        curve.parent.mkdir(parents=True, exist_ok=True)
        curve.write_text(f"step\t{curve.stem}\n1\t2.0\n2\t1.0\n3\t0.5\n")


def split_rows(task: Task) -> pa.Table:
    """Test rows in reverse order: wide and square in turn, two groups, every seventh flagged."""
    rows = [
        {
            "id": f"{row:032x}",
            "source": f"digits/{row}.png",
            "label": CLASSES[int(target)] if task == "image_classification" else None,
            "target": None if task == "image_classification" else float(target),
            "group": "north" if row < 10 else "south",
            "width": 16 if row % 2 else 8,
            "height": 8,
            "bytes": 64,
            "sha256": f"{row:064x}",
            "flags": ["blurred"] if row % 7 == 0 else [],
            "corrections": [],
            "split": "test",
            "leaked": False,
        }
        for row, target in enumerate(targets(task))
    ]
    return pa.Table.from_pylist(rows[::-1], schema=SPLIT_ROWS)


def params_with(task: Task, gates: dict[str, dict[str, float | None]], **evaluate: Any) -> Params:
    """The project's params with other gates, and other values of the section evaluate."""
    content = of_kind(own_content(), task)
    content["evaluate"] |= {"gates": gates, "batch_size": 4, **evaluate}
    return parse_params(content)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Task], None]:
    """Make the project of a task in an empty directory, which becomes the current one."""
    monkeypatch.chdir(tmp_path)
    return write_project
