"""The output of DVC and its stages: `slipway run` shows a part of it, and its log has all."""

import pytest

from slipway.experiments.reproduction import Screen
from tests.experiments.tiny_project import TinyProject, make_project

OUTPUT = b"""\
Running stage 'code':
> python -m slipway.stages.code
Generating lock file 'dvc.lock'
Updating lock file 'dvc.lock'

Stage 'clean' didn't change, skipping
Stage 'split' is cached - skipping run, checking out outputs
Updating lock file 'dvc.lock'

Running stage 'precompute':
> python -m slipway.stages.precompute
packed 7 rows

> of which 3 are new
Updating lock file 'dvc.lock'

Running stage 'augment':
> python -m slipway.stages.augment
Updating lock file 'dvc.lock'
WARNING: the cache is almost full
Use `dvc push` to send your updates to remote storage.
"""
SHOWN = b"""\
[precompute]
packed 7 rows

> of which 3 are new
[augment]
WARNING: the cache is almost full
"""


def shown(*chunks: bytes) -> bytes:
    screen = Screen()
    return b"".join(screen.shown(chunk) for chunk in (*chunks, b""))


@pytest.mark.parametrize("size", [1, 7, len(OUTPUT)])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_the_screen_has_stages_and_warnings_but_not_what_dvc_says_when_all_is_well(
    size: int, end: bytes
) -> None:
    output = OUTPUT.replace(b"\n", end)
    chunks = [output[at : at + size] for at in range(0, len(output), size)]
    assert shown(*chunks).replace(b"\r", b"") == SHOWN


def test_half_a_line_is_shown_at_a_pause_and_a_bar_at_once() -> None:
    screen = Screen()
    assert screen.shown(b"loading ...") == b""
    assert screen.shown(b"") == b"loading ..."
    assert screen.shown(b" done\n\r 10%|#\r 20%|##\r") == b" done\n\r 10%|#\r 20%|##\r"
    assert screen.shown(b"    \rUpdating lock file 'dvc.lock'\n") == b"    \r"


def test_errors_of_dvc_are_shown() -> None:
    error = b"ERROR: failed to reproduce 'train': failed to run: python train.py, exited with 1\n"
    start = b"Running stage 'train':\n> python train.py\n"
    assert shown(start + b"error: no rows\n" + error) == b"[train]\nerror: no rows\n" + error


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> TinyProject:
    return make_project(tmp_path_factory.mktemp("tiny"))


@pytest.mark.process
def test_a_run_shows_no_line_of_dvc_and_its_log_has_them_all(project: TinyProject) -> None:
    text = project.slipway("run", "train.learning_rate=0.1", "--name", "good")
    assert "[train]\ntraining with 0.1\n[evaluate]\n\ngood: done" in text
    log = project.path / ".work/experiments/good.log"
    assert text.count(str(log.relative_to(project.path))) == 1
    for line in ("Running stage 'train':", "> python train.py", "Updating lock file 'dvc.lock'"):
        assert line in log.read_text(), "DVC words it so: see _OF_DVC"
        assert line not in text
    text = project.slipway("run", "train.learning_rate=0.1", "--name", "again")
    assert "didn't change" not in text
    assert "didn't change, skipping" in log.with_name("again.log").read_text()
