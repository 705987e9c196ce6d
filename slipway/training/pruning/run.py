"""Pruning: removes channels or weights, fine-tunes briefly, calibrates, and reports the cost.

Fine-tuning runs in one process with the settings of the section train, except for the epochs, the
learning rate and its schedule. The result depends only on seed, data and weights: a killed run
starts from the beginning and ends with the same bytes.
"""

import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from slipway.config.sections import MeasuringParams, PruneParams
from slipway.config.training import TrainParams
from slipway.kinds.registry import kind_of
from slipway.metrics.paired_bootstrap import PairedDifference, paired_difference
from slipway.metrics.scores import Resampling
from slipway.reports.console import number, size, text_table
from slipway.system import files
from slipway.training.distributed.placement import place, requested_setup
from slipway.training.job import TrainingData, count_parameters
from slipway.training.networks.networks import (
    Network,
    load_network,
    read_model_manifest,
    serialize_tensors,
)
from slipway.training.pruning.channels import prune_channels
from slipway.training.pruning.result import PrunedManifest, Width, pruned_network
from slipway.training.recipe.optimizers import decays
from slipway.training.short_run import ONE_PROCESS, EpochPrinter, one_process, train_short
from slipway.training.telemetry.progress import silence_chatter
from slipway.training.uncertainty.calibration import Calibrator, FittedCalibration
from slipway.training.uncertainty.prediction import default_device, predict

# Settings of the section train: fine-tuning starts from trained weights, and its learning rate
# falls to zero.
_FINE_TUNING = {
    "schedule": "cosine",
    "warmup_epochs": 0.0,
    "step_epochs": None,
    "step_factor": None,
    "pretrained": None,
    "freeze_epochs": 0,
    "unfreeze_epochs": 0,
    "early_stopping_patience": None,
}


@dataclass(frozen=True)
class PruningResult:
    """A pruned network and the figures of its report."""

    manifest: PrunedManifest
    weights: dict[str, Tensor]
    fitted: FittedCalibration
    num_parameters: int  # parameters of the trained network
    # Sizes of the weights: before, after, before_compressed, after_compressed (zlib).
    bytes: dict[str, int]
    metric: PairedDifference  # on the validation rows, from the trained network to this one

    def report(self) -> dict[str, Any]:
        """Return the content of `reports/prune.json`."""
        return {
            "kind": self.manifest.kind,
            "sparsity": self.manifest.sparsity,
            "removed_fraction": self.removed_fraction,
            "widths": {name: width.model_dump() for name, width in self.manifest.widths.items()},
            "parameters": {
                "before": self.num_parameters,
                "after": self.manifest.num_parameters,
                "zeros": self.manifest.num_zeros,
            },
            "bytes": self.bytes,
            "validation": self.metric.model_dump(mode="json"),
        }

    @property
    def removed_fraction(self) -> float:
        """The fraction of channels removed from narrowed layers, else of zero parameters."""
        if not self.manifest.widths:
            return self.manifest.num_zeros / self.manifest.num_parameters
        widths = self.manifest.widths.values()
        return 1 - sum(width.after for width in widths) / sum(width.before for width in widths)

    def text(self) -> str:
        """Return the result as text for a terminal."""
        sizes = {name: size(num_bytes) for name, num_bytes in self.bytes.items()}
        rows = [
            [
                "trained",
                f"{self.num_parameters:,}",
                sizes["before"],
                sizes["before_compressed"],
                number(self.metric.before),
            ],
            [
                "pruned",
                f"{self.manifest.num_parameters:,}",
                sizes["after"],
                sizes["after_compressed"],
                number(self.metric.after),
            ],
        ]
        metric = f"{self.metric.metric} on {self.metric.rows:,} validation rows"
        columns = ["network", "parameters", "weights", "compressed", metric]
        removed = "channels of the narrowed layers removed"
        what = removed if self.manifest.widths else "parameters are zero"
        summary = (
            f"{self.manifest.kind}: {self.removed_fraction:.1%} of the {what}, "
            f"{self.manifest.sparsity:.1%} requested"
        )
        return f"{summary}\n{text_table(columns, rows, '  ')}"


