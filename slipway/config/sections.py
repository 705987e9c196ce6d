"""The typed sections of `params.yaml`, with units, bounds, and rules between a section's keys.

slipway/config/contradictions.py checks the rules between sections, params.py reads the file.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from encodings.aliases import aliases
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from slipway.config.mistakes import as_yaml
from slipway.config.network_arguments import argument_mistakes
from slipway.inputs.images import MAX_PIXELS
from slipway.inputs.texts import PersonalData
from slipway.kinds.inputs import ENCODER
from slipway.kinds.registry import Task, are_trees
from slipway.system.user_code import NAME

Fraction = Annotated[float, Field(ge=0, le=1)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[int, Field(ge=1)]
NotNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
LicenseText = Annotated[str, Field(min_length=1, max_length=200, examples=["Apache-2.0"])]
# Your own code.
UserName = Annotated[str, Field(pattern=f"^{NAME}$", examples=["package.module:function"])]
# refuse: quarantine the row; flag: keep it and name the rule in rows.parquet; null: do not check.
Action = Literal["refuse", "flag"] | None
Operation = Literal[
    "random_resized_crop",
    "rotation_deg",
    "scale",
    "translation",
    "crop_padding_px",
    "horizontal_flip",
    "vertical_flip",
    "brightness",
    "contrast",
    "saturation",
    "hue",
    "erasing",
    "mixup_alpha",
    "cutmix_alpha",
]
Offload = Literal["optimizer", "optimizer_and_parameters"]
Variant = Literal["fp32", "fp16", "int8", "int8_dynamic", "int8_tensorrt", "pruned", "pruned_int8"]
Tracker = Literal["mlflow", "wandb"]
PRUNED_VARIANTS: tuple[Variant, ...] = ("pruned", "pruned_int8")


class ParamsSection(BaseModel):
    """A strict section: no unknown keys, no type conversion, finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_no_problems(self) -> Self:
        if problems := list(self.problems()):
            raise ValueError(*problems)
        return self

    def problems(self) -> Iterable[str]:
        """Return a message for each contradiction between keys that are valid on their own."""
        return ()


class ColumnParams(ParamsSection):
    """Corrections for one table column. reports/columns.yaml lists the inferred types."""

    kind: Literal["number", "category", "boolean", "date", "ignore"]  # ignore: not an input
    min: float | None  # smaller numbers are out of range; null for no bound
    max: float | None
    required: bool  # true: a missing value is refused

    def problems(self) -> Iterator[str]:
        if (self.min is not None or self.max is not None) and self.kind != "number":
            yield f"min and max are for numbers, the kind is {self.kind!r}"
        if self.min is not None and self.max is not None and self.min > self.max:
            yield f"min {self.min} is above max {self.max}"


_COLUMN = {"kind": "number", "min": 0, "max": None, "required": False}
Columns = Annotated[dict[str, ColumnParams], Field(examples=[{"age": _COLUMN}])]


