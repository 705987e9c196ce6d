"""Builds the initial network, with random or pretrained weights.

Pretrained weights come from a local file, from the cache of the hub that timm configures for the
network, or for an encoder from a local folder. Their head is always new, and starts with answers
near zero. All other weights must fit by name and shape; timm adapts the first layer to another
number of channels. Nothing is downloaded or unpickled.

Any network but an encoder and trees can also start from the weights.safetensors of a former model,
head included. All names and shapes must fit. If the former model.json lies beside it, images are
normalised as in that model.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from slipway.config.params import Params
from slipway.config.training import TrainParams
from slipway.inputs.images import MAX_PIXELS, ImageContract
from slipway.kinds.inputs import ENCODER
from slipway.kinds.registry import kind_of
from slipway.system.errors import ParamsError, UnavailableError
from slipway.training.networks.encoders import EncoderBackbone, encoder_weights, load_encoder
from slipway.training.networks.networks import (
    Network,
    NetworkSpec,
    build_network,
    read_model_manifest,
)

MODEL = "model.json"
_TIMM = "timm/"
_BACKBONE = "backbone."  # prefix of the names of all weights in a model of Slipway
_MOST_NAMED = 5
# Standard deviation of the weights of a new head. For EfficientNet and MobileNet timm takes 0.4 if
# there are two classes. Behind a pretrained body the first losses are then many times those of
# guessing, and with a frozen body the head does not make up for it.
_HEAD_STD = 0.01
_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


def initial_network(seed: int, params: TrainParams, spec: NetworkSpec) -> Network:
    """Build a network with random weights from `seed`, and load pretrained ones if requested."""
    torch.manual_seed(seed)
    network = build_network(spec)
    if pretrained := pretrained_file(params):
        if params.network == ENCODER:
            load_encoder(network, pretrained.parent)
            assert isinstance(network.backbone, EncoderBackbone)
            _draw_heads([network.backbone.head])
        else:
            load_pretrained(network, pretrained)
    return network


def image_network_spec(params: Params) -> NetworkSpec:
    """Return the spec of the image network before the packed store exists.

    It has two outputs if `data.classes` is null. The mean and the maximum of the pixels are
    placeholders; no shape depends on them.
    """
    data, wanted = params.data, params.precompute
    mean, std = [0.5] * wanted.channels, [0.25] * wanted.channels
    mean, std = start_normalisation(params.train, mean, std)
    classes = data.classes or ["one", "two"]
    return NetworkSpec(
        task=data.task,
        name=params.train.network,
        arguments=params.train.network_arguments,
        classes=classes if kind_of(data.task).target.has_classes else [],
        input=ImageContract(
            kind="images",
            transform=None,
            size_px=wanted.image_size_px,
            channels=wanted.channels,
            resize_mode=wanted.resize_mode,
            interpolation=wanted.interpolation,
            max_pixels=MAX_PIXELS,
        ),
        mean=mean,
        std=std,
        target_scale=None,
    )


def pretrained_file(params: TrainParams) -> Path | None:
    """Return the file of the pretrained weights, or None for random weights.

    Raises ParamsError if the file does not exist, UnavailableError if the hub's cache lacks it.
    """
    if params.pretrained is None:
        return None
    if params.network == ENCODER:
        return encoder_weights(Path(params.pretrained))
    if params.pretrained == "hub":
        return _cached(params.network)
    path = Path(params.pretrained)
    if path.suffix not in _SUFFIXES:
        raise ParamsError(
            f"train.pretrained is {params.pretrained!r}, expected 'hub' or a file that ends in "
            f"{', '.join(_SUFFIXES)}."
        )
    if not path.is_file():
        raise ParamsError(
            f"train.pretrained is {params.pretrained!r}, which is not a file. Paths are relative "
            "to the project's folder."
        )
    return path


def without_former_model(params: TrainParams) -> TrainParams:
    """Return `params` without the weights of a former model.

    That model may have been trained on rows that are held out now.
    """
    if params.pretrained and is_former_model(Path(params.pretrained)):
        no_weights = {"pretrained": None, "freeze_epochs": 0, "unfreeze_epochs": 0}
        return params.model_copy(update=no_weights)
    return params


def is_former_model(path: Path) -> bool:
    """Return True if `path` holds weights that a training of Slipway wrote."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            return all(name.startswith(_BACKBONE) for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return False


def start_normalisation(
    params: TrainParams, mean: list[float], std: list[float]
) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel, as the initial weights expect them.

    If the initial weights are random, returns `mean` and `std`, which are those of the data.
    """
    if params.pretrained is None:
        return mean, std
    path = Path(params.pretrained)
    if path.with_name(MODEL).is_file() and is_former_model(path):
        former = read_model_manifest(path.parent).network
        return former.mean, former.std
    if params.network.startswith(_TIMM):
        return pretrained_normalisation(params.network, len(mean))
    return mean, std


def pretrained_normalisation(network: str, channels: int) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel in pretraining, for pixels in [0, 1].

    Grey images get the mean over red, green and blue, because timm sums the first layer's weights
    over them.
    """
    config = _config(network)
    mean, std = list(config.mean), list(config.std)
    if channels == 1:
        return [sum(mean) / len(mean)], [sum(std) / len(std)]
    return mean, std


