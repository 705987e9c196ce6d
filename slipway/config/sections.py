"""The sections of `params.yaml`, each typed by itself: units, bounds, and what its own values say to each other.

How sections fit together, and how the file is read, is in slipway/config/params.py.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from slipway.config.network_arguments import argument_mistakes
from slipway.inputs.images import MAX_PIXELS
from slipway.kinds.registry import Task

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Action = Literal[
    "refuse", "flag", "off"
]  # refuse: into the quarantine; flag: kept, named in rows.parquet; off: not checked
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
Offload = Literal["none", "optimizer", "optimizer_and_parameters"]
Variant = Literal["fp32", "fp16", "int8", "int8_dynamic", "int8_tensorrt", "pruned", "pruned_int8"]
PRUNED_VARIANTS: tuple[Variant, ...] = ("pruned", "pruned_int8")


class Section(BaseModel):
    """Strict: no unknown key, no value of another type, nothing that is not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ColumnParams(Section):
    """What the user says of one column of a table; what is inferred otherwise is written to reports/columns.yaml."""

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


class DataParams(Section):
    """Where the raw data is and what its columns mean."""

    path: str  # folder with one sub-folder per class, a .csv or .parquet file, or a .zip, .tar or .tar.gz of these
    task: Task
    image_column: str  # image bytes ({bytes, path} or binary) or a path relative to the file; for image tasks with a table
    target_column: str  # class names or numbers; without effect for a folder
    group_column: str | None  # rows of one group stay in one split; null for none
    time_column: (
        str | None
    )  # the test split is the latest, the training split the earliest; null for none
    weight_column: str | None  # how much a row counts in the training loss; null: all the same
    split_column: (
        str | None
    )  # the user's own split: train, val, test; null: split_folders, or Slipway splits
    # Folders and Parquet shards that name splits. auto: they are the given split; pool: Slipway splits; classes: folders are classes.
    split_folders: Literal["auto", "pool", "classes"]
    label_map: dict[str, str]  # spelling variants of a class: {found: meant}
    classes: (
        list[str] | None
    )  # every class there may be; another label is unknown. null: all that are found
    columns: dict[str, ColumnParams]  # for table tasks: corrections of the inferred column types
    digests: str | None  # a file of lines "SHA-256  path" as sha256sum writes them; null for none
    engine: Literal["local", "ray"]  # where clean and precompute run

    @field_validator("path")
    @classmethod
    def _path_is_not_empty(cls, path: str) -> str:
        if not path.strip():  # DVC, which has it as a dependency, ends with an unexpected error
            raise ValueError(f"found {path!r}, expected a folder, a table or an archive")
        return path


class RuleParams(Section):
    """What happens to a row that breaks a rule. Rules that leave nothing to choose are not here: see docs/data.md."""

    near_duplicate: Action  # flag: its cluster stays in one split; refuse: one of a cluster is kept
    conflicting_label: (
        Action  # the same picture or row under different classes or with different numbers
    )
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


class CleanParams(Section):
    """When a sample is refused or flagged, and when there are too many of them."""

    max_bad_share: (
        Share  # refused rows over read rows above which the stage fails; duplicates do not count
    )
    num_workers: Annotated[int, Field(ge=0)]  # decoding processes; 0 means one per core
    min_side_px: Positive  # a shorter side is too_small
    # Images of more pixels are refused before they are decoded; the service has the same limit. Pillow itself objects to more.
    max_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)]
    near_duplicate_bits: Annotated[
        int, Field(ge=0, le=16)
    ]  # of 64 in the perceptual hash that near duplicates may differ in
    constant_std: (
        NotNegative  # grey levels of 255; a smaller standard deviation is a constant_image
    )
    blur_variance: NotNegative  # of the Laplacian, in grey levels squared; less is blurred
    dark_mean: Annotated[float, Field(ge=0, le=255)]  # grey levels; a darker mean is too_dark
    bright_mean: Annotated[float, Field(ge=0, le=255)]  # grey levels; a brighter mean is too_bright
    max_aspect: Annotated[float, Field(ge=1)]  # longer side over shorter side; more is odd_aspect
    outlier_deviations: Annotated[
        float, Field(gt=0)
    ]  # robust standard deviations from the median; further is an outlier
    max_archive_members: Positive
    max_archive_ratio: Positive  # bytes out over bytes in, of a whole archive
    rules: RuleParams


