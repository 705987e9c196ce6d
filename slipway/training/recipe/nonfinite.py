"""Keeps a step that is not finite out of everything that lasts: weights, optimizer, running statistics, sums of the epoch.

What is judged is the norm of the gradient, once per optimizer step: that is all the host waits for, and with DeepSpeed not
even that, since its own check already does. A loss that is not finite makes its gradient NaN, which the reduction of
gradients spreads; so all ranks find the same without asking each other. Only to name the rows they exchange messages.
In float16 a gradient that overflows is the loss scaler's affair, as long as the losses are finite and the scale can sink.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from slipway.config.sections import TrainParams
from slipway.system.errors import TrainingError
from slipway.training.batches.batches import Batch
from slipway.training.distributed.collectives import gather_objects

_LOWEST_LOSS_SCALE = 1.0  # DeepSpeed's floor; torch's scaler has none and would sink until nothing is left of the gradient
_MOST_NAMED = 64


class SeenLosses(NamedTuple):
    """The losses of one batch, which a step has one or, with accumulation, several of."""

    losses: Tensor  # (B,) float32, detached
    counted: Tensor  # (B,) bool
    rows: Tensor  # (B,) int64 positions in the training rows


class _BadStep(NamedTuple):
    """Over all ranks."""

    of_loss: bool  # otherwise every loss is finite and the gradient alone is not
    num_rows: int
    ids: list[
        str
    ]  # of the rows whose loss is not finite; of all rows of the step where every loss is


class StepGuard:
    """Judges every optimizer step of one training; `ids` are those of the training rows."""

    def __init__(self, network: nn.Module, params: TrainParams, ids: Sequence[str]) -> None:
        self.num_skipped = 0  # steps of the whole run whose loss or gradient was not finite
        self.just_dropped = False  # the last optimizer step changed nothing: for what follows the weights, like an average of them
        self._network, self._params, self._ids = network, params, ids
        self._buffers: list[Tensor] | None = (
            None  # of the network on its device, which is known at the first batch
        )
        self._kept_buffers: list[Tensor] = []
        self._seen: list[SeenLosses] = []
        self.gradient_norm: Tensor | None = (
            None  # of the last step before clipping, () on the device; None with DeepSpeed, which has its own
        )
        self._is_finite = True  # the gradient of the last step, without DeepSpeed
        self._scaler = _LossScaler(None)

    def state_dict(self) -> dict[str, int]:
        """What a resumed run has to know to decide the same."""
        return {"num_skipped": self.num_skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self.num_skipped = state["num_skipped"]

    def start_batch(self) -> None:
        """Before the forward of a batch, which changes running statistics: remember those before the step."""
        if self._seen:
            return
        if self._buffers is None:
            self._buffers = list(self._network.buffers())
            self._kept_buffers = [buffer.clone() for buffer in self._buffers]
        _copy(self._buffers, self._kept_buffers)

    def watched_mean(self, losses: Tensor, batch: Batch) -> Tensor:
        """The mean of (B,) losses, () float32; its gradient is NaN where it is not finite, which an infinite loss alone need not bring."""
        self._seen.append(SeenLosses(losses.detach(), batch.counted, batch.rows))
        mean = losses.mean()
        return mean * torch.where(torch.isfinite(mean.detach()), 1.0, torch.nan)

    def forget(self) -> None:
        """Drop what was seen, where no trainer makes the step."""
        self._seen = []

    def clip(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient as torch's `clip_grad_norm_` does; one that is not finite is thrown away, so that the step changes nothing."""
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            return  # which has its own
        parameters = [value for group in optimizer.param_groups for value in group["params"]]
        norm = get_total_norm([value.grad for value in parameters if value.grad is not None])
        self.gradient_norm, self._is_finite = norm, bool(torch.isfinite(norm))
        if not self._is_finite:
            self._scaler = _LossScaler(getattr(trainer.precision_plugin, "scaler", None))
            optimizer.zero_grad(
                set_to_none=True
            )  # without a gradient no optimizer of torch touches a weight or its own state
        elif self._params.gradient_clip_norm:
            clip_grads_with_norm_(parameters, self._params.gradient_clip_norm, norm)

    def before_step(self, trainer: Trainer) -> None:
        """Before the optimizer (or DeepSpeed's engine) is asked for a step."""
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            self._scaler = _LossScaler(trainer.strategy.deepspeed_engine.optimizer.loss_scaler)

    def after_step(self, trainer: Trainer) -> list[SeenLosses]:
        """The losses to count, empty while batches accumulate and after a step that was skipped.

        TrainingError, on all ranks, where the run must not go on.
        """
        if len(self._seen) < trainer.accumulate_grad_batches:
            return []
        seen, self._seen = self._seen, []
        self.just_dropped = not self._was_applied(trainer)
        if not self.just_dropped:
            return seen
        assert self._buffers is not None
        _copy(self._kept_buffers, self._buffers)
        step = f"step {trainer.global_step + 1} (epoch {trainer.current_epoch + 1})"
        bad = self._describe(seen)
        if self._scaler.scales and not bad.of_loss:
            if self._scaler.value <= _LOWEST_LOSS_SCALE:
                raise TrainingError(_at_the_floor(bad, step, self._scaler.value))
            return seen  # their losses are fine, and the scaler has lowered its scale
        self._scaler.restore()
        self.num_skipped += 1
        self._go_on_or_stop(trainer, _not_finite(bad, step))
        return []

    def _was_applied(self, trainer: Trainer) -> bool:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            return bool(trainer.strategy.deepspeed_engine.was_step_applied())
        return self._is_finite

    def _go_on_or_stop(self, trainer: Trainer, what: str) -> None:
        most = self._params.max_skipped_steps
        if self._params.on_nonfinite == "fail":
            raise TrainingError(
                f"{what} {_CURES}, or let such steps be left out: train.on_nonfinite: skip."
            )
        if self.num_skipped > most:
            raise TrainingError(
                f"{what} It is skipped step {self.num_skipped} of the run, train.max_skipped_steps is {most}. {_CURES}."
            )
        if trainer.is_global_zero:
            print(
                f"skipped   {what} Skipped steps so far: {self.num_skipped} of at most {most}.",
                flush=True,
            )

    def _describe(self, seen: list[SeenLosses]) -> _BadStep:
        rows = torch.cat([batch.rows for batch in seen]).tolist()
        finite = torch.isfinite(torch.cat([batch.losses for batch in seen])).tolist()
        own = ([row for row, is_finite in zip(rows, finite, strict=True) if not is_finite], rows)
        of_ranks = gather_objects(own)
        bad = [row for of_rank, _ in of_ranks for row in of_rank]
        every = [row for _, of_rank in of_ranks for row in of_rank]
        return _BadStep(bool(bad), len(every), [self._ids[row] for row in bad or every])


