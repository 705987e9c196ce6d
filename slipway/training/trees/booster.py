"""Fits LightGBM's trees to the training rows; the validation rows decide when to stop.

The same seed, rows and settings give the same model text, on any number of threads. Loss and
headline metric of each round are computed as for networks, so trees and networks are comparable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipway.config.training import TrainParams
from slipway.data.store.packed import PackedSplit
from slipway.kinds.registry import kind_of
from slipway.system.errors import TrainingError
from slipway.training.checkpoints.callback import has_ended
from slipway.training.job import TrainingData
from slipway.training.networks.trees import TreeNetwork, import_lightgbm, stored_text

if TYPE_CHECKING:
    from lightgbm import Booster, Dataset

History = list[dict[str, float]]


@dataclass(frozen=True)
class FittedTrees:
    """The trees to keep in LightGBM's text format, and the metrics of every round."""

    text: str
    history: History
    kept_round: int  # last round, counted from 1, whose trees are kept


def fit_trees(
    network: TreeNetwork,
    seed: int,
    params: TrainParams,
    data: TrainingData,
    threads: int,
    on_round: Callable[[History], None] = lambda history: None,
) -> FittedTrees:
    """Fit at most `params.epochs` rounds of trees; stop if the validation loss stops falling.

    Loads into `network` the trees up to the best round, or all of them if `params.keep` says so.
    Calls `on_round` after each round. Raises TrainingError if no split can be found.
    """
    lightgbm, measure = import_lightgbm(), _Measure(network, params, data)
    settings = _settings(network, seed, params, threads)
    train = _dataset(network, data.train[0], settings, weights=_weights(params, data))
    val = _dataset(network, data.val, settings, reference=train)
    booster: Booster = lightgbm.Booster(settings, train)
    booster.add_valid(val, "val")
    history: History = []
    patience = params.patience(len(data.val))
    while not has_ended(history, params.epochs, patience):
        if booster.update():  # True: no leaf can be split any more
            break
        loss, _ = (found[2] for found in booster.eval_train(measure.of(data.train[0])))
        val_loss, headline = (found[2] for found in booster.eval_valid(measure.of(data.val)))
        history.append(
            {
                "train/loss": loss,
                "skipped_steps": 0.0,
                "val/loss": val_loss,
                f"val/{measure.headline}": headline,
                "learning_rate": params.learning_rate,
            }
        )
        on_round(history)
    if not history:
        raise TrainingError(
            f"no column splits the {len(data.train[0]):,} training rows into leaves of "
            f"{network.arguments.min_data_in_leaf} rows. Lower min_data_in_leaf in "
            "train.network_arguments, or see reports/clean.html for what the columns hold."
        )
    losses = [metrics["val/loss"] for metrics in history]
    kept = 1 + losses.index(min(losses)) if params.keep == "best" else len(history)
    text = stored_text(booster.model_to_string(num_iteration=kept))
    network.load_payload(text.encode())
    return FittedTrees(text, history, kept)


def _settings(network: TreeNetwork, seed: int, params: TrainParams, threads: int) -> dict[str, Any]:
    arguments = network.arguments.model_dump()
    depth = arguments.pop("max_depth")
    return {
        **network.head.objective(params, len(network.spec.classes)),
        **arguments,
        "max_depth": depth or -1,
        "bagging_freq": 1,
        "learning_rate": params.learning_rate,
        "seed": seed & 0x7FFFFFFF,  # LightGBM's is an int32
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": threads,
        "metric": "None",  # `_Measure` computes them
        "verbosity": -1,
    }


def _dataset(
    network: TreeNetwork,
    split: PackedSplit,
    settings: dict[str, Any],
    reference: "Dataset | None" = None,
    weights: NDArray[np.float64] | None = None,
) -> "Dataset":
    rows = torch.from_numpy(np.array(split.inputs[:], np.float32))
    num_numbers = len(network.inputs.names)
    dataset: Dataset = import_lightgbm().Dataset(
        network.inputs(rows).numpy(),
        label=network.head.labels(split.targets, network.spec.target_scale),
        weight=weights,
        reference=reference,
        categorical_feature=list(range(num_numbers, num_numbers + len(network.inputs.categories))),
        params=settings,
    )
    return dataset


def _weights(params: TrainParams, data: TrainingData) -> NDArray[np.float64]:
    """Return the weights (N,) of the training rows, relative to their mean, times class weights."""
    split, of_classes = data.train[0], data.class_weights(params)
    weights: NDArray[np.float64] = split.weights / data.mean_weight
    if of_classes is not None:
        weights = weights * of_classes.numpy()[split.targets.astype(np.int64)]
    return weights


class _Measure:
    """Computes loss and headline metric from LightGBM's predictions, as for networks."""

    def __init__(self, network: TreeNetwork, params: TrainParams, data: TrainingData) -> None:
        spec, target = network.spec, kind_of(network.spec.task).target
        std = spec.target_scale.std if spec.target_scale else 1.0
        self._network, self._dtype = network, target.dtype
        self._loss = target.load_part("loss")(params, std, data.class_weights(params))
        self.headline = target.headline

    def of(self, split: PackedSplit) -> Callable[[Any, Any], list[tuple[str, float, bool]]]:
        """Return a function for LightGBM's `feval` that evaluates the rows of `split`."""
        targets = torch.from_numpy(split.targets.astype(self._dtype))

        def feval(predictions: NDArray[np.float64], _: Any) -> list[tuple[str, float, bool]]:
            sums = torch.from_numpy(self._network.head.sums(predictions).astype(np.float32))
            answers = self._network.to_target_unit(self._network.head.answers(sums))
            loss = float(self._loss(answers, targets).double().mean())
            score = float(self._loss.scores(answers, targets).mean())
            return [("loss", loss, False), ("headline", self._loss.metric(score), False)]

        return feval
