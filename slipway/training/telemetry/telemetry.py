"""What a running training tells beside its epoch lines: scalars by step, the first batch as pictures, histograms on request.

Every rank carries this callback, since histograms of shards are put together by all of them; rank 0 alone writes. Steps are
counted by the trainer, so a resumed run goes on counting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from slipway.config.sections import TrainParams
from slipway.inputs.images import ImageContract
from slipway.training.distributed.process_memory import peak_bytes
from slipway.training.recipe.gradients import engine_norm, loss_scale, whole_tensors
from slipway.training.telemetry.board import Board
from slipway.training.telemetry.run_log import RunLog
from slipway.training.telemetry.step_clock import Lap, StepClock


@dataclass(frozen=True)
class Where:
    """What a training's telemetry needs to know of it."""

    board: Path
    rows_per_step: int
    num_accumulated: int
    steps_per_epoch: int
    history: Sequence[Mapping[str, float]]  # of the epochs before a resume


class StepTelemetry(pl.Callback):
    """Scalars every `log_every_steps`, images once, histograms every `log_histograms_every_epochs`."""

    def __init__(self, params: TrainParams, where: Where, log: RunLog, clock: StepClock) -> None:
        self._params, self._where, self._log = params, where, log
        self._board: Board | None = None
        self._lap, self._lap_step = Lap(clock), 0
        self._learning_rate = 0.0
        self.latest: dict[
            str, float
        ] = {}  # of the last step that was written, for the progress bar

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._lap_step = trainer.global_step
        if not trainer.is_global_zero:
            return
        self._board = Board(
            self._where.board, trainer.global_step, self._where.history, self._where.steps_per_epoch
        )
        if trainer.global_step == 0 and isinstance(pl_module.network.spec.input, ImageContract):
            self._show_first_batch(pl_module.network)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._lap.begin()  # validation is no part of a lap
        self._lap_step = trainer.global_step

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self._is_due(trainer.global_step + 1) and trainer.is_global_zero:
            self._learning_rate = float(
                optimizer.param_groups[0]["lr"]
            )  # of this step: the schedule goes on before the batch ends
        every = self._params.log_histograms_every_epochs
        if every and trainer.is_last_batch and (trainer.current_epoch + 1) % every == 0:
            self._write_histograms(trainer, pl_module.network)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ends_step = (
            trainer.global_step > self._lap_step
            and (batch_idx + 1) % self._where.num_accumulated == 0
        )
        if self._board and ends_step and self._is_due(trainer.global_step):
            self._write_step(trainer, pl_module, outputs)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._board:
            epoch = trainer.current_epoch + 1
            self._board.scalars(
                {**pl_module.epoch_metrics, "epoch": float(epoch)}, trainer.global_step
            )
            self._log.write(
                "epoch", step=trainer.global_step, epoch=epoch, **pl_module.epoch_metrics
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _is_due(self, step: int) -> bool:
        return step == 1 or step % self._params.log_every_steps == 0

    def _write_step(self, trainer: pl.Trainer, module: Any, outputs: Any) -> None:
        step, norm = trainer.global_step, module.guard.gradient_norm
        figures: dict[str, float | None] = {
            "loss": _loss(outputs, self._where.num_accumulated),
            "learning_rate": self._learning_rate,
            "gradient_norm": engine_norm(trainer) if norm is None else float(norm),
            "loss_scale": loss_scale(trainer),
            **self._lap.finish((step - self._lap_step) * self._where.rows_per_step),
            "memory_bytes": float(peak_bytes(on_gpu=trainer.strategy.root_device.type == "cuda")),
        }
        self._lap_step = step
        self.latest = {name: value for name, value in figures.items() if value is not None}
        assert self._board
        self._board.scalars({f"step/{name}": value for name, value in self.latest.items()}, step)
        self._log.write("step", step=step, **self.latest)

    def _show_first_batch(self, network: torch.nn.Module) -> None:
        """Exactly what the network is given first, after all augmentation; rank 0's share of it."""

        def show(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            hook.remove()
            assert self._board
            self._board.images("first_batch", inputs[0].detach().cpu(), 0)

        hook = network.register_forward_pre_hook(show)

    def _write_histograms(self, trainer: pl.Trainer, network: torch.nn.Module) -> None:
        for name, weight, gradient in whole_tensors(trainer, network):
            if self._board:
                self._board.histogram(f"weights/{name}", weight, trainer.global_step + 1)
                if gradient is not None:
                    self._board.histogram(f"gradients/{name}", gradient, trainer.global_step + 1)

    def _close(self) -> None:
        if self._board:
            self._board.close()
            self._board = None


def _loss(outputs: Any, num_accumulated: int) -> float | None:
    """Of this rank's last batch; Lightning has divided it by the number of accumulated ones."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return float(loss) * num_accumulated if isinstance(loss, Tensor) else None