class DataParams(ParamsSection):
    """Location of the raw data and the meaning of its columns."""

    # A folder with one sub-folder per class, a .csv or .parquet file, or a .zip, .tar or .tar.gz
    # of these.
    path: Annotated[str, Field(examples=["data/raw"])]
    # Paths and globs inside the folder `path`, which are joined; null: all of `path` is one source.
    sources: Annotated[list[str], Field(min_length=1, examples=[["2024/*.csv"]])] | None
    # Of a .csv or of text files, a name that Python knows.
    encoding: Annotated[str, Field(examples=["utf-8"])]
    task: Task
    # Holds image bytes ({bytes, path} or binary) or a path relative to the file. Used by image
    # tasks that read a table.
    image_column: str
    # Text tasks: the columns with the texts of a row, which are joined in this order.
    text_columns: Annotated[list[str], Field(examples=[["title", "text"]])]
    # Class names or numbers, without effect for a folder. Several labels: a column of lists, or a
    # list of columns of true and false, one for each label.
    target_column: str | Annotated[list[str], Field(min_length=2, examples=[["cat", "dog"]])]
    # Several labels: between the labels of a cell that is text and no JSON list.
    label_separator: Annotated[str, Field(min_length=1, examples=["|"])]
    group_column: str | None  # rows of one group stay in one split
    time_column: str | None  # the test split is the latest, the training split the earliest
    weight_column: str | None  # weight of a row in the training loss; null: equal weights
    # The user's own split (train, val, test). null: split_folders decides, or Slipway splits.
    split_column: str | None
    # Or a file that names the split of each row: .csv, .jsonl or .parquet.
    split_file: str | None
    # Folders and Parquet shards named after splits. auto: they are the given split; pool: Slipway
    # splits all rows; classes: the folders are classes.
    split_folders: Literal["auto", "pool", "classes"]
    label_map: dict[str, str]  # spelling variants of a class: {found: meant}
    # The allowed classes. The rule `unknown_label` handles any other label. null: all found.
    classes: list[str] | None
    columns: Columns  # table tasks: corrections of the inferred column types
    # Table tasks: cells that count as missing, besides the usual words.
    missing_values: list[str]
    # Table tasks: how dates are written other than in ISO 8601, such as "%d/%m/%Y".
    date_format: str | None
    checksums: str | None  # file of lines "SHA-256  path", as sha256sum writes them
    engine: Literal["local", "ray"]  # runs clean and precompute

    @field_validator("path", mode="before")
    @classmethod
    def _path_is_one(cls, path: Any) -> Any:
        if isinstance(path, list):
            raise ValueError(
                "found a list, expected one folder, table or archive; for several, set it to "
                "their folder and list them in data.sources"
            )
        return path

    @field_validator("path")
    @classmethod
    def _path_is_not_empty(cls, path: str) -> str:
        if not path.strip():  # DVC, which has it as a dependency, ends with an unexpected error
            raise ValueError(f"found {path!r}, expected a folder, a table or an archive")
        return path

    @field_validator("sources")
    @classmethod
    def _sources_are_inside(cls, sources: list[str] | None) -> list[str] | None:
        for entry in sources or ():
            path = PurePosixPath(entry)
            if not entry.strip() or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"found {entry!r}, expected a path or a glob inside data.path")
        return sources

    @property
    def target_columns(self) -> list[str]:
        """The columns of the target: one, or one for each label."""
        named = self.target_column
        return [named] if isinstance(named, str) else named

    def problems(self) -> Iterator[str]:
        if isinstance(self.target_column, list):
            yield from _named_twice("target_column", self.target_column)
        yield from _named_twice("text_columns", self.text_columns)
        if self.split_column is not None and self.split_file is not None:
            yield "split_column and split_file both give the split; set one of them to null"

    @field_validator("encoding")
    @classmethod
    def _encoding_is_known(cls, encoding: str) -> str:
        try:
            "a".encode(encoding)
        except (LookupError, ValueError):
            name = encoding.lower().replace("_", "-")
            known = {known.replace("_", "-") for known in {*aliases, *aliases.values()}}
            close = difflib.get_close_matches(name, sorted(known - {name}), n=1)
            raise ValueError(
                f"found {encoding!r}, which is not a text encoding; "
                f"did you mean {(close or ['utf-8'])[0]!r}?"
            ) from None
        return encoding

    @field_validator("date_format")
    @classmethod
    def _date_format_holds_a_date(cls, date_format: str | None) -> str | None:
        if date_format is not None:
            try:
                moment = datetime(2019, 12, 31)
                read = datetime.strptime(moment.strftime(date_format), date_format)
            except ValueError:
                read = None
            if read is None or read.replace(tzinfo=None) != moment:
                raise ValueError(
                    f"found {date_format!r}, expected a day, a month and a year, such as %d/%m/%Y"
                )
        return date_format


class RuleParams(ParamsSection):
    """The action for rows that break a rule, per rule.

    docs/reference/data.md lists the rules whose action is fixed.
    """

    near_duplicate: Action  # flag: its cluster stays in one split; refuse: one row per cluster
    conflicting_label: Action  # equal images or rows with different classes or targets
    unknown_label: Action  # a label that is not in data.classes
    wrong_extension: Action
    too_small: Action
    constant_image: Action
    blurred: Action
    too_dark: Action
    too_bright: Action
    odd_aspect: Action
    outlier: Action  # numbers of a table, and numeric targets
    type_violation: Action  # flag: the cell counts as missing
    out_of_range: Action  # flag: the cell counts as missing
    all_missing: Action
    constant_column: Action  # refuse: the column is not an input
    duplicate_column: Action  # refuse: the second of the two is not an input
    too_short: Action  # texts
    too_long: Action  # texts
    control_characters: Action  # in a text; flag: each run of them becomes a space
    garbled: Action  # a text that was read in another encoding
    mixed_script: Action  # a word of Latin and Greek or Cyrillic letters
    rare_script: Action  # a text in a script of less than 1 % of the texts
    personal_data: Action  # in a text; precompute.mask_personal_data hides it from the network
    boilerplate: Action  # a passage that many texts of one class have and no other text


