"""Resumable state under `.work/train/FINGERPRINT/`: it survives a kill at any moment and is gone after success.

fingerprint.json        what the training depends on, to tell others what differs
epoch-000005/state      the trainer's state: a file, or a directory of shards with DeepSpeed
epoch-000005/save.json  written last: metrics so far, and the SHA-256 of every file of the state

Each save is a new directory, renamed into place when it is complete. A damaged one is named and
skipped, never loaded. On several nodes the directory has to be on a shared file system.
"""

import io
import json
import shutil
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pydantic import ValidationError
from torch import Tensor

from slipway import files
from slipway.contract import Contract
from slipway.errors import TrainingError
from slipway.params import TrainParams
from slipway.training.early_stopping import has_ended
from slipway.training.fingerprint import Fingerprint
from slipway.training.networks import TrainingSetup
from slipway.training.strategies import actual_setup
from slipway.training.weight_average import averaged_weights

_PREFIX = "network."  # of the weights inside the Lightning module
Keep = Literal["best", "last"]


class Save(Contract):
    """The content of `save.json`: a training after `epoch` epochs."""

    format_version: Literal[1]
    epoch: int  # that were completed
    kept_epoch: int  # whose weights would become the checkpoint
    history: list[dict[str, float]]  # metrics of each epoch so far
    actual: TrainingSetup  # what ran
    files: dict[str, str]  # hex SHA-256 by path below the save


class Saves:
    """The saves of one training."""

    def __init__(self, work: Path, fingerprint: Fingerprint) -> None:
        self._work, self._fingerprint = work, fingerprint
        self.root = work / fingerprint.name

    def newest(self) -> tuple[Save | None, list[str]]:
        """The newest save that is whole, and so is the one that it keeps; and what is wrong with newer ones. Changes nothing."""
        problems: list[str] = []
        whole: dict[int, Save] = {}
        for folder in sorted(self.root.glob("epoch-??????")):
            try:
                save = _verified(folder)
            except (OSError, ValueError) as error:
                problems.append(f"{folder} is damaged and skipped: {error}")
            else:
                whole[save.epoch] = save
        usable = [save for save in whole.values() if save.kept_epoch in whole]
        return (max(usable, key=lambda save: save.epoch) if usable else None), problems

    def state(self, epoch: int) -> Path:
        """The trainer's state after `epoch` epochs."""
        return self._folder(epoch) / "state"

    def write(self, trainer: pl.Trainer, history: list[dict[str, float]], kept_epoch: int) -> None:
        """Save the trainer's state, on all ranks together."""
        epoch = len(history)
        with ExitStack() as stack:
            partial = stack.enter_context(files.new_directory(self._folder(epoch))) if trainer.is_global_zero else None
            partial = Path(trainer.strategy.broadcast(str(partial)))
            _save_state(trainer, partial / "state")
            trainer.strategy.barrier("every rank has written its part")
            if trainer.is_global_zero:
                save = Save(
                    format_version=1,
                    epoch=epoch,
                    kept_epoch=kept_epoch,
                    history=history,
                    actual=actual_setup(trainer),
                    files=_digests(partial),
                )
                files.write_json(partial / "save.json", save.model_dump(mode="json"))
        if trainer.is_global_zero:
            self._prune(epoch, kept_epoch)
        trainer.strategy.barrier("the save is complete")

    def open(self) -> None:
        """Make the directory and say what it is for; directories that nothing was saved in go. For one process."""
        for path in self._work.glob("*/fingerprint.json"):
            if path.parent != self.root and not any(path.parent.glob("epoch-??????")):
                shutil.rmtree(path.parent)
        files.write_json(self.root / "fingerprint.json", self._fingerprint.model_dump(mode="json"))

    def remove(self) -> None:
        """Forget everything, after success."""
        shutil.rmtree(self.root)

    def others(self) -> list[str]:
        """One line for each unfinished training with another fingerprint, with what differs. They are left alone."""
        lines = []
        for path in sorted(self._work.glob("*/fingerprint.json")):
            if path.parent == self.root:
                continue
            try:
                other = Fingerprint.model_validate(json.loads(path.read_bytes()))
            except ValueError:
                lines.append(f"{path.parent} holds a training that this version does not understand")
                continue
            differences = other.differences(self._fingerprint)
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            lines.append(f"{path.parent} differs in {'; '.join(differences[:3])}{more}")
        return lines

    def _folder(self, epoch: int) -> Path:
        return self.root / f"epoch-{epoch:06d}"

    def _prune(self, epoch: int, kept_epoch: int) -> None:
        """Leave this save, the one before it, and the ones that these two keep."""
        found = sorted(int(folder.name.removeprefix("epoch-")) for folder in self.root.glob("epoch-??????"))
        before = [number for number in found if number < epoch][-1:]
        wanted = {epoch, kept_epoch, *before, *(_kept_by(self._folder(number)) for number in before)}
        for number in set(found) - wanted:
            shutil.rmtree(self._folder(number))


