"""Rules of thumb, each with its reason: image size, network, batches, epochs, augmentation."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.network_arguments import SmallTransformerArguments, TabmArguments
from slipway.config.params import value_at
from slipway.data.sources.raw_tables import RawColumn
from slipway.kinds.registry import are_trees, kind_of
from slipway.kinds.targets import UNBOUNDED_METRICS
from slipway.project.pretrained import Weights
from slipway.project.summary import ImageSample
from slipway.runtimes.runtime import why_no_cuda_driver
from slipway.system.cores import num_cores

Start = Literal["scratch", "pretrained", "frozen"]
Values = dict[str, tuple[Any, str]]  # value and reason by key
MIN_STEPS = 300
FROZEN = "all: only the new head learns. 1 trains the body, too: slower"
SMALL_PX = 64  # up to here images keep their size
_PHOTOGRAPH_PX = {"scratch": 64, "pretrained": 224}
_MIN_PX = 16
_TRAINING_SECONDS = {"cpu": 100.0, "gpu": 900.0}
_FLOPS_PER_CORE = 30e9  # speed of a convolution in float32, beside some other load
_FLOPS_OF_GPU = 4e12
_FASTER_BF16 = 2.0  # factor with AMX
_TRAINING = 3  # operations forward and backward over those forward
_RESNET18_FLOPS = 3.6e9 / 224**2  # per pixel, forward
_HEAD_FLOPS = 2e4  # per image, forward
_SMALL_RESNET_FLOPS = 92e3 / 32**2  # per pixel and squared width, forward
_USUAL_EPOCHS = {"scratch": 40, "pretrained": 12, "frozen": 30, "table": 40, "text": 8}
_MOST_EPOCHS = 100
_TEXT_STEPS = 150
_WHOLE_TEXTS = 0.99  # fraction of the texts that are not cut
_TEXT_STEP, _MOST_TEXT_BYTES = 64, 2048
_BYTES_PER_TOKEN, _FEWEST_TOKENS, _MOST_TOKENS = 4, 16, 256
_TABLE_EFFICIENCY = 0.35  # speed of small matrices relative to convolutions
_FEWEST_EPOCHS_OF_TABM = 8
_SEARCH_TRIALS, _SEARCH_REDUCTION, _SEARCH_RUNGS = 12, 3, 9
_WIDTH_STEP = 16  # step between widths of small_resnet
_SIDES = re.compile(r"(^|[^a-z])(left|right)([^a-z]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Machine:
    """A machine: its number of cores, GPU, and AMX, by which bfloat16 is fast on the CPU."""

    cores: int
    has_gpu: bool
    has_amx: bool

    @property
    def flops(self) -> float:
        """Operations per second in training, as a rule of thumb."""
        if self.has_gpu:
            return _FLOPS_OF_GPU
        return self.cores * _FLOPS_PER_CORE * (_FASTER_BF16 if self.has_amx else 1)

    def __str__(self) -> str:
        if self.has_gpu:
            return "the GPU of this machine"
        return f"{self.cores} core{'s' * (self.cores > 1)} without a GPU"


def this_machine() -> Machine:
    """Return facts about this machine, without importing torch."""
    information = Path("/proc/cpuinfo")
    has_amx = information.exists() and "amx_bf16" in information.read_text(errors="replace")
    return Machine(num_cores(), why_no_cuda_driver() is None, has_amx)


class Length(NamedTuple):
    """The length of a training: rows per step, and epochs."""

    batch_size: int
    epochs: int
    reason: str


def are_photographs(images: ImageSample) -> bool:
    """Return True if the images are large enough to profit from a network that has seen others."""
    return min(images.sides) > SMALL_PX


def image_values(images: ImageSample, counts_matter: bool, has_weights: bool) -> Values:
    """Return image size, channels and resize mode, each with a reason.

    `counts_matter` is True if no part of an image may be cut off.
    """
    width, height = images.sides
    side = min(width, height)
    channels = (3, "the images have colour") if images.has_colour else (1, "the images are grey")
    if side <= SMALL_PX:
        size = max(_MIN_PX, side)
        why = f"the images have {width}x{height} px"
    else:
        size = min(_PHOTOGRAPH_PX["pretrained" if has_weights else "scratch"], side)
        why = f"the images have {width}x{height} px; larger sees more and takes longer"
    if images.same_aspect:
        mode = ("stretch", "all images have nearly the same shape")
    elif counts_matter:
        mode = ("pad", "shapes differ, and no part may be cut off")
    else:
        mode = ("crop", "shapes differ; pad keeps the borders")
    return {
        "precompute.image_size_px": (size, why),
        "precompute.channels": channels,
        "precompute.resize_mode": mode,
    }


def small_resnet_width(size_px: int, num_train: int, machine: Machine) -> int:
    """Return the width of `small_resnet`: 32, or 16 if a training at 32 would take too long."""
    wanted = num_train * max(8, math.ceil(MIN_STEPS * batch_size(num_train) / num_train))
    cost = _SMALL_RESNET_FLOPS * 32**2 * size_px**2
    return 32 if wanted * cost * _TRAINING <= _seconds(machine) * machine.flops else 16


def image_length(
    size_px: int,
    width: int | None,
    start: Start,
    num_train: int,
    machine: Machine,
) -> Length:
    """Return batch size and epochs of a network for images.

    `width` is that of `small_resnet`; None means ResNet-18.
    """
    if start == "frozen":
        return head_length(num_train, machine)
    per_pixel = _RESNET18_FLOPS if width is None else _SMALL_RESNET_FLOPS * width**2
    return _length(per_pixel * size_px**2, _USUAL_EPOCHS[start], num_train, machine)


def head_length(num_train: int, machine: Machine) -> Length:
    """Return batch size and epochs of a head behind a frozen body.

    Epochs cost next to nothing, because the features of the body are computed once.
    """
    return _length(_HEAD_FLOPS, _USUAL_EPOCHS["frozen"], num_train, machine)


def table_length(
    num_columns: int, arguments: TabmArguments, num_train: int, machine: Machine
) -> Length:
    """Return batch size and epochs of a TabM network with these `arguments`."""
    width = arguments.width
    inner = num_columns * arguments.embedding_size + (arguments.num_blocks - 1) * width
    cost = 2 * arguments.num_submodels * width * inner / _TABLE_EFFICIENCY
    return _length(cost, _USUAL_EPOCHS["table"], num_train, machine)


def text_values(columns: Sequence[RawColumn]) -> Values:
    """Return the length of the texts that a network sees, with a reason."""
    num_bytes = np.sum([_cell_bytes(column) for column in columns], axis=0)
    usual = int(np.quantile(num_bytes, _WHOLE_TEXTS)) + len(columns)
    size = min(_MOST_TEXT_BYTES, max(_TEXT_STEP, math.ceil(usual / _TEXT_STEP) * _TEXT_STEP))
    whole = np.count_nonzero(num_bytes + len(columns) - 1 <= size) / max(1, num_bytes.size)
    return {"precompute.max_text_bytes": (size, f"{whole:.1%} of the texts are not longer")}


def encoder_values(weights: Weights, num_bytes: int) -> Values:
    """Return the folder of an encoder, and the tokens of texts of so many bytes."""
    tokens = min(_MOST_TOKENS, max(_FEWEST_TOKENS, num_bytes // _BYTES_PER_TOKEN))
    return {
        "precompute.tokenizer": (weights.pretrained, "the encoder's own"),
        "precompute.max_tokens": (tokens, f"about {num_bytes} bytes; longer texts are cut"),
        "train.pretrained": (weights.pretrained, weights.reason),
    }


def _cell_bytes(column: RawColumn) -> NDArray[np.int64]:
    """Return the size of each row's cell in bytes, (N,)."""
    texts = column.values.cast(pa.string())
    lengths = np.append(pc.binary_length(texts).to_numpy(zero_copy_only=False), 0)
    return np.asarray(lengths[column.codes], np.int64)