class CleanParams(ParamsSection):
    """Limits beyond which a row is refused or flagged, and the allowed number of bad rows."""

    # The stage fails if refused rows are a larger fraction of the rows read. Duplicates do not
    # count.
    max_bad_fraction: Fraction
    num_workers: NotNegativeInt  # decoding processes; 0: one per core
    min_side_px: Positive  # a shorter side breaks too_small
    # Larger images are refused before they are decoded; the service has the same limit.
    max_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)]
    # Near duplicates differ in at most this many of the 64 bits of the perceptual hash.
    near_duplicate_bits: Annotated[int, Field(ge=0, le=16)]
    # Near duplicates share at least this fraction of their sequences of four characters.
    near_duplicate_similarity: Annotated[float, Field(ge=0.5, le=1)]
    constant_std: NotNegative  # grey levels of 255; a smaller deviation is a constant_image
    blur_variance: NotNegative  # variance of the Laplacian, in grey levels squared; less is blurred
    dark_mean: Annotated[float, Field(ge=0, le=255)]  # grey levels; a darker mean is too_dark
    bright_mean: Annotated[float, Field(ge=0, le=255)]  # grey levels; above it is too_bright
    max_aspect: Annotated[float, Field(ge=1)]  # longer side over shorter side
    # Distance from the median in robust standard deviations (1.4826 MAD) that makes an outlier.
    outlier_mad_threshold: PositiveFloat
    min_characters: Positive  # fewest characters of a text; fewer break too_short
    max_characters: Positive  # most characters of a text; more break too_long
    max_archive_members: Positive
    max_archive_ratio: Positive  # unpacked bytes over packed bytes of a whole archive
    rules: RuleParams


_TimeCuts = Annotated[
    list[str], Field(min_length=2, max_length=2, examples=[["2024-01-01", "2024-07-01"]])
]


class SplitParams(ParamsSection):
    """Fractions of the three splits. Each class is split in these fractions."""

    train: OpenFraction
    val: OpenFraction
    test: OpenFraction
    # stable: the row's own content decides, so new rows move no old one; exact: exact fractions
    # in each class.
    assignment: Literal["stable", "exact"]
    # report: leaked rows are marked, and metrics come with and without them; auto: report with a
    # given split, else fail.
    on_leak: Literal["auto", "fail", "report"]
    # Times at which val and test begin. null: the fractions decide.
    time_cuts: _TimeCuts | None
    folds: Annotated[int, Field(ge=2)] | None  # folds of the rows outside test
    fold: NotNegativeInt  # the fold that is val, counted from 0

    def problems(self) -> Iterator[str]:
        total = self.train + self.val + self.test
        if abs(total - 1) > 1e-9:
            yield f"train {self.train} + val {self.val} + test {self.test} is {total:g}, expected 1"
        if self.fold >= (self.folds or 1):
            folds = as_yaml(self.folds)
            yield f"fold is {self.fold}, expected less than folds {folds} (0 without folds)"