class SplitParams(Section):
    """Shares of the three splits; each class is split in these shares."""

    train: Annotated[float, Field(gt=0, lt=1)]
    val: Annotated[float, Field(gt=0, lt=1)]
    test: Annotated[float, Field(gt=0, lt=1)]
    # stable: each row by its own content, so that new rows move no old one; exact: exact shares in each class.
    assignment: Literal["stable", "exact"]
    # report: leaked rows are marked, and metrics come with and without them; auto: report with a given split, else fail
    on_leak: Literal["auto", "fail", "report"]
    time_cuts: (
        Annotated[list[str], Field(min_length=2, max_length=2)] | None
    )  # where val and test begin; null: by the shares
    folds: Annotated[int, Field(ge=0)]  # of the rows that are not for testing; 0 for none
    fold: Annotated[int, Field(ge=0)]  # which of them is val, counted from 0

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> Self:
        total = self.train + self.val + self.test
        if abs(total - 1) > 1e-9:
            raise ValueError(
                f"train {self.train} + val {self.val} + test {self.test} is {total:g}, expected 1"
            )
        return self

    @model_validator(mode="after")
    def _fold_is_one_of_the_folds(self) -> Self:
        if self.folds == 1:
            raise ValueError("folds is 1, expected 0 for none, or at least 2")
        if self.fold >= max(self.folds, 1):
            raise ValueError(
                f"fold is {self.fold}, expected less than folds {self.folds} (0 without folds)"
            )
        return self


class PrecomputeParams(Section):
    """What the network sees."""

    image_size_px: Annotated[int, Field(ge=4, le=4096)]  # side of the square
    train_size_px: (
        Annotated[int, Field(ge=4, le=4096)] | None
    )  # side that training images are stored with, for crops; null: the same
    channels: Literal[1, 3]  # 1 grey, 3 RGB
    fit: Literal["stretch", "crop", "pad"]  # how an oblong image becomes a square
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"]
    encoding: Literal[
        "raw", "jpeg"
    ]  # of the packed pixels; jpeg is about an eighth of the size, lossy and slower to read
    jpeg_quality: Annotated[int, Field(ge=1, le=100)]  # without effect for raw
    transform: (
        str | None
    )  # a function of yours, "package.module:function", on each decoded image; null for none
    num_workers: Annotated[int, Field(ge=0)]  # decoding processes; 0 means one per core
    max_categories: Annotated[
        int, Field(ge=1, le=2000)
    ]  # of a table's column; rarer ones count as unknown. fp16 counts to 2048
    num_quantiles: Annotated[
        int, Field(ge=2, le=256)
    ]  # of a table's numeric column, which its embedding is cut at

    @model_validator(mode="after")
    def _training_images_are_not_smaller(self) -> Self:
        if self.train_size_px is not None and self.train_size_px < self.image_size_px:
            raise ValueError(
                f"train_size_px is {self.train_size_px}, below image_size_px {self.image_size_px}"
            )
        return self


Range = Annotated[
    list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2)
]  # [smallest, largest]


class AugmentParams(Section):
    """Random changes of training images, drawn anew for each sample and epoch. Without effect for tables."""

    random_resized_crop: Range  # area that is cropped, as a share of the image; [1, 1] for none
    crop_aspect: Range  # width over height of that area; without effect where nothing is cropped
    rotation_deg: Annotated[float, Field(ge=0, le=180)]  # up to this angle either way
    scale: Range  # zoom between these factors
    translation: Share  # shift by up to this share of the side either way
    crop_padding_px: Annotated[
        int, Field(ge=0)
    ]  # random crop after padding every side by this much
    horizontal_flip: Share  # probability
    vertical_flip: Share  # probability
    brightness: Share  # factor between 1 - this and 1 + this
    contrast: Share
    saturation: Share  # without effect for grey images
    hue: Annotated[
        float, Field(ge=0, le=0.5)
    ]  # turn of the colour circle either way; without effect for grey images
    erasing: Share  # probability that a rectangle is filled with grey
    erasing_area: Range  # of that rectangle, as a share of the image
    mixup_alpha: NotNegative  # of the beta distribution that two images are blended by; 0 for none
    cutmix_alpha: NotNegative  # of the beta distribution of the area that comes from a second image; 0 for none
    mix_probability: Share  # of a row to be mixed at all; without effect where both alphas are 0
    forbid: list[
        Operation
    ]  # operations that would change the label; asking for one of them fails the stage
    offline_copies: Annotated[
        int, Field(ge=0)
    ]  # augmented copies of each training row, written to disk; 0 for none

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
                    f"{name} is {getattr(self, name)}, a share of the image, expected at most 1"
                )
        return self


