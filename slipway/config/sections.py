"""The typed sections of `params.yaml`: units, bounds, and rules between the keys of one section.

slipway/config/params.py reads the file and checks the rules between sections.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from slipway.config.network_arguments import argument_mistakes
from slipway.inputs.images import MAX_PIXELS
from slipway.kinds.registry import Task

Fraction = Annotated[float, Field(ge=0, le=1)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[int, Field(ge=1)]
NotNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
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
PRUNED_VARIANTS: tuple[Variant, ...] = ("pruned", "pruned_int8")


class ParamsSection(BaseModel):
    """A strict section: no unknown keys, no type conversion, finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ColumnParams(ParamsSection):
    """Corrections for one table column. reports/columns.yaml lists the inferred types."""

    kind: Literal["number", "category", "boolean", "date", "ignore"]  # ignore: not an input
    min: float | None  # smaller numbers are out of range; null for no bound
    max: float | None
    required: bool  # true: a missing value is refused

    @model_validator(mode="after")
    def _bounds_are_a_range(self) -> Self:
        if (self.min is not None or self.max is not None) and self.kind != "number":
            raise ValueError(f"min and max are for numbers, the kind is {self.kind!r}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class DataParams(ParamsSection):
    """Location of the raw data and the meaning of its columns."""

    # A folder with one sub-folder per class, a .csv or .parquet file, or a .zip, .tar or .tar.gz
    # of these.
    path: str
    task: Task
    # Holds image bytes ({bytes, path} or binary) or a path relative to the file. Used by image
    # tasks that read a table.
    image_column: str
    target_column: str  # class names or numbers; without effect for a folder
    group_column: str | None  # rows of one group stay in one split
    time_column: str | None  # the test split is the latest, the training split the earliest
    weight_column: str | None  # weight of a row in the training loss; null: equal weights
    # The user's own split (train, val, test). null: split_folders decides, or Slipway splits.
    split_column: str | None
    # Folders and Parquet shards named after splits. auto: they are the given split; pool: Slipway
    # splits all rows; classes: the folders are classes.
    split_folders: Literal["auto", "pool", "classes"]
    label_map: dict[str, str]  # spelling variants of a class: {found: meant}
    # The allowed classes. The rule `unknown_label` handles any other label. null: all found.
    classes: list[str] | None
    columns: dict[str, ColumnParams]  # table tasks: corrections of the inferred column types
    checksums: str | None  # file of lines "SHA-256  path", as sha256sum writes them
    engine: Literal["local", "ray"]  # runs clean and precompute

    @field_validator("path")
    @classmethod
    def _path_is_not_empty(cls, path: str) -> str:
        if not path.strip():  # DVC, which has it as a dependency, ends with an unexpected error
            raise ValueError(f"found {path!r}, expected a folder, a table or an archive")
        return path


class RuleParams(ParamsSection):
    """Action for a row that breaks a rule. docs/data.md lists the rules without a choice, too."""

    near_duplicate: Action  # flag: its cluster stays in one split; refuse: one row per cluster
    conflicting_label: Action  # equal images or rows with different classes or targets
    unknown_label: Action  # not in data.classes
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
    constant_column: Action  # refuse: the column is no input
    duplicate_column: Action  # refuse: the second of the two is no input


class CleanParams(ParamsSection):
    """Limits beyond which a sample is refused or flagged, and the allowed number of bad rows."""

    # The stage fails if refused rows are a larger fraction of the rows read. Duplicates do not
    # count.
    max_bad_fraction: Fraction
    num_workers: NotNegativeInt  # decoding processes; 0: one per core
    min_side_px: Positive  # a shorter side breaks too_small
    # Larger images are refused before they are decoded; the service has the same limit.
    max_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)]
    # Near duplicates differ in at most this many of the 64 bits of the perceptual hash.
    near_duplicate_bits: Annotated[int, Field(ge=0, le=16)]
    constant_std: NotNegative  # grey levels of 255; a smaller deviation is a constant_image
    blur_variance: NotNegative  # of the Laplacian, in grey levels squared; less is blurred
    dark_mean: Annotated[float, Field(ge=0, le=255)]  # grey levels; a darker mean is too_dark
    bright_mean: Annotated[float, Field(ge=0, le=255)]  # grey levels; above it is too_bright
    max_aspect: Annotated[float, Field(ge=1)]  # longer side over shorter side
    # Distance from the median in robust standard deviations (1.4826 MAD) that makes an outlier.
    outlier_mad_threshold: PositiveFloat
    max_archive_members: Positive
    max_archive_ratio: Positive  # unpacked bytes over packed bytes of a whole archive
    rules: RuleParams


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
    time_cuts: Annotated[list[str], Field(min_length=2, max_length=2)] | None
    folds: Annotated[int, Field(ge=2)] | None  # folds of the rows outside test
    fold: NotNegativeInt  # the fold that is val, counted from 0

    @model_validator(mode="after")
    def _fractions_sum_to_one(self) -> Self:
        total = self.train + self.val + self.test
        if abs(total - 1) > 1e-9:
            raise ValueError(
                f"train {self.train} + val {self.val} + test {self.test} is {total:g}, expected 1"
            )
        return self

    @model_validator(mode="after")
    def _fold_is_one_of_the_folds(self) -> Self:
        if self.fold >= (self.folds or 1):
            raise ValueError(
                f"fold is {self.fold}, expected less than folds {_yaml(self.folds)} "
                "(0 without folds)"
            )
        return self


