"""Writes the bundle of a trained network: its variants, the chosen variant, and the manifest.

Errors of the modules `graphs.graph` and `graphs.variants` are passed on. Nothing here depends on
the kind of network, so any torch module with the right signature can be exported.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import (
    CARD,
    FORMAT_VERSION,
    Bundle,
    Choice,
    Lineage,
    Metric,
    ModelFile,
    OutputContract,
    Provider,
    VariantTarget,
    describe_model,
    write_manifest,
)
from slipway.artifacts.golden_rows import FILE as GOLDEN_ROWS
from slipway.artifacts.golden_rows import (
    GoldenFile,
    GoldenRows,
    golden_budget,
    golden_rows_bytes,
)
from slipway.artifacts.leaderboard import Attempt, Leaderboard
from slipway.artifacts.uncertainty import Calibration
from slipway.config.sections import ExportParams
from slipway.data.engine.randomness import drawn_order
from slipway.data.store.packed import PackedSplit
from slipway.export.background import with_background
from slipway.export.certification.lineage import package_versions
from slipway.export.drift_reference import DriftRows, write_drift
from slipway.export.graphs.graph import (
    check_graph,
    describe_graph,
    export_graph,
    onnx_answers,
    prove_parity,
)
from slipway.export.graphs.variants import (
    OF_PRUNED,
    PRECISION,
    make_variant,
    targets_of,
    why_left_out,
)
from slipway.export.precision.leaderboard import (
    FULL,
    Contest,
    Effort,
    make_leaderboard,
    metric_loss,
)
from slipway.export.precision.thresholds import own_coverage, own_thresholds
from slipway.inputs.columns import ColumnContract
from slipway.inputs.contract import InputContract, input_name
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.scores import Resampling
from slipway.system import files
from slipway.system.errors import BundleError
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork

WriteCard = Callable[[Mapping[str, ModelFile], Mapping[Provider, Choice]], str]
_PARITY = 1e-5  # largest difference of probabilities; float32 rounding alone stays below 1e-6
_PARITY_BATCH_SIZES = (1, 2, 7)  # tested together with the largest size
_DRIFT_BATCH_SIZE = 64


@dataclass(frozen=True)
class Pruned:
    """A pruned network and the calibration that was fitted to it."""

    kind: Literal["structured", "magnitude"]
    network: CalibratedNetwork
    weights_sha256: str
    calibration: Calibration


@dataclass(frozen=True)
class Trained:
    """A trained network, with the facts that its bundle records.

    The network maps inputs (rows, ...) to outputs (rows, K) and OOD scores (rows,).
    """

    network: CalibratedNetwork
    task: Task
    input: InputContract
    labels: list[str]
    weights_sha256: str
    calibration: Calibration
    metrics: dict[str, Metric]
    baseline: dict[str, float]
    coverage: Metric | None = None  # coverage of its sets or intervals on the test rows
    pruned: Pruned | None = None

    @property
    def output(self) -> OutputContract:
        """The form of the outputs: probabilities for classes, one value for a numeric target."""
        return OutputContract(kind=kind_of(self.task).target.output, labels=self.labels)


@dataclass(frozen=True)
class ExportRows:
    """The rows that an export reads: samples for ranges, rows for losses, and golden rows."""

    samples: NDArray[Any]  # (rows, ...) training rows as the network takes them, for quantization
    validation: PackedSplit  # rows to check, choose and compare variants
    train: PackedSplit | None = None  # for the drift reference; without it validation rows suffice
    test: PackedSplit | None = None  # measures the coverage of int8 variants; chooses nothing
    recent_from: int | None = None  # first row of the data that describes the present traffic


def write_bundle(
    root: Path,
    trained: Trained,
    rows: ExportRows,
    params: ExportParams,
    resampling: Resampling,
    lineage: Lineage,
    effort: Effort = FULL,
    card: WriteCard | None = None,
) -> Leaderboard:
    """Write a bundle to the folder `root`, with every variant in `params` that can be useful.

    Args:
        card: writes the model card; None for no card.

    Raises:
        ParityError: torch and fp32 differ by more than 1e-5, or a variant is broken.
    """
    models, left_out, attempts = _write_variants(root, trained, rows, params, resampling)
    calibrations = {
        variant: model.calibration or trained.calibration for variant, model in models.items()
    }
    contest = Contest(
        trained.task,
        trained.output,
        rows.validation,
        resampling,
        params.max_batch_size,
        calibrations,
    )
    board = make_leaderboard(root, models, contest, params.goal, effort, left_out, attempts)
    golden_rows = _write_golden_rows(
        root,
        rows.validation,
        resampling.seed,
        params.golden_rows,
        models,
        params.max_batch_size,
        calibrations,
    )
    drift_batch_size = min(params.max_batch_size, _DRIFT_BATCH_SIZE)
    drift_sha256 = write_drift(
        root,
        trained.input,
        trained.output,
        trained.calibration,
        models,
        DriftRows(rows.validation, rows.train, resampling.seed, drift_batch_size, rows.recent_from),
    )
    text = card(models, board.choice).encode() if card else None
    if text is not None:
        files.write_bytes(root / CARD, text)
    contract = trained.input
    if isinstance(contract, ColumnContract) and rows.train:
        fp32 = (root / models["fp32"].file).read_bytes()
        contract = with_background(
            contract,
            rows.train,
            params.background_rows,
            resampling.seed,
            lambda inputs: onnx_answers(fp32, inputs, params.max_batch_size, "fp32").outputs,
        )
    manifest = Bundle(
        format_version=FORMAT_VERSION,
        task=trained.task,
        input=contract,
        input_name=input_name(trained.input),
        output=trained.output,
        output_name=trained.output.kind,
        max_batch_size=params.max_batch_size,
        models=models,
        golden_rows=golden_rows,
        left_out=board.left_out,
        choice=board.choice,
        calibration=trained.calibration,
        coverage=trained.coverage,
        metrics=trained.metrics,
        baseline=trained.baseline,
        card_sha256=files.sha256_bytes(text) if text is not None else None,
        drift_sha256=drift_sha256,
        lineage=lineage,
        versions=package_versions(),
    )
    write_manifest(root, manifest)
    return board


def _write_golden_rows(
    root: Path,
    split: PackedSplit,
    seed: int,
    num_rows: int,
    models: Mapping[str, ModelFile],
    batch_size: int,
    calibrations: Mapping[str, Calibration],
) -> GoldenFile | None:
    """Write the file of golden rows: rows of the split with the outputs of every graph in `root`.

    At most `num_rows` rows are drawn, by the seed and the ids only.

    Returns:
        The record for `bundle.json`; None for 0 rows.
    """
    if num_rows == 0:
        return None
    rows = np.sort(drawn_order(seed, 0, split.keys, "canary")[:num_rows])
    ids, inputs = [split.ids[row] for row in rows], split.inputs[rows]
    answers = {
        variant: onnx_answers((root / model.file).read_bytes(), inputs, batch_size, variant)
        for variant, model in models.items()
    }
    payload = golden_rows_bytes(GoldenRows(ids, inputs, answers["fp32"]))
    files.write_bytes(root / GOLDEN_ROWS, payload)
    expected = calibrations["fp32"].thresholds
    budgets = {
        variant: golden_budget(
            answers[variant],
            answers["fp32"],
            model.precision,
            (calibrations[variant].thresholds, expected),
        )
        for variant, model in models.items()
    }
    return GoldenFile(
        file=GOLDEN_ROWS,
        sha256=files.sha256_bytes(payload),
        bytes=len(payload),
        rows=len(rows),
        budgets=budgets,
    )


@dataclass(frozen=True)
class _Source:
    """A network to make variants from, its fp32 graph, and the loss that its variants may have."""

    trained: Trained
    fp32: bytes
    budget: float


def _write_variants(
    root: Path, trained: Trained, rows: ExportRows, params: ExportParams, resampling: Resampling
) -> tuple[dict[str, ModelFile], dict[str, str], dict[str, list[Attempt]]]:
    """Write the graph of each variant. Returns graphs, reasons for omissions, and int8 attempts."""
    fp32 = _export_fp32(trained, rows, params)
    loss = _GraphLoss(fp32, trained, rows.validation, resampling)
    unpruned = _Source(trained, fp32, params.goal.max_metric_loss)
    pruned = unpruned
    if not OF_PRUNED.keys().isdisjoint(params.variants):
        pruned = _pruned_source(trained, rows, params, loss)
    models: dict[str, ModelFile] = {}
    left_out: dict[str, str] = {}
    attempts: dict[str, list[Attempt]] = {}
    for variant in params.variants:
        source = pruned if variant in OF_PRUNED else unpruned
        with tempfile.TemporaryDirectory(dir=root) as scratch:  # the quantizer writes files
            if reason := why_left_out(variant, fp32, Path(scratch)):
                left_out[variant] = reason
                continue
            made_as = OF_PRUNED.get(variant, variant)
            graph, tried = make_variant(
                made_as, source.fp32, rows.samples, Path(scratch), loss, source.budget
            )
        if len(tried) > 1:
            attempts[variant] = tried
        models[variant] = _write_model(root, variant, graph, source.trained, rows, resampling)
    return models, left_out, attempts


def _write_model(
    root: Path,
    variant: str,
    graph: bytes,
    trained: Trained,
    rows: ExportRows,
    resampling: Resampling,
) -> ModelFile:
    described = describe_graph(
        graph,
        variant=variant,
        task=trained.task,
        contract=trained.input,
        output=trained.output,
        weights_sha256=trained.weights_sha256,
    )
    check_graph(described, trained.input, trained.output)
    path = root / f"model_{variant}.onnx"
    files.write_bytes(path, described)

    calibration, coverage = None, None
    if PRECISION[variant] == "int8":
        calibration = own_thresholds(
            graph, trained.calibration, trained.task, rows.validation, resampling.seed
        )
    elif variant in OF_PRUNED:
        calibration = trained.calibration
    if calibration and rows.test:
        coverage = own_coverage(graph, calibration, trained.task, rows.test, resampling)
    # A graph whose zeros are computed all the same gains nothing.
    gains_nothing = variant in OF_PRUNED and trained.pruned and trained.pruned.kind == "magnitude"
    meant_for: list[VariantTarget] = [] if gains_nothing else targets_of(variant, graph)
    return describe_model(path, PRECISION[variant], meant_for, calibration, coverage)


def _pruned_source(
    trained: Trained, rows: ExportRows, params: ExportParams, loss: "_GraphLoss"
) -> _Source:
    """Export the pruned network in fp32, with the loss of quality that its int8 variant may have.

    The allowed loss is the larger of `export.goal.max_metric_loss` and the loss that pruning
    itself caused.
    """
    pruned = trained.pruned
    if pruned is None:
        raise BundleError(
            f"export.variants {params.variants} has variants of a pruned network, "
            "but there is none. Run `dvc repro prune`."
        )
    smaller = replace(
        trained,
        network=pruned.network,
        weights_sha256=pruned.weights_sha256,
        calibration=pruned.calibration,
    )
    fp32 = _export_fp32(smaller, rows, params)
    return _Source(smaller, fp32, max(params.goal.max_metric_loss, loss(fp32)))


class _GraphLoss:
    """Computes the metric loss of a graph relative to fp32 on validation rows.

    Infinite if broken.
    """

    def __init__(
        self, fp32: bytes, trained: Trained, validation: PackedSplit, resampling: Resampling
    ) -> None:
        self._fp32 = fp32
        self._task = trained.task
        self._thresholds = trained.calibration.thresholds
        self._validation = validation
        self._resampling = resampling

    def __call__(self, graph: bytes) -> float:
        found = onnx_answers(graph, self._validation.inputs)
        if not all(np.isfinite(numbers).all() for numbers in found):
            return math.inf
        reference, targets = self._reference, self._validation.targets
        both = self._thresholds, self._thresholds
        given = targets, reference, found.outputs
        return metric_loss(self._task, *given, self._resampling, both).value

    @cached_property
    def _reference(self) -> NDArray[np.float32]:
        return onnx_answers(self._fp32, self._validation.inputs).outputs


def _export_fp32(trained: Trained, rows: ExportRows, params: ExportParams) -> bytes:
    graph = export_graph(
        trained.network,
        trained.input,
        trained.output,
        opset=params.opset,
        max_batch_size=params.max_batch_size,
    )
    largest = params.max_batch_size
    sizes = [*(size for size in _PARITY_BATCH_SIZES if size < largest), largest]
    prove_parity(
        trained.network, graph, rows.validation.inputs, batch_sizes=sizes, max_difference=_PARITY
    )
    return graph
