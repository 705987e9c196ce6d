from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipway.system.errors import TrainingError
from slipway.training.checkpoints.checkpoints import write_trainer_state


def _failing_with(text: str) -> Any:
    def save_checkpoint(path: Path) -> None:
        raise RuntimeError(text)

    return SimpleNamespace(save_checkpoint=save_checkpoint)


@pytest.mark.parametrize(
    "text",
    [
        "[enforce fail at inline_container.cc:672] . unexpected pos 4288 vs 4180",
        "PytorchStreamWriter failed writing file",
    ],
)
def test_error_for_a_checkpoint_on_a_full_disk_says_that_the_disk_is_full(text: str) -> None:
    with pytest.raises(
        TrainingError,
        match="checkpoint/state could not be written, most likely because the disk is full",
    ):
        write_trainer_state(_failing_with(text), Path("checkpoint"))


def test_errors_of_a_checkpoint_other_than_a_full_disk_are_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"):
        write_trainer_state(_failing_with("shapes differ"), Path("checkpoint"))
