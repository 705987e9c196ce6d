"""Networks, and the model files that a finished training writes.

artifacts/model/model.json           model manifest: network, inputs, outputs, origin
artifacts/model/weights.safetensors  weights in float32; boosted trees have trees.txt instead
artifacts/model/student/             both files of the student, if the ensemble is served
artifacts/model/ensemble/            both files of the ensemble, if its student is served

Training, evaluation and export use the same module, which includes the normalisation, so none of
them can forget it. Altered weights, unknown networks and unknown arguments are refused.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
import safetensors.torch
import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from torch import Tensor, nn

from slipway.artifacts.training_setup import RunSegment, TrainingSetup
from slipway.config.network_arguments import argument_mistakes
from slipway.data.engine.rows import read_record
from slipway.data.store.packed import TargetScale
from slipway.inputs.contract import AnyInputContract
from slipway.kinds.code_digest import user_code
from slipway.kinds.registry import Task, are_trees, input_kind
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import IntegrityError, ParamsError, SchemaError
from slipway.system.user_code import UserCode
from slipway.training.networks.mapped_weights import MappedWeights

ENSEMBLE = "ensemble"  # `NetworkSpec.name` of several networks that answer together
STUDENT = "student"  # subfolder of an ensemble's folder, for a student that is not served
_FIX = "Run `dvc repro train`."
Arguments = TypeVar("Arguments", bound=BaseModel)


class NetworkSpec(Contract):
    """Everything needed to build a network, except its weights."""

    task: Task
    # "small_resnet" or "timm/NAME" for images, "tabm" or "lightgbm" for tables, the user's own
    # "module:Class", or "ensemble".
    name: str
    arguments: dict[str, Any]
    classes: list[str]  # classes in the order of the logits; empty for a numeric target
    input: AnyInputContract
    mean: list[float]  # mean per channel of pixels scaled to [0, 1]; empty for tables
    std: list[float]
    target_scale: TargetScale | None  # null for classes

    @property
    def num_outputs(self) -> int:
        """The number of outputs: one logit per class, or 1 for a numeric target."""
        return len(self.classes) or 1

    @property
    def networks(self) -> list[str]:
        """The name of the network, or for an ensemble the names of its members."""
        if self.name != ENSEMBLE:
            return [self.name]
        return [member["network"] for member in self.arguments["members"]]


class ModelManifest(Contract):
    """The content of `model.json`. Equal runs write equal text."""

    format_version: Literal[5]
    network: NetworkSpec
    num_parameters: int
    weights_sha256: str
    epochs: int  # number of trained epochs
    stopped_early: bool  # True if train.early_stopping_patience ended it
    kept_epoch: int  # epoch of these weights, counted from 1
    metrics: dict[str, float]  # metrics of the kept epoch on the validation split
    requested: TrainingSetup
    actual: TrainingSetup  # setup at the end of the training
    segments: list[RunSegment]  # one segment, unless another process layout resumed it
    seed: int
    params: dict[str, Any]  # the section train of params.yaml
    digests: dict[str, str]  # hex SHA-256 of params, packed manifest, augmentation plan and code
    user_code: list[UserCode]  # the user's own network and loss
    versions: dict[str, str]  # versions of the packages that trained it
    git_revision: str | None  # null outside a git work tree


class Network(nn.Module):
    """Base class of networks: the spec, the trained backbone, and the unit of a numeric target."""

    target_mean: Tensor
    target_std: Tensor

    def __init__(self, backbone: nn.Module, spec: NetworkSpec) -> None:
        super().__init__()
        self.spec = spec
        self.backbone = backbone
        self.mapped: MappedWeights | None = None  # holds the weights until they are divided
        scale = spec.target_scale or TargetScale(mean=0.0, std=1.0)
        # Not stored with the weights, because model.json is the only source.
        self.register_buffer("target_mean", torch.tensor(scale.mean), persistent=False)
        self.register_buffer("target_std", torch.tensor(scale.std), persistent=False)

    def to_target_unit(self, answer: Tensor) -> Tensor:
        """Convert predicted numbers to the target's unit; logits are returned unchanged."""
        if self.spec.target_scale is None:
            return answer
        return answer.to(torch.float32) * self.target_std + self.target_mean

    def backbone_inputs(self, rows: Tensor) -> Tensor:
        """Convert rows of the packed store (B, ...) to the inputs of the backbone (B, ...)."""
        raise NotImplementedError(f"{type(self).__name__} has no backbone that is one module")

    @property
    def num_parameters(self) -> int:
        """The number of weights."""
        return sum(parameter.numel() for parameter in self.parameters())

    def payload(self) -> bytes:
        """Return the content of the weights file."""
        return serialize_tensors(self.state_dict())

    def load_payload(self, payload: bytes) -> None:
        """Load the content of the weights file.

        Raises ValueError or RuntimeError if the content does not fit the network.
        """
        self.load_state_dict(safetensors.torch.load(payload), strict=True)

    def column_gains(self) -> dict[str, float]:
        """Return the fraction of the split gain of each column, by name; empty without trees."""
        return {}

    def misfit(self, error: Exception) -> str:
        """Return a sentence on why the network cannot read its inputs, and the remedy."""
        return f"cannot take its input: {error}. Change train.network_arguments."


