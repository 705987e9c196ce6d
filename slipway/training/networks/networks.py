"""Networks, and the checkpoint that a finished training leaves behind.

artifacts/model/model.json           what the network is, what it takes and answers, where it comes from
artifacts/model/weights.safetensors  its weights in float32

The same module is trained, evaluated and exported, with normalisation inside, so none of them can
forget it. Altered weights, an unknown network and an unknown argument are refused.
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
    mean: list[
        float
    ]  # per channel, of pixels scaled to [0, 1]; empty for tables, whose contract has them
    std: list[float]
    target_scale: TargetScale | None  # null for classes

    @property
    def num_outputs(self) -> int:
        """Logits for classes, 1 for a numeric target."""
        return len(self.classes) if is_classification(self.task) else 1


class TrainingSetup(Contract):
    """How a network is trained: as asked for, or as it came out."""

    strategy: str  # "single", "ddp", "deepspeed_stage_2"
    precision: str  # "32-true", "bf16-mixed", "16-mixed"
    accelerator: str  # "cpu", "gpu"
    world_size: int | Literal["auto"]  # processes over all nodes
    zero_stage: int | None  # null where it is not asked for, or without DeepSpeed
    offload: (
        str | None
    )  # "optimizer", "optimizer_and_parameters": what lies in the host's memory and not in the GPUs'
    parameter_dtype: (
        str | None
    )  # of the parameters in forward and backward; null where it is not asked for


class RunSegment(Contract):
    """The process layout of a training from `first_step` on.

    After a change the batches stay the same, but results may differ in the last bits.
    """

    first_step: int
    strategy: str
    world_size: int
    per_device: int  # rows of a batch
    threads: int | None = (
        None  # of each process on a CPU; null on a GPU, and where a save of an earlier version does not say
    )

    def has_same_layout(self, other: "RunSegment") -> bool:
        """Compare everything but the first step."""
        return self.model_copy(update={"first_step": other.first_step}) == other

    def __str__(self) -> str:
        threads = (
            f" and {self.threads} thread{'s' * (self.threads > 1)} each" if self.threads else ""
        )
        return f"{self.strategy} on {self.world_size} process{'es' * (self.world_size > 1)} with {self.per_device} rows a batch{threads}"


class ModelCard(Contract):
    """The content of `model.json`; equal runs write equal text."""

    format_version: Literal[4]
    network: NetworkSpec
    num_parameters: int
    weights_sha256: str
    epochs: int  # that were trained
    stopped_early: bool  # by train.early_stopping_patience
    kept_epoch: int  # whose weights these are, counted from 1
    metrics: dict[str, float]  # of the kept epoch, on the validation split
    requested: TrainingSetup
    actual: TrainingSetup  # at the end
    segments: list[RunSegment]  # one, unless another process layout resumed it
    seed: int
    params: dict[str, Any]  # the train section of params.yaml
    digests: dict[
        str, str
    ]  # hex SHA-256 of the params, the packed manifest, the augmentation plan and the code
    versions: dict[str, str]  # of the packages that trained it
    git_revision: str | None  # null outside a git work tree


class _Scaled(nn.Module):
    """What networks share: their spec, their trained part, and the unit of a numeric target."""

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

    def _in_unit(self, answer: Tensor) -> Tensor:
        """Values of a numeric target in its own unit; logits as they are."""
        if is_classification(self.spec.task):
            return answer
        return answer.to(torch.float32) * self.target_std + self.target_mean


class ImageNetwork(_Scaled):
    """(rows, height, width, channels) uint8 in [0, 255] to (rows, classes) logits, or (rows, 1) in the target's unit."""

    pixel_mean: Tensor
    pixel_scale: Tensor

    def __init__(self, backbone: nn.Module, spec: NetworkSpec) -> None:
        super().__init__(backbone, spec)
        channels = (1, -1, 1, 1)
        self.register_buffer(
            "pixel_mean", torch.tensor(spec.mean).mul(255).view(channels), persistent=False
        )
        self.register_buffer(
            "pixel_scale",
            torch.tensor(spec.std).mul(255).reciprocal().view(channels),
            persistent=False,
        )

    def forward(self, images: Tensor) -> Tensor:
        """(B, H, W, C) uint8 -> (B, K) float"""
        pixels = images.to(torch.float32).permute(
            0, 3, 1, 2
        )  # the cast comes first: TensorRT transposes no uint8
        return self._in_unit(self.backbone((pixels - self.pixel_mean) * self.pixel_scale))


class TableNetwork(_Scaled):
    """(rows, width) float32 as a column contract lays them out, to (rows, classes) logits, or (rows, 1) in the target's unit.

    In training mode it answers (rows, submodels, outputs), since each submodel has a loss of its own; else the mean of
    their probabilities, as logits, or of their values.
    """

    def __init__(self, encoding: RowEncoding, backbone: nn.Module, spec: NetworkSpec) -> None:
        super().__init__(backbone, spec)
        self.encoding = encoding

    def forward(self, rows: Tensor) -> Tensor:
        """(B, width) float32 -> (B, K) float; (B, submodels, K) in training mode"""
        answers = self._in_unit(self.backbone(*self.encoding(rows)))
        if self.training:
            return answers
        if not is_classification(self.spec.task):
            return answers.mean(dim=1)
        # The mean over submodels less the logarithm of their number, which softmax takes away again.
        return torch.logsumexp(torch.log_softmax(answers.to(torch.float32), dim=2), dim=1)


Network = ImageNetwork | TableNetwork