class PrecomputeParams(ParamsSection):
    """Format of the network's input."""

    image_size_px: Annotated[int, Field(ge=4, le=4096)]  # side of the square
    # Side that training images are stored with, for random crops. null: image_size_px.
    train_size_px: Annotated[int, Field(ge=4, le=4096)] | None
    channels: Literal[1, 3]  # 1 grey, 3 RGB
    resize_mode: Literal["stretch", "crop", "pad"]  # turns an oblong image into a square
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"]
    # Format of the packed pixels. jpeg is lossy, slower to read, and takes an eighth of the disk.
    encoding: Literal["raw", "jpeg"]
    jpeg_quality: Annotated[int, Field(ge=1, le=100)]  # without effect for raw
    transform: str | None  # your function "package.module:function" on each decoded image
    num_workers: NotNegativeInt  # decoding processes; 0: one per core
    # Most categories of a column; rarer ones count as unknown. Beyond 2048 fp16 is inexact.
    max_categories: Annotated[int, Field(ge=1, le=2000)]
    num_quantiles: Annotated[int, Field(ge=2, le=256)]  # bins of a numeric column's embedding
    # Bytes of a text in UTF-8 that the network sees; longer texts are cut, and answers say so.
    max_text_bytes: Annotated[int, Field(ge=16, le=65536)]
    # null: the network reads the bytes of a text. bpe: tokens, learned from the training texts. Or
    # a tokenizer.json, or a folder of Hugging Face's with one.
    tokenizer: Annotated[str, Field(min_length=1, examples=["bpe"])] | None
    vocabulary_size: Annotated[int, Field(ge=300, le=200_000)] | None  # only for bpe
    max_tokens: Annotated[int, Field(ge=8, le=8192)] | None  # of a text; longer ones are cut
    # Personal data that a text shows only as [email], [phone] or [card], in the service as well.
    mask_personal_data: Annotated[list[PersonalData], Field(examples=[["email", "phone", "card"]])]

    def problems(self) -> Iterator[str]:
        yield from _named_twice("mask_personal_data", self.mask_personal_data)
        own = {"vocabulary_size": self.vocabulary_size}
        yield from _belongs_to("tokenizer", self.tokenizer or "null", "bpe", **own)
        if (self.tokenizer is None) != (self.max_tokens is None):
            yield (
                f"tokenizer is {as_yaml(self.tokenizer)}, but max_tokens is "
                f"{as_yaml(self.max_tokens)}: set both, or both to null"
            )
        if self.train_size_px is not None and self.train_size_px < self.image_size_px:
            yield f"train_size_px is {self.train_size_px}, below image_size_px {self.image_size_px}"


# [smallest, largest]
Range = Annotated[list[PositiveFloat], Field(min_length=2, max_length=2, examples=[[0.9, 1.0]])]


class AugmentParams(ParamsSection):
    """Random changes of training images and texts, drawn for each sample and epoch."""

    random_resized_crop: Range  # cropped area as a fraction of the image; [1, 1]: no crop
    crop_aspect: Range  # width over height of that area; without effect if nothing is cropped
    rotation_deg: Annotated[float, Field(ge=0, le=180)]  # largest angle either way
    scale: Range  # zoom factors
    translation: Fraction  # largest shift either way, as a fraction of the side
    crop_padding_px: NotNegativeInt  # random crop after padding every side by this much
    horizontal_flip: Fraction  # probability
    vertical_flip: Fraction  # probability
    brightness: Fraction  # factor between 1 - this and 1 + this
    contrast: Fraction
    saturation: Fraction  # without effect for grey images
    hue: Annotated[float, Field(ge=0, le=0.5)]  # turn of the colour circle; not for grey images
    erasing: Fraction  # probability that a rectangle is filled with grey
    erasing_area: Range  # area of that rectangle, as a fraction of the image
    mixup_alpha: NotNegative  # beta distribution of the blend of two images; 0: no mixup
    cutmix_alpha: NotNegative  # beta distribution of the pasted area; 0: no cutmix
    mix_probability: Fraction  # for each row; without effect if both alphas are 0
    forbid: list[Operation]  # operations that would change the label; using one fails the stage
    offline_copies: NotNegativeInt  # augmented copies of each training row, written to disk
    token_dropout: Fraction  # texts with a tokenizer: probability that a token is left out
    word_deletion: Fraction  # texts without a tokenizer: probability that a word is left out

    def problems(self) -> Iterator[str]:
        for name in ("random_resized_crop", "crop_aspect", "scale", "erasing_area"):
            low, high = getattr(self, name)
            if low > high:
                yield f"{name} {[low, high]} goes from large to small, expected {[high, low]}"
        for name in ("random_resized_crop", "erasing_area"):
            if (found := getattr(self, name))[1] > 1:
                yield f"{name} is {found}, a fraction of the image, expected at most 1"


def _belongs_to(key: str, chosen: str, choice: str, **values: object) -> list[str]:
    """Return messages for values that `choice` of `key` needs and all other choices refuse."""
    if chosen == choice:
        return [
            f"{key} is {chosen!r}, which needs {name}"
            for name, value in values.items()
            if value is None
        ]
    return [
        f"{name} is {value!r}, but {key} is {chosen!r}: set it to null"
        for name, value in values.items()
        if value is not None
    ]


