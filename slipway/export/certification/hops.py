"""The hops of the certificate before HTTP: torch, every ONNX variant on every provider, the TensorRT engine.

What is not there (no GPU, no engine) becomes a hop with the status `not_executed` and the reason. What is
there and refused or broken becomes a hop that differs. Columns are compared by the names that the bundle
gives them, so permuted labels are seen here. fp32 answers in small batches as well: a graph may depend on its batch.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
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
from slipway.export.certification.comparison import (
    BatchAnswers,
    HopComparison,
    Measurement,
    TestRows,
    Tolerance,
    failed,
    not_executed,
)
from slipway.export.graphs.graph import torch_answers
from slipway.export.graphs.variants import PRECISION, run_in_batches
from slipway.runtimes.runtime import (
    ONNX_TENSORRT,
    Runner,
    open_engine,
    open_onnx,
    open_onnx_tensorrt,
    why_unavailable,
)
from slipway.system.errors import BundleError, SlipwayError, UnavailableError
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork

TORCH = Execution(backend="torch", provider="cpu", precision="fp32", variant="weights")
_SMALL_BATCHES = (1, 2, 7)  # as export tries, and as requests may come
_WARM_UP_CALLS = 3
_THROUGHPUT_CALLS = 5
_SERVED_BATCHES = (1, 2, 4, 8)  # what the HTTP hop's connections make of single rows
_NOISE_ROWS = 512
_THROUGHPUT_BUDGET_S = 3.0  # a large network on a CPU takes seconds for one batch
Measured = tuple[Hop, Measurement | None]
EngineOpener = Callable[[Path, LoadedBundle, str | None], Runner]


class TorchRunner:
    """The trained network behind the same call as every other hop."""

    actual = TORCH

    def __init__(self, network: CalibratedNetwork) -> None:
        self._network = network

    def run(self, batch: NDArray[Any]) -> Answers:
        """(rows, ...) as the network takes them to (rows, outputs) and (rows,) float32."""
        return torch_answers(self._network, batch)


class HopRunner:
    """Runs hops over the test rows of one comparison, each against the trained network."""

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
        measured = measure(
            TorchRunner(network),
            comparison.rows,
            bundle.manifest.max_batch_size,
            params.timing_rounds,
        )
        measured = replace(measured, calibration=bundle.manifest.calibration)
        self.torch = (comparison.first("torch", TORCH, measured), measured)

    def run_onnx(self) -> Iterator[Measured]:
        """Every variant on the CPU, and on the GPU where it is meant for it."""
        models = self._bundle.manifest.models
        for variant, model in sorted(
            models.items(), key=lambda item: list(PRECISION).index(item[0])
        ):
            for provider in ("cpu", *(["cuda"] if "cuda" in model.meant_for else [])):
                requested = Execution(
                    backend="onnxruntime",
                    provider=provider,
                    precision=model.precision,
                    variant=variant,
                )
                name = f"onnxruntime/{provider}/{variant}"
                reason = why_unavailable(provider)
                opener, is_served = self._onnx_opener(requested), provider in model.meant_for
                yield (
                    (not_executed(name, requested, reason), None)
                    if reason
                    else self._run(name, requested, opener, is_served=is_served)
                )

    def run_onnx_tensorrt(self, engine: Path, cache: Path) -> Iterator[Measured]:
        """Every variant that ONNX Runtime's TensorRT provider computes as it is, in the profile that was requested in `engine`."""
        reason = why_unavailable(ONNX_TENSORRT)
        for variant, model in sorted(
            self._bundle.manifest.models.items(), key=lambda item: list(PRECISION).index(item[0])
        ):
            if "tensorrt" not in model.meant_for or model.precision == "fp32":
                continue
            requested = Execution(
                backend="onnxruntime",
                provider="tensorrt",
                precision=model.precision,
                variant=variant,
            )
            name = f"onnxruntime/tensorrt/{variant}"
            opener = partial(self._open_onnx_tensorrt, variant, engine, cache)
            yield (
                (not_executed(name, requested, reason), None)
                if reason
                else self._run(name, requested, opener)
            )

    def run_engine(
        self, root: Path, digest: str | None = None, opener: EngineOpener = open_engine
    ) -> Measured:
        """The TensorRT engine in `root`, whose engine manifest has `digest`. One that does not fit differs: it must not be served."""
        skipped_build = read_skipped_build(root)
        if skipped_build:
            return not_executed(
                f"tensorrt/{skipped_build.requested.variant}",
                skipped_build.requested,
                skipped_build.reason,
            ), None
        requested = read_engine_manifest(root).requested
        return self._run(
            f"tensorrt/{requested.variant}", requested, lambda: opener(root, self._bundle, digest)
        )

    def _run(
        self,
        name: str,
        requested: Execution,
        opener: Callable[[], Runner],
        *,
        is_served: bool = True,
    ) -> Measured:
        try:
            measured = self._measure(opener(), requested)
        except UnavailableError as error:
            return not_executed(name, requested, str(error)), None
        except SlipwayError as error:
            return failed(name, requested, str(error), self.torch[0].name), None
        tolerance = replace(self._tolerance(requested.variant), is_served=is_served)
        return self._comparison.against(name, requested, measured, self.torch, tolerance), measured

    def _open_onnx_tensorrt(self, variant: str, engine: Path, cache: Path) -> Runner:
        return open_onnx_tensorrt(
            self._bundle, variant, read_request(engine).profile, cache, num_threads=0
        )

    def _measure(self, runner: Runner, requested: Execution) -> Measurement:
        """Columns in the network's order. fp32 promises the same answers in any batch, so it answers in several sizes."""
        rows, manifest, largest = (
            self._comparison.rows,
            self._bundle.manifest,
            self._bundle.manifest.max_batch_size,
        )
        measured = measure(runner, rows, largest, self._params.timing_rounds)
        small = (
            in_small_batches(runner, rows.inputs, largest, self._params.batch_seconds)
            if requested.variant == "fp32"
            else []
        )
        runs = [*small, BatchAnswers(largest, measured.outputs, measured.scores)]
        ordered = tuple(
            replace(run, outputs=in_order_of(rows.classes, manifest.output.labels, run.outputs))
            for run in runs
        )
        own = manifest.calibration_of(requested.variant)
        return replace(measured, outputs=ordered[-1].outputs, batches=ordered, calibration=own)

    def _onnx_opener(self, requested: Execution) -> Callable[[], Runner]:
        return lambda: open_onnx(
            self._bundle.model_bytes(requested.variant),
            variant=requested.variant,
            precision=requested.precision,
            provider=requested.provider,
            num_threads=0,
        )

    def _tolerance(self, variant: str) -> Tolerance:
        if variant == "fp32":
            return Tolerance(max_difference=self._params.max_difference)
        budgets: Mapping[str, float] = {
            str(name): budget for name, budget in self._params.max_metric_loss.items()
        }
        key = f"verify.max_metric_loss.{variant}"
        return Tolerance(max_metric_loss=budgets[variant], budget_key=key)