class Saver(pl.callbacks.Checkpoint):
    """Keeps the history, ends a training early, and saves: every so many epochs, at the end, and when the validation loss is the lowest."""

    def __init__(self, saves: Saves, resumed: Save | None, params: TrainParams) -> None:
        self._saves, self._params = saves, params
        self.history: list[dict[str, float]] = list(resumed.history) if resumed else []
        self.kept_epoch = resumed.kept_epoch if resumed else 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """TrainingError where ranks have resumed from different saves."""
        first = trainer.strategy.broadcast(len(self.history))
        if first != len(self.history) or first != trainer.current_epoch:
            raise TrainingError(
                f"rank {trainer.global_rank} starts after epoch {len(self.history)}, rank 0 after {first}. "
                "All nodes need the project on one shared file system."
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        epoch = trainer.current_epoch + 1
        self.history.append(dict(pl_module.epoch_metrics))
        better = self.kept_epoch == 0 or self.history[-1]["val/loss"] < self.history[self.kept_epoch - 1]["val/loss"]
        better = trainer.strategy.broadcast(better or self._params.keep == "last")
        if better:
            self.kept_epoch = epoch
        ended = has_ended(self.history, self._params)
        if (better and self._params.keep == "best") or epoch % self._params.checkpoint_every_epochs == 0 or ended:
            self._saves.write(trainer, self.history, self.kept_epoch)
        trainer.should_stop = ended


def consolidated_weights(state: Path) -> dict[str, Tensor]:
    """The weights in float32 by name, or their average, from a state that was verified; shards of all ranks are put together."""
    if state.is_dir():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it tells every step
            weights = get_fp32_state_dict_from_zero_checkpoint(str(state), tag="checkpoint")
    else:
        weights = torch.load(state, map_location="cpu", weights_only=True)["state_dict"]
    own = {name.removeprefix(_PREFIX): value for name, value in weights.items() if name.startswith(_PREFIX)}
    return own | averaged_weights(state)


def _save_state(trainer: pl.Trainer, path: Path) -> None:
    """TrainingError where the disk is full: of torch's own message nobody would guess it."""
    try:
        trainer.save_checkpoint(path)
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("inline_container", "iostream", "PytorchStreamWriter")):
            raise
        raise TrainingError(
            f"{path} could not be written, most likely because the disk is full ({error}). Free space, then run the same command again."
        ) from error


def _digests(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): files.sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _verified(folder: Path) -> Save:
    """The save in `folder`; ValueError or OSError that says what is wrong with it."""
    try:
        save = Save.model_validate(json.loads((folder / "save.json").read_bytes()))
    except (ValidationError, ValueError) as error:
        raise ValueError(f"save.json is not readable ({error})") from error
    found = _digests(folder)
    found.pop("save.json")
    differing = sorted(name for name in found.keys() | save.files.keys() if found.get(name) != save.files.get(name))
    if differing:
        raise ValueError(f"{', '.join(differing)} missing, foreign or altered")
    return save


def _kept_by(folder: Path) -> int:
    try:
        return Save.model_validate(json.loads((folder / "save.json").read_bytes())).kept_epoch
    except (OSError, ValueError):
        return 0
