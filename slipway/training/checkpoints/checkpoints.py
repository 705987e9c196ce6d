"""Checkpoints under `.work/train/FINGERPRINT/`: they survive a kill at any moment.

fingerprint.json                   inputs of the training, to list the differences of another one
step-00000120/state                the trainer's state: a file, or DeepSpeed's directory of shards
step-00000120/rank-00000.safetensors  state of each process, see `rank_state`
step-00000120/checkpoint.json      written last: position, metrics, and SHA-256 of every other file
step-00000140-epoch-000002/        a checkpoint after the validation that ends epoch 2

Each checkpoint is a new directory, renamed into place when it is complete. A damaged one is
reported and skipped, never loaded. After success all are removed. Several nodes need the directory
on a shared file system.
"""

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytorch_lightning as pl

from slipway.artifacts.training_setup import RunSegment, TrainingSetup
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import TrainingError
from slipway.training.checkpoints.fingerprint import Fingerprint

_STATE, _MANIFEST = "state", "checkpoint.json"
# Parts of torch's messages when the disk is full.
_WRITE_ERRORS = ("inline_container", "iostream", "PytorchStreamWriter")


@dataclass(frozen=True, order=True)
class TrainingPosition:
    """Progress of a training: `epoch` complete epochs, and `step` optimizer steps of the next one.

    An epoch is complete after its validation. Before that, `step` may equal the number of steps per
    epoch.
    """

    epoch: int
    step: int

    def total_steps(self, steps_per_epoch: int) -> int:
        return self.epoch * steps_per_epoch + self.step


class Checkpoint(Contract):
    """The content of `checkpoint.json`."""

    format_version: Literal[3]
    epoch: int  # completed epochs
    step: int  # completed steps of the next epoch
    kept_epoch: int  # epoch whose weights would become the model; 0 if there is none yet
    history: list[dict[str, float]]  # metrics of each epoch so far
    segments: list[RunSegment]  # in order; the last one wrote this checkpoint
    actual: TrainingSetup
    files: dict[str, str]  # hex SHA-256 by path within the checkpoint

    @property
    def position(self) -> TrainingPosition:
        return TrainingPosition(self.epoch, self.step)


