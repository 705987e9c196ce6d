"""Runs the hops before HTTP: torch, every ONNX variant on every provider, the TensorRT engine.

A hop that cannot run here (no GPU, no engine) gets the status `not_executed` with the reason. A hop
that is refused or fails gets the status `differs`. Columns are compared by their names in the
bundle, so permuted labels are detected. fp32 is also run in small batches, because a graph's
predictions may depend on the batch.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Execution, Hop
from slipway.artifacts.engine_manifest import read_engine_manifest, read_request, read_skipped_build
from slipway.artifacts.uncertainty import Answers
from slipway.config.sections import VerifyParams
from slipway.data.store.packed import Inputs
from slipway.export.certification.comparison import HopComparison, Tolerance, failed, not_executed
from slipway.export.certification.measurement import BatchAnswers, Measurement, TestRows
from slipway.export.certification.timings import repeated_rows, seconds_of
from slipway.export.graphs.graph import torch_answers
from slipway.export.graphs.variants import PRECISION
from slipway.runtimes.engine_runner import open_engine
from slipway.runtimes.runtime import (
    ONNX_TENSORRT,
    Runner,
    open_onnx,
    open_onnx_tensorrt,
    run_in_batches,
    why_unavailable,
)
from slipway.system.errors import BundleError, SlipwayError, UnavailableError
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork

TORCH = Execution(backend="torch", provider="cpu", precision="fp32", variant="weights")
_SMALL_BATCHES = (1, 2, 7)  # sizes that export tries, and that requests may have
_WARM_UP_CALLS = 3
_THROUGHPUT_CALLS = 5
_SERVED_BATCHES = (1, 2, 4, 8)  # batch sizes that result from the HTTP hop's connections
_NOISE_ROWS = 512
_THROUGHPUT_BUDGET_S = 3.0  # one batch of a large network takes seconds on a CPU
Measured = tuple[Hop, Measurement | None]
EngineOpener = Callable[[Path, LoadedBundle, str | None], Runner]


class TorchRunner:
    """The trained torch network, with the interface of the other runners."""

    actual = TORCH

    def __init__(self, network: CalibratedNetwork) -> None:
        self._network = network

    def run(self, batch: NDArray[Any]) -> Answers:
        """Map network inputs (rows, ...) to outputs (rows, outputs) and OOD scores (rows,)."""
        return torch_answers(self._network, batch)


class HopRunner:
    """Runs each hop on the test rows, and compares its predictions with the trained network's."""

    def __init__(
        self,
        comparison: HopComparison,
        bundle: LoadedBundle,
        network: CalibratedNetwork,
        params: VerifyParams,
    ) -> None:
        self._comparison = comparison
        self._bundle = bundle
        self._params = params
        self._max_batch_size = bundle.manifest.max_batch_size
        self._models = dict(
            sorted(
                bundle.manifest.models.items(), key=lambda model: list(PRECISION).index(model[0])
            )
        )
        measured = measure(
            TorchRunner(network), comparison.rows, self._max_batch_size, params.timing_rounds
        )
        measured = replace(measured, calibration=bundle.manifest.calibration)
        self.torch = (comparison.first("torch", TORCH, measured), measured)

    def run_onnx(self) -> Iterator[Measured]:
        """Run every variant on the CPU, and the variants meant for a GPU on the GPU."""
        for variant, model in self._models.items():
            for provider in ("cpu", *(["cuda"] if "cuda" in model.meant_for else [])):
                requested = Execution(
                    backend="onnxruntime",
                    provider=provider,
                    precision=model.precision,
                    variant=variant,
                )
                yield self._run(
                    f"onnxruntime/{provider}/{variant}",
                    requested,
                    partial(self._open_onnx, requested),
                    unavailable=why_unavailable(provider),
                    is_served=provider in model.meant_for,
                )

    def run_onnx_tensorrt(self, engine: Path, cache: Path) -> Iterator[Measured]:
        """Run the variants that ONNX Runtime's TensorRT provider computes unchanged.

        The batch profile is the one requested in `engine`.
        """
        for variant, model in self._models.items():
            if "tensorrt" not in model.meant_for or model.precision == "fp32":
                continue
            requested = Execution(
                backend="onnxruntime",
                provider="tensorrt",
                precision=model.precision,
                variant=variant,
            )
            yield self._run(
                f"onnxruntime/tensorrt/{variant}",
                requested,
                partial(self._open_onnx_tensorrt, variant, engine, cache),
                unavailable=why_unavailable(ONNX_TENSORRT),
            )

    def run_engine(
        self, root: Path, digest: str | None = None, opener: EngineOpener = open_engine
    ) -> Measured:
        """Run the TensorRT engine in `root`, whose manifest has `digest`.

        An engine that does not fit has the status `differs`, because it must not be served.
        """
        skipped = read_skipped_build(root)
        requested = (skipped or read_engine_manifest(root)).requested
        return self._run(
            f"tensorrt/{requested.variant}",
            requested,
            partial(opener, root, self._bundle, digest),
            unavailable=skipped.reason if skipped else None,
        )

    def _run(
        self,
        name: str,
        requested: Execution,
        opener: Callable[[], Runner],
        *,
        unavailable: str | None,
        is_served: bool = True,
    ) -> Measured:
        if unavailable:
            return not_executed(name, requested, unavailable), None
        try:
            measured = self._measure(opener(), requested)
        except UnavailableError as error:
            return not_executed(name, requested, str(error)), None
        except SlipwayError as error:
            return failed(name, requested, str(error), self.torch[0].name), None
        tolerance = replace(self._tolerance(requested.variant), is_served=is_served)
        return self._comparison.against(name, requested, measured, self.torch, tolerance), measured

    def _open_onnx(self, requested: Execution) -> Runner:
        return open_onnx(
            self._bundle.model_bytes(requested.variant),
            variant=requested.variant,
            precision=requested.precision,
            provider=requested.provider,
            num_threads=0,
        )

    def _open_onnx_tensorrt(self, variant: str, engine: Path, cache: Path) -> Runner:
        profile = read_request(engine).profile
        return open_onnx_tensorrt(self._bundle, variant, profile, cache, num_threads=0)

    def _measure(self, runner: Runner, requested: Execution) -> Measurement:
        """Measure a hop's predictions and speed; for fp32 at several batch sizes.

        The predictions of fp32 must not depend on the batch size.
        """
        rows, manifest, size = self._comparison.rows, self._bundle.manifest, self._max_batch_size
        measured = measure(runner, rows, size, self._params.timing_rounds)
        runs = [BatchAnswers(size, measured.outputs, measured.scores)]
        if requested.variant == "fp32":
            runs = in_small_batches(runner, rows.inputs, size, self._params.batch_seconds) + runs
        ordered = tuple(
            replace(run, outputs=in_order_of(rows.classes, manifest.output.labels, run.outputs))
            for run in runs
        )
        return replace(
            measured,
            outputs=ordered[-1].outputs,
            batches=ordered,
            calibration=manifest.calibration_of(requested.variant),
        )

    def _tolerance(self, variant: str) -> Tolerance:
        if variant == "fp32":
            return Tolerance(max_difference=self._params.max_difference)
        budgets = {str(name): budget for name, budget in self._params.max_metric_loss.items()}
        return Tolerance(
            max_metric_loss=budgets[variant], budget_key=f"verify.max_metric_loss.{variant}"
        )


