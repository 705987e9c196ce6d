"""Soft targets for distillation: an ensemble's outputs for the training rows.

A student learns from them (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network"). One
safetensors file holds the outputs and the settings of the distillation, so the digest of this file
in the fingerprint of the student's training covers both.
"""

from dataclasses import astuple, dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from slipway.system import files
from slipway.system.errors import IntegrityError, SchemaError

_FIX = "Remove it, and run `dvc repro train`."


@dataclass(frozen=True)
class Distillation:
    """Settings of the loss between a student's outputs and the soft targets."""

    temperature: float  # divides the logits of student and teacher; 1 for a numeric target
    fraction: float  # weight of the distillation loss; the rest is the loss of the true targets


@dataclass(frozen=True)
class SoftAnswers:
    """Soft targets of all training rows, offline copies included, with the settings of the loss."""

    answers: Tensor  # (N, K) float32 logits, or (N, 1) values in the target's unit
    distillation: Distillation

    def write(self, path: Path) -> None:
        # Settings are a tensor: metadata has no order, and equal answers are to be equal bytes.
        settings = torch.tensor(astuple(self.distillation), dtype=torch.float64)
        tensors = {"answers": self.answers, "settings": settings}
        files.write_bytes(path, safetensors.torch.save(tensors))


def read_soft_answers(path: Path, num_rows: int) -> SoftAnswers:
    """Read the soft targets for `num_rows` training rows.

    Raises IntegrityError if the file is not readable, SchemaError if the number of rows differs.
    """
    try:
        tensors = safetensors.torch.load_file(path)
        found, answers = Distillation(*tensors["settings"].tolist()), tensors["answers"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{path} has no soft answers: {error}. {_FIX}") from error
    if len(answers) != num_rows:
        raise SchemaError(f"{path} has {len(answers)} rows, expected {num_rows}. {_FIX}")
    return SoftAnswers(answers, found)
