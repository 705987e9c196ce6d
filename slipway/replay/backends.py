"""A kept request through every hop that is possible here, in the order in which a model travels, each compared with one before.

decode      the payload, by the bundle's contract, against the inputs that the service's model took, bit for bit
torch       the trained network, where torch and its checkpoint are there
onnxruntime every variant on every provider that is there
tensorrt    the engine beside the bundle
recorded    what the caller was answered, against the same runtime now
service     the running service, where its URL is given

What is not there is a hop that was not executed, with the reason.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import SCORE_NAME, Bundle, LoadedBundle
from slipway.artifacts.certificate import Certificate, Execution
from slipway.artifacts.uncertainty import Answers
from slipway.replay.comparison import (
    Answer,
    AnswerTolerance,
    BackendResult,
    compare,
    describe,
    exact,
    of_variant,
)
from slipway.replay.decoding import decode_payload
from slipway.replay.service import ask_again, outputs_of, served_execution
from slipway.replay.torch_hop import torch_answers
from slipway.runtimes import runtime
from slipway.runtimes.runtime import Runner
from slipway.system.errors import BundleError, ParityError, SlipwayError, UnavailableError
from slipway.traffic.request_log import LoggedRequest, digest_inputs

TORCH = Execution(backend="torch", provider="cpu", precision="fp32", variant="weights")
_BATCH_SIZES = (1, 2, 4, 8)  # in which a GPU's own answers are compared with each other
_NOISE_ROWS = 8
_Answered = tuple[Execution, Answer, dict[str, float]]  # what ran, what it answered, and its noise


@dataclass(frozen=True)
class Places:
    """Where a replay looks for what a bundle does not hold."""

    checkpoint: Path
    engine: Path
    url: str | None


@dataclass(frozen=True)
class _Executed:
    name: str
    execution: Execution
    answer: Answer
    noise: dict[str, float]  # between batch sizes, by output name


class Replay:
    """One request on its way through the hops of one bundle."""

    def __init__(
        self,
        request: LoggedRequest,
        bundle: LoadedBundle,
        certificate: Certificate | None,
        places: Places,
    ) -> None:
        self._request = request
        self._bundle = bundle
        self._certificate = certificate
        self._places = places
        self._executed: list[_Executed] = []

    def run(self) -> Iterator[BackendResult]:
        """Every hop, as it is done. Where the payload cannot be decoded any more, that is the only one."""
        try:
            inputs = decode_payload(
                self._request.content_type, self._request.payload, self._bundle.manifest.input
            )
        except SlipwayError as error:
            yield BackendResult(
                "decode",
                "parted",
                "recorded",
                detail=f"the service took this payload, here it is refused: {error}",
            )
            return
        yield self._decoded(inputs)
        yield self._tried("torch", lambda: self._torch(inputs))
        yield from self._onnx(inputs)
        yield self._engine(inputs)
        yield self._recorded()
        yield self._service()

    @property
    def num_executed(self) -> int:
        """Ways of running the model that were possible here."""
        return len(self._executed)

    def _decoded(self, inputs: NDArray[Any]) -> BackendResult:
        shown = "x".join(map(str, inputs.shape))
        if digest_inputs(inputs) == self._request.inputs_sha256:
            return BackendResult("decode", "equal", "recorded", 0.0, shown)
        what = "pixels" if inputs.dtype == np.uint8 else "encoded rows"
        return BackendResult(
            "decode",
            "parted",
            "recorded",
            None,
            shown,
            f"the {what} differ from those that the service's model took",
        )

    def _torch(self, inputs: NDArray[Any]) -> _Answered:
        return TORCH, self._named(torch_answers(self._places.checkpoint, self._bundle, inputs)), {}

    def _onnx(self, inputs: NDArray[Any]) -> Iterator[BackendResult]:
        models = self._bundle.manifest.models
        for variant in sorted(models, key=lambda name: (name != "fp32", name)):
            for provider in ("cpu", *(["cuda"] if "cuda" in models[variant].meant_for else [])):
                wanted = Execution(
                    backend="onnxruntime",
                    provider=provider,
                    precision=models[variant].precision,
                    variant=variant,
                )
                yield self._tried(f"onnxruntime/{provider}/{variant}", self._runs(inputs, wanted))

    def _runs(self, inputs: NDArray[Any], wanted: Execution) -> Callable[[], _Answered]:
        def open_and_run() -> _Answered:
            if reason := runtime.why_unavailable(wanted.provider):
                raise UnavailableError(reason)
            runner = runtime.open_onnx(
                self._bundle.model_bytes(wanted.variant),
                variant=wanted.variant,
                precision=wanted.precision,
                provider=wanted.provider,
                num_threads=0,
            )
            return self._run(runner, inputs)

        return open_and_run

    def _engine(self, inputs: NDArray[Any]) -> BackendResult:
        digest = self._certificate.engine_digest if self._certificate else None
        return self._tried(
            "tensorrt",
            lambda: self._run(
                runtime.open_engine(self._places.engine, self._bundle, digest), inputs
            ),
        )

    def _run(self, runner: Runner, inputs: NDArray[Any]) -> _Answered:
        largest = self._bundle.manifest.max_batch_size
        answers = _in_batches(runner, inputs, largest)
        zero = np.zeros(1, np.float32)
        noise = (
            Answers(zero, zero)
            if runner.actual.provider == "cpu"
            else _noise(runner, inputs, answers, largest)
        )
        return (
            runner.actual,
            self._named(answers),
            {name: float(numbers.max()) for name, numbers in self._named(noise).items()},
        )

    def _named(self, answers: Answers) -> dict[str, NDArray[np.float32]]:
        return {self._bundle.manifest.output_name: answers.outputs, SCORE_NAME: answers.scores}

    def _tried(self, name: str, execute: Callable[[], _Answered]) -> BackendResult:
        """The hop, compared with the last before it in which nothing may have changed."""
        try:
            actual, answer, noise = execute()
        except BundleError as error:
            return BackendResult(name, "parted", detail=str(error))
        except SlipwayError as error:
            return BackendResult(name, "not_executed", detail=str(error).rstrip("."))
        except ImportError as error:
            return BackendResult(name, "not_executed", detail=f"{error.name} is not installed")
        except (RuntimeError, ValueError) as error:  # torch's, ONNX Runtime's and TensorRT's own
            return BackendResult(name, "parted", detail=f"it failed: {error}")
        name = f"{name}/{actual.variant}" if name == "tensorrt" else name
        before = self._last_exact()
        self._executed.append(_Executed(name, actual, answer, noise))
        if before is None:
            return BackendResult(name, "reference", answered=self._shown(answer))
        return self._compared(name, answer, before, of_variant(actual, self._certified(actual)))

    def _recorded(self) -> BackendResult:
        request = self._request
        try:
            told = outputs_of(request.answers, self._manifest_of(request.execution))
        except ParityError as error:
            return BackendResult("recorded", "parted", detail=str(error))
        for name, numbers in told.items():
            if name not in request.outputs or not np.array_equal(numbers, request.outputs[name]):
                return BackendResult(
                    "recorded",
                    "parted",
                    detail=f"the answer that was sent is not what the model answered, by its {name}",
                )
        return self._against_same("recorded", request.outputs, request.execution)

    def _service(self) -> BackendResult:
        if self._places.url is None:
            return BackendResult("service", "not_executed", detail="no --url was given")
        try:
            execution = served_execution(self._places.url, self._bundle)
            return self._against_same(
                "service",
                ask_again(self._places.url, self._request, self._manifest_of(execution)),
                execution,
            )
        except UnavailableError as error:
            return BackendResult("service", "not_executed", detail=str(error))
        except ParityError as error:
            return BackendResult("service", "parted", detail=str(error))

    def _manifest_of(self, execution: Execution) -> Bundle:
        """With the calibration that answers of this variant are held to."""
        manifest = self._bundle.manifest
        return manifest.model_copy(
            update={"calibration": manifest.calibration_of(execution.variant)}
        )

    def _against_same(self, name: str, answer: Answer, execution: Execution) -> BackendResult:
        """What a service answered, against the runtime that it says it ran; where that is not here, as one variant against another."""
        same = next((hop for hop in self._executed if hop.execution == execution), None)
        if same is not None:
            return self._compared(name, answer, same, exact(same.noise))
        before = self._last_exact()
        ran = f"{execution.backend}/{execution.provider}/{execution.variant}"
        if before is None:
            return BackendResult(
                name,
                "not_executed",
                detail=f"it ran {ran}, and nothing could be run here to compare it with",
            )
        return self._compared(
            name, answer, before, of_variant(execution, self._certified(execution))
        )

    def _compared(
        self, name: str, answer: Answer, before: _Executed, tolerance: AnswerTolerance
    ) -> BackendResult:
        return compare(
            name, answer, before.name, before.answer, tolerance, self._bundle.manifest.output
        )

    def _last_exact(self) -> _Executed | None:
        executed = [hop for hop in self._executed if hop.execution.variant in ("weights", "fp32")]
        return next(reversed(executed or self._executed), None)

    def _certified(self, execution: Execution) -> float | None:
        hops = self._certificate.hops if self._certificate else []
        return next((hop.max_difference for hop in hops if hop.actual == execution), None)

    def _shown(self, answer: Answer) -> str:
        return describe(answer[self._bundle.manifest.output_name], self._bundle.manifest.output)


def _in_batches(runner: Runner, inputs: NDArray[Any], size: int) -> Answers:
    batches = [
        runner.run(np.ascontiguousarray(inputs[begin : begin + size]))
        for begin in range(0, len(inputs), size)
    ]
    return Answers(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))


def _noise(runner: Runner, inputs: NDArray[Any], answers: Answers, largest: int) -> Answers:
    """Differences between answers to the same rows in batches of different sizes, for which a GPU has other kernels."""
    differences: tuple[list[float], list[float]] = ([], [])
    for size in (size for size in _BATCH_SIZES if size <= largest):
        for row in range(min(len(inputs), _NOISE_ROWS)):
            found = runner.run(np.repeat(inputs[row : row + 1], size, axis=0))
            for kind, numbers, before in zip(differences, found, answers, strict=True):
                kind.append(float(np.abs(numbers - before[row]).max()))
    return Answers(np.array(differences[0], np.float32), np.array(differences[1], np.float32))
