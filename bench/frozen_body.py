"""Compares trainings of a head on stored features with those whose frozen body runs in every epoch.

`python -m bench.frozen_body PROJECT ...` takes projects whose data is packed and whose
`train.freezes_body` is true. In each it trains both ways in turn, and measures the seconds of an
epoch, the difference of the features between batches of other sizes, and that of the last metrics.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.conditions import conditions
from slipway.config.params import load_params
from slipway.config.training import TrainParams
from slipway.kinds.registry import kind_of
from slipway.system import files
from slipway.training.assembly import prepare_process
from slipway.training.distributed.placement import place, this_host
from slipway.training.frozen_features import FeatureStore, frozen_body
from slipway.training.job import TrainingData, network_spec, open_data
from slipway.training.module import TrainingModule
from slipway.training.networks.frozen_parts import FrozenBody
from slipway.training.networks.initialization import initial_network
from slipway.training.short_run import ONE_PROCESS, EpochPrinter, train_short
from slipway.training.telemetry.progress import silence_chatter
from slipway.training.uncertainty.prediction import predict_raw

RESULT = Path("bench/results/frozen_body.md")
EPOCHS, ROUNDS = 3, 2
_OTHER_ROWS = 7  # rows in a batch, beside those of the store


class _Epochs(EpochPrinter):
    """Notes the seconds and the metrics of each epoch, validation included."""

    def __init__(self) -> None:
        super().__init__("bench", "validation rows")
        self.seconds: list[float] = []
        self.metrics: dict[str, float] = {}
        self._began = 0.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert isinstance(pl_module, TrainingModule)
        self.seconds.append(time.perf_counter() - self._began)
        self.metrics = dict(pl_module.epoch_metrics)


def measure(project: Path) -> str:
    """Return the row of a project."""
    os.chdir(project)
    params = load_params(project / "params.yaml")
    train = params.train.model_copy(
        update={**ONE_PROCESS, "epochs": EPOCHS, "freeze_epochs": EPOCHS, "warmup_epochs": 1.0}
    )
    data = open_data(Path("data/packed"), Path("data/augmented"), verify=False)
    network = initial_network(0, train, network_spec(train, data.manifest))
    placement = place(train, this_host())
    body = frozen_body(network, train, data.plan, placement)
    assert isinstance(body, FrozenBody), body
    prepare_process(train, placement, network)
    with tempfile.TemporaryDirectory() as folder:
        store = FeatureStore.of(Path(folder), network, train, data, body, placement)
        began = time.perf_counter()
        store.fill("cpu")
        once = time.perf_counter() - began
        stored = store.attached()
        assert stored.val.features is not None
        rows = np.asarray(data.val.inputs)
        other = predict_raw(network, body.head, rows, _OTHER_ROWS, "cpu").scores
        difference = np.abs(other - stored.val.features[np.arange(len(rows))]).max()
        ways: dict[str, list[_Epochs]] = {"each": [], "once": []}
        for _ in range(ROUNDS):
            ways["each"].append(_train(train, data, params.seed))
            ways["once"].append(_train(train, stored, params.seed))
    each, fast = (
        statistics.median(value for run in runs for value in run.seconds) for runs in ways.values()
    )
    headline = f"val/{kind_of(data.manifest.task).target.headline}"
    found = [ways[way][-1].metrics for way in ("each", "once")]
    assert all(run.metrics == ways["once"][0].metrics for run in ways["once"])
    return (
        f"| {train.network}, {'x'.join(map(str, data.manifest.input.shape))} "
        f"| {data.num_train:,} + {len(data.val):,} | {once:.1f} | {each:.2f} | {fast:.3f} "
        f"| {each / fast:.0f} | {difference:.1e} "
        f"| {abs(found[0]['val/loss'] - found[1]['val/loss']):.1e} "
        f"| {found[0][headline]:.4f} / {found[1][headline]:.4f} |"
    )


def _train(train: TrainParams, data: TrainingData, seed: int) -> _Epochs:
    network = initial_network(seed, train, network_spec(train, data.manifest))
    epochs = _Epochs()
    with tempfile.TemporaryDirectory() as folder:
        placement = place(train, this_host())
        train_short(network, seed, train, placement, data, [epochs], Path(folder))
    return epochs


def main() -> None:
    silence_chatter()
    root = Path.cwd()
    lines = [measure(Path(name).resolve()) for name in sys.argv[1:]]
    os.chdir(root)
    files.write_text(RESULT, _page("\n".join(lines)))
    print("\n".join(lines))


def _page(table: str) -> str:
    columns = [
        *("network, row", "rows", "features, s", "s an epoch, in each", "s an epoch, once"),
        *("ratio", "features differ by", "loss differs by", "metric, in each / once"),
    ]
    return f"""# A frozen body that computes once

| {" | ".join(columns)} |
|{"---|" * len(columns)}
{table}

Medians of {ROUNDS} trainings of {EPOCHS} epochs each way in turn, validation included. Features are
compared between batches of 64 and of {_OTHER_ROWS} rows. The trainings on features gave equal
metrics to the last bit. {conditions("torch", "timm", "transformers")}
"""


if __name__ == "__main__":
    main()