def build_network(spec: NetworkSpec) -> Network:
    """A network with fresh weights, drawn from torch's global generator; ParamsError if it cannot be built as asked."""
    network = (
        _table_network(spec, spec.input)
        if isinstance(spec.input, ColumnContract)
        else _image_network(spec, spec.input.channels)
    )
    _check_it_answers(network)
    return network


def save_checkpoint(folder: Path, card: ModelCard, state: Mapping[str, Tensor]) -> None:
    """Write `folder` as a whole. `card.weights_sha256` is filled in here."""
    payload = safetensors.torch.save(
        {name: value.detach().cpu().contiguous() for name, value in state.items()}
    )
    card = card.model_copy(update={"weights_sha256": files.sha256_bytes(payload)})
    with files.new_directory(folder) as partial:
        files.write_bytes(partial / "weights.safetensors", payload)
        files.write_json(partial / "model.json", card.model_dump(mode="json"))


def read_model_card(folder: Path) -> ModelCard:
    """The `model.json` of a checkpoint; SchemaError if it is missing or not understood."""
    path = folder / "model.json"
    try:
        return ModelCard.model_validate(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        raise SchemaError(f"{path} is missing. {_FIX}") from None
    except ValueError as error:  # pydantic's and json's are both ValueErrors
        raise SchemaError(f"{path} is not a checkpoint's description: {error}. {_FIX}") from error


def load_network(folder: Path) -> Network:
    """The trained network of a checkpoint, in evaluation mode on the CPU.

    SchemaError if a file is missing or does not fit, IntegrityError if the weights were altered.
    """
    card = read_model_card(folder)
    path = folder / "weights.safetensors"
    try:
        state = safetensors.torch.load(files.read_verified(path, card.weights_sha256))
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. {_FIX}") from None
    except IntegrityError as error:
        raise IntegrityError(f"{error} {_FIX}") from None
    network = build_network(card.network)
    try:
        network.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise SchemaError(
            f"{path} does not fit the network {card.network.name!r} of model.json: {error} {_FIX}"
        ) from error
    return network.eval()


def _image_network(spec: NetworkSpec, channels: int) -> ImageNetwork:
    if spec.name == "small_resnet":
        arguments = _parse_arguments(spec, SmallResnetArguments)
        return ImageNetwork(SmallResnet(arguments, channels, spec.num_outputs), spec)
    if spec.name.startswith(_TIMM):
        return ImageNetwork(
            _timm_network(
                spec.name.removeprefix(_TIMM), spec.arguments, channels, spec.num_outputs
            ),
            spec,
        )
    raise ParamsError(
        f"train.network is {spec.name!r}, expected 'small_resnet' or 'timm/NAME', for example 'timm/resnet18'."
    )


def _table_network(spec: NetworkSpec, contract: ColumnContract) -> TableNetwork:
    if spec.name != "tabm":
        raise ParamsError(f"train.network is {spec.name!r}, expected 'tabm' for a table.")
    if not contract.columns:
        raise ParamsError(
            "the table has no column left to learn from. See reports/clean.html for the columns that were refused."
        )
    arguments = _parse_arguments(spec, TabmArguments)
    encoding = RowEncoding(contract, arguments.num_bins)
    return TableNetwork(encoding, Tabm(arguments, encoding, spec.num_outputs), spec)


def _parse_arguments(spec: NetworkSpec, kind: type[Arguments]) -> Arguments:
    if mistakes := argument_mistakes(spec.name, spec.arguments):
        raise ParamsError(f"train.{mistakes}")
    return kind.model_validate(spec.arguments)


def _timm_network(
    name: str, arguments: dict[str, Any], channels: int, num_outputs: int
) -> nn.Module:
    import timm

    if not timm.is_model(name):
        raise ParamsError(
            f"train.network is 'timm/{name}', which timm {timm.__version__} lacks{_did_you_mean(name, timm.list_models(), 'timm/')}"
        )
    ours = sorted({"pretrained", "in_chans", "num_classes"} & set(arguments))
    if ours:
        raise ParamsError(
            f"train.network_arguments names {', '.join(ours)}, which Slipway sets itself from the data. Remove it."
        )
    try:
        network: nn.Module = timm.create_model(
            name, pretrained=False, in_chans=channels, num_classes=num_outputs, **arguments
        )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ParamsError(
            f"timm/{name} refuses train.network_arguments {arguments}: {error}"
        ) from error
    return network


def _check_it_answers(network: Network) -> None:
    """One row of zeros through the network: sizes that do not fit are found before any data is read."""
    spec = network.spec
    example = torch.from_numpy(np.zeros((1, *spec.input.shape), spec.input.dtype))
    try:
        with torch.no_grad():
            answer = network.eval()(example)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ParamsError(f"train.network {spec.name!r} {_refusal(spec.input, error)}") from error
    finally:
        network.train()
    if answer.shape != (1, spec.num_outputs):
        raise ParamsError(
            f"train.network {spec.name!r} answers {tuple(answer.shape)}, expected (1, {spec.num_outputs})."
        )


def _refusal(contract: InputContract, error: Exception) -> str:
    if isinstance(contract, ColumnContract):
        return f"cannot take rows of {contract.shape[0]} numbers: {error}. Change train.network_arguments."
    return (
        f"cannot take images of {contract.size_px}x{contract.size_px} px with {contract.channels} channels: {error}. "
        "Change precompute.image_size_px, or give the size in train.network_arguments (img_size for many of timm)."
    )


def _did_you_mean(name: str, known: list[str], before: str) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(before + each) for each in close)}?" if close else "."