def measure(runner: Runner, rows: TestRows, largest_batch: int, timing_rounds: int) -> Measurement:
    """Answers for all rows in order, the median latency of one row, and the speed at the largest batch."""
    row, batch = (
        rows.inputs[:1],
        np.ascontiguousarray(rows.inputs[np.arange(largest_batch) % len(rows.inputs)]),
    )
    answers = answers_of_all(runner, rows.inputs, largest_batch)
    for _ in range(_WARM_UP_CALLS):
        runner.run(row)
    latency = statistics.median(_seconds(runner, row) for _ in range(timing_rounds))
    whole = [_seconds(runner, batch)]
    while len(whole) < _THROUGHPUT_CALLS and sum(whole) < _THROUGHPUT_BUDGET_S:
        whole.append(_seconds(runner, batch))
    noise, score_noise = (
        (0.0, 0.0)
        if runner.actual.provider == "cpu"
        else batch_noise(runner, rows.inputs, answers, largest_batch)
    )
    speed = largest_batch / statistics.median(whole)
    return Measurement(
        runner.actual, answers.outputs, latency * 1000, speed, noise, answers.scores, score_noise
    )


def answers_of_all(runner: Runner, inputs: Inputs, batch_size: int) -> Answers:
    """To all rows in order. Fewer rows than a batch are repeated to fill one, so that a batch of that size is really answered."""
    if len(inputs) >= batch_size:
        return run_in_batches(runner, inputs, batch_size)
    outputs, scores = runner.run(np.ascontiguousarray(inputs[np.arange(batch_size) % len(inputs)]))
    return Answers(outputs[: len(inputs)], scores[: len(inputs)])


def in_small_batches(
    runner: Runner, inputs: Inputs, largest_batch: int, seconds: float
) -> list[BatchAnswers]:
    """Answers in batches of 1, 2 and 7; for each size to as many rows, from the first, as are begun within `seconds`."""
    return [
        BatchAnswers(size, *_run_for(seconds, runner, inputs, size))
        for size in _SMALL_BATCHES
        if size < largest_batch
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
    runner: Runner, inputs: Inputs, answers: Answers, largest_batch: int
) -> tuple[float, float]:
    """The largest difference between `answers` and the runner's in small batches, for which a GPU has other kernels.

    Of the outputs, and of the outlier scores.
    """
    rows, sizes = inputs[:_NOISE_ROWS], [size for size in _SERVED_BATCHES if size <= largest_batch]
    found = [run_in_batches(runner, rows, size) for size in sizes]
    return _largest(answers.outputs, [small.outputs for small in found]), _largest(
        answers.scores, [small.scores for small in found]
    )


def _largest(expected: NDArray[np.float32], found: list[NDArray[np.float32]]) -> float:
    return float(
        np.max(
            [
                np.abs(numbers - expected[: len(numbers)].astype(np.float64)).max()
                for numbers in found
            ]
        )
    )


def in_order_of(
    classes: list[str], labels: list[str], outputs: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The columns of `outputs`, which are called `labels`, in the order of `classes`; BundleError if the names differ."""
    if sorted(classes) != sorted(labels) or outputs.shape[1] != max(len(labels), 1):
        raise BundleError(
            f"{outputs.shape[1]} columns called {labels}, the network has the classes {classes}. Run `dvc repro export`."
        )
    return outputs[:, [labels.index(name) for name in classes]] if classes else outputs


def _seconds(runner: Runner, batch: NDArray[Any]) -> float:
    start = time.perf_counter()
    runner.run(batch)
    return time.perf_counter() - start
