"""Checks params.yaml for settings that boosted trees cannot apply.

Requests of devices, precision, weight averages and the user's loss are refused, and so are keys of
gradient steps, such as `batch_size`, if their value is not the default.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from slipway.config.sections import CompileParams, PruneParams, default_of
from slipway.config.training import TrainParams
from slipway.config.yaml_text import as_yaml
from slipway.kinds.registry import are_trees
from slipway.kinds.targets import TargetKind
from slipway.system.errors import ParamsError
from slipway.system.user_code import is_user_code

# For each key of the section train: values that request nothing of gradient steps or devices.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "strategy": ("auto", "single"),
    "precision": ("auto", "32-true"),
    "accelerator": ("auto", "cpu"),
    "devices": ("auto", 1),
    "num_nodes": (1,),
    "compile": (False,),
    "channels_last": ("auto", False),
    "ema_decay": (None,),
    "log_histograms_every_epochs": (None,),
    "loggers": ([],),
}

# Keys of the section train that configure gradient steps, their devices and their checkpoints.
WITHOUT_EFFECT = (
    *("batch_size", "max_batch_per_device", "shuffle", "shuffle_buffer_mib"),
    *("optimizer", "momentum", "nesterov", "weight_decay", "l1"),
    *("schedule", "step_epochs", "step_factor", "gradient_clip_norm"),
    *("num_workers", "deterministic", "on_nonfinite", "on_loss_spike"),
    *("max_skipped_steps", "repeat_every_steps"),
    *("checkpoint_every_epochs", "checkpoint_every_minutes", "log_every_steps"),
)


def without_steps(train: Mapping[str, Any], network: str) -> dict[str, Any]:
    """Return the section train of a file with only the keys that `network` reads.

    For a model that takes over the section of another network, such as a member of an ensemble.
    """
    unread = WITHOUT_EFFECT if are_trees(network) else ()
    return {key: value for key, value in train.items() if key not in unread}


def require_gradient_steps(network: str, command: str) -> None:
    """Raise ParamsError if `network` takes no gradient steps, because `command` would time them."""
    if are_trees(network):
        raise ParamsError(
            f"{command} times gradient steps, but train.network is {network!r}, which takes none, "
            "expected a network such as 'tabm'. `slipway plan` predicts the time of its rounds."
        )


def requests_beyond_trees(
    train: TrainParams, prune: PruneParams, compiled: CompileParams, target: TargetKind
) -> Iterator[str]:
    """Yield a message for each setting that trees cannot apply, with the value to write instead."""
    trees = f"train.network is {train.network!r}, which"
    if "trees" not in target.parts:
        yield f"{trees} cannot learn {target.plural}: use another network"
    for key, neutral in _NEUTRAL.items():
        if (value := getattr(train, key)) not in neutral:
            yield (
                f"train.{key} is {as_yaml(value)}, but {trees} takes no gradient steps and runs in "
                f"one process on the CPU: set it to {as_yaml(neutral[0])}"
            )
    for key in WITHOUT_EFFECT:
        if (value := getattr(train, key)) != (usual := default_of(TrainParams, key)):
            yield (
                f"train.{key} is {as_yaml(value)}, but {trees} takes no gradient steps: remove it, "
                f"or set it to {as_yaml(usual)}"
            )
    if train.label_smoothing and target.has_classes:
        yield (
            f"train.label_smoothing is {train.label_smoothing:g}, but {trees} learns the labels as "
            "they are: set it to 0.0"
        )
    if is_user_code(train.loss):
        yield f"train.loss is {train.loss!r}, but {trees} has losses of its own: set it to auto"
    if prune.kind is not None:
        yield (
            f"prune.kind is {prune.kind!r}, but {trees} has no weights to prune: set it to null, "
            "and lower num_leaves or train.epochs for a smaller model"
        )
    if compiled.require:
        yield (
            f"compile.require is true, but {trees} has trees, which TensorRT cannot run: set it to "
            "false"
        )