def text_length(network: str, num_bytes: int, num_train: int, machine: Machine) -> Length:
    """Return batch size and epochs of `small_transformer` or `hashed_ngrams`.

    `num_bytes` is the length of the texts, at most.
    """
    if network == "small_transformer":
        arguments = SmallTransformerArguments()
        positions, width = num_bytes / arguments.patch, arguments.width
        per_position = arguments.num_layers * (24 * width**2 + 4 * width * positions)
        cost = positions * per_position / _TABLE_EFFICIENCY
        return _length(cost, _USUAL_EPOCHS["text"], num_train, machine)
    size = batch_size(num_train)
    steps = max(1, math.ceil(num_train / size))
    epochs = max(_USUAL_EPOCHS["text"], min(_MOST_EPOCHS, math.ceil(_TEXT_STEPS / steps)))
    reason = f"about {num_train:,} training rows: such a network overfits texts after few epochs"
    return Length(size, epochs, reason)


def table_network(length: Length, machine: Machine) -> tuple[str, str]:
    """Return the network that is likely better for the table, and the reason.

    The figures behind it are in docs/how-to/trees.md: with 28 and 40 epochs, TabM and trees were
    about as good on housing; with 10, TabM was worse.
    """
    if length.epochs < _FEWEST_EPOCHS_OF_TABM:
        return (
            "lightgbm",
            f"likely better here: {machine} has time for only {length.epochs} "
            f"epoch{'s' * (length.epochs > 1)} of tabm",
        )
    return "tabm", "likely about as good as lightgbm, which trains in seconds"


