"""Non-finite guard: a step with a NaN or infinite loss or gradient leaves no lasting change.

The guard protects weights, optimizer, running statistics and the sums of the epoch. It checks the
norm of the gradient once per optimizer step, so the host synchronises with the GPU only once; with
DeepSpeed it reads the result of DeepSpeed's own check. A non-finite loss makes the gradient NaN,
and the reduction of gradients spreads the NaN, so all ranks reach the same result; they communicate
only to list the rows. In float16 the loss scaler handles an overflowing gradient, as long as the
losses are finite and the scale can be lowered. A loss spike is skipped in the same way: its
gradient is replaced by NaN.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from slipway.config.training import TrainParams
from slipway.system.errors import TrainingError
from slipway.training.batches.batches import Batch
from slipway.training.distributed.collectives import gather_objects
from slipway.training.distributed.pipeline import PipelineStrategy
from slipway.training.distributed.shards import by_division, total_norm
from slipway.training.recipe.loss_spikes import WINDOW, LossWindow, mean_over_ranks

# DeepSpeed's lower limit. torch's scaler has none, and would fall until the gradient vanishes.
_MIN_LOSS_SCALE = 1.0
_MAX_NAMED_IDS = 64
_REMEDIES = (
    "Look at these rows, lower train.learning_rate, raise train.warmup_epochs, or use "
    "train.precision 32-true"
)


class BatchLosses(NamedTuple):
    """The losses of one batch; a step has several batches if gradients are accumulated."""

    losses: Tensor  # (B,) float32, detached
    counted: Tensor  # (B,) bool
    rows: Tensor  # (B,) int64 positions in the training rows


class _BadStep(NamedTuple):
    """A step in which some rank has a non-finite loss or gradient."""

    name: str  # for messages, such as "step 3 (epoch 1)"
    has_bad_loss: bool  # otherwise every loss is finite and only the gradient is not
    num_rows: int
    ids: list[str]  # rows with a non-finite loss; all rows of the step if every loss is finite


class NonFiniteGuard:
    """Checks every optimizer step of one training; `ids` are the ids of the training rows."""

    def __init__(self, network: nn.Module, params: TrainParams, ids: Sequence[str]) -> None:
        self.num_skipped = 0  # steps of the whole run that changed no weight
        self.skipped_last_step = False
        # () of the last step before clipping, on the device; None with DeepSpeed
        self.gradient_norm: Tensor | None = None
        self._network, self._params, self._ids = network, params, ids
        # by dtype; known at the first batch, when they are on the device
        self._buffers: list[list[Tensor]] | None = None
        self._saved_buffers: list[list[Tensor]] = []
        self._batches: list[BatchLosses] = []
        self._is_finite = True  # the gradient of the last step, without DeepSpeed
        self._scaler = _LossScaler(None)
        self._window = LossWindow()
        self._step_loss = 0.0  # loss of the last step, if the guard checks for spikes
        self._spike: str | None = None  # description of the step's loss spike; None if it is none
        self._rewinds = False

    def state_dict(self) -> dict[str, Any]:
        return {"num_skipped": self.num_skipped, "losses": self._window.values()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_skipped, self._window = state["num_skipped"], LossWindow(state["losses"])

    def take_rewind(self) -> bool:
        """Return True once after a spike that should send the training back to a checkpoint."""
        wanted, self._rewinds = self._rewinds, False
        return wanted

    def start_batch(self) -> None:
        """Save the running statistics before the first forward pass of a step changes them."""
        if self._batches:
            return
        if self._buffers is None:
            self._buffers = _by_dtype(self._network.buffers())
            self._saved_buffers = [[one.clone() for one in group] for group in self._buffers]
        _copy(self._buffers, self._saved_buffers)

    def checked_mean(self, losses: Tensor, batch: Batch, num_accumulated: int = 1) -> Tensor:
        """Return the mean of losses (B,), whose gradient is NaN if the mean is not finite.

        Without this, an infinite loss could have a finite gradient. A loss spike gets a NaN
        gradient, too; it is detected in the last of the `num_accumulated` batches of a step.
        """
        self._batches.append(BatchLosses(losses.detach(), batch.counted, batch.rows))
        mean = losses.mean()
        if self._params.on_loss_spike and len(self._batches) == num_accumulated:
            self._step_loss = mean_over_ranks([batch.losses for batch in self._batches])
            self._spike = self._window.describe_spike(self._step_loss)
            if self._spike is not None:
                return mean * torch.nan
        return mean * torch.where(torch.isfinite(mean.detach()), 1.0, torch.nan)

    def discard(self) -> None:
        """Discard the recorded batches of a step that the trainer aborts."""
        self._batches = []

    def clip(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient as `clip_grad_norm_` does, and discard a non-finite gradient.

        Does nothing with DeepSpeed, which clips gradients itself.
        """
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            return
        parameters = [value for group in optimizer.param_groups for value in group["params"]]
        norm = total_norm([value.grad for value in parameters if value.grad is not None])
        if isinstance(trainer.strategy, PipelineStrategy):
            norm = trainer.strategy.norm(norm)
        self.gradient_norm, self._is_finite = norm, bool(torch.isfinite(norm))
        if not self._is_finite:
            self._scaler = _LossScaler(getattr(trainer.precision_plugin, "scaler", None))
            # Without a gradient torch's optimizers change neither a weight nor their own state.
            optimizer.zero_grad(set_to_none=True)
        elif self._params.gradient_clip_norm:
            for group in by_division(parameters):
                clip_grads_with_norm_(group, self._params.gradient_clip_norm, norm)

    def before_step(self, trainer: Trainer) -> None:
        """Save the state of DeepSpeed's loss scaler, to restore it if the step is skipped."""
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            self._scaler = _LossScaler(trainer.strategy.deepspeed_engine.optimizer.loss_scaler)

    def after_step(self, trainer: Trainer) -> list[BatchLosses]:
        """Return the losses to count: none while gradients accumulate or after a skipped step.

        Raises TrainingError on all ranks if the run must stop.
        """
        if len(self._batches) < trainer.accumulate_grad_batches:
            return []
        batches, self._batches = self._batches, []
        self.skipped_last_step = not self._was_applied(trainer)
        spike, self._spike = self._spike, None
        if not self.skipped_last_step:
            if self._params.on_loss_spike:
                self._window.add(self._step_loss)
            return batches
        assert self._buffers is not None
        _copy(self._saved_buffers, self._buffers)
        bad = self._find_bad_rows(batches, trainer)
        if spike is not None:
            self._skip_spike(bad, spike, trainer)
        elif bad.has_bad_loss or not self._scaler.is_dynamic:
            self._skip_nonfinite(bad, trainer)
        elif self._scaler.value <= _MIN_LOSS_SCALE:
            raise TrainingError(_describe_overflow(bad, self._scaler.value))
        else:
            return batches  # their losses are fine, and the scaler has lowered its scale
        return []

    def _skip_spike(self, bad: _BadStep, spike: str, trainer: Trainer) -> None:
        self._scaler.restore()
        self._rewinds = self._params.on_loss_spike == "rewind"
        self._count_skip(trainer, _describe_spike(bad, self._step_loss, spike))

    def _skip_nonfinite(self, bad: _BadStep, trainer: Trainer) -> None:
        """Skip the step, or raise TrainingError if `train.on_nonfinite` is fail."""
        self._scaler.restore()
        message = _describe_nonfinite(bad)
        if self._params.on_nonfinite == "fail":
            raise TrainingError(
                f"{message} {_REMEDIES}, or skip such steps: train.on_nonfinite: skip."
            )
        self._count_skip(trainer, message)

    def _was_applied(self, trainer: Trainer) -> bool:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            return bool(trainer.strategy.deepspeed_engine.was_step_applied())
        return self._is_finite

    def _count_skip(self, trainer: Trainer, message: str) -> None:
        self.num_skipped += 1
        limit = self._params.max_skipped_steps
        if self.num_skipped > limit:
            raise TrainingError(
                f"{message} The run has skipped {self.num_skipped} steps, expected at most "
                f"{limit} (train.max_skipped_steps). {_REMEDIES}."
            )
        if trainer.is_global_zero:
            print(
                f"skipped   {message} Skipped steps so far: {self.num_skipped} of at most {limit}.",
                flush=True,
            )

    def _find_bad_rows(self, batches: list[BatchLosses], trainer: Trainer) -> _BadStep:
        rows = torch.cat([batch.rows for batch in batches]).tolist()
        finite = torch.isfinite(torch.cat([batch.losses for batch in batches])).tolist()
        own_bad = [row for row, is_finite in zip(rows, finite, strict=True) if not is_finite]
        ranks = gather_objects((own_bad, rows))
        # Ranks may have computed the same rows.
        bad = list(dict.fromkeys(row for rank_bad, _ in ranks for row in rank_bad))
        every = list(dict.fromkeys(row for _, rank_rows in ranks for row in rank_rows))
        return _BadStep(
            name=f"step {trainer.global_step + 1} (epoch {trainer.current_epoch + 1})",
            has_bad_loss=bool(bad),
            num_rows=len(every),
            ids=[self._ids[row] for row in bad or every],
        )