class _LossScaler:
    """torch's GradScaler or DeepSpeed's, as it was before a step; None and a constant scale of 1 scale nothing."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._of_torch = isinstance(scaler, torch.amp.GradScaler)
        self.scales = self._of_torch or getattr(scaler, "dynamic", False)
        self._state = (
            scaler.state_dict() if self._of_torch else dict(vars(scaler)) if self.scales else {}
        )
        if self.scales and not self._of_torch:
            scaler.raise_error_at_min_scale = (
                False  # it would end the run in the middle of a step, with a bare Exception
            )

    @property
    def value(self) -> float:
        return float(self._state["scale" if self._of_torch else "cur_scale"])

    def restore(self) -> None:
        """Undo what the scaler made of a step whose loss was not finite, which no scale is to blame for."""
        if self._of_torch:
            self._scaler.load_state_dict(self._state)
        elif self.scales:
            vars(self._scaler).update(self._state)


_CURES = "Look at these rows, lower train.learning_rate, raise train.warmup_epochs, or use train.precision 32-true"


def _not_finite(bad: _BadStep, step: str) -> str:
    named = _named(bad.ids)
    if bad.of_loss:
        what = f"the loss is not finite in {step} for {len(bad.ids)} of {bad.num_rows} rows, with the ids {named}."
    else:
        what = f"the gradient is not finite in {step}, while the loss of each of its {bad.num_rows} rows is; their ids are {named}."
    return f"{what} No weight was changed by this step."


def _at_the_floor(bad: _BadStep, step: str, scale: float) -> str:
    return (
        f"the gradient overflows float16 in {step}, and the loss scale cannot be lowered any more: it is at {scale:g}. "
        "No weight was changed by this step. Use train.precision bf16-mixed or 32-true, lower train.learning_rate, or look at "
        f"the rows of this step, with the ids {_named(bad.ids)}."
    )


def _named(ids: list[str]) -> str:
    return ", ".join(ids[:_MOST_NAMED]) + (
        f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else ""
    )


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    if sources:
        torch._foreach_copy_(targets, sources)