def load_pretrained(network: Network, path: Path) -> None:
    """Load the weights in `path` into the backbone, and draw a new head.

    Only from a former model the head is loaded as well. Raises ParamsError with the names of the
    weights that do not fit.
    """
    if is_former_model(path):
        _load_former(network, path)
        return
    spec = network.spec
    if not spec.name.startswith(_TIMM):
        raise ParamsError(
            f"train.pretrained {str(path)!r} is not the file of a model that Slipway trained, "
            f"expected weights.safetensors of a training of {spec.name!r}. Name that file, or set "
            "it to null."
        )
    import timm

    state = _read(path)
    classifiers = _config(spec.name).classifier or ()
    if isinstance(classifiers, str):
        classifiers = (classifiers,)
    heads = [state[f"{name}.weight"] for name in classifiers if f"{name}.weight" in state]
    num_classes = len(heads[0]) if heads else 0
    try:
        donor = timm.create_model(
            spec.name.removeprefix(_TIMM),
            pretrained=True,
            # With the file's number of classes timm loads strictly, instead of dropping weights.
            pretrained_cfg_overlay={
                "state_dict": state,
                "num_classes": num_classes,
                "label_offset": 0,
            },
            num_classes=num_classes,
            in_chans=len(spec.mean),
            **spec.arguments,
        )
    except (RuntimeError, KeyError, AttributeError, ValueError) as error:
        raise ParamsError(
            f"train.pretrained {str(path)!r} does not fit the network {spec.name!r}: {error}"
        ) from error
    _copy_body(donor, network.backbone)
    _draw_heads(_heads(network.backbone))


def _load_former(network: Network, path: Path) -> None:
    given, wanted = safetensors.torch.load_file(path), network.state_dict()
    misfits = [f"{name} is missing" for name in sorted(wanted.keys() - given.keys())]
    misfits += [f"{name} is not in this network" for name in sorted(given.keys() - wanted.keys())]
    misfits += [
        f"{name} has the shape {tuple(given[name].shape)}, expected {tuple(value.shape)}"
        for name, value in wanted.items()
        if name in given and given[name].shape != value.shape
    ]
    if misfits:
        further = len(misfits) - _MOST_NAMED
        more = [f"and {further} further ones"] if further > 0 else []
        raise ParamsError(
            f"train.pretrained {str(path)!r} does not fit the network {network.spec.name!r}: "
            f"{'; '.join([*misfits[:_MOST_NAMED], *more])}. The columns, categories, classes or "
            "train.network_arguments were others. Start from random weights: train.pretrained: null"
        )
    network.load_state_dict(given)


def head_tensors(backbone: Any) -> set[int]:
    """Return the `id()` of each tensor in the backbone's classifier."""
    return {
        id(value) for head in _heads(backbone) for value in head.state_dict(keep_vars=True).values()
    }


def _heads(backbone: Any) -> tuple[nn.Module, ...]:
    heads = backbone.get_classifier()
    return heads if isinstance(heads, tuple) else (heads,)


def _draw_heads(heads: Iterable[nn.Module]) -> None:
    """Draw the weights of new heads so that their first answers are near zero."""
    for layer in (layer for head in heads for layer in head.modules()):
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(layer.weight, std=_HEAD_STD)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _copy_body(donor: nn.Module, backbone: Any) -> None:
    in_head = head_tensors(backbone)
    state = backbone.state_dict(keep_vars=True)
    names = {name for name, value in state.items() if id(value) not in in_head}
    given = {name: value for name, value in donor.state_dict().items() if name in names}
    missing = backbone.load_state_dict(given, strict=False).missing_keys
    if lacking := sorted(names.intersection(missing)):
        raise ParamsError(
            f"train.pretrained lacks {', '.join(lacking)}, which {type(backbone).__name__} has."
        )


def _read(path: Path) -> dict[str, Tensor]:
    from timm.models import load_state_dict

    try:
        state = load_state_dict(str(path), use_ema=True, weights_only=True)
    except Exception as error:  # torch, pickle and safetensors have their own kinds of errors
        raise ParamsError(
            f"train.pretrained {str(path)!r} could not be read as plain weights: {error}. "
            "Save it again with safetensors.torch.save_file(network.state_dict(), path)."
        ) from error
    if not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ParamsError(
            f"train.pretrained {str(path)!r} holds more than weights by name. Save only "
            "network.state_dict()."
        )
    return state


def _config(network: str) -> Any:
    import timm  # takes seconds, and few need it

    name = network.removeprefix(_TIMM)
    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if config is None:
        raise ParamsError(
            f"train.pretrained is set, but timm {timm.__version__} has no pretrained configuration "
            f"of {name!r}. Set it to null."
        )
    return config


def _cached(network: str) -> Path:
    """Return the file in the hub's cache on this machine; only `slipway init` asks the hub."""
    from huggingface_hub import try_to_load_from_cache

    config = _config(network)
    if not config.hf_hub_id:
        raise UnavailableError(
            f"train.pretrained is 'hub', which has no weights of {network!r}. Name a file of them, "
            "or set it to null."
        )
    filename = config.hf_hub_filename or "model.safetensors"
    found = try_to_load_from_cache(config.hf_hub_id, filename)
    if not isinstance(found, str):
        raise UnavailableError(
            f"train.pretrained is 'hub', but {filename} of {config.hf_hub_id} is not in the hub's "
            "cache on this machine, and no stage downloads anything. Fetch it once: "
            f"hf download {config.hf_hub_id} {filename}. Without a network, copy the file here and "
            "name it: train.pretrained: weights/NAME.safetensors"
        )
    return Path(found)
