"""A joint search: several processes share a journal, and decide as one process would."""

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from slipway.config.params import parse_params
from slipway.planning.search_space import Space, read_space
from slipway.search.journal import JobLine, Journal
from slipway.search.locks import Interrupted, held
from slipway.search.schedule import Schedule
from slipway.search.study import Study, open_study
from tests.planning.test_search_space import content
from tests.search.test_schedule import quality, result

EPOCHS = 9


@pytest.fixture(name="space")
def _space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    monkeypatch.chdir(tmp_path)
    found = content(
        method="random",
        workers=2,
        budget={"trials": 9, "epochs": None, "minutes": None},
        halving={"reduction": 3, "first_rung": 1},
        space={"train.learning_rate": {"range": [0.001, 0.01]}},
    )
    params = parse_params(found).search
    assert params is not None
    study = open_study("joint", "search", "digest", params, EPOCHS, threads=2)
    assert study.folder == Path(".work/search/joint")
    return read_space(found, params)


def joined(space: Space) -> Study:
    """The study as one more process opens it."""
    journal = Journal(Path(".work/search/joint/journal.jsonl")).read()
    params = parse_params(dict(space.content)).search
    assert params is not None
    return Study(journal, Schedule(params, EPOCHS))


def simulate(space: Space, num_processes: int, seed: int) -> list[JobLine]:
    """Return the decisions of processes that claim jobs and end them in a random order."""
    drawn, running = random.Random(seed), dict[int, tuple[JobLine, IO[bytes]]]()
    studies = [joined(space) for _ in range(num_processes)]
    while True:
        number = drawn.randrange(num_processes)
        study = studies[number]
        if number in running:
            job, lock = running.pop(number)
            study.add_result(result(study.schedule, job, quality(job.trial)))
            lock.close()
        elif claimed := study.claim(space):
            assert claimed[0].job not in [job.job for job, _ in running.values()]
            running[number] = claimed
        elif not running and not study.unfinished:
            return study.schedule.jobs


@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_of_a_joint_search_train_each_job_once_with_the_same_decisions(
    space: Space, num_processes: int
) -> None:
    journal = Path(".work/search/joint/journal.jsonl")
    empty = journal.read_bytes()
    expected = simulate(space, 1, 0)
    assert len(expected) > 9, "some trials continue"
    for seed in range(3):
        journal.write_bytes(empty)
        assert simulate(space, num_processes, seed) == expected


def test_trial_of_a_killed_search_is_claimed_once_its_last_process_has_ended(
    space: Space,
) -> None:
    killed, other = joined(space), joined(space)
    first = killed.claim(space)
    assert first is not None
    job, lock = first
    training = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()]
    )
    lock.close()
    second = other.claim(space)
    assert second is not None
    assert second[0].trial != job.trial, "the training of the killed process still runs"
    assert other.claim(space) is None, "two trials at a time"
    training.communicate(b"\n")
    again = other.claim(space)
    assert again is not None
    assert again[0] == job
    for _, open_lock in (second, again):
        open_lock.close()


def test_waiting_for_a_lock_ends_with_the_search(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with held(tmp_path / "lock"), pytest.raises(Interrupted), held(tmp_path / "lock", stop):
        pass