class PrecomputeParams(ParamsSection):
    """Format of the network's input."""

    image_size_px: Annotated[int, Field(ge=4, le=4096)]  # side of the square
    # Side that training images are stored with, for random crops. null: image_size_px.
    train_size_px: Annotated[int, Field(ge=4, le=4096)] | None
    channels: Literal[1, 3]  # 1 grey, 3 RGB
    resize_mode: Literal["stretch", "crop", "pad"]  # turns an oblong image into a square
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"]
    # Of the packed pixels. jpeg takes about an eighth of the disk, is lossy and slower to read.
    encoding: Literal["raw", "jpeg"]
    jpeg_quality: Annotated[int, Field(ge=1, le=100)]  # without effect for raw
    transform: str | None  # your function "package.module:function" on each decoded image
    num_workers: NotNegativeInt  # decoding processes; 0: one per core
    # Of a table column; rarer ones count as unknown. The limit is fp16's exact integers (2048).
    max_categories: Annotated[int, Field(ge=1, le=2000)]
    num_quantiles: Annotated[int, Field(ge=2, le=256)]  # bins of a numeric column's embedding

    @model_validator(mode="after")
    def _training_images_are_not_smaller(self) -> Self:
        if self.train_size_px is not None and self.train_size_px < self.image_size_px:
            raise ValueError(
                f"train_size_px is {self.train_size_px}, below image_size_px {self.image_size_px}"
            )
        return self


# [smallest, largest]
Range = Annotated[list[PositiveFloat], Field(min_length=2, max_length=2)]


class AugmentParams(ParamsSection):
    """Random changes of training images, drawn anew for each sample and epoch."""

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
    erasing_area: Range  # of that rectangle, as a fraction of the image
    mixup_alpha: NotNegative  # beta distribution of the blend of two images; 0: no mixup
    cutmix_alpha: NotNegative  # beta distribution of the pasted area; 0: no cutmix
    mix_probability: Fraction  # of a row to be mixed; without effect if both alphas are 0
    forbid: list[Operation]  # operations that would change the label; using one fails the stage
    offline_copies: NotNegativeInt  # augmented copies of each training row, written to disk

    @model_validator(mode="after")
    def _ranges_go_up(self) -> Self:
        for name in ("random_resized_crop", "crop_aspect", "scale", "erasing_area"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(
                    f"{name} {[low, high]} goes from large to small, expected [smallest, largest]"
                )
        for name in ("random_resized_crop", "erasing_area"):
            if getattr(self, name)[1] > 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, a fraction of the image, expected at most 1"
                )
        return self


_WHY_NOT_ZERO_3 = "no process has whole weights there. Use deepspeed_stage_2"


def _belongs_to(key: str, chosen: str, choice: str, **values: object) -> list[str]:
    """Mistakes in values that exactly one choice of `key` needs."""
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


def _yaml(value: object) -> str:
    return "null" if value is None else str(value)


