"""A trained network to a bundle: every variant made, checked and put on disk, the manifest last.

Refused: everything that `graph` and `variants` refuse. Nothing here names a network, so any torch module
of the right signature can be exported.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway import files
from slipway.bundle import FORMAT_VERSION, Bundle, Lineage, Metric, ModelFile, OutputContract, describe_model, write_manifest
from slipway.calibration import Answers, Calibration
from slipway.canary import Canary
from slipway.contract import Task, is_classification
from slipway.data.packed import Inputs
from slipway.export.canary import ChosenRows, write_canary
from slipway.export.graph import check_graph, describe_graph, export_graph, prove_parity
from slipway.export.lineage import package_versions
from slipway.export.variants import MEANT_FOR, PRECISION, make_variant, refuse_broken, run_in_batches
from slipway.input_contract import InputContract, input_name
from slipway.params import ExportParams
from slipway.reports.console import number, size, text_table
from slipway.runtime import Runner, open_onnx
from slipway.training.calibrated import CalibratedNetwork

_PARITY = 1e-5  # of probabilities; float32 rounding alone stays below 1e-6
_PARITY_BATCH_SIZES = (1, 2, 7)  # and the largest
_TIMED_CALLS = 20


@dataclass(frozen=True)
class Trained:
    """A network and what its bundle says of it. The network maps (rows, ...) of `input` to answers and outlier scores."""

    network: CalibratedNetwork
    task: Task
    input: InputContract
    labels: list[str]
    weights_sha256: str
    calibration: Calibration
    metrics: dict[str, Metric]

    @property
    def output(self) -> OutputContract:
        """Probabilities for classes, one value for a numeric target."""
        kind = "probabilities" if is_classification(self.task) else "value"
        return OutputContract.model_validate({"kind": kind, "labels": self.labels})


@dataclass(frozen=True)
class ExportRows:
    """(rows, ...) as the network takes them: training rows to calibrate on, validation rows to check on and some to bundle."""

    calibration: NDArray[Any]
    validation: Inputs
    canary: ChosenRows | None = None


@dataclass(frozen=True)
class VariantReport:
    """One line of the table that the stage prints."""

    variant: str
    num_bytes: int
    max_difference: float  # from fp32, on the validation rows
    latency_ms: float  # median for one row on the CPU


def write_bundle(root: Path, trained: Trained, rows: ExportRows, params: ExportParams, lineage: Lineage) -> list[VariantReport]:
    """Fill the folder `root` with a bundle of every variant in `params`.

    ParityError where torch and fp32 differ by more than 1e-5, or where a variant is broken.
    """
    fp32 = _export_fp32(trained, rows, params)
    reference = run_in_batches(_open(fp32, "fp32"), rows.validation, params.max_batch_size)
    models: dict[str, ModelFile] = {}
    reports: list[VariantReport] = []
    for variant in params.variants:
        graph = _make(variant, fp32, trained, rows, root)
        reports.append(_check(variant, graph, reference, trained, rows))
        path = root / f"model_{variant}.onnx"
        files.write_bytes(path, graph)
        models[variant] = describe_model(path, PRECISION[variant], MEANT_FOR[variant])
    precisions: dict[str, str] = {variant: model.precision for variant, model in models.items()}
    canary = write_canary(
        root, rows.canary, precisions, lambda variant: _open((root / models[variant].file).read_bytes(), variant), params.max_batch_size
    )
    write_manifest(root, _manifest(trained, params, models, canary, lineage))
    return reports


def report_table(reports: list[VariantReport]) -> str:
    """What the stage prints."""
    rows = [[line.variant, size(line.num_bytes), number(line.max_difference), number(line.latency_ms)] for line in reports]
    return text_table(["variant", "size", "max difference", "ms, 1 row on the CPU"], rows)


def _export_fp32(trained: Trained, rows: ExportRows, params: ExportParams) -> bytes:
    graph = export_graph(trained.network, trained.input, trained.output, opset=params.opset, max_batch_size=params.max_batch_size)
    sizes = sorted({batch for batch in _PARITY_BATCH_SIZES if batch < params.max_batch_size} | {params.max_batch_size})
    prove_parity(trained.network, graph, rows.validation, batch_sizes=sizes, max_difference=_PARITY)
    return graph


def _make(variant: str, fp32: bytes, trained: Trained, rows: ExportRows, root: Path) -> bytes:
    with tempfile.TemporaryDirectory(dir=root) as scratch:  # the quantizer writes files of its own
        graph = make_variant(variant, fp32, rows.calibration, Path(scratch))
    graph = describe_graph(
        graph,
        variant=variant,
        task=trained.task,
        contract=trained.input,
        output=trained.output,
        weights_sha256=trained.weights_sha256,
    )
    check_graph(graph, trained.input, trained.output)
    return graph


def _check(variant: str, graph: bytes, reference: Answers, trained: Trained, rows: ExportRows) -> VariantReport:
    runner = _open(graph, variant)
    difference = refuse_broken(variant, runner, reference, rows.validation, trained.output)
    return VariantReport(variant, len(graph), difference, _latency_ms(runner, rows.validation[:1]))


def _open(graph: bytes, variant: str) -> Runner:
    return open_onnx(graph, variant=variant, precision=PRECISION[variant], provider="cpu", num_threads=0)


def _latency_ms(runner: Runner, row: NDArray[Any]) -> float:
    def timed() -> float:
        start = time.perf_counter()
        runner.run(np.ascontiguousarray(row))
        return time.perf_counter() - start

    return statistics.median(timed() for _ in range(_TIMED_CALLS)) * 1000


def _manifest(trained: Trained, params: ExportParams, models: dict[str, ModelFile], canary: Canary | None, lineage: Lineage) -> Bundle:
    return Bundle(
        format_version=FORMAT_VERSION,
        task=trained.task,
        input=trained.input,
        input_name=input_name(trained.input),
        output=trained.output,
        output_name=trained.output.kind,
        max_batch_size=params.max_batch_size,
        models=models,
        canary=canary,
        calibration=trained.calibration,
        metrics=trained.metrics,
        lineage=lineage,
        versions=package_versions(),
    )
