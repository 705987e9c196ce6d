"""Runs a logged request through every backend available here, each compared with an earlier one.

decode      the payload by the bundle's contract, against the logged inputs, bit for bit
torch       the trained network, if torch and its checkpoint are available
onnxruntime every variant on every available provider
tensorrt    the engine beside the bundle
recorded    the logged answer, against the same runtime now
service     the running service, if its URL is given

A backend that is unavailable is reported as not executed, with the reason.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import SCORE_NAME, Bundle, LoadedBundle
from slipway.artifacts.certificate import Certificate, Execution
from slipway.artifacts.uncertainty import Answers
from slipway.inputs.columns import ColumnContract, encode_rows, read_row
from slipway.inputs.contract import InputContract, listed_rows
from slipway.inputs.images import ImageContract, array_from_bytes
from slipway.inputs.multipart import decode_images
from slipway.inputs.texts import TextContract, encode_texts, read_text
from slipway.replay.comparison import (
    Answer,
    AnswerTolerance,
    BackendResult,
    compare,
    describe,
    exact,
    of_variant,
)
from slipway.replay.service import outputs_of, request_again, served_execution
from slipway.runtimes import engine_runner, runtime
from slipway.runtimes.runtime import Runner
from slipway.system import files
from slipway.system.errors import (
    BundleError,
    DataError,
    ParityError,
    SlipwayError,
    UnavailableError,
)
from slipway.traffic.request_log import LoggedRequest, digest_inputs

TORCH = Execution(backend="torch", provider="cpu", precision="fp32", variant="weights")
_WEIGHTS = ("weights.safetensors", "trees.txt")
_STATISTICS = "ood_score.safetensors"  # beside the checkpoint
_BATCH_SIZES = (1, 2, 4, 8)  # to measure how a GPU's answers vary with the batch size
_NOISE_ROWS = 8
# Execution, answer, and variation of the answer with the batch size by output name.
_Answered = tuple[Execution, Answer, dict[str, float]]


@dataclass(frozen=True)
class Places:
    """Locations of the parts that are not in a bundle."""

    checkpoint: Path
    engine: Path
    url: str | None


@dataclass(frozen=True)
class _Executed:
    name: str
    execution: Execution
    answer: Answer
    noise: dict[str, float]  # variation with the batch size, by output name


class Replay:
    """One request, and the backends of one bundle."""

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
        """Yield the result of each backend; only `decode` if the payload cannot be decoded."""
        try:
            inputs = decode_payload(
                self._request.content_type, self._request.payload, self._bundle.manifest.input
            )
        except SlipwayError as error:
            yield BackendResult(
                "decode",
                "diverged",
                "recorded",
                detail=f"the service accepted this payload, but here it is refused: {error}",
            )
            return
        yield self._decoded(inputs)
        checkpoint = self._places.checkpoint
        yield self._attempt(
            "torch",
            lambda: (TORCH, self._named(_torch_answers(checkpoint, self._bundle, inputs)), {}),
        )
        yield from self._onnx(inputs)
        yield self._engine(inputs)
        yield self._recorded()
        yield self._service()

    @property
    def num_executed(self) -> int:
        """Number of backends that ran."""
        return len(self._executed)

    def _decoded(self, inputs: NDArray[Any]) -> BackendResult:
        shown = "x".join(map(str, inputs.shape))
        if digest_inputs(inputs) == self._request.inputs_sha256:
            return BackendResult("decode", "equal", "recorded", 0.0, shown)
        what = "pixels" if inputs.dtype == np.uint8 else "encoded rows"
        return BackendResult(
            "decode",
            "diverged",
            "recorded",
            None,
            shown,
            f"the {what} differ from the logged ones",
        )

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
                yield self._attempt(f"onnxruntime/{provider}/{variant}", self._runs(inputs, wanted))

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
        return self._attempt(
            "tensorrt",
            lambda: self._run(
                engine_runner.open_engine(self._places.engine, self._bundle, digest), inputs
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

    def _attempt(self, name: str, execute: Callable[[], _Answered]) -> BackendResult:
        """Run a backend, and compare its answer with that of the last exact backend before it."""
        try:
            actual, answer, noise = execute()
        except BundleError as error:
            return BackendResult(name, "diverged", detail=str(error))
        except SlipwayError as error:
            return BackendResult(name, "not_executed", detail=str(error).rstrip("."))
        except ImportError as error:
            return BackendResult(name, "not_executed", detail=f"{error.name} is not installed")
        except (RuntimeError, ValueError) as error:  # errors of torch, ONNX Runtime and TensorRT
            return BackendResult(name, "diverged", detail=f"it failed: {error}")
        name = f"{name}/{actual.variant}" if name == "tensorrt" else name
        before = self._last_exact()
        self._executed.append(_Executed(name, actual, answer, noise))
        if before is None:
            return BackendResult(name, "reference", answered=self._shown(answer))
        return self._compared(name, answer, before, of_variant(actual, self._certified(actual)))

    def _recorded(self) -> BackendResult:
        request = self._request
        try:
            outputs = outputs_of(request.answers, self._manifest_of(request.execution))
        except ParityError as error:
            return BackendResult("recorded", "diverged", detail=str(error))
        for name, numbers in outputs.items():
            if name not in request.outputs or not np.array_equal(numbers, request.outputs[name]):
                return BackendResult(
                    "recorded",
                    "diverged",
                    detail=f"the logged answer differs from the logged outputs in {name}",
                )
        return self._against_same("recorded", request.outputs, request.execution)

    def _service(self) -> BackendResult:
        if self._places.url is None:
            return BackendResult("service", "not_executed", detail="no --url was given")
        try:
            execution = served_execution(self._places.url, self._bundle)
            return self._against_same(
                "service",
                request_again(self._places.url, self._request, self._manifest_of(execution)),
                execution,
            )
        except UnavailableError as error:
            return BackendResult("service", "not_executed", detail=str(error))
        except ParityError as error:
            return BackendResult("service", "diverged", detail=str(error))

    def _manifest_of(self, execution: Execution) -> Bundle:
        """Return the manifest with the calibration of this variant."""
        manifest = self._bundle.manifest
        return manifest.model_copy(
            update={"calibration": manifest.calibration_of(execution.variant)}
        )

    def _against_same(self, name: str, answer: Answer, execution: Execution) -> BackendResult:
        """Compare a service's answer with the same variant run here, or else another variant."""
        same = next((one for one in self._executed if one.execution == execution), None)
        if same is not None:
            return self._compared(name, answer, same, exact(same.noise))
        before = self._last_exact()
        ran = f"{execution.backend}/{execution.provider}/{execution.variant}"
        if before is None:
            return BackendResult(
                name,
                "not_executed",
                detail=f"it ran {ran}, and no backend ran here to compare it with",
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
        executed = [one for one in self._executed if one.execution.variant in ("weights", "fp32")]
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
    """Return by output the largest variation with the batch size, which changes GPU kernels."""
    differences: tuple[list[float], list[float]] = ([], [])
    for size in (size for size in _BATCH_SIZES if size <= largest):
        for row in range(min(len(inputs), _NOISE_ROWS)):
            found = runner.run(np.repeat(inputs[row : row + 1], size, axis=0))
            for kind, numbers, before in zip(differences, found, answers, strict=True):
                kind.append(float(np.abs(numbers - before[row]).max()))
    return Answers(np.array(differences[0], np.float32), np.array(differences[1], np.float32))


def decode_payload(content_type: str, payload: bytes, contract: InputContract) -> NDArray[Any]:
    """Decode a payload to (rows, ...) encoded rows of `contract`.

    Raises:
        DataError: this version of Slipway refuses the payload.
        UnavailableError: the bundle's own image function is missing.
        IntegrityError: the code of that function was altered.
    """
    if isinstance(contract, ImageContract):
        try:
            images = decode_images(content_type, payload)
        except ValueError as error:
            raise DataError(str(error)) from error
        return np.stack([array_from_bytes(image, contract) for image in images])
    if not isinstance(contract, (ColumnContract, TextContract)):
        raise DataError(f"requests with {contract.kind} cannot be replayed.")
    try:
        content = json.loads(payload)
    except ValueError as error:
        raise DataError(f"the request is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError("it is not a JSON object")
    listed = listed_rows(content)
    rows = [content] if listed is None else listed
    if isinstance(contract, TextContract):
        return encode_texts([read_text(row, contract) for row in rows], contract)
    return encode_rows([read_row(row, contract) for row in rows], contract)


def _torch_answers(checkpoint: Path, bundle: LoadedBundle, inputs: NDArray[Any]) -> Answers:
    """Run the trained network with the bundle's calibration and order of labels.

    UnavailableError, IntegrityError or SchemaError if it cannot run here.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("torch is not installed")
    digests = bundle.manifest.lineage.digests
    name = next((name for name in digests if name.endswith(_WEIGHTS)), None)
    if name is None:
        raise UnavailableError("the bundle does not name the digest of its weights")
    expected, path = digests[name], checkpoint / Path(name).name
    if not path.is_file():
        raise UnavailableError(f"{path} does not exist")
    found = files.sha256_file(path)
    if found != expected:
        raise UnavailableError(f"{path} is {found[:12]}, the bundle was made of {expected[:12]}")
    from slipway.export.certification.hops import TorchRunner, in_order_of
    from slipway.training.networks.networks import load_network
    from slipway.training.uncertainty.calibrated_network import calibrated

    network, manifest = load_network(checkpoint), bundle.manifest
    outputs, scores = TorchRunner(
        calibrated(network, manifest.calibration, checkpoint.parent / _STATISTICS)
    ).run(inputs)
    return Answers(in_order_of(manifest.output.labels, network.spec.classes, outputs), scores)
