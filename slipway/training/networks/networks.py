"""Networks, and the model that a finished training writes.

artifacts/model/model.json           model manifest: network, inputs, outputs, origin
artifacts/model/weights.safetensors  weights in float32

Training, evaluation and export use the same module, with normalisation inside, so none of them can
forget it. Altered weights, unknown networks and unknown arguments are refused.
"""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import safetensors.torch
import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from torch import Tensor, nn

from slipway.artifacts.input_contract import InputContract
from slipway.config.network_arguments import SmallResnetArguments, TabmArguments, argument_mistakes
from slipway.data.store.packed import TargetScale
from slipway.inputs.columns import ColumnContract
from slipway.kinds.registry import Task, is_classification
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import IntegrityError, ParamsError, SchemaError
from slipway.training.networks.small_resnet import SmallResnet
from slipway.training.networks.tabm import RowEncoding, Tabm

_TIMM = "timm/"
_FIX = "Run `dvc repro train`."
Arguments = TypeVar("Arguments", bound=BaseModel)


class NetworkSpec(Contract):
    """Everything a network is built from, except its weights."""

    task: Task
    name: str  # "small_resnet" or "timm/NAME" for images, "tabm" for tables
    arguments: dict[str, Any]
    classes: list[str]  # in the order of the logits; empty for a numeric target
    input: InputContract
    mean: list[float]  # per channel, of pixels scaled to [0, 1]; empty for tables
    std: list[float]
    target_scale: TargetScale | None  # null for classes

    @property
    def num_outputs(self) -> int:
        """Logits for classes, 1 for a numeric target."""
        return len(self.classes) if is_classification(self.task) else 1


class TrainingSetup(Contract):
    """How a network is trained: the requested or the actual setup."""

    strategy: str  # "single", "ddp", "deepspeed_stage_2"
    precision: str  # "32-true", "bf16-mixed", "16-mixed"
    accelerator: str  # "cpu", "gpu"
    world_size: int | Literal["auto"]  # processes over all nodes
    zero_stage: int | None  # null in a request, or without DeepSpeed
    offload: str | None  # "optimizer", "optimizer_and_parameters": kept in the host's memory
    parameter_dtype: str | None  # in forward and backward; null in a request


class RunSegment(Contract):
    """The process layout of a training from `first_step` on.

    After a change the batches stay the same, but results may differ in the last bits.
    """

    first_step: int
    strategy: str
    world_size: int
    per_device: int  # rows of a batch
    threads: int | None = None  # of each process on a CPU; null on a GPU

    def has_same_layout(self, other: "RunSegment") -> bool:
        """Compare everything but the first step."""
        return self.model_copy(update={"first_step": other.first_step}) == other

    def __str__(self) -> str:
        processes = f"{self.world_size} process{'es' * (self.world_size > 1)}"
        threads = ""
        if self.threads:
            threads = f" and {self.threads} thread{'s' * (self.threads > 1)} each"
        return f"{self.strategy} on {processes} with {self.per_device} rows a batch{threads}"


class ModelManifest(Contract):
    """The content of `model.json`; equal runs write equal text."""

    format_version: Literal[4]
    network: NetworkSpec
    num_parameters: int
    weights_sha256: str
    epochs: int  # trained
    stopped_early: bool  # by train.early_stopping_patience
    kept_epoch: int  # whose weights these are, counted from 1
    metrics: dict[str, float]  # of the kept epoch, on the validation split
    requested: TrainingSetup
    actual: TrainingSetup  # at the end
    segments: list[RunSegment]  # one, unless another process layout resumed it
    seed: int
    params: dict[str, Any]  # the train section of params.yaml
    digests: dict[str, str]  # hex SHA-256 of params, packed manifest, augmentation plan and code
    versions: dict[str, str]  # of the packages that trained it
    git_revision: str | None  # null outside a git work tree


class _NetworkBase(nn.Module):
    """Holds the spec, the trained backbone, and the unit of a numeric target."""

    target_mean: Tensor
    target_std: Tensor

    def __init__(self, backbone: nn.Module, spec: NetworkSpec) -> None:
        super().__init__()
        self.spec = spec
        self.backbone = backbone
        scale = spec.target_scale or TargetScale(mean=0.0, std=1.0)
        # Not in the weights: model.json is their only source.
        self.register_buffer("target_mean", torch.tensor(scale.mean), persistent=False)
        self.register_buffer("target_std", torch.tensor(scale.std), persistent=False)

    def _to_target_unit(self, answer: Tensor) -> Tensor:
        """Scale values of a numeric target to its unit; logits stay as they are."""
        if is_classification(self.spec.task):
            return answer
        return answer.to(torch.float32) * self.target_std + self.target_mean