class CheckpointStore:
    """The checkpoints of one training, in one directory."""

    def __init__(self, work: Path, fingerprint: Fingerprint, steps_per_epoch: int) -> None:
        self._work, self._fingerprint, self._steps_per_epoch = work, fingerprint, steps_per_epoch
        self.root = work / fingerprint.name

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest usable checkpoint, and a description of each damaged one.

        A checkpoint is usable if it is intact and the checkpoint of the epoch that it selects is
        intact, too. This method changes no file.
        """
        problems: list[str] = []
        intact: dict[str, Checkpoint] = {}
        for folder in self._folders():
            try:
                intact[folder.name] = self._verify(folder)
            except (OSError, ValueError) as error:
                problems.append(f"{folder} is damaged and skipped: {error}")
        usable = [
            checkpoint
            for checkpoint in intact.values()
            if checkpoint.kept_epoch == 0
            or self._epoch_folder(checkpoint.kept_epoch).name in intact
        ]
        return max(usable, key=lambda checkpoint: checkpoint.position, default=None), problems

    def folder(self, position: TrainingPosition) -> Path:
        suffix = f"-epoch-{position.epoch:06d}" if position.step == 0 else ""
        return self.root / f"step-{position.total_steps(self._steps_per_epoch):08d}{suffix}"

    def state(self, position: TrainingPosition) -> Path:
        """Return the path of the trainer's state at `position`."""
        return self.folder(position) / _STATE

    def write(
        self,
        trainer: pl.Trainer,
        write_state: Callable[[Path], None],
        describe: Callable[[dict[str, str]], Checkpoint],
    ) -> None:
        """Write a checkpoint and delete old ones. Every rank has to call it.

        Args:
            write_state: writes this rank's files into a folder.
            describe: returns the manifest, given the SHA-256 of each file.
        """
        checkpoint = describe({})
        with ExitStack() as stack:
            partial = None
            if trainer.is_global_zero:
                target = self.folder(checkpoint.position)
                partial = stack.enter_context(files.new_directory(target))
            partial = Path(trainer.strategy.broadcast(str(partial)))
            write_state(partial)
            trainer.strategy.barrier("every rank has written its part")
            if trainer.is_global_zero:
                manifest = describe(_checksums(partial))
                files.write_json(partial / _MANIFEST, manifest.model_dump(mode="json"))
        if trainer.is_global_zero:
            self._prune(checkpoint)
        trainer.strategy.barrier("the checkpoint is complete")

    def prepare(self) -> None:
        """Create the directory, and remove unfinished files of killed trainings.

        Only the process that holds the lock may call it.
        """
        for path in self._work.glob("*/fingerprint.json"):
            if path.parent != self.root and not any(path.parent.glob("step-*")):
                files.remove_directory(path.parent)
        for leftover in [*self._work.glob("*.partial"), *self.root.glob("*.partial")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        files.write_json(self.root / "fingerprint.json", self._fingerprint.model_dump(mode="json"))

    def remove(self) -> None:
        """Remove all checkpoints after a successful training."""
        files.remove_directory(self.root)

    def describe_others(self) -> list[str]:
        """Return lines on unfinished trainings with other fingerprints, and how to remove them."""
        folders = sorted(
            path.parent
            for path in self._work.glob("*/fingerprint.json")
            if path.parent != self.root
        )
        lines = [self._describe_other(folder) for folder in folders]
        if folders:
            sizes = (
                path.stat().st_size
                for folder in folders
                for path in folder.rglob("*")
                if path.is_file()
            )
            lines.append(
                f"they stay until you remove them ({sum(sizes) / 1e6:,.1f} MB): "
                f"rm -r {' '.join(map(str, folders))}"
            )
        return lines

    def _describe_other(self, folder: Path) -> str:
        try:
            content = json.loads((folder / "fingerprint.json").read_bytes())
            differences = Fingerprint.model_validate(content).differences(self._fingerprint)
        except ValueError:
            return f"not resumed: {folder} holds a training that this version does not understand"
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        return f"not resumed: {folder} differs in {'; '.join(differences[:3])}{more}"

    def _folders(self) -> list[Path]:
        return sorted(folder for folder in self.root.glob("step-*") if folder.suffix != ".partial")

    def _epoch_folder(self, epoch: int) -> Path:
        return self.folder(TrainingPosition(epoch, 0))

    def _verify(self, folder: Path) -> Checkpoint:
        """Verify the checkpoint in `folder` and return its manifest.

        Raises ValueError or OSError if the checkpoint is damaged.
        """
        checkpoint = _read_manifest(folder)
        found = _checksums(folder)
        found.pop(_MANIFEST)
        differing = sorted(
            name
            for name in found.keys() | checkpoint.files.keys()
            if found.get(name) != checkpoint.files.get(name)
        )
        if differing:
            raise ValueError(f"{', '.join(differing)} missing, foreign or altered")
        expected = self.folder(checkpoint.position)
        if expected != folder:
            raise ValueError(f"it is the checkpoint {expected.name} under another name")
        return checkpoint

    def _prune(self, checkpoint: Checkpoint) -> None:
        """Delete all checkpoints but this one, the one before, and the selected epochs of both."""
        newest = self.folder(checkpoint.position)
        before = [folder for folder in self._folders() if folder < newest][-1:]
        kept_epochs = [checkpoint.kept_epoch, *map(_kept_epoch, before)]
        kept = {newest, *before, *map(self._epoch_folder, kept_epochs)}
        for folder in set(self._folders()) - kept:
            files.remove_directory(folder)


def newest_manifest(work: Path) -> Checkpoint | None:
    """Return the manifest of the newest checkpoint below `work`, without verifying its files.

    Checkpoints without a readable manifest are ignored.
    """
    found = []
    for path in work.glob(f"*/step-*/{_MANIFEST}"):
        with suppress(OSError, ValueError):
            found.append(_read_manifest(path.parent))
    return max(found, key=lambda checkpoint: checkpoint.position, default=None)


def write_trainer_state(trainer: pl.Trainer, folder: Path) -> None:
    """Write this rank's part of the trainer's state into `folder`.

    Raises TrainingError if the disk is full, which torch's own message does not mention.
    """
    path = folder / _STATE
    try:
        trainer.save_checkpoint(path)
    except (RuntimeError, OSError) as error:
        is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if not is_full and not any(part in str(error) for part in _WRITE_ERRORS):
            raise
        raise TrainingError(
            f"{path} could not be written, most likely because the disk is full ({error}). "
            "Free space, then run the same command again."
        ) from error


def _checksums(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): files.sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _read_manifest(folder: Path) -> Checkpoint:
    try:
        return Checkpoint.model_validate(json.loads((folder / _MANIFEST).read_bytes()))
    except ValueError as error:  # pydantic's and json's are both ValueErrors
        raise ValueError(f"{_MANIFEST} is not readable ({error})") from error


def _kept_epoch(folder: Path) -> int:
    try:
        return _read_manifest(folder).kept_epoch
    except (OSError, ValueError):
        return 0
