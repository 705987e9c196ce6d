"""One loop for one database: a second one is refused, with the name of the first."""

import multiprocessing
import os
import socket
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from slipway.loop.lease import ABSENT_S, Holder, lease, refusal
from slipway.system.errors import LockedError, UnavailableError
from slipway.traffic.postgres import DATABASE_URL
from tests.serving.monitoring.postgres import cluster

HOLDER = Holder("a-1", "node-a", 17, "/srv/a", since=1000.0, seen=2000.0)


def test_the_lease_is_refused_while_another_call_runs() -> None:
    found = refusal(HOLDER, "a-1", 1e9, is_running=True)
    assert "is running for this SLIPWAY_DATABASE_URL as process 17 since 1970-01-01" in found
    assert "on node-a, SLIPWAY_STATE /srv/a. Expected one call at a time. Wait" in found
    assert refusal(None, "a-1", 1e9, is_running=True).count("an unknown machine") == 1


def test_the_lease_stays_with_its_loop_until_that_was_absent_for_a_day() -> None:
    own = refusal(HOLDER, HOLDER.name, HOLDER.seen + 1, is_running=False)
    other = refusal(HOLDER, "b-2", HOLDER.seen + ABSENT_S - 1, is_running=False)
    late = refusal(HOLDER, "b-2", HOLDER.seen + ABSENT_S, is_running=False)
    assert (own, late, refusal(None, "b-2", 0.0, is_running=False)) == ("", "", "")
    assert "belongs to node-a, SLIPWAY_STATE /srv/a: its last call was process 17 at" in other
    assert "Expected one loop for one database" in other


def test_without_a_shared_database_there_is_no_lease(tmp_path: Path) -> None:
    with lease(tmp_path) as require_lease:
        require_lease()
    assert not list(tmp_path.iterdir())


def hold(state: Path, is_held: Event, is_over: Event) -> None:
    with lease(state):
        is_held.set()
        is_over.wait(60)


@pytest.mark.nightly
def test_two_loops_of_one_postgresql_exclude_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    is_held, is_over = context.Event(), context.Event()
    first, second = tmp_path / "first", tmp_path / "second"
    with cluster() as postgres:
        monkeypatch.setenv(DATABASE_URL, postgres.url)
        other = context.Process(target=hold, args=(first, is_held, is_over))
        other.start()
        assert is_held.wait(60)
        for state in (first, second):
            running = f"is running .* as process {other.pid} since .* on {socket.gethostname()}"
            with pytest.raises(LockedError, match=running), lease(state):
                pass
        other.kill()  # a killed call leaves its loop the owner, and no lock
        other.join(60)
        with (
            pytest.raises(LockedError, match=f"belongs to .*{first}: its last call"),
            lease(second),
        ):
            pass
        with lease(first) as require_lease:
            require_lease()
        assert postgres.fetch("SELECT process FROM slipway_loop.holder") == [(os.getpid(),)]
        postgres.fetch("UPDATE slipway_loop.holder SET seen = seen - 90000 RETURNING 1")
        with lease(second) as require_lease:
            postgres.stop()
            with pytest.raises(UnavailableError, match="and with it the lock of this process"):
                require_lease()
