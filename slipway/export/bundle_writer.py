"""A trained network to a bundle: every variant made, measured and put on disk, one chosen, the manifest last.

Refused: everything that `graph` and `variants` refuse. Nothing here names a network, so any torch module
of the right signature can be exported.
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
    Target,
    describe_model,
    write_manifest,
)
from slipway.artifacts.golden_rows import GoldenFile
from slipway.artifacts.input_contract import InputContract, input_name
from slipway.artifacts.uncertainty import Answers, Calibration
from slipway.config.sections import ExportParams
from slipway.data.store.packed import PackedSplit
from slipway.export.certification.lineage import package_versions
from slipway.export.drift_reference import DriftRows, write_drift
from slipway.export.golden_rows import choose_golden_rows, write_golden_rows
from slipway.export.graphs.graph import check_graph, describe_graph, export_graph, prove_parity
from slipway.export.graphs.quantization import largest_batch
from slipway.export.graphs.variants import (
    MEANT_FOR,
    OF_PRUNED,
    PRECISION,
    make_variant,
    run_in_batches,
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
from slipway.kinds.registry import Task, is_classification
from slipway.metrics.scores import Resampling
from slipway.reports.pages.leaderboard_page import Attempt, Leaderboard
from slipway.runtimes.runtime import open_onnx
from slipway.system import files
from slipway.system.errors import BundleError
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork

WriteCard = Callable[[Mapping[str, ModelFile], Mapping[Provider, Choice]], str]
_PARITY = 1e-5  # of probabilities; float32 rounding alone stays below 1e-6
_DRIFT_BATCH_SIZE = 64
_PARITY_BATCH_SIZES = (1, 2, 7)  # and the largest


@dataclass(frozen=True)
class Pruned:
    """The same network made smaller, with all that is its own."""

    kind: Literal["structured", "magnitude"]
    network: CalibratedNetwork
    weights_sha256: str
    calibration: Calibration


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
    baseline: dict[str, float]
    coverage: Metric | None = None  # of its sets or intervals, on the test rows
    pruned: Pruned | None = None

    @property
    def output(self) -> OutputContract:
        """Probabilities for classes, one value for a numeric target."""
        kind = "probabilities" if is_classification(self.task) else "value"
        return OutputContract.model_validate({"kind": kind, "labels": self.labels})


@dataclass(frozen=True)
class ExportRows:
    """Training rows (rows, ...) as the network takes them, to calibrate on, and the validation split, to check, choose and compare on."""

    calibration: NDArray[Any]
    validation: PackedSplit
    train: PackedSplit | None = (
        None  # the training split, for the reference of drift; None where the validation rows have to do
    )
    test: PackedSplit | None = (
        None  # to measure the coverage of variants with a calibration of their own; chooses nothing
    )


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
    """Fill the folder `root` with a bundle of every variant in `params` that has something to gain, and of the choice among them.

    `card` writes its model card; None for none.

    ParityError where torch and fp32 differ by more than 1e-5, or where a variant is broken.
    """
    fp32 = _export_fp32(trained, rows, params)
    loss = GraphLoss(fp32, trained, rows.validation, resampling)
    whole = _Source(trained, fp32, params.goal.max_metric_loss)
    smaller = (
        _smaller(trained, rows, params, loss)
        if not OF_PRUNED.keys().isdisjoint(params.variants)
        else whole
    )
    models: dict[str, ModelFile] = {}
    left_out: dict[str, str] = {}
    attempts: dict[str, list[Attempt]] = {}
    for variant in params.variants:
        source, made_as = (
            (smaller, OF_PRUNED[variant]) if variant in OF_PRUNED else (whole, variant)
        )
        with tempfile.TemporaryDirectory(
            dir=root
        ) as scratch:  # the quantizer writes files of its own
            if reason := why_left_out(variant, fp32, Path(scratch)):
                left_out[variant] = reason
                continue
            graph, tried = make_variant(
                made_as, source.fp32, rows.calibration, Path(scratch), loss, source.budget
            )
        attempts |= {variant: tried} if len(tried) > 1 else {}
        path = root / f"model_{variant}.onnx"
        files.write_bytes(path, _described(variant, graph, source.trained))
        calibration = source.trained.calibration if source is not whole else None
        if PRECISION[variant] == "int8":
            calibration = own_thresholds(
                graph, source.trained.calibration, trained.task, rows.validation, resampling.seed
            )
        coverage = (
            own_coverage(graph, calibration, trained.task, rows.test, resampling)
            if calibration and rows.test
            else None
        )
        models[variant] = describe_model(
            path, PRECISION[variant], _meant_for(variant, trained.pruned), calibration, coverage
        )
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
    golden_rows = write_golden_rows(
        root,
        choose_golden_rows(rows.validation, resampling.seed, params.golden_rows),
        models,
        params.max_batch_size,
    )
    drift_rows = DriftRows(
        rows.validation, rows.train, resampling.seed, min(params.max_batch_size, _DRIFT_BATCH_SIZE)
    )
    drift_sha256 = write_drift(
        root, trained.input, trained.output, trained.calibration, models, drift_rows
    )
    manifest = _manifest(trained, params, models, board, golden_rows, lineage).model_copy(
        update={"drift_sha256": drift_sha256}
    )
    if card is not None:
        text = card(models, board.choice).encode()
        files.write_bytes(root / CARD, text)
        manifest = manifest.model_copy(update={"card_sha256": files.sha256_bytes(text)})
    write_manifest(root, manifest)
    return board


@dataclass(frozen=True)
class _Source:
    """A network that variants are made of, its fp32 graph, and what they may lose against the trained network."""

    trained: Trained
    fp32: bytes
    budget: float


def _smaller(
    trained: Trained, rows: ExportRows, params: ExportParams, loss: "GraphLoss"
) -> _Source:
    """The pruned network. int8 of it may lose as much as the goal allows, and what pruning already lost where that is more."""
    pruned = trained.pruned
    if pruned is None:
        raise BundleError(
            f"export.variants {params.variants} asks for a pruned network, but there is none. Run `dvc repro prune`."
        )
    itself = replace(
        trained,
        network=pruned.network,
        weights_sha256=pruned.weights_sha256,
        calibration=pruned.calibration,
    )
    fp32 = _export_fp32(itself, rows, params)
    return _Source(itself, fp32, max(params.goal.max_metric_loss, loss(fp32)))


def _meant_for(variant: str, pruned: Pruned | None) -> list[Target]:
    """None for a graph whose zeros are computed all the same: nothing is gained by running it."""
    gains_nothing = variant in OF_PRUNED and pruned is not None and pruned.kind == "magnitude"
    return [] if gains_nothing else MEANT_FOR[variant]


class GraphLoss:
    """What a graph loses against the fp32 one on the validation rows; infinite for answers that are none."""

    def __init__(
        self, fp32: bytes, trained: Trained, validation: PackedSplit, resampling: Resampling
    ) -> None:
        self._fp32, self._trained, self._validation, self._resampling = (
            fp32,
            trained,
            validation,
            resampling,
        )

    def __call__(self, graph: bytes) -> float:
        found = self._answers(graph)
        if not all(np.isfinite(numbers).all() for numbers in found):
            return math.inf
        return metric_loss(
            self._trained.task,
            self._validation.targets,
            self._reference,
            found.outputs,
            self._resampling,
        ).value

    @cached_property
    def _reference(self) -> NDArray[np.float32]:
        return self._answers(self._fp32).outputs

    def _answers(self, graph: bytes) -> Answers:
        runner = open_onnx(graph, variant="int8", precision="int8", provider="cpu", num_threads=0)
        return run_in_batches(runner, self._validation.inputs, largest_batch(graph))


def _export_fp32(trained: Trained, rows: ExportRows, params: ExportParams) -> bytes:
    graph = export_graph(
        trained.network,
        trained.input,
        trained.output,
        opset=params.opset,
        max_batch_size=params.max_batch_size,
    )
    sizes = sorted(
        {batch for batch in _PARITY_BATCH_SIZES if batch < params.max_batch_size}
        | {params.max_batch_size}
    )
    prove_parity(
        trained.network, graph, rows.validation.inputs, batch_sizes=sizes, max_difference=_PARITY
    )
    return graph


def _described(variant: str, graph: bytes, trained: Trained) -> bytes:
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


def _manifest(
    trained: Trained,
    params: ExportParams,
    models: dict[str, ModelFile],
    board: Leaderboard,
    golden_rows: GoldenFile | None,
    lineage: Lineage,
) -> Bundle:
    return Bundle(
        format_version=FORMAT_VERSION,
        task=trained.task,
        input=trained.input,
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
        card_sha256=None,
        drift_sha256=None,
        lineage=lineage,
        versions=package_versions(),
    )
