"""Weights that a network of timm begins with: from a local file, or from the hub that timm's pretrained tag names.

The head is always a new one. Everything else has to fit, name by name and shape by shape; inputs of another number of channels
are handled as timm does. Nothing is unpickled.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipway.config.sections import TrainParams
from slipway.system.errors import ParamsError, UnavailableError
from slipway.training.networks.networks import Network

_TIMM = "timm/"
_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


def pretrained_file(params: TrainParams) -> Path | None:
    """The file of weights to begin with, fetched if it is the hub's; None for fresh weights.

    ParamsError where there is no such file, UnavailableError where the hub does not give it.
    """
    if params.pretrained is None:
        return None
    if params.pretrained == "hub":
        return _fetched(params.network)
    path = Path(params.pretrained)
    if path.suffix not in _SUFFIXES:
        raise ParamsError(
            f"train.pretrained is {params.pretrained!r}, expected 'hub' or a file that ends in {', '.join(_SUFFIXES)}."
        )
    if not path.is_file():
        raise ParamsError(
            f"train.pretrained is {params.pretrained!r}, which is no file. Paths are relative to the project's folder."
        )
    return path


def pretrained_normalisation(network: str, channels: int) -> tuple[list[float], list[float]]:
    """Mean and standard deviation, per channel of pixels in [0, 1], that the weights of a network of timm were trained with.

    For grey images the mean of those of red, green and blue, since timm sums the first layer's weights over them.
    """
    config = _config(network)
    mean, std = list(config.mean), list(config.std)
    if channels == 1:
        return [sum(mean) / len(mean)], [sum(std) / len(std)]
    return mean, std


def load_pretrained(network: Network, path: Path) -> None:
    """Give the backbone of `network` the weights in `path`, but for its head; ParamsError naming every one that does not fit."""
    import timm

    spec = network.spec
    name = spec.name.removeprefix(_TIMM)
    state = _read(path)
    own_head = _classifier_names(spec.name)
    head = next((state[f"{name}.weight"] for name in own_head if f"{name}.weight" in state), None)
    num_classes = 0 if head is None else len(head)
    try:
        donor = timm.create_model(
            name,
            pretrained=True,
            # With as many classes as the file has, timm loads strictly; it would drop what does not fit otherwise.
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
    _copy_all_but_the_head(donor, network.backbone)


def _copy_all_but_the_head(donor: nn.Module, backbone: Any) -> None:
    """Whatever of the backbone belongs to its classifier stays as it is."""
    heads = backbone.get_classifier()
    of_head = {
        id(value)
        for head in (heads if isinstance(heads, tuple) else (heads,))
        for value in head.state_dict(keep_vars=True).values()
    }
    names = {
        name
        for name, value in backbone.state_dict(keep_vars=True).items()
        if id(value) not in of_head
    }
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
    except Exception as error:  # torch's, pickle's and safetensors' own kinds
        raise ParamsError(
            f"train.pretrained {str(path)!r} could not be read as weights alone: {error}. "
            "Save it again with safetensors.torch.save_file(network.state_dict(), path)."
        ) from error
    if not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ParamsError(
            f"train.pretrained {str(path)!r} holds more than weights by name. Save network.state_dict() alone."
        )
    return state


def _config(network: str) -> Any:
    import timm  # takes seconds, which few need

    name = network.removeprefix(_TIMM)
    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if config is None:
        raise ParamsError(
            f"train.pretrained is set, but timm {timm.__version__} has no pretrained configuration of {name!r}. Set it to null."
        )
    return config


def _classifier_names(network: str) -> tuple[str, ...]:
    names = _config(network).classifier or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _fetched(network: str) -> Path:
    from huggingface_hub import hf_hub_download

    config = _config(network)
    if not config.hf_hub_id:
        raise UnavailableError(
            f"train.pretrained is 'hub', which has no weights of {network!r}. Name a file of them, or set it to null."
        )
    filename = config.hf_hub_filename or "model.safetensors"
    try:
        return Path(hf_hub_download(config.hf_hub_id, filename))
    except (OSError, ValueError, RuntimeError) as error:
        raise UnavailableError(
            f"train.pretrained is 'hub', but {filename} of {config.hf_hub_id} could not be fetched ({type(error).__name__}). "
            "Without a network, fetch that file elsewhere, copy it here and name it: train.pretrained: weights/NAME.safetensors"
        ) from error
