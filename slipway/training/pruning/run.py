"""A pruning: cut, a short fine-tune on the training rows with their augmentation, a calibration of its own, and what it cost.

As `train` asks, but for the epochs, the learning rate and its schedule, and in one process. It is short: killed, it begins again,
and a function of seed, data and weights, so that it ends with the same bytes.
"""

import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from slipway.config.sections import MeasuringParams, PruneParams, TrainParams
from slipway.data.augmentation.plan import open_augmented
from slipway.data.store.packed import open_split, read_manifest
from slipway.kinds.registry import is_classification
from slipway.metrics.paired_bootstrap import PairedDifference, paired_difference
from slipway.metrics.scores import Resampling
from slipway.reports.console import number, size, text_table
from slipway.system import files
from slipway.training.distributed.strategies import place, requested_setup
from slipway.training.job import TrainingData, count_parameters
from slipway.training.networks.networks import Network, load_network, read_model_card
from slipway.training.pruning.channels import prune_channels
from slipway.training.pruning.magnitude import KeepZeros, smallest_masked
from slipway.training.pruning.result import PrunedCard, Width, network_of, weights_content
from slipway.training.short_run import ONE_PROCESS, EpochPrinter, one_process, train_short
from slipway.training.telemetry.progress import silence_chatter
from slipway.training.uncertainty.calibrating import Calibrator, FittedCalibration
from slipway.training.uncertainty.prediction import default_device, predict

_NO_MORE = {  # of the section train: a fine-tune starts from trained weights, and falls from its learning rate to zero
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
class PrunePaths:
    """What a pruning reads."""

    checkpoint: Path
    packed: Path
    augmented: Path


@dataclass(frozen=True)
class Pruning:
    """A pruned network and all that is said of it."""

    card: PrunedCard
    weights: dict[str, Tensor]
    fitted: FittedCalibration
    num_parameters: int  # of the trained network
    bytes: dict[
        str, int
    ]  # of the weights: before, after, before_compressed, after_compressed (zlib)
    metric: PairedDifference  # on the validation rows, from the trained network to this one

    def report(self) -> dict[str, Any]:
        """The content of `reports/prune.json`."""
        return {
            "kind": self.card.kind,
            "share": self.card.share,
            "removed_share": self.removed_share,
            "widths": {name: width.model_dump() for name, width in self.card.widths.items()},
            "parameters": {
                "before": self.num_parameters,
                "after": self.card.num_parameters,
                "zeros": self.card.num_zeros,
            },
            "bytes": self.bytes,
            "validation": self.metric.model_dump(mode="json"),
        }

    @property
    def removed_share(self) -> float:
        """Of the channels of the layers that were narrowed, or of all parameters."""
        if not self.card.widths:
            return self.card.num_zeros / self.card.num_parameters
        widths = self.card.widths.values()
        return 1 - sum(width.after for width in widths) / sum(width.before for width in widths)

    def text(self) -> str:
        """For a terminal."""
        sizes = {name: size(number_of) for name, number_of in self.bytes.items()}
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
                f"{self.card.num_parameters:,}",
                sizes["after"],
                sizes["after_compressed"],
                number(self.metric.after),
            ],
        ]
        columns = [
            "network",
            "parameters",
            "weights",
            "compressed",
            f"{self.metric.metric} on {self.metric.rows:,} validation rows",
        ]
        what = "channels of the narrowed layers" if self.card.widths else "parameters are zero"
        told = f"{self.card.kind}: {self.removed_share:.1%} of the {what}, {self.card.share:.1%} was asked for"
        return f"{told}\n{text_table(columns, rows, '  ')}"


def prune(
    seed: int, train: TrainParams, prune: PruneParams, evaluate: MeasuringParams, paths: PrunePaths
) -> Pruning:
    """Prune the checkpoint as `prune` asks.

    ParamsError where nothing can be pruned so; UnavailableError, TrainingError as for a training.
    """
    silence_chatter()
    params = train.model_copy(
        update={
            **_NO_MORE,
            **ONE_PROCESS,
            "epochs": prune.epochs,
            "learning_rate": prune.learning_rate,
        }
    )
    placement = place(params, one_process("a pruning", "prune"))
    data, trained = _open(paths), load_network(paths.checkpoint)
    network, widths, callbacks = _cut(trained, prune)
    with tempfile.TemporaryDirectory() as folder:
        train_short(
            network,
            seed,
            params,
            placement,
            data,
            [*callbacks, EpochPrinter("fine-tune", "the validation rows")],
            Path(folder),
        )
    weights = {name: _stored(value) for name, value in network.state_dict().items()}
    network = network_of(trained.spec, weights)
    device, source = default_device(), read_model_card(paths.checkpoint)
    fitted = Calibrator(network, evaluate, seed, device).fit(data.train[0], data.val)
    before, after = (
        predict(one, data.val.inputs, evaluate.batch_size, device) for one in (trained, network)
    )
    task = data.manifest.task
    metric = "accuracy" if is_classification(task) else "rmse"
    resampling = Resampling(seed, evaluate.bootstrap_samples, evaluate.confidence)
    contents = {"before": weights_content(trained.state_dict()), "after": weights_content(weights)}
    card = PrunedCard(
        format_version=1,
        kind="structured" if widths else "magnitude",
        network=trained.spec,
        share=prune.sparsity,
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
    return Pruning(
        card=card,
        weights=weights,
        fitted=fitted,
        num_parameters=count_parameters(trained),
        bytes={name: len(content) for name, content in contents.items()}
        | {f"{name}_compressed": len(zlib.compress(content)) for name, content in contents.items()},
        metric=paired_difference(task, metric, data.val.targets, before, after, resampling),
    )


def _stored(value: Tensor) -> Tensor:
    return (value.detach().float() if value.is_floating_point() else value).cpu()


def _open(paths: PrunePaths) -> TrainingData:
    manifest = read_manifest(paths.packed)
    plan, copies = open_augmented(paths.augmented, manifest)
    train, val = (
        open_split(paths.packed, manifest, split, verify=True) for split in ("train", "val")
    )
    return TrainingData(manifest, [train, copies] if copies else [train], val, plan)


def _cut(
    trained: Network, prune: PruneParams
) -> tuple[Network, dict[str, Width], list[pl.Callback]]:
    """A network of its own to be trained on, what became narrower, and what keeps zeros at zero."""
    if prune.kind == "structured":
        weights, widths = prune_channels(trained, prune.sparsity)
        return network_of(trained.spec, weights).train(), widths, []
    network = network_of(trained.spec, trained.state_dict())
    return network.train(), {}, [KeepZeros(network, smallest_masked(network, prune.sparsity))]