def build_network(spec: NetworkSpec) -> Network:
    """Build a network with random weights, drawn from torch's global generator.

    Raises ParamsError if `spec` cannot be built.
    """
    make: Callable[[NetworkSpec], Network] = input_kind(spec.input.kind).load_part("network")
    if spec.name == ENSEMBLE:
        from slipway.training.networks import ensemble  # that module imports this one

        make = ensemble.EnsembleNetwork
    network = make(spec)
    _check_forward(network)
    return network


def weights_file(network: str) -> str:
    """Return the name of the file that holds the weights or the trees in a model's folder."""
    return "trees.txt" if are_trees(network) else "weights.safetensors"


def example_rows(spec: NetworkSpec, num_rows: int = 1) -> Tensor:
    """Return rows of zeros in the shape and dtype of the network's input, (num_rows, ...)."""
    return torch.from_numpy(np.zeros((num_rows, *spec.input.shape), spec.input.dtype))


def serialize_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the tensors as the bytes of a safetensors file."""
    return safetensors.torch.save(_plain(tensors))


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def load_tensors(path: Path, sha256: str, fix: str) -> dict[str, Tensor]:
    """Read a safetensors file; `fix` is the remedy that ends the error messages.

    Raises SchemaError if the file is missing, IntegrityError if it was altered.
    """
    try:
        return safetensors.torch.load(_read_payload(path, sha256, fix))
    except SafetensorError as error:
        raise IntegrityError(f"{error} {fix}") from None


def _read_payload(path: Path, sha256: str, fix: str) -> bytes:
    try:
        return files.read_verified(path, sha256)
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. {fix}") from None
    except IntegrityError as error:
        raise IntegrityError(f"{error} {fix}") from None


def save_model(
    folder: Path,
    manifest: ModelManifest,
    weights: bytes | Mapping[str, Tensor],
    others: Mapping[str, tuple[ModelManifest, bytes]] = MappingProxyType({}),
) -> None:
    """Write a model to `folder` atomically, and fill in `manifest.weights_sha256`.

    `weights` are tensors, which are written without a copy in memory, or the content of the file.
    `others` are models to write into subfolders, by name of the subfolder.
    """
    with files.new_directory(folder) as partial:
        for name, (facts, content) in {"": (manifest, weights), **others}.items():
            place = partial / name
            place.mkdir(exist_ok=True)
            path = place / weights_file(facts.network.name)
            if isinstance(content, bytes):
                files.write_bytes(path, content)
            else:
                safetensors.torch.save_file(_plain(content), path)
            facts = facts.model_copy(update={"weights_sha256": files.sha256_file(path)})
            files.write_json(place / "model.json", facts.model_dump(mode="json"))


def read_model_manifest(folder: Path) -> ModelManifest:
    """Read `model.json`. Raises SchemaError if it is missing or invalid."""
    return read_record(ModelManifest, folder / "model.json", "train")


def load_network(folder: Path) -> Network:
    """Load the trained network of a model, in evaluation mode on the CPU.

    Raises SchemaError if a file is missing or does not fit, IntegrityError if the weights or the
    code of a user's network were altered.
    """
    manifest = read_model_manifest(folder)
    _check_code(manifest)
    name = manifest.network.name
    path = folder / weights_file(name)
    payload = _read_payload(path, manifest.weights_sha256, _FIX)
    network = build_network(manifest.network)
    try:
        network.load_payload(payload)
    except SafetensorError as error:
        raise IntegrityError(f"{path}: {error} {_FIX}") from None
    except (RuntimeError, ValueError) as error:
        raise SchemaError(
            f"{path} does not fit the network {name!r} of model.json: {error} {_FIX}"
        ) from error
    return network.eval()


def _check_code(manifest: ModelManifest) -> None:
    for code in user_code(Path(), "train.network", manifest.network.networks):
        if code not in manifest.user_code:
            raise IntegrityError(
                f"the code of train.network {code.name!r} has the SHA-256 {code.sha256[:16]}..., "
                "but it was trained with other code. Restore that code, or run `dvc repro train`."
            )


def parse_arguments(spec: NetworkSpec, kind: type[Arguments]) -> Arguments:
    if mistakes := argument_mistakes(spec.name, spec.arguments):
        raise ParamsError(f"train.{mistakes}")
    return kind.model_validate(spec.arguments)


def _check_forward(network: Network) -> None:
    """Run a forward pass of one row of zeros, so that mismatched sizes fail early."""
    spec = network.spec
    try:
        with torch.no_grad():
            answer = network.eval()(example_rows(spec))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ParamsError(f"train.network {spec.name!r} {network.misfit(error)}") from error
    finally:
        network.train()
    if answer.shape != (1, spec.num_outputs):
        raise ParamsError(
            f"train.network {spec.name!r} returns {tuple(answer.shape)}, expected "
            f"(1, {spec.num_outputs})."
        )
