"""Makes a small trained project on disk, in the state before the stage export."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.gates import write_gates
from slipway.artifacts.uncertainty import Calibration, read_calibration, write_calibration
from slipway.config.params import Params, load_params, parse_params
from slipway.data.store.packed import (
    PackedManifest,
    PackedSplit,
    TargetScale,
    open_split,
    write_manifest,
    write_split,
)
from slipway.export.bundle_writer import ExportRows, Trained, write_bundle
from slipway.export.certification.lineage import trace_lineage
from slipway.export.graphs.graph import torch_answers
from slipway.export.precision.leaderboard import Effort
from slipway.inputs.images import ImageContract
from slipway.kinds.registry import Task
from slipway.metrics.scores import Resampling, baseline_scores, measure
from slipway.reports.evaluation.record import Evaluation, write_evaluation
from slipway.system import files
from slipway.training.networks.networks import (
    ModelManifest,
    Network,
    NetworkSpec,
    build_network,
    load_network,
    save_model,
)
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork, calibrated
from slipway.training.uncertainty.calibration import Calibrator
from slipway.training.uncertainty.ood_score import save_ood_score
from tests.model_manifests import model_manifest
from tests.packed_rows import packed_rows
from tests.project_params import own_content

CONTRACT = ImageContract(
    kind="images",
    transform=None,
    size_px=8,
    channels=3,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=10**6,
)
CLASSES = ["amber", "blue", "green"]
COLOURS = np.array([[200, 140, 40], [40, 80, 200], [60, 180, 80]])
NUM_ROWS = {"train": 96, "val": 30, "test": 41}
RESAMPLING = Resampling(seed=7, num_samples=100, confidence=0.95)
SMALL_RESNET = {
    "width": 16,
    "blocks": [1],
    "dropout": 0.0,
    "stochastic_depth": 0.0,
    "normalisation": "batch",
}
QUICK = Effort(limit_s=0.0, memory=False)  # six rounds of one row


@dataclass(frozen=True)
class Project:
    """A project in the state after `evaluate`; after `bundle` was called, that after `export`."""

    root: Path
    task: Task

    @property
    def packed(self) -> Path:
        return self.root / "data/packed"

    @property
    def checkpoint(self) -> Path:
        return self.root / "artifacts/model"

    @property
    def bundle_root(self) -> Path:
        return self.root / "artifacts/bundle"

    def network(self) -> Network:
        return load_network(self.checkpoint)

    def calibrated(self) -> CalibratedNetwork:
        return calibrated(
            self.network(), self.calibration(), self.root / "artifacts/ood_score.safetensors"
        )

    def calibration(self) -> Calibration:
        return read_calibration(self.root / "artifacts/calibration.json")

    def split(self, name: str) -> PackedSplit:
        return open_split(self.packed, read_packed(self.packed), name)

    def bundle(self) -> LoadedBundle:
        return load_bundle(self.bundle_root)


def read_packed(root: Path) -> PackedManifest:
    return PackedManifest.model_validate_json((root / "manifest.json").read_text())


@pytest.fixture(scope="session")
def evaluated_classifier(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Return a classifier of three noisy colours, trained almost to perfection."""
    return make_project(tmp_path_factory.mktemp("classifier"), "image_classification")


@pytest.fixture(scope="session")
def classifier(evaluated_classifier: Project) -> Project:
    """Return that classifier, exported."""
    return _exported(evaluated_classifier)