def _named_twice(key: str, names: Sequence[str]) -> Iterator[str]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"{key} names {', '.join(map(repr, twice))} more than once"


class TrainParams(ParamsSection):
    """The network and its training recipe."""

    # "small_resnet", "timm/NAME" for any network of timm, "tabm" for tables, "encoder" for a local
    # Hugging Face folder, or your own "package.module:Class".
    network: str
    # Passed to the network's constructor.
    network_arguments: Annotated[dict[str, Any], Field(examples=[{"width": 32}])]
    # For timm networks: "hub", or a .safetensors or .pth file. null: fresh weights. For "encoder":
    # a local Hugging Face folder. For all others but trees: weights.safetensors of a former model.
    pretrained: str | None
    freeze_epochs: NotNegativeInt  # epochs that train only the head of a pretrained network
    # Epochs over which the frozen parts join, the last one first. 0: all at once.
    unfreeze_epochs: NotNegativeInt
    epochs: Positive
    # Training ends after this many epochs without a lower validation loss. null: never early.
    early_stopping_patience: Positive | None
    batch_size: Positive  # rows per optimizer step, over all devices and accumulation steps
    max_batch_per_device: Positive  # above it gradients are accumulated over smaller batches
    shuffle: Literal["rows", "blocks"]  # blocks are read whole: for data larger than memory
    # MiB per node, of the rows in use and those read ahead. Only for blocks.
    shuffle_buffer_mib: Positive | None
    # auto: cross_entropy, bce or mse.
    loss: Literal["auto", "cross_entropy", "bce", "asymmetric", "mse", "huber"] | UserName
    # Error, in standard deviations of the target, above which the Huber loss is linear.
    huber_delta: PositiveFloat | None
    class_weights: Literal["balanced"] | dict[str, PositiveFloat] | None  # in the loss
    label_smoothing: Annotated[float, Field(ge=0, lt=1)]  # without effect for a numeric target
    optimizer: Literal["adamw", "sgd"]
    momentum: Annotated[float, Field(ge=0, lt=1)] | None  # only for sgd
    nesterov: bool  # only for sgd
    learning_rate: PositiveFloat  # at its peak
    weight_decay: NotNegative
    l1: NotNegative  # factor of the sum of the magnitudes of the decayed weights, in the loss
    schedule: Literal["cosine", "one_cycle", "step", "constant"]  # after the warm-up
    warmup_epochs: NotNegative  # the learning rate rises during these
    step_epochs: Positive | None  # epochs between multiplications by step_factor; only for step
    step_factor: OpenFraction | None  # only for step
    gradient_clip_norm: PositiveFloat | None
    ema_decay: OpenFraction | None  # decay of the moving average of the weights, per step
    strategy: Literal[
        "auto",
        "single",
        "ddp",
        "fsdp",
        "tensor_parallel",
        "pipeline",
        "deepspeed_stage_1",
        "deepspeed_stage_2",
        "deepspeed_stage_3",
    ]
    # Processes that share a copy of the network. Only for tensor_parallel and pipeline. null: all.
    model_parallel: Annotated[int, Field(ge=2)] | None
    precision: Literal["auto", "16-mixed", "bf16-mixed", "32-true"]
    accelerator: Literal["auto", "cpu", "gpu"]
    # State that DeepSpeed keeps in host memory: more room on the GPU for less speed.
    offload: Offload | None
    # Folder on disk for the offloaded optimizer state. null: the host's memory.
    offload_path: Annotated[str, Field(min_length=1, examples=["/mnt/nvme"])] | None
    devices: Literal["auto"] | Positive  # per node
    num_nodes: Positive
    num_workers: NotNegativeInt  # loader processes per device; 0 loads in the trainer itself
    # Action for a step whose loss or gradient is NaN or infinite. Such a step never changes a
    # weight.
    on_nonfinite: Literal["fail", "skip"]
    # Action for a step whose loss lies 6 standard deviations above that of the last 128 steps.
    # rewind: back to the newest checkpoint as well. null: none.
    on_loss_spike: Literal["skip", "rewind"] | None
    max_skipped_steps: NotNegativeInt  # skipped steps of the whole run; one more fails it
    repeat_every_steps: Positive | None  # a repeated step must give equal bits; null: never
    # true: an operation without a deterministic kernel fails; warn: it runs, with a warning.
    deterministic: Literal["warn"] | bool
    compile: bool  # torch.compile; needs a C++ compiler, or triton on a GPU
    channels_last: Literal["auto"] | bool  # memory layout of the weights of image networks
    keep: Literal["best", "last"]  # epoch that the model comes from; best by validation loss
    checkpoint_every_epochs: Positive  # a killed run repeats at most this many
    # Checkpoints within an epoch as well. null: only at the ends of epochs.
    checkpoint_every_minutes: PositiveFloat | None
    log_every_steps: Positive  # scalars in TensorBoard and the run log
    log_histograms_every_epochs: Positive | None  # weights and gradients in TensorBoard
    loggers: list[Tracker]  # trackers that get TensorBoard's scalars and the settings as well

    def problems(self) -> Iterator[str]:
        yield from self._problems_of_choices()
        yield from self._problems_of_networks()
        needs_zero_3 = self.offload == "optimizer_and_parameters"
        needed = "deepspeed_stage_3" if needs_zero_3 else "deepspeed_stage_"
        if self.offload and not self.strategy.startswith(needed):
            expected = "'deepspeed_stage_3'" if needs_zero_3 else "a deepspeed strategy"
            yield (
                f"offload is {self.offload!r}, which needs strategy {expected}, "
                f"but strategy is {self.strategy!r}"
            )
        if self.offload_path and not self.offload:
            yield (
                f"offload_path is {self.offload_path!r}, but offload is null, so no state would be "
                "there. Use offload: optimizer, or offload_path: null"
            )
        elif self.offload_path and self.strategy != "deepspeed_stage_3":
            yield (
                f"offload_path is {self.offload_path!r}, which needs strategy 'deepspeed_stage_3', "
                f"but strategy is {self.strategy!r}. Use it, or offload_path: null"
            )
        if self.model_parallel and self.strategy not in ("tensor_parallel", "pipeline"):
            yield (
                f"model_parallel is {self.model_parallel}, which needs strategy 'tensor_parallel' "
                f"or 'pipeline', but strategy is {self.strategy!r}. Use null, or one of the two"
            )
        if self.strategy == "pipeline" and self.log_histograms_every_epochs:
            yield (
                f"log_histograms_every_epochs is {self.log_histograms_every_epochs}, but strategy "
                "is 'pipeline': the first process has only its own weights. Use null"
            )
        if self.strategy == "deepspeed_stage_3" and self.l1:
            yield (
                f"l1 is {self.l1:g}, but strategy is 'deepspeed_stage_3': no process has whole "
                "weights there. Use deepspeed_stage_2"
            )

    def _problems_of_choices(self) -> Iterator[str]:
        """Yield messages for values that no choice uses, and for missing values that one needs."""
        yield from _named_twice("loggers", self.loggers)
        yield from _belongs_to("loss", self.loss, "huber", huber_delta=self.huber_delta)
        yield from _belongs_to("optimizer", self.optimizer, "sgd", momentum=self.momentum)
        buffer = {"shuffle_buffer_mib": self.shuffle_buffer_mib}
        yield from _belongs_to("shuffle", self.shuffle, "blocks", **buffer)
        steps = {"step_epochs": self.step_epochs, "step_factor": self.step_factor}
        yield from _belongs_to("schedule", self.schedule, "step", **steps)
        if self.nesterov and not self.momentum:
            yield (
                f"nesterov is true, but momentum is {as_yaml(self.momentum)}: "
                "set nesterov to false, or use optimizer 'sgd' with a momentum"
            )
        if self.schedule == "one_cycle" and not self.warmup_epochs:
            yield (
                "schedule is 'one_cycle', but warmup_epochs is 0: "
                "one_cycle begins with a rise of the learning rate"
            )

    def _problems_of_networks(self) -> Iterator[str]:
        is_own = not self.network.startswith(("timm/", ENCODER))
        if self.pretrained is not None and is_own:
            chosen = f"pretrained is {self.pretrained!r}, but network is {self.network!r}"
            if are_trees(self.network):
                yield f"{chosen}: trees start from no weights, set it to null"
            elif not self.pretrained.endswith(".safetensors"):
                yield (
                    f"{chosen}: expected null, or the weights.safetensors of a model that this "
                    "network was; only 'timm/NAME' and 'encoder' have other pretrained weights"
                )
            if self.freeze_epochs:
                yield (
                    f"freeze_epochs is {self.freeze_epochs}, but network is {self.network!r}: only "
                    "'timm/NAME' and 'encoder' have parts to freeze, set it to 0"
                )
        if self.network == ENCODER and self.pretrained in (None, "hub"):
            yield (
                f"network is {ENCODER!r}, but pretrained is {as_yaml(self.pretrained)}: expected a "
                "folder with config.json, model.safetensors and tokenizer.json"
            )
        yield from self._problems_of_freezing()
        if mistakes := argument_mistakes(self.network, self.network_arguments):
            yield mistakes

    def _problems_of_freezing(self) -> Iterator[str]:
        if self.freeze_epochs and self.network_arguments.get("lora_rank") is not None:
            yield (
                f"freeze_epochs is {self.freeze_epochs}, but network_arguments.lora_rank is set, "
                "which freezes the encoder itself: set one of them to 0 or null"
            )
        if self.freeze_epochs and self.pretrained is None:
            yield (
                f"freeze_epochs is {self.freeze_epochs}, but pretrained is null: "
                "untrained weights would be frozen"
            )
        if self.unfreeze_epochs and not self.freeze_epochs:
            yield (
                f"unfreeze_epochs is {self.unfreeze_epochs}, but freeze_epochs is 0: "
                "nothing is frozen"
            )


