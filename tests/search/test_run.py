"""`slipway search` in a tiny project whose training is a formula, as processes that users start."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.test_disks import can_mount
from tests.search.tiny_search import TinySearch, make_search

pytestmark = pytest.mark.process


def test_trials_are_experiments_with_validation_scores_and_take_runs_the_rest_once(
    tmp_path: Path,
) -> None:
    project = make_search(tmp_path)
    project.write_search("choice: [0.1, 0.2, 2.0]")
    # Uncommitted edits and untracked files belong to the trials.
    (project.path / "extra.py").write_text("from untracked import SECONDS\n")
    (project.path / "untracked.py").write_text("SECONDS = 0\n")
    before = project.git("status", "--short")
    found = project.search()

    scores = {row["params"]["train.learning_rate"]: row for row in found["trials"]}
    assert scores[0.2]["score"] == pytest.approx(1 - 0.1 - 0.1 / 4)
    assert scores[2.0]["status"] == "failed"
    assert scores[2.0]["cause"].startswith("the loss is not finite")
    assert found["best"] == scores[0.2]["name"]
    assert project.counts("clean") == ["clean"], "a shared stage runs once"
    assert project.counts("evaluate") == [], "no test row is looked at"
    assert project.git("status", "--short") == before
    assert list((project.path / ".work/search/folders").iterdir()) == []
    assert len(project.git("worktree", "list").splitlines()) == 1

    rows = project.rows()
    assert len(rows) == 3
    best = rows[found["best"]]
    assert best["results"] is None, "validation metrics only"
    assert best["validation"]["value"] == scores[0.2]["score"]
    assert best["params"] == {"train.learning_rate": 0.2}
    kept = project.git("for-each-ref", "--format=%(refname:lstrip=4)", "refs/exps").splitlines()
    done = {row["name"] for row in found["trials"] if row["status"] == "done"}
    assert done <= set(kept)
    assert scores[2.0]["name"] not in kept, "a trial that failed is never saved as done"

    again = project.search()
    assert again["trials"] == found["trials"]
    assert len(project.counts("epoch")) == 8, "an equal search trains nothing again"

    project.slipway("take", found["best"])
    assert project.counts("evaluate") == ["evaluate 0.2"]
    assert (project.path / "artifacts/model").read_text() == "0.2 4"
    assert (project.path / "extra.py").read_text() == "from untracked import SECONDS\n"
    assert len(project.counts("epoch")) == 8, "the winner is not trained again"


@pytest.mark.nightly(seconds=240)
def test_search_killed_ten_times_has_the_same_winner_and_repeats_no_epoch(
    tmp_path: Path,
) -> None:
    project = make_search(tmp_path, epochs=9)
    (project.path / "extra.py").write_text("SECONDS = 1.0\n")
    project.write_search(
        "range: [0.1, 0.5]",
        method="tpe",
        trials=4,
        workers=2,
        halving="{ reduction: 2, first_rung: 2 }",
    )
    whole = project.path.parent / "whole"
    whole.mkdir()
    other = make_search(whole, epochs=9)
    text = (project.path / "params.yaml").read_text()
    (other.path / "params.yaml").write_text(text)
    expected = other.search()

    drawn = random.Random(24)
    for _ in range(10):
        _kill_after(project, drawn.uniform(1, 20))
    found = project.search()
    assert [_facts(row) for row in found["trials"]] == [_facts(row) for row in expected["trials"]]
    assert found["best"] == expected["best"]
    epochs_trained = project.counts("epoch")
    assert len(set(epochs_trained)) == len(epochs_trained), "an epoch was trained twice"
    assert set(epochs_trained) == set(other.counts("epoch")), "an epoch was lost"


@pytest.mark.nightly(seconds=36)
def test_a_trial_whose_training_is_killed_resumes_without_a_new_search(tmp_path: Path) -> None:
    project = make_search(tmp_path)
    project.write_search("choice: [0.1, 0.2]", trials=2)
    (tmp_path / "kill").write_text("0.2")
    found = project.search()
    assert [row["status"] for row in found["trials"]] == ["done", "done"]
    assert not (tmp_path / "kill").exists()
    assert len(project.counts("epoch")) == 8


@pytest.mark.nightly(seconds=90)
def test_tasks_of_a_slurm_array_search_as_one_and_survive_the_kill_of_one(tmp_path: Path) -> None:
    project = make_search(tmp_path, epochs=9)
    (project.path / "extra.py").write_text("SECONDS = 1.0\n")
    project.write_search(
        "range: [0.1, 0.5]",
        method="tpe",
        trials=4,
        workers=2,
        halving="{ reduction: 2, first_rung: 2 }",
    )
    tasks = [_start_task(project, number) for number in range(2)]
    _wait_until(lambda: len(project.counts("epoch")) > 2)
    assert len(list((project.path / ".work/search/folders").iterdir())) == 2
    refused = project.slipway("search", code=1)
    assert "is already running" in refused
    tasks[1].kill()
    output, _ = tasks[0].communicate(timeout=300)
    tasks[1].communicate()
    assert tasks[0].returncode == 0, output
    assert "1 at a time in each process" in output
    joint = project.search("--join")

    whole = tmp_path / "whole"
    whole.mkdir()
    other = make_search(whole, epochs=9)
    (other.path / "params.yaml").write_text((project.path / "params.yaml").read_text())
    expected = other.search()
    assert [_facts(row) for row in joint["trials"]] == [_facts(row) for row in expected["trials"]]
    epochs_trained = project.counts("epoch")
    assert len(set(epochs_trained)) == len(epochs_trained), "an epoch was trained twice"
    assert set(epochs_trained) == set(other.counts("epoch")), "an epoch was lost"


# A module that Python imports at the start: its clock is wrong by years, now ahead and now behind.
_JUMPING_CLOCK = """\
import itertools, time
real, jumps = time.time, itertools.cycle([9e7, -9e7, 0.0])
time.time = lambda: real() + next(jumps)
time.time_ns = lambda: int(time.time() * 1e9)
"""


@pytest.mark.nightly(seconds=60)
def test_a_clock_that_jumps_during_a_search_loses_no_trial(tmp_path: Path) -> None:
    project = make_search(tmp_path)
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock/sitecustomize.py").write_text(_JUMPING_CLOCK)
    # Checkpoints and outputs of an epoch have the time of another year, too.
    (project.path / "extra.py").write_text(
        "import atexit, os, pathlib, random\nSECONDS = 0.2\n"
        "def jump():\n"
        "    for path in pathlib.Path('.work/train').resolve().rglob('*'):\n"
        "        os.utime(path, (moment := random.choice([1e9, 3e9]), moment))\n"
        "atexit.register(jump)\n"
    )
    project.write_search(halving="{ reduction: 2, first_rung: 2 }")
    text = (project.path / "params.yaml").read_text()
    budget = "budget: { trials: 3, epochs: null, minutes: "
    assert f"{budget}null" in text
    (project.path / "params.yaml").write_text(text.replace(f"{budget}null", f"{budget}30"))
    search = [sys.executable, "-m", "slipway.cli", "search", "--json"]
    paths = f"{tmp_path / 'clock'}:{project.environment()['PYTHONPATH']}"
    environment = project.environment() | {"PYTHONPATH": paths}
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(search, cwd=project.path, env=environment, timeout=12, capture_output=True)
    done = subprocess.run(
        search, cwd=project.path, env=environment, timeout=600, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rates = {row["params"]["train.learning_rate"]: row["name"] for row in found["trials"]}
    assert set(rates) == {0.1, 0.2, 0.3}
    assert found["best"] == rates[0.3]
    assert all(0 < row["seconds"] < 600 for row in found["trials"]), "measured by another clock"
    epochs_trained = project.counts("epoch")
    assert len(set(epochs_trained)) == len(epochs_trained), "an epoch was trained twice"


@pytest.mark.nightly(seconds=90)
def test_a_search_with_a_damaged_journal_loses_no_trial(tmp_path: Path) -> None:
    project = make_search(tmp_path)
    project.write_search()
    found = project.search()
    journal = project.path / ".work/search/search-1/journal.jsonl"
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 7, "the search, then a decision and a result of each trial"
    # Without its last results the trials are found in DVC's cache; without a decision it follows
    # from the others.
    journal.write_bytes(b"".join(lines[:3]) + lines[3][:-9] + b"\x00\n" + lines[4][:20])
    output = project.slipway("search")
    assert "no trial is lost" in output
    assert [_facts(row) for row in project.search()["trials"]] == [
        _facts(row) for row in found["trials"]
    ]
    # A search that cannot be recognized stays as experiments; an equal one finds its models.
    journal.write_bytes(b"".join(lines[1:]))
    again = project.search()
    assert again["best"] == found["best"].replace("search-1", "search-2")
    assert set(project.rows()) == {row["name"] for row in [*found["trials"], *again["trials"]]}
    assert len(project.counts("epoch")) == 12, "no epoch was trained twice"


@pytest.mark.nightly(seconds=40)
def test_trial_that_is_killed_after_its_outputs_are_written_is_not_saved(tmp_path: Path) -> None:
    project = make_search(tmp_path)
    project.write_search("choice: [0.3]", trials=1)
    # Model and metrics are whole, but the training has not ended.
    (project.path / "extra.py").write_text(
        "import atexit, os\nSECONDS = 0\natexit.register(lambda: os.kill(os.getpid(), 9))\n"
    )
    assert "no trial of search-1 was trained to its end" in project.slipway("search", code=1)
    assert project.git("for-each-ref", "--format=%(refname:lstrip=4)", "refs/exps") == ""
    assert project.rows()["search-1-000"]["status"] == "failed"


# Imported by each training; the second one fills the disk, once, and goes on.
_FILLING = """\
from pathlib import Path
SECONDS = 0
starts = Path({starts!r})
starts.write_text(starts.read_text() + ".")
if starts.read_text() == "..":
    with open({filler!r}, "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(1 << 16)):
                pass
        except OSError:
            pass
"""


@pytest.mark.nightly(seconds=60)
def test_a_full_disk_ends_the_search_and_the_same_command_loses_no_trial(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("no right to mount a file system here")
    project, disk, starts = make_search(tmp_path), tmp_path / "disk", tmp_path / "starts"
    project.write_search("choice: [0.1, 0.2, 0.3]")
    starts.touch()
    filling = _FILLING.format(starts=str(starts), filler=str(disk / "filler"))
    (project.path / "extra.py").write_text(filling)
    disk.mkdir()
    search = f"{sys.executable} -m slipway.cli search --json"
    script = (
        "mount -t tmpfs -o size=32m none disk && cp -a project/. disk && cd disk\n"
        f"{search} >../first 2>&1; echo $? >../code; rm filler; {search} >../second 2>../again"
    )
    environment = project.environment() | {"DVC_SITE_CACHE_DIR": str(tmp_path / "dvc")}
    command = ["unshare", "-m", "bash", "-c", script]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=600)
    assert (tmp_path / "code").read_text().strip() == "1"
    assert "No trial is lost." in (tmp_path / "first").read_text()
    found = json.loads((tmp_path / "second").read_text())
    assert [row["status"] for row in found["trials"]] == ["done"] * 3
    epochs_trained = project.counts("epoch")
    assert len(set(epochs_trained)) == 12
    assert len(epochs_trained) == 13, "only the epoch that could not be saved is trained again"


def _start_task(project: TinySearch, number: int) -> "subprocess.Popen[str]":
    """Start the search as a task of a Slurm array."""
    array = {
        "SLURM_JOB_ID": str(120 + number),
        "SLURM_ARRAY_JOB_ID": "120",
        "SLURM_ARRAY_TASK_ID": str(number),
        "SLURM_ARRAY_TASK_COUNT": "2",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "slipway.cli", "search", "--join"],
        cwd=project.path,
        env=project.environment() | array,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _facts(row: dict[str, object]) -> dict[str, object]:
    """A row of the search without its seconds."""
    return {key: value for key, value in row.items() if key != "seconds"}


def _kill_after(project: TinySearch, seconds: float) -> None:
    """Start the search and kill its process, but not its trials, after `seconds`."""
    process = project.start("search")
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