def batch_size(num_train: int) -> int:
    """Return the batch size: a power of two that gives some tens of steps per epoch."""
    return 1 << max(4, min(9, round(math.log2(max(1, num_train) / 40)), 7 + num_train // 100_000))


def _length(cost: float, usual: int, num_train: int, machine: Machine) -> Length:
    """Return the batch size and the epochs that the machine can afford.

    `cost` is the number of FLOPs of a forward pass of one row.
    """
    size = batch_size(num_train)
    steps = max(1, math.ceil(num_train / size))
    affordable = _seconds(machine) * machine.flops / (cost * _TRAINING * max(1, num_train))
    needed = math.ceil(MIN_STEPS / steps)
    epochs = max(1, min(max(usual, needed), _MOST_EPOCHS, max(needed, int(affordable))))
    reason = (
        f"about {num_train:,} training rows: {steps} steps per epoch, {epochs * steps:,} in all"
    )
    if affordable < 0.5 * needed:
        epochs = max(1, round(2 * affordable))
        reason = (
            f"about {num_train:,} training rows: {epochs * steps:,} steps, fewer than {MIN_STEPS}, "
            f"because of {machine}"
        )
    elif epochs < usual:
        reason += f"; more are better, but take long with {machine}"
    return Length(size, epochs, reason)


def _seconds(machine: Machine) -> float:
    return _TRAINING_SECONDS["gpu" if machine.has_gpu else "cpu"]


def image_network(
    network: str, weights: Weights | None, width: int | None, frozen_epochs: int | None
) -> Values:
    """Return the params of a network for images; `width` is that of `small_resnet`.

    `frozen_epochs` are all epochs if only the head of a pretrained network is trained, else None.
    """
    if weights is not None:
        return {
            "train.network": (network, "photographs: a pretrained network"),
            "train.pretrained": (weights.pretrained, weights.reason),
            "train.freeze_epochs": (1, "the new head learns first")
            if frozen_epochs is None
            else (frozen_epochs, FROZEN),
        }
    values: Values = {"train.network": (network, "trained from scratch")}
    if width is not None:
        learns_more = "a larger width learns more and takes longer"
        values["train.network_arguments"] = ({"width": width}, learns_more)
    return values


def augmentation(
    images: ImageSample, classes: Iterable[str], size_px: int, counts_matter: bool
) -> tuple[dict[str, Any], list[str], str]:
    """Return the augmentations to use, those to forbid, and the reason to forbid them.

    Signs lose their meaning in a mirror, and a crop may change a number.
    """
    names = list(classes)
    is_photograph = are_photographs(images)
    are_signs = bool(names) and all(len(name) == 1 for name in names)
    have_sides = any(_SIDES.search(name) for name in names)
    forbid: list[str] = []
    chosen: dict[str, Any] = {}
    reason = "operations that would change a class or a number"
    if are_signs or have_sides:
        forbid += ["horizontal_flip", "vertical_flip"]
        reason = "a mirrored sign is a different one" if are_signs else "classes name left or right"
    else:
        chosen["horizontal_flip"] = 0.5
    if counts_matter:
        forbid += ["random_resized_crop", "crop_padding_px", "cutmix_alpha"]
        reason = "a crop may change the number"
    elif are_signs or not images.has_colour:
        chosen |= {"rotation_deg": 10.0, "scale": [0.9, 1.1], "crop_padding_px": size_px // 8}
    elif is_photograph:
        chosen |= {"random_resized_crop": [0.5, 1.0], "brightness": 0.1, "contrast": 0.1}
    else:
        chosen["crop_padding_px"] = max(1, size_px // 8)
    if not are_signs and not have_sides and not counts_matter:
        forbid.append("vertical_flip")
    return chosen, forbid, reason


def proposed_search(content: Mapping[str, Any]) -> dict[str, Any]:
    """Propose the section `search` for the values of all params of a project."""
    headline = kind_of(value_at(content, "data.task")).target.headline
    epochs = value_at(content, "train.epochs")
    # A training of trees cannot go on after a stop.
    first_rung = 0 if are_trees(value_at(content, "train.network")) else epochs // _SEARCH_RUNGS
    halving = {"halving": {"reduction": _SEARCH_REDUCTION, "first_rung": first_rung}}
    return {
        "metric": headline,
        "direction": "minimize" if headline in UNBOUNDED_METRICS else "maximize",
        "budget": {"trials": _SEARCH_TRIALS},
        **(halving if first_rung else {}),
        "space": _search_space(content),
    }


def _search_space(content: Mapping[str, Any]) -> dict[str, Any]:
    rate = value_at(content, "train.learning_rate")
    low, high = (float(f"{bound:.2g}") for bound in (rate / 4, rate * 4))
    space: dict[str, Any] = {"train.learning_rate": {"log_range": [low, high]}}
    network, arguments = value_at(content, "train.network"), "train.network_arguments"
    if are_trees(network):
        leaves, rows = (
            value_at(content, f"{arguments}.{name}") for name in ("num_leaves", "min_data_in_leaf")
        )
        space[f"{arguments}.num_leaves"] = {"choice": sorted({7, 15, 31, 63, leaves})}
        space[f"{arguments}.min_data_in_leaf"] = {"choice": sorted({5, 20, 60, rows})}
        return space
    decay = value_at(content, "train.weight_decay")
    space["train.weight_decay"] = {"choice": sorted({0.0, 0.01, 0.05, 0.2, decay})}
    width = value_at(content, f"{arguments}.width")
    if network == "small_resnet":
        half = max(_WIDTH_STEP, width // 2 // _WIDTH_STEP * _WIDTH_STEP)
        space[f"{arguments}.width"] = {"choice": sorted({half, width, 2 * width})}
        space[f"{arguments}.dropout"] = {"choice": [0.0, 0.1, 0.3]}
    elif network == "tabm":
        space[f"{arguments}.width"] = {"choice": sorted({width // 2, width, 2 * width})}
        space[f"{arguments}.num_blocks"] = {"choice": [1, 2, 3]}
        space[f"{arguments}.dropout"] = {"choice": [0.0, 0.1, 0.2]}
    elif network == "hashed_ngrams":
        space[f"{arguments}.width"] = {"choice": sorted({max(1, width // 2), width, 2 * width})}
        space[f"{arguments}.word_ngrams"] = {"choice": [1, 2, 3]}
        space[f"{arguments}.dropout"] = {"choice": [0.0, 0.2, 0.5]}
    return space