class AuditParams(ParamsSection):
    """Search for wrong labels by cross-validation. Only for classification."""

    # Networks to train, each without one fold of the rows of train and val. null: no search.
    folds: Annotated[int, Field(ge=2)] | None
    # Epochs of each network. Fewer than train.epochs, because long training memorises wrong labels.
    epochs: Positive


class Gate(ParamsSection):
    """The required range of a metric."""

    min: float | None
    max: float | None

    def problems(self) -> Iterator[str]:
        if self.min is None and self.max is None:
            yield "min and max are both null, expected at least one of them"
        if self.min is not None and self.max is not None and self.min > self.max:
            yield f"min {self.min:g} is above max {self.max:g}"


# Gates by metric.
Gates = Annotated[dict[str, Gate], Field(examples=[{"accuracy": {"min": 0.9, "max": None}}])]


class CostParams(ParamsSection):
    """Costs of decisions between two classes, in any unit; a right decision costs nothing."""

    false_positive: NotNegative  # the positive class is answered, and wrong
    false_negative: NotNegative  # the other class is answered, and wrong
    abstain: PositiveFloat | None  # leave the row to a person; null: never

    def problems(self) -> Iterator[str]:
        if self.false_positive + self.false_negative == 0:
            yield "false_positive and false_negative are both 0, expected one of them above 0"
        dearest = max(self.false_positive, self.false_negative)
        if self.abstain is not None and self.abstain >= dearest > 0:
            yield f"abstain is {self.abstain:g}, expected less than {dearest:g}, or null"


