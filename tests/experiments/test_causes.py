"""The cause of a failed run, from the output of DVC and of the stages as they print it."""

import pytest

from slipway.experiments.causes import find_cause

FAILED = "ERROR: failed to reproduce 'train': failed to run: python -m x, exited with {}\n"
BUSY = """ERROR: failed to reproduce 'train': '/p/model' is busy, it is being blocked by:
  (PID 19184): /p/.venv/bin/dvc repro -f

If there are no processes with such PIDs, you can manually remove '/p/.dvc/tmp/rwlock'.
"""
DAMAGED = (
    "ERROR: failed to reproduce 'train': Unable to read RWLock-file '.dvc/tmp/rwlock'. "
    "JSON structure is corrupted: Expecting value: line 1 column 1 (char 0)\n"
)
FULL = (
    "Traceback (most recent call last):\n  File 'train.py', line 1, in <module>\n    f()\n"
    "OSError: [Errno 28] No space left on device: '/p/model'\n" + FAILED.format(1)
)
MEMORY = "torch.OutOfMemoryError: CUDA out of memory\n"
BUG = "Traceback (most recent call last):\n  File 'a.py', line 1\nKeyError: 'width'\n"


def test_a_stages_own_message_is_the_cause() -> None:
    output = "epoch 1\n\nerror: the loss is NaN.\nLower it.\n" + FAILED.format(1)
    found = find_cause(output)
    assert (found.stage, found.text) == ("train", "the loss is NaN.\nLower it.")


def test_what_a_progress_bar_wrote_over_and_colours_do_not_hide_the_message() -> None:
    output = " 10%\r 20%\r\n\x1b[31merror: no rows.\x1b[0m\r\n" + FAILED.format(1)
    assert find_cause(output).text == "no rows."


@pytest.mark.parametrize(
    ("output", "part", "fix"),
    [
        (BUSY, "another DVC, process 19184", "Wait for it"),
        (DAMAGED, "damaged lock .dvc/tmp/rwlock", "rm .dvc/tmp/rwlock"),
        (FULL, "No space left on device", "Free space"),
        (FAILED.format(-9), "killed (signal 9)", "train.max_batch_per_device"),
        (BUG + FAILED.format(1), "KeyError: 'width'", "traceback"),
        (
            MEMORY + FAILED.format(1),
            "out of memory",
            "plan",
        ),
    ],
)
def test_causes_of_dvc_and_the_machine_get_a_remedy(output: str, part: str, fix: str) -> None:
    found = find_cause(output)
    assert found.stage == "train"
    assert part in found.text
    assert fix in found.text


def test_other_errors_of_dvc_are_passed_on() -> None:
    assert find_cause("ERROR: bad dvc.yaml\n").text == "bad dvc.yaml"
    assert find_cause("").text == "DVC ended without a message"