def prune(
    seed: int,
    train: TrainParams,
    prune: PruneParams,
    evaluate: MeasuringParams,
    data: TrainingData,
    model: Path,
) -> PruningResult:
    """Prune the trained model in the folder `model`.

    Raises ParamsError if these settings prune nothing, UnavailableError or TrainingError as any
    training does.
    """
    silence_chatter()
    params = train.model_copy(
        update={
            **_FINE_TUNING,
            **ONE_PROCESS,
            "epochs": prune.epochs,
            "learning_rate": prune.learning_rate,
        }
    )
    placement = place(params, one_process("a pruning", "prune"))
    trained, source = load_network(model), read_model_manifest(model)
    network, widths, callbacks = _prune_network(trained, prune)
    callbacks.append(EpochPrinter("fine-tune", "the validation rows"))
    with tempfile.TemporaryDirectory() as folder:
        train_short(network, seed, params, placement, data, callbacks, Path(folder))
    weights = {
        name: (value.detach().float() if value.is_floating_point() else value).cpu()
        for name, value in network.state_dict().items()
    }
    network, device = pruned_network(trained.spec, weights), default_device()
    fitted = Calibrator(network, evaluate, seed, device).fit(data.train[0], data.val)
    before, after = (
        predict(one, data.val.inputs, evaluate.batch_size, device) for one in (trained, network)
    )
    task = data.manifest.task
    metric = kind_of(task).target.headline
    resampling = Resampling(seed, evaluate.bootstrap_samples, evaluate.confidence)
    contents = {
        "before": serialize_tensors(trained.state_dict()),
        "after": serialize_tensors(weights),
    }
    sizes = {name: len(content) for name, content in contents.items()}
    for name, content in contents.items():
        sizes[f"{name}_compressed"] = len(zlib.compress(content))
    manifest = PrunedManifest(
        format_version=2,
        kind="structured" if widths else "magnitude",
        network=trained.spec,
        sparsity=prune.sparsity,
        widths=widths,
        num_parameters=count_parameters(network),
        num_zeros=sum(int((value == 0).sum()) for value in network.parameters()),
        pruned_from=source.weights_sha256,
        weights_sha256=files.sha256_bytes(contents["after"]),
        calibration=fitted.calibration,
        epochs=prune.epochs,
        learning_rate=prune.learning_rate,
        seed=seed,
        requested=requested_setup(train),
        actual=placement.expected,
    )
    return PruningResult(
        manifest=manifest,
        weights=weights,
        fitted=fitted,
        num_parameters=count_parameters(trained),
        bytes=sizes,
        metric=paired_difference(task, metric, data.val.targets, before, after, resampling),
    )


def _prune_network(
    trained: Network, prune: PruneParams
) -> tuple[Network, dict[str, Width], list[pl.Callback]]:
    """Return a pruned network to fine-tune, its narrowed layers, and callbacks that keep zeros."""
    if prune.kind == "structured":
        weights, widths = prune_channels(trained, prune.sparsity)
        return pruned_network(trained.spec, weights).train(), widths, []
    network = pruned_network(trained.spec, trained.state_dict())
    return network.train(), {}, [KeepZeros(network, magnitude_masks(network, prune.sparsity))]


def magnitude_masks(network: Network, sparsity: float) -> dict[str, Tensor]:
    """Return a bool mask for each weight tensor, False for the weights nearest to zero.

    The fraction `sparsity` of all weights is False. After Han et al. 2015, "Learning both weights
    and connections", with one threshold for all layers. The zeros do not make a dense graph faster,
    but its file compresses better.
    """
    weights = {
        name: value.detach().cpu()
        for name, value in network.named_parameters()
        if decays(name, value)
    }
    sizes = torch.cat([value.abs().flatten() for value in weights.values()])
    mask = torch.ones(len(sizes), dtype=torch.bool)
    mask[torch.argsort(sizes, stable=True)[: round(sparsity * len(sizes))]] = False
    parts = torch.split(mask, [value.numel() for value in weights.values()])
    return {
        name: part.view(value.shape)
        for (name, value), part in zip(weights.items(), parts, strict=True)
    }


class KeepZeros(pl.Callback):
    """Sets the masked weights to zero, before the first step and after each."""

    def __init__(self, network: nn.Module, masks: Mapping[str, Tensor]) -> None:
        self._weights = {name: value for name, value in network.named_parameters() if name in masks}
        self._masks = dict(masks)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._masks = {
            name: mask.to(self._weights[name].device) for name, mask in self._masks.items()
        }
        self.apply()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        for name, mask in self._masks.items():
            self._weights[name].mul_(mask)