class ImageNetwork(_NetworkBase):
    """Maps (rows, height, width, channels) uint8 in [0, 255] to (rows, classes) logits.

    For a numeric target the output is (rows, 1) in its unit.
    """

    pixel_mean: Tensor
    pixel_scale: Tensor

    def __init__(self, backbone: nn.Module, spec: NetworkSpec) -> None:
        super().__init__(backbone, spec)
        per_channel = (1, -1, 1, 1)
        mean = torch.tensor(spec.mean).mul(255).view(per_channel)
        scale = torch.tensor(spec.std).mul(255).reciprocal().view(per_channel)
        self.register_buffer("pixel_mean", mean, persistent=False)
        self.register_buffer("pixel_scale", scale, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """(B, H, W, C) uint8 -> (B, K) float"""
        # The cast comes first: TensorRT transposes no uint8.
        pixels = images.to(torch.float32).permute(0, 3, 1, 2)
        return self._to_target_unit(self.backbone((pixels - self.pixel_mean) * self.pixel_scale))


class TableNetwork(_NetworkBase):
    """Maps (rows, width) float32, as a column contract lays them out, to (rows, classes) logits.

    For a numeric target the output is (rows, 1) in its unit. In training mode it is (rows,
    submodels, outputs), because each submodel has its own loss; otherwise the mean of their
    probabilities, as logits, or of their values.
    """

    def __init__(self, encoding: RowEncoding, backbone: nn.Module, spec: NetworkSpec) -> None:
        super().__init__(backbone, spec)
        self.encoding = encoding

    def forward(self, rows: Tensor) -> Tensor:
        """(B, width) float32 -> (B, K) float; (B, submodels, K) in training mode"""
        answers = self._to_target_unit(self.backbone(*self.encoding(rows)))
        if self.training:
            return answers
        if not is_classification(self.spec.task):
            return answers.mean(dim=1)
        # Without dividing by the number of submodels, a constant that softmax removes.
        return torch.logsumexp(torch.log_softmax(answers.to(torch.float32), dim=2), dim=1)


Network = ImageNetwork | TableNetwork


def build_network(spec: NetworkSpec) -> Network:
    """Build a network with weights drawn from torch's global generator.

    Raises ParamsError if `spec` cannot be built.
    """
    network = (
        _table_network(spec, spec.input)
        if isinstance(spec.input, ColumnContract)
        else _image_network(spec, spec.input.channels)
    )
    _check_forward(network)
    return network


def example_rows(spec: NetworkSpec, num_rows: int = 1) -> Tensor:
    """Rows of zeros in the shape and dtype that the network takes."""
    return torch.from_numpy(np.zeros((num_rows, *spec.input.shape), spec.input.dtype))


def serialize_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a safetensors file."""
    return safetensors.torch.save(
        {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    )


def load_tensors(path: Path, sha256: str, fix: str) -> dict[str, Tensor]:
    """Read a safetensors file; `fix` ends the messages of errors.

    Raises SchemaError if it is missing, IntegrityError if it was altered.
    """
    try:
        return safetensors.torch.load(files.read_verified(path, sha256))
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. {fix}") from None
    except (IntegrityError, SafetensorError) as error:
        raise IntegrityError(f"{error} {fix}") from None


def save_model(folder: Path, manifest: ModelManifest, weights: Mapping[str, Tensor]) -> None:
    """Write `folder` atomically. `manifest.weights_sha256` is filled in here."""
    payload = serialize_tensors(weights)
    manifest = manifest.model_copy(update={"weights_sha256": files.sha256_bytes(payload)})
    with files.new_directory(folder) as partial:
        files.write_bytes(partial / "weights.safetensors", payload)
        files.write_json(partial / "model.json", manifest.model_dump(mode="json"))


def read_model_manifest(folder: Path) -> ModelManifest:
    """Read `model.json`; SchemaError if it is missing or not understood."""
    path = folder / "model.json"
    try:
        return ModelManifest.model_validate(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        raise SchemaError(f"{path} is missing. {_FIX}") from None
    except ValueError as error:  # pydantic's and json's are both ValueErrors
        raise SchemaError(f"{path} is not a model manifest: {error}. {_FIX}") from error


def load_network(folder: Path) -> Network:
    """Load the trained network of a model, in evaluation mode on the CPU.

    Raises SchemaError if a file is missing or does not fit, IntegrityError if the weights were
    altered.
    """
    manifest = read_model_manifest(folder)
    path = folder / "weights.safetensors"
    weights = load_tensors(path, manifest.weights_sha256, _FIX)
    network = build_network(manifest.network)
    try:
        network.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        name = manifest.network.name
        raise SchemaError(
            f"{path} does not fit the network {name!r} of model.json: {error} {_FIX}"
        ) from error
    return network.eval()


def _image_network(spec: NetworkSpec, channels: int) -> ImageNetwork:
    if spec.name == "small_resnet":
        arguments = _parse_arguments(spec, SmallResnetArguments)
        return ImageNetwork(SmallResnet(arguments, channels, spec.num_outputs), spec)
    if spec.name.startswith(_TIMM):
        return ImageNetwork(_timm_network(spec, channels), spec)
    raise ParamsError(
        f"train.network is {spec.name!r}, expected 'small_resnet' or 'timm/NAME', for example "
        "'timm/resnet18'."
    )


def _table_network(spec: NetworkSpec, contract: ColumnContract) -> TableNetwork:
    if spec.name != "tabm":
        raise ParamsError(f"train.network is {spec.name!r}, expected 'tabm' for a table.")
    if not contract.columns:
        raise ParamsError(
            "the table has no column left to learn from. See reports/clean.html for the refused "
            "columns."
        )
    arguments = _parse_arguments(spec, TabmArguments)
    encoding = RowEncoding(contract, arguments.num_bins)
    return TableNetwork(encoding, Tabm(arguments, encoding, spec.num_outputs), spec)


def _parse_arguments(spec: NetworkSpec, kind: type[Arguments]) -> Arguments:
    if mistakes := argument_mistakes(spec.name, spec.arguments):
        raise ParamsError(f"train.{mistakes}")
    return kind.model_validate(spec.arguments)


def _timm_network(spec: NetworkSpec, channels: int) -> nn.Module:
    import timm

    name = spec.name.removeprefix(_TIMM)
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        known = " or ".join(repr(_TIMM + each) for each in close)
        hint = f"; did you mean {known}?" if close else "."
        raise ParamsError(
            f"train.network is 'timm/{name}', which timm {timm.__version__} lacks{hint}"
        )
    reserved = sorted({"pretrained", "in_chans", "num_classes"} & set(spec.arguments))
    if reserved:
        raise ParamsError(
            f"train.network_arguments names {', '.join(reserved)}, which Slipway sets itself from "
            "the data. Remove it."
        )
    try:
        network: nn.Module = timm.create_model(
            name,
            pretrained=False,
            in_chans=channels,
            num_classes=spec.num_outputs,
            **spec.arguments,
        )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ParamsError(
            f"timm/{name} refuses train.network_arguments {spec.arguments}: {error}"
        ) from error
    return network


def _check_forward(network: Network) -> None:
    """Run one row of zeros, to find sizes that do not fit before any data is read."""
    spec = network.spec
    try:
        with torch.no_grad():
            answer = network.eval()(example_rows(spec))
    except (RuntimeError, AssertionError, ValueError) as error:
        refusal = _describe_refusal(spec.input, error)
        raise ParamsError(f"train.network {spec.name!r} {refusal}") from error
    finally:
        network.train()
    if answer.shape != (1, spec.num_outputs):
        raise ParamsError(
            f"train.network {spec.name!r} answers {tuple(answer.shape)}, expected "
            f"(1, {spec.num_outputs})."
        )


def _describe_refusal(contract: InputContract, error: Exception) -> str:
    if isinstance(contract, ColumnContract):
        return (
            f"cannot take rows of {contract.shape[0]} numbers: {error}. "
            "Change train.network_arguments."
        )
    return (
        f"cannot take images of {contract.size_px}x{contract.size_px} px with {contract.channels} "
        f"channels: {error}. Change precompute.image_size_px, or give the size in "
        "train.network_arguments (img_size for many of timm)."
    )