class _LossScaler:
    """The state of torch's GradScaler or DeepSpeed's dynamic scaler before a step."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._is_torch = isinstance(scaler, torch.amp.GradScaler)
        self.is_dynamic = self._is_torch or getattr(scaler, "dynamic", False)
        self._state: dict[str, Any] = {}
        if self._is_torch:
            self._state = scaler.state_dict()
        elif self.is_dynamic:
            self._state = dict(vars(scaler))
            # DeepSpeed would end the run in the middle of a step, with a bare Exception.
            scaler.raise_error_at_min_scale = False

    @property
    def value(self) -> float:
        return float(self._state["scale" if self._is_torch else "cur_scale"])

    def restore(self) -> None:
        """Restore the scaler after a non-finite loss, which a lower scale would not prevent."""
        if self._is_torch:
            self._scaler.load_state_dict(self._state)
        elif self.is_dynamic:
            vars(self._scaler).update(self._state)


def _describe_nonfinite(bad: _BadStep) -> str:
    ids = _list_ids(bad.ids)
    if bad.has_bad_loss:
        what = (
            f"the loss is not finite in {bad.name} for {len(bad.ids)} of {bad.num_rows} rows, with "
            f"the ids {ids}."
        )
    else:
        what = (
            f"the gradient is not finite in {bad.name}, while the losses of all its {bad.num_rows} "
            f"rows are; their ids are {ids}."
        )
    return f"{what} No weight was changed by this step."


def _describe_spike(bad: _BadStep, loss: float, spike: str) -> str:
    return (
        f"the loss {loss:.4g} of {bad.name} is {spike} {WINDOW} steps; the ids of its rows are "
        f"{_list_ids(bad.ids)}. No weight was changed by this step."
    )


def _describe_overflow(bad: _BadStep, scale: float) -> str:
    return (
        f"the gradient overflows float16 in {bad.name}, and the loss scale cannot be lowered any "
        f"more: it is at {scale:g}. No weight was changed by this step. Use train.precision "
        "bf16-mixed or 32-true, lower train.learning_rate, or look at the rows of this step, with "
        f"the ids {_list_ids(bad.ids)}."
    )


def _list_ids(ids: list[str]) -> str:
    more = f" and {len(ids) - _MAX_NAMED_IDS} more" if len(ids) > _MAX_NAMED_IDS else ""
    return ", ".join(ids[:_MAX_NAMED_IDS]) + more


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors of one dtype, which a GPU copies in one kernel; mixed ones it copies singly."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _copy(sources: list[list[Tensor]], targets: list[list[Tensor]]) -> None:
    for of_dtype, to in zip(sources, targets, strict=True):
        torch._foreach_copy_(to, of_dtype)