@pytest.fixture(scope="session")
def regressor(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Return an exported regressor of mean brightness, in a unit with values around 1,000."""
    return _exported(make_project(tmp_path_factory.mktemp("regressor"), "image_regression"))


@pytest.fixture(scope="session")
def export_params() -> Params:
    """Return the repository's params with small sizes."""
    content = own_content()
    content["data"] |= {"path": "data/raw.parquet"}
    content["export"] |= {"max_batch_size": 32, "quantization_samples": 64}
    content["compile"] |= {"optimal_batch_size": 8, "variant": "fp16", "require": False}
    content["verify"] |= {
        "batch_seconds": 60,
        "timing_rounds": 3,
        "max_metric_loss": {
            "fp16": 0.01,
            "int8": 0.05,
            "int8_dynamic": 0.05,
            "int8_tensorrt": 0.05,
        },
    }
    content["evaluate"] |= {"bootstrap_samples": 100}
    return parse_params(content)


def make_project(
    root: Path,
    task: Task,
    size_px: int = CONTRACT.size_px,
    name: str = "small_resnet",
    arguments: Mapping[str, Any] = SMALL_RESNET,
) -> Project:
    """Make the outputs of all stages before `export`, with a network trained for seconds."""
    generator = np.random.default_rng(3)
    total = sum(NUM_ROWS.values())
    contract = CONTRACT.model_copy(update={"size_px": size_px})
    images, targets = _pictures(generator, total, task, contract)
    payloads = [_png(image) for image in images]
    _write_raw(root / "data/raw.parquet", payloads, targets, task)
    manifest = _write_packed(root / "data/packed", images, targets, payloads, task, contract)
    project = Project(root, task)
    _train(project, manifest, name, dict(arguments))
    _calibrate(project)
    _write_metrics(project)
    (root / "artifacts/pruned").mkdir()
    files.write_json(root / "artifacts/pruned/model.json", {"format_version": 2, "kind": None})
    write_reports(project.root, NUM_ROWS)
    return project


def _pictures(
    generator: np.random.Generator, total: int, task: Task, contract: ImageContract
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    noise = generator.normal(0, 25, size=(total, *contract.shape))
    if task == "image_classification":
        targets = (np.arange(total) % len(CLASSES)).astype(np.float64)
        base = COLOURS[targets.astype(int)][:, None, None, :]
    else:
        level = generator.uniform(40, 210, size=total)
        targets, base = 1000 + level, level[:, None, None, None]
    return np.clip(base + noise, 0, 255).astype(np.uint8), targets


def _png(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def _write_raw(path: Path, payloads: list[bytes], targets: NDArray[np.float64], task: Task) -> None:
    labels = (
        [CLASSES[int(target)] for target in targets]
        if task == "image_classification"
        else targets.tolist()
    )
    path.parent.mkdir(parents=True)
    pq.write_table(
        pa.table(
            {"image": [{"bytes": payload, "path": None} for payload in payloads], "label": labels}
        ),
        path,
    )


def _write_packed(
    root: Path,
    images: NDArray[np.uint8],
    targets: NDArray[np.float64],
    payloads: list[bytes],
    task: Task,
    contract: ImageContract,
) -> PackedManifest:
    splits, start = {}, 0
    for name, size in NUM_ROWS.items():
        rows = range(start, start + size)
        (root / name).mkdir(parents=True)
        np.save(root / name / "inputs.npy", images[start : start + size])
        ids = [files.sha256_bytes(payloads[row])[:32] for row in rows]
        splits[name] = write_split(
            root / name,
            packed_rows(ids, [str(row) for row in rows], targets[start : start + size]),
            images.shape[1:],
        )
        start += size
    train = targets[: NUM_ROWS["train"]]
    has_classes = task == "image_classification"
    pixels = images[: NUM_ROWS["train"]] / 255
    manifest = PackedManifest(
        format_version=3,
        task=task,
        input=contract,
        classes=CLASSES if has_classes else [],
        mean=pixels.mean(axis=(0, 1, 2)).tolist(),
        std=pixels.std(axis=(0, 1, 2)).tolist(),
        target_scale=None
        if has_classes
        else TargetScale(mean=float(train.mean()), std=float(train.std())),
        splits=splits,
    )
    write_manifest(root, manifest)
    return manifest


def _train(
    project: Project, manifest: PackedManifest, name: str, arguments: dict[str, Any]
) -> None:
    spec = NetworkSpec(
        task=project.task,
        name=name,
        arguments=arguments,
        classes=manifest.classes,
        input=manifest.input,
        mean=manifest.mean,
        std=manifest.std,
        target_scale=manifest.target_scale,
    )
    torch.set_num_threads(1)  # for so small a network threads only wait for each other
    torch.manual_seed(0)
    network, split = build_network(spec).train(), project.split("train")
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    pixels, targets = (
        torch.from_numpy(np.array(split.inputs)),
        torch.from_numpy(np.array(split.targets)),
    )
    for _ in range(40):
        optimizer.zero_grad()
        answer = network(pixels)
        if spec.target_scale is None:
            loss = functional.cross_entropy(answer, targets.long())
        else:
            loss = functional.mse_loss(
                answer[:, 0] / spec.target_scale.std, targets.float() / spec.target_scale.std
            )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    save_model(project.checkpoint, model_manifest(spec), network.state_dict())


def _calibrate(project: Project) -> None:
    params = load_params(Path(__file__).parents[2] / "params.yaml").evaluate
    fitted = Calibrator(project.network(), params, 7, "cpu").fit(
        project.split("train"), project.split("val")
    )
    write_calibration(project.root / "artifacts/calibration.json", fitted.calibration)
    save_ood_score(project.root / "artifacts/ood_score.safetensors", fitted.score)


def trained(project: Project) -> Trained:
    network = project.calibrated()
    card = ModelManifest.model_validate_json((project.checkpoint / "model.json").read_text())
    outputs = torch_answers(network, project.split("test").inputs[:]).outputs
    metrics = measure(project.task, project.split("test").targets, outputs, RESAMPLING)
    targets, classes = project.split("test").targets, card.network.classes
    baseline = baseline_scores(
        project.task, project.split("train").targets, targets, len(classes), None
    )
    calibration = project.calibration()
    return Trained(
        network,
        project.task,
        card.network.input,
        classes,
        card.weights_sha256,
        calibration,
        metrics,
        baseline,
    )


def write_reports(root: Path, num_rows: dict[str, int]) -> None:
    """Write the parts of the reports of clean and split that a model card uses."""
    total = sum(num_rows.values())
    refused = {"exact_duplicate": {"count": 2, "examples": []}}
    clean = {
        "read": total + 2,
        "kept": total,
        "refused": refused,
        "flagged": {},
        "not_checked": {"blurred": "clean.rules.blurred is null"},
    }
    split = {
        "splits": {name: {"rows": rows} for name, rows in num_rows.items()},
        "leaks": {"rows": 0},
    }
    files.write_json(root / "reports/clean.json", clean)
    files.write_json(root / "reports/split.json", split)


def _write_metrics(project: Project) -> None:
    (project.root / "metrics").mkdir()
    split = project.split("test")
    outputs = torch_answers(project.calibrated(), split.inputs[:]).outputs
    evaluation = Evaluation(
        project.task,
        project.network().spec.classes,
        split.ids,
        split.sources,
        split.targets,
        outputs,
        trained(project).metrics,
        baseline=trained(project).baseline,
    )
    path = project.root / "metrics/evaluate.json"
    write_evaluation(path, evaluation)
    write_gates(project.root / "metrics/gates.json", [], path)


def _exported(project: Project) -> Project:
    content = own_content()
    content["export"] |= {"max_batch_size": 32, "quantization_samples": 64}
    params = parse_params(content)
    rows = ExportRows(
        project.split("train").inputs[:], project.split("val"), project.split("train")
    )
    with files.new_directory(project.bundle_root) as folder:
        write_bundle(
            folder, trained(project), rows, params.export, RESAMPLING, trace_lineage({}, []), QUICK
        )
    return project
