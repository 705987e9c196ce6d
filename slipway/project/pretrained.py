"""Pretrained weights for photographs: a file of the project, a cached download, or the hub."""

import os
from pathlib import Path
from typing import NamedTuple

from slipway.system.errors import ParamsError

FOLDER = "weights"  # folder of the project: weights/resnet18.a1_in1k.safetensors
_NAME = "resnet18.a1_in1k"  # timm's name of a small network with BatchNorm, for all runtimes
_REPOSITORY, _FILE, _LICENCE = f"timm/{_NAME}", "model.safetensors", "Apache-2.0"
_TIMEOUT_S = 3.0
_ENDINGS = (".safetensors", ".pth")


class Weights(NamedTuple):
    """A network of timm and the source of its weights."""

    network: str  # "timm/NAME"
    pretrained: str  # "hub" or a file
    reason: str


def weights_file(path: Path) -> Weights:
    """Return the weights in a file named after a network of timm; ParamsError for other names."""
    import timm

    if path.suffix in _ENDINGS and path.is_file():
        for name in (path.stem, path.stem.partition(".")[0]):
            if timm.is_model(name):
                reason = f"pretrained weights in {path}; check their licence"
                return Weights(f"timm/{name}", str(path), reason)
    raise ParamsError(
        f"{path} holds no weights of a known network: expected a file {' or '.join(_ENDINGS)} with "
        "the name of a network of timm, such as weights/resnet18.safetensors."
    )


def find_weights(folder: Path) -> Weights | None:
    """Find pretrained weights in `folder`/weights, the cache or the hub; None if there are none."""
    files = sorted(path for path in (folder / FOLDER).glob("*") if path.suffix in _ENDINGS)
    if files:
        return weights_file(files[0])
    from huggingface_hub import try_to_load_from_cache

    described = f"weights of ImageNet, {_REPOSITORY}, licence {_LICENCE}"
    if isinstance(cached := try_to_load_from_cache(_REPOSITORY, _FILE), str):
        return Weights(f"timm/{_NAME}", cached, f"{described}, already on this machine")
    num_bytes = _reachable_bytes()
    if num_bytes is None:
        return None
    reason = f"{described}, {num_bytes / 1e6:.0f} MB to download"
    return Weights(f"timm/{_NAME}", "hub", reason)


def local_weights(folder: Path, network: str) -> Weights | None:
    """Find the weights of a network of timm without a download; None if there are none."""
    for path in sorted((folder / FOLDER).glob("*")):
        if path.suffix in _ENDINGS and (found := weights_file(path)).network == network:
            return found
    return None


def _reachable_bytes() -> int | None:
    """Return the size of the weights on the hub; None if it cannot be reached."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    if os.environ.get("HF_HUB_OFFLINE", "").strip() not in ("", "0"):
        return None
    try:
        metadata = get_hf_file_metadata(hf_hub_url(_REPOSITORY, _FILE), timeout=_TIMEOUT_S)
    except Exception:  # each layer of the client has its own kinds of errors
        return None
    return metadata.size or 0
