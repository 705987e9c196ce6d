"""Resumable state under `.work/train/FINGERPRINT/`: it survives a kill at any moment and is gone after success.

fingerprint.json                   what the training depends on, to tell others what differs
step-00000120/state                the trainer's state: a file, or a directory of shards with DeepSpeed
step-00000120/rank-00000.safetensors  what each process has for itself, see `rank_state`
step-00000120/save.json            written last: where it is, metrics so far, and the SHA-256 of every other file
step-00000140-epoch-000002/        the same, after the validation that ends the second epoch

Each save is a new directory, renamed into place when it is complete. A damaged one is named and
skipped, never loaded. On several nodes the directory has to be on a shared file system.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
from pydantic import ValidationError

from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import TrainingError
from slipway.training.checkpoints.fingerprint import Fingerprint
from slipway.training.checkpoints.positions import Position
from slipway.training.networks.networks import Stretch, TrainingSetup

_STATE, _MANIFEST = "state", "save.json"


class Save(Contract):
    """The content of `save.json`."""

    format_version: Literal[2]
    epoch: int  # that were completed
    step: int  # of the epoch after it; see `positions.Position`
    kept_epoch: int  # whose weights would become the checkpoint; 0 before there is one
    history: list[dict[str, float]]  # metrics of each epoch so far
    stretches: list[Stretch]  # in their order; the last one is how the state was written
    actual: TrainingSetup  # what ran
    files: dict[str, str]  # hex SHA-256 by path below the save

    @property
    def position(self) -> Position:
        """Where the training stood."""
        return Position(self.epoch, self.step)


class Saves:
    """The saves of one training, of which an epoch has `steps_per_epoch` optimizer steps."""

    def __init__(self, work: Path, fingerprint: Fingerprint, steps_per_epoch: int) -> None:
        self._work, self._fingerprint, self._steps_per_epoch = work, fingerprint, steps_per_epoch
        self.root = work / fingerprint.name

    def newest(self) -> tuple[Save | None, list[str]]:
        """The newest save that is whole, and so is the one that it keeps; and what is wrong with newer ones. Changes nothing."""
        problems: list[str] = []
        whole: dict[str, Save] = {}
        for folder in self._folders():
            try:
                whole[folder.name] = self._verified(folder)
            except (OSError, ValueError) as error:
                problems.append(f"{folder} is damaged and skipped: {error}")
        usable = [
            save
            for save in whole.values()
            if save.kept_epoch == 0 or self._of_epoch(save.kept_epoch).name in whole
        ]
        return (max(usable, key=lambda save: save.position) if usable else None), problems

    def folder(self, position: Position) -> Path:
        """The save at `position`."""
        ends_epoch = f"-epoch-{position.epoch:06d}" if position.step == 0 else ""
        return self.root / f"step-{position.total_steps(self._steps_per_epoch):08d}{ends_epoch}"

    def state(self, position: Position) -> Path:
        """The trainer's state at `position`."""
        return self.folder(position) / _STATE

    def write(
        self,
        trainer: pl.Trainer,
        write_state: Callable[[Path], None],
        describe: Callable[[dict[str, str]], Save],
    ) -> None:
        """Save on all ranks together: `write_state` puts files into a folder, `describe` makes the manifest of their digests."""
        save = describe({})
        with ExitStack() as stack:
            partial = (
                stack.enter_context(files.new_directory(self.folder(save.position)))
                if trainer.is_global_zero
                else None
            )
            partial = Path(trainer.strategy.broadcast(str(partial)))
            write_state(partial)
            trainer.strategy.barrier("every rank has written its part")
            if trainer.is_global_zero:
                files.write_json(
                    partial / _MANIFEST, describe(_digests(partial)).model_dump(mode="json")
                )
        if trainer.is_global_zero:
            self._prune(save)
        trainer.strategy.barrier("the save is complete")

    def open(self) -> None:
        """Make the directory, say what it is for, and remove what killed trainings left unfinished. For one process, which has the lock."""
        for path in self._work.glob("*/fingerprint.json"):
            if path.parent != self.root and not any(path.parent.glob("step-*")):
                files.remove_directory(path.parent)
        for leftover in [*self._work.glob("*.partial"), *self.root.glob("*.partial")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        files.write_json(self.root / "fingerprint.json", self._fingerprint.model_dump(mode="json"))

    def remove(self) -> None:
        """Forget everything, after success."""
        files.remove_directory(self.root)

    def others(self) -> list[str]:
        """A line for each unfinished training with another fingerprint, with what differs, and how to remove them. They are left alone."""
        lines = []
        folders = sorted(
            path.parent
            for path in self._work.glob("*/fingerprint.json")
            if path.parent != self.root
        )
        for folder in folders:
            try:
                other = Fingerprint.model_validate(
                    json.loads((folder / "fingerprint.json").read_bytes())
                )
            except ValueError:
                lines.append(
                    f"not resumed: {folder} holds a training that this version does not understand"
                )
                continue
            differences = other.differences(self._fingerprint)
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            lines.append(f"not resumed: {folder} differs in {'; '.join(differences[:3])}{more}")
        if folders:
            megabytes = (
                sum(
                    path.stat().st_size
                    for folder in folders
                    for path in folder.rglob("*")
                    if path.is_file()
                )
                / 1e6
            )
            lines.append(
                f"they stay until you remove them ({megabytes:,.1f} MB): rm -r {' '.join(map(str, folders))}"
            )
        return lines

    def _folders(self) -> list[Path]:
        return sorted(folder for folder in self.root.glob("step-*") if folder.suffix != ".partial")

    def _of_epoch(self, epoch: int) -> Path:
        return self.folder(Position(epoch, 0))

    def _verified(self, folder: Path) -> Save:
        """The save in `folder`; ValueError or OSError that says what is wrong with it."""
        save = _manifest(folder)
        found = _digests(folder)
        found.pop(_MANIFEST)
        differing = sorted(
            name
            for name in found.keys() | save.files.keys()
            if found.get(name) != save.files.get(name)
        )
        if differing:
            raise ValueError(f"{', '.join(differing)} missing, foreign or altered")
        if self.folder(save.position) != folder:
            raise ValueError(f"it is the save {self.folder(save.position).name} under another name")
        return save

    def _prune(self, save: Save) -> None:
        """Leave this save, the one before it, and the ones that these two keep."""
        newest = self.folder(save.position)
        before = [folder for folder in self._folders() if folder < newest][-1:]
        kept = [save.kept_epoch, *map(_kept_by, before)]
        for folder in set(self._folders()) - {newest, *before, *map(self._of_epoch, kept)}:
            files.remove_directory(folder)


def write_trainer_state(trainer: pl.Trainer, folder: Path) -> None:
    """Let every rank write its part of the state into `folder`.

    TrainingError where the disk is full: of torch's own message nobody would guess it.
    """
    path = folder / _STATE
    try:
        trainer.save_checkpoint(path)
    except RuntimeError as error:
        if not any(
            sign in str(error) for sign in ("inline_container", "iostream", "PytorchStreamWriter")
        ):
            raise
        raise TrainingError(
            f"{path} could not be written, most likely because the disk is full ({error}). Free space, then run the same command again."
        ) from error


def _digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): files.sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _manifest(folder: Path) -> Save:
    try:
        content: Any = json.loads((folder / _MANIFEST).read_bytes())
        return Save.model_validate(content)
    except (ValidationError, ValueError) as error:
        raise ValueError(f"{_MANIFEST} is not readable ({error})") from error


def _kept_by(folder: Path) -> int:
    try:
        return _manifest(folder).kept_epoch
    except (OSError, ValueError):
        return 0