_WHY_NOT_ZERO_3 = "no process has whole weights there. Use deepspeed_stage_2, or 0"


def _belongs_to(key: str, chosen: str, choice: str, **values: object) -> list[str]:
    """What is wrong with values that one choice of `key` needs, and that the others have no use for."""
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


class TrainParams(Section):
    """The network and how it is trained."""

    network: str  # "small_resnet", "timm/NAME" for any network of timm, "tabm" for tables
    network_arguments: dict[str, Any]  # passed to the network's constructor
    pretrained: (
        str | None
    )  # of timm's networks: "hub", or a .safetensors or .pth file; null for fresh weights
    freeze_epochs: Annotated[
        int, Field(ge=0)
    ]  # in which the head of a pretrained network learns alone; 0 for none
    unfreeze_epochs: Annotated[
        int, Field(ge=0)
    ]  # over which its other parts then join, the last first; 0: at once
    epochs: Positive
    early_stopping_patience: (
        Positive | None
    )  # epochs without a lower validation loss, after which training ends; null for never
    batch_size: Positive  # rows per optimizer step, over all devices and accumulation steps
    max_batch_per_device: (
        Positive  # above it the gradient is accumulated over several smaller batches
    )
    loss: Literal[
        "auto", "cross_entropy", "mse", "huber"
    ]  # auto: cross_entropy for classes, mse for a number
    huber_delta: (
        Annotated[float, Field(gt=0)] | None
    )  # standard deviations of the target from where huber is linear; for huber alone
    class_weights: (
        Literal["none", "balanced"] | dict[str, Annotated[float, Field(gt=0)]]
    )  # in the loss; for classes alone
    label_smoothing: Annotated[float, Field(ge=0, lt=1)]  # without effect for a numeric target
    optimizer: Literal["adamw", "sgd"]
    momentum: Annotated[float, Field(ge=0, lt=1)] | None  # for sgd alone
    nesterov: bool  # for sgd alone
    learning_rate: Annotated[float, Field(gt=0)]  # at its peak
    weight_decay: Annotated[float, Field(ge=0)]
    l1: Annotated[
        float, Field(ge=0)
    ]  # times the sum of the magnitudes of the weights that decay, added to the loss
    schedule: Literal[
        "cosine", "one_cycle", "step", "constant"
    ]  # of the learning rate, after its warm-up
    warmup_epochs: Annotated[float, Field(ge=0)]  # in which the learning rate rises
    step_epochs: (
        Positive | None
    )  # after every so many the learning rate is multiplied by step_factor; for step alone
    step_factor: Annotated[float, Field(gt=0, lt=1)] | None  # for step alone
    gradient_clip_norm: Annotated[float, Field(ge=0)]  # 0 for none
    ema_decay: Annotated[
        float, Field(ge=0, lt=1)
    ]  # of the moving average of the weights, per step; 0 for none
    strategy: Literal[
        "auto", "single", "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"
    ]
    precision: Literal["auto", "16-mixed", "bf16-mixed", "32-true"]
    accelerator: Literal["auto", "cpu", "gpu"]
    offload: Offload  # what DeepSpeed keeps in the host's memory: nothing, or more room on the GPU for less speed
    devices: Literal["auto"] | Positive  # per node
    num_nodes: Positive
    num_workers: Annotated[
        int, Field(ge=0)
    ]  # loader processes per device; 0 loads in the trainer itself
    not_finite: Literal[
        "stop", "skip"
    ]  # what a step does whose loss or gradient is NaN or infinite; it never changes a weight
    max_skipped_steps: Annotated[int, Field(ge=0)]  # of the whole run; one more stops it
    compile: bool  # the network, by torch; needs a C++ compiler, or triton on a GPU
    channels_last: Literal["auto"] | bool  # layout of the weights of networks for images
    keep: Literal[
        "best", "last"
    ]  # which epoch's weights become the checkpoint; best is by the validation loss
    checkpoint_every_epochs: Positive  # how much a killed run repeats at most
    checkpoint_every_minutes: (
        Annotated[float, Field(gt=0)] | None
    )  # the same where epochs are long; null saves at their ends alone
    log_every_steps: Positive  # scalars of a step in TensorBoard and the run log
    log_histograms_every_epochs: Annotated[
        int, Field(ge=0)
    ]  # of weights and gradients in TensorBoard; 0 for none

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
                f"nesterov is true, but momentum is {_yaml(self.momentum)}: it is a way of momentum, of optimizer 'sgd'"
            )
        if self.schedule == "one_cycle" and not self.warmup_epochs:
            problems.append(
                "schedule is 'one_cycle', but warmup_epochs is 0: its first part is the rise of the learning rate"
            )
        if self.early_stopping_patience is not None and self.early_stopping_patience >= self.epochs:
            problems.append(
                f"early_stopping_patience is {self.early_stopping_patience}, which epochs {self.epochs} cannot exhaust; set it to null"
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
                f"pretrained is {self.pretrained!r}, but network is {self.network!r}: there are such weights for 'timm/NAME' alone"
            )
        if self.freeze_epochs and self.pretrained is None:
            raise ValueError(
                f"freeze_epochs is {self.freeze_epochs}, but pretrained is null: weights that nothing has trained would be frozen"
            )
        if self.freeze_epochs > self.epochs:
            raise ValueError(
                f"freeze_epochs is {self.freeze_epochs}, expected at most epochs {self.epochs}"
            )
        if self.unfreeze_epochs and not self.freeze_epochs:
            raise ValueError(
                f"unfreeze_epochs is {self.unfreeze_epochs}, but freeze_epochs is 0: nothing is frozen"
            )
        return self

    @model_validator(mode="after")
    def _strategy_can_offload(self) -> Self:
        needed = {
            "none": "",
            "optimizer": "deepspeed_stage_",
            "optimizer_and_parameters": "deepspeed_stage_3",
        }[self.offload]
        if not self.strategy.startswith(needed):
            expected = "'deepspeed_stage_3'" if needed.endswith("3") else "a deepspeed strategy"
            raise ValueError(
                f"offload is {self.offload!r}, which needs strategy {expected}, but strategy is {self.strategy!r}"
            )
        return self

    @model_validator(mode="after")
    def _arguments_fit_the_network(self) -> Self:
        if mistakes := argument_mistakes(self.network, self.network_arguments):
            raise ValueError(mistakes)
        return self