def measure(runner: Runner, rows: TestRows, max_batch_size: int, timing_rounds: int) -> Measurement:
    """Measure predictions for all rows, the median latency of one row, and the throughput."""
    row, batch = rows.inputs[:1], repeated_rows(rows.inputs, max_batch_size)
    answers = _answer_all(runner, rows.inputs, max_batch_size)
    for _ in range(_WARM_UP_CALLS):
        runner.run(row)
    latency = statistics.median(seconds_of(runner, row) for _ in range(timing_rounds))
    batch_times = [seconds_of(runner, batch)]
    while len(batch_times) < _THROUGHPUT_CALLS and sum(batch_times) < _THROUGHPUT_BUDGET_S:
        batch_times.append(seconds_of(runner, batch))
    noise = score_noise = 0.0
    if runner.actual.provider != "cpu":
        noise, score_noise = batch_noise(runner, rows.inputs, answers, max_batch_size)
    return Measurement(
        runner.actual,
        answers.outputs,
        latency_ms=latency * 1000,
        rows_per_second=max_batch_size / statistics.median(batch_times),
        batch_noise=noise,
        scores=answers.scores,
        score_noise=score_noise,
    )


def _answer_all(runner: Runner, inputs: Inputs, batch_size: int) -> Answers:
    """Predict all rows. If they are fewer than a batch, repeats them to fill one."""
    if len(inputs) >= batch_size:
        return run_in_batches(runner.run, inputs, batch_size)
    outputs, scores = runner.run(repeated_rows(inputs, batch_size))
    return Answers(outputs[: len(inputs)], scores[: len(inputs)])


def in_small_batches(
    runner: Runner, inputs: Inputs, max_batch_size: int, seconds: float
) -> list[BatchAnswers]:
    """Predict the rows in batches of 1, 2 and 7; each size stops after `seconds`."""
    return [
        BatchAnswers(size, *_run_for(seconds, runner, inputs, size))
        for size in _SMALL_BATCHES
        if size < max_batch_size
    ]


def _run_for(seconds: float, runner: Runner, inputs: Inputs, batch_size: int) -> Answers:
    end = time.monotonic() + seconds
    answers: list[Answers] = []
    for start in range(0, len(inputs), batch_size):
        if answers and time.monotonic() >= end:
            break
        answers.append(runner.run(np.ascontiguousarray(inputs[start : start + batch_size])))
    return Answers(*(np.concatenate(part) for part in zip(*answers, strict=True)))


def batch_noise(
    runner: Runner, inputs: Inputs, answers: Answers, max_batch_size: int
) -> tuple[float, float]:
    """Return the largest differences between `answers` and predictions in small batches.

    The first number is for outputs, the second for OOD scores. They differ because a GPU uses other
    kernels for small batches.
    """
    rows = inputs[:_NOISE_ROWS]
    sizes = [size for size in _SERVED_BATCHES if size <= max_batch_size]
    found = [run_in_batches(runner.run, rows, size) for size in sizes]
    outputs, scores = (
        [np.abs(small - all_rows[: len(small)].astype(np.float64)).max() for small in part]
        for part, all_rows in zip(zip(*found, strict=True), answers, strict=True)
    )
    return float(np.max(outputs)), float(np.max(scores))


def in_order_of(
    classes: list[str], labels: list[str], outputs: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Reorder the columns of `outputs`, named by `labels`, to the order of `classes`.

    Raises:
        BundleError: the names differ.
    """
    if sorted(classes) != sorted(labels) or outputs.shape[1] != max(len(labels), 1):
        raise BundleError(
            f"found {outputs.shape[1]} columns called {labels}, expected the network's classes "
            f"{classes}. Run `dvc repro export`."
        )
    return outputs[:, [labels.index(name) for name in classes]] if classes else outputs
