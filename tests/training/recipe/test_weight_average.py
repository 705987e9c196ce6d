"""Compares the moving average of the weights with NumPy; test_recipe_runs.py has whole runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from slipway.training.recipe.weight_average import WeightAverage, averaged_weights

DECAY = 0.2  # below (1 + n) / (10 + n) from the second step on, so that it has an effect
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*isinstance.treespec, LeafSpec.*"
    ),  # of Lightning about torch
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty.*"),
]


class _Module(pl.LightningModule):
    """A layer and a norm that record their weights after each step and in validation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.nonfinite_guard = SimpleNamespace(skipped_last_step=False)
        self.network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.after_steps: list[dict[str, Tensor]] = [self._copy()]
        self.validated: list[dict[str, Tensor]] = []

    def _copy(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.network.state_dict().items()}

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        torch.manual_seed(index)
        loss: Tensor = self.network(batch).square().mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == len(self.after_steps):
            self.after_steps.append(self._copy())

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.validated.append(self._copy())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _rows() -> DataLoader[Tensor]:
    rows: Any = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=2)


def _fit(
    folder: Path, epochs: int, accumulated: int = 1, resumed: Path | None = None
) -> tuple[_Module, WeightAverage, pl.Trainer]:
    module = _Module()
    average = WeightAverage(module.network, DECAY)
    trainer = pl.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accumulate_grad_batches=accumulated,
        callbacks=[average],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, _rows(), _rows(), ckpt_path=resumed, weights_only=True)
    return module, average, trainer


def _expected(seen: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    average = {name: value.double() for name, value in seen[0].items() if value.is_floating_point()}
    for step, weights in enumerate(seen[1:], start=1):
        decay = min(DECAY, (1 + step) / (10 + step))
        average = {
            name: decay * value + (1 - decay) * weights[name].double()
            for name, value in average.items()
        }
    return average


def test_the_average_follows_weights_and_running_statistics_after_each_step(
    tmp_path: Path,
) -> None:
    for accumulated, num_steps in ((1, 6), (3, 2)):
        module, average, _ = _fit(tmp_path, 1, accumulated)
        assert len(module.after_steps) == num_steps + 1
        expected = _expected(module.after_steps)
        found = average.state_dict()["values"]
        assert found.keys() == expected.keys()
        assert all(
            torch.allclose(found[name].double(), value, atol=1e-6)
            for name, value in expected.items()
        )


def test_validation_uses_the_average_and_training_continues_with_its_own_weights(
    tmp_path: Path,
) -> None:
    module, average, _ = _fit(tmp_path, 1)
    found = average.state_dict()["values"]
    assert all(torch.equal(module.validated[-1][name], value) for name, value in found.items())
    assert all(
        torch.equal(value, module.after_steps[-1][name])
        for name, value in module.network.state_dict().items()
    )
    assert not torch.equal(found["0.weight"], module.after_steps[-1]["0.weight"])


def test_the_average_of_a_resumed_training_equals_that_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    whole = _fit(tmp_path, 2)[1].state_dict()["values"]
    _, _, stopped = _fit(tmp_path, 1)
    stopped.save_checkpoint(tmp_path / "state")
    resumed = _fit(tmp_path, 2, resumed=tmp_path / "state")[1].state_dict()["values"]
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_the_average_is_read_from_a_trainer_state_if_it_has_one(tmp_path: Path) -> None:
    _, average, trainer = _fit(tmp_path, 1)
    trainer.save_checkpoint(tmp_path / "state")
    found = averaged_weights(tmp_path / "state")
    assert all(
        torch.equal(found[name], value) for name, value in average.state_dict()["values"].items()
    )
    torch.save({"callbacks": {}}, tmp_path / "plain")
    assert averaged_weights(tmp_path / "plain") == {}
