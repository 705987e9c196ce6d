"""A bundle on disk without a trained network, for tests that never run its graph."""

from pathlib import Path
from typing import Any

from slipway.artifacts.bundle import (
    Bundle,
    Lineage,
    LoadedBundle,
    describe_model,
    load_bundle,
    write_manifest,
)
from slipway.artifacts.certificate import Execution
from slipway.artifacts.engine_manifest import EngineMachine, EngineManifest, Profile
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.contract import InputContract, input_name
from slipway.inputs.images import ImageContract
from slipway.system import files
from tests.calibrations import CALIBRATION

LABELS = ["cat", "dog", "emu"]
MACHINE = EngineMachine(
    tensorrt_version="10.16.1",
    cuda_version="13.0",
    driver_version="580.95.05",
    driver_cuda_version="13.1",
    gpu="H200",
    compute_capability="9.0",
)
TENSORRT_FP16 = Execution(backend="tensorrt", provider="tensorrt", precision="fp16", variant="fp16")
COLUMN = {
    "name": "x", "kind": "number", "required": True, "min": None, "max": None,
    "has_missing": False, "categories": [], "mean": 0.0, "std": 1.0, "fill": 0.0, "quantiles": [],
}  # fmt: skip
COLUMNS = ColumnContract(kind="columns", columns=[Column.model_validate(COLUMN)])
CONTRACT = ImageContract(
    kind="images",
    transform=None,
    size_px=4,
    channels=1,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=10**6,
)


def write_small_bundle(
    root: Path,
    model: bytes = b"a graph",
    labels: list[str] = LABELS,
    contract: InputContract = CONTRACT,
) -> LoadedBundle:
    root.mkdir(parents=True, exist_ok=True)
    files.write_bytes(root / "model_fp16.onnx", model)
    data = "table" if contract.kind == "columns" else "image"
    manifest = Bundle.model_validate(
        {
            "format_version": 7,
            "task": f"{data}_{'classification' if labels else 'regression'}",
            "input": contract,
            "input_name": input_name(contract),
            "output": {"kind": "probabilities" if labels else "value", "labels": labels},
            "output_name": "probabilities" if labels else "value",
            "max_batch_size": 8,
            "models": {"fp16": describe_model(root / "model_fp16.onnx", "fp16", ["tensorrt"])},
            "golden_rows": None,
            "card_sha256": None,
            "drift_sha256": None,
            "left_out": {},
            "choice": {},
            "calibration": CALIBRATION,
            "metrics": {},
            "baseline": {},
            "lineage": Lineage(
                git_revision=None, git_dirty=False, params={}, data=None, digests={}
            ),
            "versions": {},
        }
    )
    write_manifest(root, manifest)
    return load_bundle(root)


def engine_manifest_for(bundle: LoadedBundle, plan: bytes, **changes: Any) -> EngineManifest:
    engine_manifest = EngineManifest(
        format_version=2,
        engine_sha256=files.sha256_bytes(plan),
        model_sha256=bundle.manifest.models["fp16"].sha256,
        bundle_digest=bundle.digest,
        profile=Profile(smallest=1, optimal=4, largest=8),
        workspace_mib=256,
        machine=MACHINE,
        requested=TENSORRT_FP16,
        actual=TENSORRT_FP16,
        precision_read_from="engine",
    )
    return engine_manifest.model_copy(update=changes)