class DecisionParams(ParamsSection):
    """The rule that turns the probability of one of two classes into a decision."""

    positive: str  # the class that has the threshold
    # Its threshold has the lowest cost on validation rows; null: the largest F1.
    costs: CostParams | None


_DECISION = {"positive": "spam", "costs": {"false_positive": 5, "false_negative": 1, "abstain": 1}}
Rule = Annotated[DecisionParams, Field(examples=[_DECISION])]


class MeasuringParams(ParamsSection):
    """Keys of `evaluate` that `prune` also reads: calibration, and measurement of predictions."""

    batch_size: Positive
    bootstrap_samples: Annotated[int, Field(ge=100)]  # resamples behind each interval
    confidence: OpenFraction  # confidence of the intervals
    calibration: Literal["temperature"] | None  # of probabilities, fitted on validation rows
    # Two classes: a threshold, chosen on validation rows. null: the most probable class.
    decision: Rule | None
    coverage: OpenFraction  # coverage of prediction sets and intervals
    ood_fraction: OpenFraction  # of ordinary rows that may be flagged as out of distribution


class EvaluateParams(MeasuringParams):
    """Measurements on the test split, and the requirements for a release."""

    metrics: list[UserName]  # your own functions, besides the built-in metrics
    top_k: Positive | None  # k of top_k_accuracy; null: no such metric
    gates: Gates  # a model that misses one is neither served nor released
    # Columns of the user's table that also cut the test rows into slices. Class, size, brightness
    # and group are always slices.
    slices: list[str]
    slice_min_rows: Annotated[int, Field(ge=2)]  # smaller slices are listed, but not judged
    slice_gates: Gates  # required of every judged slice
    reference_model: str | None  # folder of an earlier bundle to compare with on the same rows
    # Largest loss against it: accuracy points, or relative growth of the RMSE.
    max_regression: NotNegative

    def problems(self) -> Iterator[str]:
        yield from _named_twice("slices", self.slices)
        yield from _named_twice("metrics", self.metric_names)
        for name, gates in (("gates", self.gates), ("slice_gates", self.slice_gates)):
            if self.top_k is None and "top_k_accuracy" in gates:
                yield f"{name} names top_k_accuracy, which needs top_k, but top_k is null"

    @property
    def metric_names(self) -> list[str]:
        """The names of the user's own metrics: the names of their functions."""
        return [name.partition(":")[2] for name in self.metrics]