class AuditParams(Section):
    """The search for wrong labels, by networks that learn from the other rows. For classes only."""

    folds: Annotated[
        int, Field(ge=0)
    ]  # networks that are trained, each without one fold of the rows of train and val; 0: no search
    epochs: Positive  # of each of them; fewer than train.epochs, since a network that learns long learns wrong labels by heart

    @model_validator(mode="after")
    def _one_fold_leaves_nothing_to_learn(self) -> Self:
        if self.folds == 1:
            raise ValueError("folds is 1, expected 0 for no audit, or at least 2")
        return self


class Gate(Section):
    """A required range of a metric; null for no bound."""

    min: float | None
    max: float | None

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("a gate needs a min or a max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self


class MeasuringParams(Section):
    """The keys of `evaluate` that `prune` reads as well: how answers are calibrated and measured."""

    batch_size: Positive
    bootstrap_samples: Annotated[int, Field(ge=100)]  # resamples behind each interval
    confidence: Annotated[float, Field(gt=0, lt=1)]  # of the intervals
    calibration: Literal["temperature", "none"]  # of probabilities, on validation rows
    coverage: Annotated[
        float, Field(gt=0, lt=1)
    ]  # of rows whose prediction set or interval has to hold the truth
    outlier_share: Annotated[
        float, Field(gt=0, lt=1)
    ]  # of ordinary rows that may be called outliers


class EvaluateParams(MeasuringParams):
    """Measures of the test split, and what is required for a release."""

    top_k: Positive  # of top_k_accuracy; without effect for a numeric target, and where there are no more classes
    gates: dict[str, Gate]  # by metric; a model that misses one is not released
    slices: list[
        str
    ]  # columns of the user's table that the test rows are also cut by; class, size, brightness and group always are
    slice_min_rows: Annotated[int, Field(ge=2)]  # a slice with fewer is named, and not judged
    slice_gates: dict[str, Gate]  # by metric, required of every slice that is judged
    released: (
        str | None
    )  # folder of a released bundle to compare with on the same rows; null for none
    released_max_loss: (
        NotNegative  # accuracy points that may be lost against it, or relative growth of the RMSE
    )

    @model_validator(mode="after")
    def _slices_are_named_once(self) -> Self:
        twice = sorted({name for name in self.slices if self.slices.count(name) > 1})
        if twice:
            raise ValueError(f"slices names {', '.join(map(repr, twice))} more than once")
        return self


class PruneParams(Section):
    """A smaller network from the trained one, for the variants `pruned` and `pruned_int8`."""

    kind: Literal[
        "none", "structured", "magnitude"
    ]  # structured: channels are taken out; magnitude: single weights become zero
    share: Annotated[
        float, Field(gt=0, lt=1)
    ]  # of the channels of each layer that has some to spare, or of all weights of layers
    epochs: Positive  # of the fine-tune
    learning_rate: Annotated[
        float, Field(gt=0)
    ]  # of the fine-tune, at its beginning; it falls to zero


class GoalParams(Section):
    """What the service's `auto` is to serve, of all variants that fit a provider."""

    max_metric_loss: NotNegative  # on validation rows, against fp32: accuracy points, or relative growth of the RMSE
    prefer: Literal["fastest", "smallest"]  # among those that lose no more


class ExportParams(Section):
    """The ONNX graphs that are made, and which of them is chosen."""

    purpose: (
        str | None
    )  # what the model is for and what not, for its card; null: the card says that nobody wrote it down
    opset: Annotated[int, Field(ge=18, le=24)]
    max_batch_size: Annotated[
        int, Field(ge=1, le=4096)
    ]  # largest batch the graphs and the service take
    variants: Annotated[list[Variant], Field(min_length=1)]
    calibration_rows: Positive  # training rows that int8 ranges are measured on
    canary_rows: Annotated[
        int, Field(ge=0, le=4096)
    ]  # validation rows that travel in the bundle; 0 for none
    goal: GoalParams

    @model_validator(mode="after")
    def _fp32_is_there_and_none_twice(self) -> Self:
        if "fp32" not in self.variants:
            raise ValueError(
                f"variants {self.variants} lacks 'fp32', which the others are made from and compared with"
            )
        twice = sorted({name for name in self.variants if self.variants.count(name) > 1})
        if twice:
            raise ValueError(f"variants names {', '.join(map(repr, twice))} more than once")
        return self


class CompileParams(Section):
    """The TensorRT engine."""

    variant: Literal["fp32", "fp16", "int8_tensorrt"]  # which exported graph is compiled
    require: bool  # true: fail where there is no GPU or no TensorRT; false: leave a skipped build
    optimal_batch_size: (
        Positive  # the batch the engine is tuned for; it takes 1 to export.max_batch_size
    )
    workspace_mib: Positive  # scratch memory the builder may use


class VerifyParams(Section):
    """How much two hops may differ."""

    max_difference: Annotated[
        float, Field(gt=0)
    ]  # torch to ONNX fp32, and ONNX to HTTP: absolute, on the outputs
    max_metric_loss: dict[
        Variant, Annotated[float, Field(ge=0)]
    ]  # accuracy points lost, or relative growth of the RMSE
    batch_seconds: Annotated[
        float, Field(gt=0)
    ]  # that fp32 may answer for in each small batch size
    timing_rounds: Positive  # latency is the median of this many calls