class TrainParams(ParamsSection):
    """The network and its training recipe."""

    network: str  # "small_resnet", "timm/NAME" for any network of timm, "tabm" for tables
    network_arguments: dict[str, Any]  # passed to the network's constructor
    # For timm networks: "hub", or a .safetensors or .pth file. null: fresh weights.
    pretrained: str | None
    freeze_epochs: NotNegativeInt  # epochs that train only the head of a pretrained network
    # Epochs over which the frozen parts join, the last one first. 0: all at once.
    unfreeze_epochs: NotNegativeInt
    epochs: Positive
    # Training ends after this many epochs without a lower validation loss. null: never early.
    early_stopping_patience: Positive | None
    batch_size: Positive  # rows per optimizer step, over all devices and accumulation steps
    max_batch_per_device: Positive  # above it gradients are accumulated over smaller batches
    loss: Literal["auto", "cross_entropy", "mse", "huber"]  # auto: cross_entropy or mse
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
    ema_decay: OpenFraction | None  # of the moving average of the weights, per step
    strategy: Literal[
        "auto", "single", "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"
    ]
    precision: Literal["auto", "16-mixed", "bf16-mixed", "32-true"]
    accelerator: Literal["auto", "cpu", "gpu"]
    # State that DeepSpeed keeps in host memory: more room on the GPU for less speed.
    offload: Offload | None
    devices: Literal["auto"] | Positive  # per node
    num_nodes: Positive
    num_workers: NotNegativeInt  # loader processes per device; 0 loads in the trainer itself
    # Action for a step whose loss or gradient is NaN or infinite. Such a step never changes a
    # weight.
    on_nonfinite: Literal["fail", "skip"]
    max_skipped_steps: NotNegativeInt  # of the whole run; one more fails it
    compile: bool  # torch.compile; needs a C++ compiler, or triton on a GPU
    channels_last: Literal["auto"] | bool  # memory layout of the weights of image networks
    keep: Literal["best", "last"]  # epoch that the model comes from; best by validation loss
    checkpoint_every_epochs: Positive  # a killed run repeats at most this many
    # Checkpoints within an epoch as well. null: only at the ends of epochs.
    checkpoint_every_minutes: PositiveFloat | None
    log_every_steps: Positive  # scalars in TensorBoard and the run log
    log_histograms_every_epochs: Positive | None  # weights and gradients in TensorBoard

    @model_validator(mode="after")
    def _warms_up_before_its_end(self) -> Self:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"warmup_epochs is {self.warmup_epochs}, expected less than epochs {self.epochs}"
            )
        return self

    @model_validator(mode="after")
    def _choices_have_what_they_need_and_no_more(self) -> Self:
        problems = [
            *_belongs_to("loss", self.loss, "huber", huber_delta=self.huber_delta),
            *_belongs_to("optimizer", self.optimizer, "sgd", momentum=self.momentum),
            *_belongs_to(
                "schedule",
                self.schedule,
                "step",
                step_epochs=self.step_epochs,
                step_factor=self.step_factor,
            ),
        ]
        if self.nesterov and not self.momentum:
            problems.append(
                f"nesterov is true, but momentum is {_yaml(self.momentum)}: "
                "set nesterov to false, or use optimizer 'sgd' with a momentum"
            )
        if self.schedule == "one_cycle" and not self.warmup_epochs:
            problems.append(
                "schedule is 'one_cycle', but warmup_epochs is 0: "
                "one_cycle begins with a rise of the learning rate"
            )
        if self.early_stopping_patience is not None and self.early_stopping_patience >= self.epochs:
            problems.append(
                f"early_stopping_patience is {self.early_stopping_patience}, "
                f"which epochs {self.epochs} cannot exhaust; set it to null"
            )
        if self.strategy == "deepspeed_stage_3":
            wanted = {
                "ema_decay": self.ema_decay,
                "l1": self.l1,
                "freeze_epochs": self.freeze_epochs,
            }
            problems += [
                f"{key} is {value:g}, but strategy is {self.strategy!r}: {_WHY_NOT_ZERO_3}"
                for key, value in wanted.items()
                if value
            ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _pretrained_weights_are_there_to_be_frozen(self) -> Self:
        if self.pretrained is not None and not self.network.startswith("timm/"):
            raise ValueError(
                f"pretrained is {self.pretrained!r}, but network is {self.network!r}: "
                "only 'timm/NAME' has pretrained weights"
            )
        if self.freeze_epochs and self.pretrained is None:
            raise ValueError(
                f"freeze_epochs is {self.freeze_epochs}, but pretrained is null: "
                "untrained weights would be frozen"
            )
        if self.freeze_epochs > self.epochs:
            raise ValueError(
                f"freeze_epochs is {self.freeze_epochs}, expected at most epochs {self.epochs}"
            )
        if self.unfreeze_epochs and not self.freeze_epochs:
            raise ValueError(
                f"unfreeze_epochs is {self.unfreeze_epochs}, but freeze_epochs is 0: "
                "nothing is frozen"
            )
        return self

    @model_validator(mode="after")
    def _strategy_can_offload(self) -> Self:
        needs_zero_3 = self.offload == "optimizer_and_parameters"
        needed = "deepspeed_stage_3" if needs_zero_3 else "deepspeed_stage_"
        if self.offload and not self.strategy.startswith(needed):
            expected = "'deepspeed_stage_3'" if needs_zero_3 else "a deepspeed strategy"
            raise ValueError(
                f"offload is {self.offload!r}, which needs strategy {expected}, "
                f"but strategy is {self.strategy!r}"
            )
        return self

    @model_validator(mode="after")
    def _arguments_fit_the_network(self) -> Self:
        if mistakes := argument_mistakes(self.network, self.network_arguments):
            raise ValueError(mistakes)
        return self


class AuditParams(ParamsSection):
    """Search for wrong labels by cross-validation. Only for classification."""

    # Networks to train, each without one fold of the rows of train and val. null: no search.
    folds: Annotated[int, Field(ge=2)] | None
    # Of each network. Fewer than train.epochs, because long training memorises wrong labels.
    epochs: Positive


class Gate(ParamsSection):
    """Required range of a metric."""

    min: float | None
    max: float | None

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("a gate needs a min or a max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self


class MeasuringParams(ParamsSection):
    """Keys of `evaluate` that `prune` reads as well: calibration and measurement of predictions."""

    batch_size: Positive
    bootstrap_samples: Annotated[int, Field(ge=100)]  # resamples behind each interval
    confidence: OpenFraction  # of the intervals
    calibration: Literal["temperature"] | None  # of probabilities, fitted on validation rows
    coverage: OpenFraction  # of prediction sets and intervals
    ood_fraction: OpenFraction  # of ordinary rows that may be flagged as out of distribution


class EvaluateParams(MeasuringParams):
    """Measurements on the test split, and the requirements for a release."""

    top_k: Positive  # of top_k_accuracy; without effect for a numeric target or fewer classes
    gates: dict[str, Gate]  # by metric; a model that misses one is neither served nor released
    # Columns of the user's table that also cut the test rows into slices. Class, size, brightness
    # and group are always slices.
    slices: list[str]
    slice_min_rows: Annotated[int, Field(ge=2)]  # smaller slices are listed, but not judged
    slice_gates: dict[str, Gate]  # by metric, required of every judged slice
    reference_model: str | None  # folder of an earlier bundle to compare with on the same rows
    # Largest loss against it: accuracy points, or relative growth of the RMSE.
    max_regression: NotNegative

    @model_validator(mode="after")
    def _slices_are_named_once(self) -> Self:
        twice = sorted({name for name in self.slices if self.slices.count(name) > 1})
        if twice:
            raise ValueError(f"slices names {', '.join(map(repr, twice))} more than once")
        return self


class PruneParams(ParamsSection):
    """A smaller network made from the trained one, for the variants `pruned` and `pruned_int8`."""

    # structured: removes whole channels; magnitude: sets single weights to zero.
    kind: Literal["structured", "magnitude"] | None
    sparsity: OpenFraction  # of the channels of each layer that can spare some, or of all weights
    epochs: Positive  # of the fine-tune
    learning_rate: PositiveFloat  # of the fine-tune at its start; it falls to zero


class GoalParams(ParamsSection):
    """Selection of the variant that the service's `auto` serves, per provider."""

    # Against fp32 on validation rows: accuracy points, or relative growth of the RMSE.
    max_metric_loss: NotNegative
    prefer: Literal["fastest", "smallest"]  # among the variants within max_metric_loss


class ExportParams(ParamsSection):
    """The ONNX graphs to make, and the selection among them."""

    purpose: str | None  # intended use, for the model card; null: the card says it is unknown
    opset: Annotated[int, Field(ge=18, le=24)]
    max_batch_size: Annotated[int, Field(ge=1, le=4096)]  # of the graphs and the service
    variants: Annotated[list[Variant], Field(min_length=1)]
    quantization_samples: Positive  # training rows that int8 ranges are measured on
    golden_rows: Annotated[int, Field(ge=0, le=4096)]  # validation rows stored in the bundle
    goal: GoalParams

    @model_validator(mode="after")
    def _fp32_is_there_and_none_twice(self) -> Self:
        if "fp32" not in self.variants:
            raise ValueError(
                f"variants {self.variants} lacks 'fp32', "
                "which the others are made from and compared with"
            )
        twice = sorted({name for name in self.variants if self.variants.count(name) > 1})
        if twice:
            raise ValueError(f"variants names {', '.join(map(repr, twice))} more than once")
        return self


class CompileParams(ParamsSection):
    """The TensorRT engine."""

    variant: Literal["fp32", "fp16", "int8_tensorrt"]  # exported graph to compile
    # true: fail without a GPU or TensorRT; false: record why there is no engine.
    require: bool
    optimal_batch_size: Positive  # tuned for; the engine takes 1 to export.max_batch_size
    workspace_mib: Positive  # scratch memory of the builder


class VerifyParams(ParamsSection):
    """Allowed differences between the hops of the certificate."""

    max_difference: PositiveFloat  # torch to ONNX fp32 and ONNX to HTTP: absolute, on the outputs
    max_metric_loss: dict[Variant, NotNegative]  # accuracy points, or relative growth of the RMSE
    batch_seconds: PositiveFloat  # limit for the repetition of fp32 in each small batch size
    timing_rounds: Positive  # latency is the median of this many calls