class PruneParams(ParamsSection):
    """A smaller network made from the trained one, for the variants `pruned` and `pruned_int8`."""

    # structured: removes whole channels; magnitude: sets single weights to zero.
    kind: Literal["structured", "magnitude"] | None
    sparsity: OpenFraction  # of the channels of each layer that can spare some, or of all weights
    epochs: Positive  # epochs of the fine-tune
    learning_rate: PositiveFloat  # learning rate at the start of the fine-tune; it falls to zero


class GoalParams(ParamsSection):
    """The goal by which a provider's variant is chosen for the service's `auto`."""

    # Against fp32 on validation rows: accuracy points, or relative growth of the RMSE.
    max_metric_loss: NotNegative
    prefer: Literal["fastest", "smallest"]  # among the variants within max_metric_loss


class ExportParams(ParamsSection):
    """The ONNX graphs to make, and the rules for choosing one."""

    purpose: str | None  # intended use, for the model card; null: the card says it is unknown
    # Licences of weights and raw data, for the model card and the release's bill of materials: an
    # SPDX expression, or a name. null: nobody declared one.
    license: LicenseText | None
    data_license: LicenseText | None
    opset: Annotated[int, Field(ge=18, le=24)]
    max_batch_size: Annotated[int, Field(ge=1, le=4096)]  # of the graphs and the service
    variants: Annotated[list[Variant], Field(min_length=1)]
    quantization_samples: Positive  # training rows that int8 ranges are measured on
    golden_rows: Annotated[int, Field(ge=0, le=4096)]  # validation rows stored in the bundle
    goal: GoalParams

    def problems(self) -> Iterator[str]:
        if "fp32" not in self.variants:
            yield (
                f"variants {self.variants} lacks 'fp32', "
                "which the others are made from and compared with"
            )
        yield from _named_twice("variants", self.variants)


class CompileParams(ParamsSection):
    """Settings of the TensorRT engine that the stage `compile` builds."""

    variant: Literal["fp32", "fp16", "int8_tensorrt"]  # exported graph to compile
    # true: fail without a GPU or TensorRT; false: record why there is no engine.
    require: bool
    optimal_batch_size: Positive  # tuned for; the engine takes 1 to export.max_batch_size
    workspace_mib: Positive  # scratch memory of the builder


class VerifyParams(ParamsSection):
    """Allowed differences between the backends of the certificate."""

    max_difference: PositiveFloat  # of outputs: torch to ONNX fp32, and ONNX to HTTP
    max_metric_loss: dict[Variant, NotNegative]  # accuracy points, or relative growth of the RMSE
    batch_seconds: PositiveFloat  # limit for the repetition of fp32 in each small batch size
    timing_rounds: Positive  # latency is the median of this many calls


class EdgeParams(ParamsSection):
    """Limits of `slipway export edge`; null is no limit."""

    max_folder_mb: PositiveFloat | None  # size of the written files
    max_installed_mb: PositiveFloat | None  # size of the packages that run.py needs
    max_memory_mb: PositiveFloat | None  # peak memory of the process
    max_latency_ms: PositiveFloat | None  # median for one row, on the machine that exports
