"""The sections of `params.yaml` that `augment`, `train` and `audit` read."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from slipway.config.network_arguments import argument_mistakes, arguments_class
from slipway.config.sections import (
    ByChoice,
    Fraction,
    NotNegative,
    NotNegativeInt,
    OpenFraction,
    ParamsSection,
    Positive,
    PositiveFloat,
    UserName,
    belongs_to,
    named_twice,
)
from slipway.config.yaml_text import as_yaml
from slipway.kinds.inputs import ENCODER, TIMM
from slipway.kinds.registry import are_trees

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
Tracker = Literal["mlflow", "wandb"]
# Strategies whose processes share a copy of the network, and its rows, so that they wait for each
# other's values within a pass.
SHARING = ("pipeline", "tensor_parallel")
# [smallest, largest]
Range = Annotated[list[PositiveFloat], Field(min_length=2, max_length=2, examples=[[0.9, 1.0]])]


class AugmentParams(ParamsSection):
    """Random changes of training images and texts, drawn for each sample and epoch."""

    # Cropped area as a fraction of the image; [1, 1]: no crop.
    random_resized_crop: Range = [1.0, 1.0]
    # Width over height of that area; without effect if nothing is cropped.
    crop_aspect: Range = [0.75, 1.3333]
    rotation_deg: Annotated[float, Field(ge=0, le=180)] = 0.0  # largest angle either way
    scale: Range = [1.0, 1.0]  # zoom factors
    translation: Fraction = 0.0  # largest shift either way, as a fraction of the side
    crop_padding_px: NotNegativeInt = 0  # random crop after padding every side by this much
    horizontal_flip: Fraction = 0.0  # probability
    vertical_flip: Fraction = 0.0  # probability
    brightness: Fraction = 0.0  # factor between 1 - this and 1 + this
    # Factor between 1 - this and 1 + this, around the mean of the image.
    contrast: Fraction = 0.0
    saturation: Fraction = 0.0  # without effect for grey images
    # Turn of the colour circle; not for grey images.
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    erasing: Fraction = 0.0  # probability that a rectangle is filled with grey
    erasing_area: Range = [0.02, 0.2]  # area of that rectangle, as a fraction of the image
    mixup_alpha: NotNegative = 0.0  # beta distribution of the blend of two images; 0: no mixup
    cutmix_alpha: NotNegative = 0.0  # beta distribution of the pasted area; 0: no cutmix
    mix_probability: Fraction = 1.0  # for each row; without effect if both alphas are 0
    # Operations that would change the label; using one fails the stage.
    forbid: list[Operation] = []
    offline_copies: NotNegativeInt = 0  # augmented copies of each training row, written to disk
    token_dropout: Fraction = 0.0  # texts with a tokenizer: probability that a token is left out
    word_deletion: Fraction = 0.0  # texts without a tokenizer: probability that a word is left out

    def problems(self) -> Iterator[str]:
        for name in ("random_resized_crop", "crop_aspect", "scale", "erasing_area"):
            low, high = getattr(self, name)
            if low > high:
                yield f"{name} {[low, high]} goes from large to small, expected {[high, low]}"
        for name in ("random_resized_crop", "erasing_area"):
            if (found := getattr(self, name))[1] > 1:
                yield f"{name} is {found}, a fraction of the image, expected at most 1"


# Keys whose right value depends on the network; another network starts with its own.
OF_NETWORK = (
    *("train.network_arguments", "train.pretrained", "train.freeze_epochs"),
    *("train.unfreeze_epochs", "train.epochs", "train.early_stopping_patience"),
    *("train.batch_size", "train.max_batch_per_device", "train.optimizer", "train.momentum"),
    *("train.nesterov", "train.learning_rate", "train.weight_decay", "train.l1"),
    *("train.schedule", "train.warmup_epochs", "train.step_epochs", "train.step_factor"),
    *("train.gradient_clip_norm", "train.ema_decay", "train.precision", "train.compile"),
    *("train.channels_last", "audit.epochs"),
)
# Validation rows from which on the lowest loss tells the best epoch: on fewer it is mostly chance.
STOPPING_ROWS = 50
_LEAST_PATIENCE = 5  # epochs
_TREES_PATIENCE = 100  # rounds: each changes little at the usual learning rates


class TrainParams(ParamsSection):
    """The network and its training recipe."""

    DEFAULTS: ClassVar[ByChoice] = {
        "small_resnet": {"learning_rate": 0.004},
        TIMM: {"epochs": 12},
        "tabm": {"learning_rate": 0.006, "weight_decay": 0.0003},
        "lightgbm": {"epochs": 2000, "learning_rate": 0.05},
        "hashed_ngrams": {"epochs": 8, "learning_rate": 0.003, "weight_decay": 0.01},
        "small_transformer": {"epochs": 8, "weight_decay": 0.01},
        ENCODER: {"epochs": 3, "learning_rate": 5e-5, "weight_decay": 0.01},
    }

    # "small_resnet", "timm/NAME" for any network of timm, "tabm" for tables, "encoder" for a local
    # Hugging Face folder, or your own "package.module:Class". Without the key: small_resnet for
    # images, tabm for tables, hashed_ngrams for texts.
    network: str = "small_resnet"
    # Passed to the network's constructor: those that differ from its own defaults.
    network_arguments: Annotated[dict[str, Any], Field(examples=[{"width": 32}])] = {}
    # For timm networks: a .safetensors or .pth file, or "hub" for the hub's cache on this machine.
    # null: fresh weights. For "encoder": a local Hugging Face folder. For all others but trees:
    # weights.safetensors of a former model.
    pretrained: str | None = None
    freeze_epochs: NotNegativeInt = 0  # epochs that train only the head of a pretrained network
    # Epochs over which the frozen parts join, the last one first. 0: all at once.
    unfreeze_epochs: NotNegativeInt = 0
    # Passes over the training rows; of trees: rounds, each of which adds a tree.
    epochs: Positive = 40
    # Training ends after this many epochs without a lower validation loss. null: never early. auto:
    # a tenth of epochs, at least 5 (trees: 100 rounds), where there are 50 validation rows and keep
    # is best.
    early_stopping_patience: Positive | Literal["auto"] | None = "auto"
    batch_size: Positive = 128  # rows per optimizer step, over all devices and accumulation steps
    max_batch_per_device: Positive = 1024  # above it gradients are accumulated over smaller batches
    # blocks are read whole: for data larger than memory.
    shuffle: Literal["rows", "blocks"] = "rows"
    # MiB per node, of the rows in use and those read ahead. Only for blocks.
    shuffle_buffer_mib: Positive | None = None
    # auto: cross_entropy, bce or mse.
    loss: Literal["auto", "cross_entropy", "bce", "asymmetric", "mse", "huber"] | UserName = "auto"
    # Error, in standard deviations of the target, above which the Huber loss is linear.
    huber_delta: PositiveFloat | None = None
    class_weights: Literal["balanced"] | dict[str, PositiveFloat] | None = None  # in the loss
    # Fraction of each label that is spread over all classes.
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # adamw decouples weight decay from the gradient; sgd needs momentum.
    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None  # only for sgd
    nesterov: bool = False  # only for sgd
    learning_rate: PositiveFloat = 0.001  # at its peak
    # Of all weights but norms, scales and biases.
    weight_decay: NotNegative = 0.05
    l1: NotNegative = 0.0  # factor of the sum of the magnitudes of the decayed weights, in the loss
    schedule: Literal["cosine", "one_cycle", "step", "constant"] = "cosine"  # after the warm-up
    # The learning rate rises during these. Without the key: a tenth of epochs, at most 2.
    warmup_epochs: NotNegative = 2.0
    # Epochs between multiplications by step_factor; only for step.
    step_epochs: Positive | None = None
    step_factor: OpenFraction | None = None  # only for step
    # Largest norm of the gradient; null: no clipping.
    gradient_clip_norm: PositiveFloat | None = 1.0
    ema_decay: OpenFraction | None = None  # decay of the moving average of the weights, per step
    # How processes share the work (docs/how-to/scaling.md). A named one is used or refused; auto
    # reports its choice, as do precision and accelerator.
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
    ] = "auto"
    # Processes that share a copy of the network. Only for tensor_parallel, pipeline and fsdp. null:
    # all processes share one copy; with fsdp, no processes share one.
    model_parallel: Annotated[int, Field(ge=2)] | None = None
    # Arithmetic of the forward and backward pass; the optimizer keeps 32 bits.
    precision: Literal["auto", "16-mixed", "bf16-mixed", "32-true"] = "auto"
    # Kind of device.
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    # State that DeepSpeed keeps in host memory: more room on the GPU for less speed.
    offload: Offload | None = None
    # Folder on disk for the offloaded optimizer state. null: the host's memory.
    offload_path: Annotated[str, Field(min_length=1, examples=["/mnt/nvme"])] | None = None
    devices: Literal["auto"] | Positive = "auto"  # per node
    # Machines.
    num_nodes: Positive = 1
    num_workers: NotNegativeInt = 0  # loader processes per device; 0 loads in the trainer itself
    # Action for a step whose loss or gradient is NaN or infinite. Such a step never changes a
    # weight.
    on_nonfinite: Literal["fail", "skip"] = "fail"
    # Action for a step whose loss lies 6 standard deviations above that of the last 128 steps.
    # rewind: back to the newest checkpoint as well. null: none.
    on_loss_spike: Literal["skip", "rewind"] | None = None
    max_skipped_steps: NotNegativeInt = 10  # skipped steps of the whole run; one more fails it
    repeat_every_steps: Positive | None = None  # a repeated step must give equal bits; null: never
    # true: an operation without a deterministic kernel fails; warn: it runs, with a warning.
    deterministic: Literal["warn"] | bool = "warn"
    compile: bool = False  # torch.compile; needs a C++ compiler, or triton on a GPU
    channels_last: Literal["auto"] | bool = "auto"  # memory layout of the weights of image networks
    # Epoch that the model comes from; best by validation loss.
    keep: Literal["best", "last"] = "best"
    checkpoint_every_epochs: Positive = 5  # a killed run repeats at most this many
    # Checkpoints within an epoch as well. null: only at the ends of epochs.
    checkpoint_every_minutes: PositiveFloat | None = 10.0
    log_every_steps: Positive = 10  # scalars in TensorBoard and the run log
    log_histograms_every_epochs: Positive | None = None  # weights and gradients in TensorBoard
    loggers: list[Tracker] = []  # trackers that get TensorBoard's scalars and the settings as well

    @model_validator(mode="before")
    @classmethod
    def _with_all_arguments(cls, content: Any) -> Any:
        """Add the network's own defaults to its arguments, so that records name them."""
        if not isinstance(content, dict):
            return content
        given = content.get("network_arguments", {})
        known = arguments_class(str(content.get("network", cls.model_fields["network"].default)))
        if known is None or not isinstance(given, dict):
            return content
        return content | {"network_arguments": {**known().model_dump(), **given}}

    @property
    def freezes_body(self) -> bool:
        """True if only the head is trained, in all epochs."""
        return 0 < self.epochs <= self.freeze_epochs

    def patience(self, num_val: int) -> int | None:
        """Return the epochs without a lower validation loss that end a training; None: never early.

        `auto` ends it if the best epoch is kept and `num_val` validation rows suffice to tell it.
        """
        if self.early_stopping_patience != "auto":
            return self.early_stopping_patience
        if self.keep != "best" or num_val < STOPPING_ROWS:
            return None
        if are_trees(self.network):
            return _TREES_PATIENCE
        return max(_LEAST_PATIENCE, self.epochs // 10)

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
        if self.model_parallel and self.strategy not in ("tensor_parallel", "pipeline", "fsdp"):
            yield (
                f"model_parallel is {self.model_parallel}, which needs strategy "
                f"'tensor_parallel', 'pipeline' or 'fsdp', but strategy is {self.strategy!r}, and "
                "others cannot be combined (decision 43). Use null, or one of the three"
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
        yield from named_twice("loggers", self.loggers)
        yield from belongs_to("loss", self.loss, "huber", huber_delta=self.huber_delta)
        yield from belongs_to("optimizer", self.optimizer, "sgd", momentum=self.momentum)
        buffer = {"shuffle_buffer_mib": self.shuffle_buffer_mib}
        yield from belongs_to("shuffle", self.shuffle, "blocks", **buffer)
        steps = {"step_epochs": self.step_epochs, "step_factor": self.step_factor}
        yield from belongs_to("schedule", self.schedule, "step", **steps)
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
        if self.freeze_epochs and not self.network.startswith(("timm/", ENCODER)):
            yield (
                f"freeze_epochs is {self.freeze_epochs}, but network is {self.network!r}: only "
                "'timm/NAME' and 'encoder' have parts to freeze, set it to 0"
            )
        elif self.freeze_epochs and self.pretrained is None:
            yield (
                f"freeze_epochs is {self.freeze_epochs}, but pretrained is null: untrained weights "
                "would be frozen. Name pretrained weights, or set it to 0"
            )
        if self.unfreeze_epochs and not self.freeze_epochs:
            yield (
                f"unfreeze_epochs is {self.unfreeze_epochs}, but freeze_epochs is 0: "
                "nothing is frozen"
            )


class AuditParams(ParamsSection):
    """Search for wrong labels by cross-validation. Only for classification."""

    DEFAULTS: ClassVar[ByChoice] = {"lightgbm": {"epochs": 300}}

    # Networks to train, each without one fold of the rows of train and val. null: no search.
    folds: Annotated[int, Field(ge=2)] | None = None
    # Epochs of each network. Fewer than train.epochs, because long training memorises wrong labels.
    epochs: Positive = 15
