"""Tests of the file of soft targets (a teacher's outputs), and of its refusals."""

from pathlib import Path

import pytest
import torch

from slipway.system import files
from slipway.system.errors import IntegrityError, SchemaError
from slipway.training.batches.soft_answers import Distillation, SoftAnswers, read_soft_answers

ANSWERS = SoftAnswers(torch.randn(5, 3), Distillation(2.5, 0.1))


def test_soft_targets_are_read_back_unchanged_and_equal_ones_have_equal_bytes(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        ANSWERS.write(tmp_path / name)
    found = read_soft_answers(tmp_path / "a", 5)
    assert torch.equal(found.answers, ANSWERS.answers)
    assert found.distillation == ANSWERS.distillation
    assert files.sha256_file(tmp_path / "a") == files.sha256_file(tmp_path / "b")
    other = SoftAnswers(ANSWERS.answers, Distillation(2.5, 0.2))
    other.write(tmp_path / "c")
    assert files.sha256_file(tmp_path / "a") != files.sha256_file(tmp_path / "c")


def test_damaged_soft_targets_and_those_of_other_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "soft.safetensors"
    ANSWERS.write(path)
    with pytest.raises(SchemaError, match=r"has 5 rows, expected 6\. Remove it"):
        read_soft_answers(path, 6)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(IntegrityError, match="has no soft answers"):
        read_soft_answers(path, 5)
