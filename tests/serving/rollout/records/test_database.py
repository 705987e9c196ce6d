"""A rollout and its history that several services share through a real PostgreSQL."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slipway.loop.history import main
from slipway.serving.rollout.commands import _candidate
from slipway.serving.rollout.history import change_rollout, record_served, return_alone
from slipway.serving.rollout.records.database import (
    WAITING,
    add_waiting,
    apply,
    read_recorded,
    read_waiting,
    service_name,
    shared_transaction,
)
from slipway.serving.rollout.records.model_files import fetch, publish, remove_unnamed
from slipway.serving.rollout.records.sync import RolloutSync, sync
from slipway.serving.rollout.reports import (
    NO_COUNTS,
    Report,
    process_started,
    read_reports,
    write_report,
)
from slipway.serving.rollout.state import EMPTY, Model, Rollout, RolloutError, read_rollout
from slipway.serving.rollout.store import copy_folder
from slipway.system.errors import UnavailableError
from slipway.traffic.postgres import DATABASE_URL, SqlConnection
from tests.serving.monitoring.postgres import Postgres, cluster, filled, small_cluster

VERSION = "0123456789ab"
NEW, OTHER = (
    Model(folder=f"{letter * 12}-{letter * 8}", version=letter * 12, digest=letter * 64)
    for letter in "cd"
)
START = "SLIPWAY_BUNDLE is served"


def refused(reason: str) -> Callable[[Rollout], Rollout]:
    return lambda rollout: rollout.with_event("refused", VERSION, reason, "ann")


def with_canary(rollout: Rollout) -> Rollout:
    candidate = _candidate(rollout, "canary", NEW)
    return rollout.changed(candidate=candidate).with_event("proposed", NEW.version, "new", "ann")


def returned(rollout: Rollout) -> Rollout:
    return rollout.ended("rolled_back", "NaN for a picture")


class Service:
    """One service with one worker, as the database sees it."""

    def __init__(self, state: Path) -> None:
        self.state = state
        state.mkdir(parents=True)
        self.name = service_name(state)
        self.sync = RolloutSync(state, lambda: None)
        process = os.getpid()
        self.report = Report(
            process=process,
            started=process_started(process),
            stopped=False,
            revision=0,
            serving=VERSION,
            folder=None,
            problem="",
            candidate=None,
            phase="none",
            reason="",
            disagreement=1.0,
            counts=NO_COUNTS,
            stable_p95_s=0.0,
            num_latencies=0,
        )
        write_report(state, self.report)

    def starts(self) -> None:
        record_served(self.state, VERSION, self.state / "bundle", self.state / "certificate.json")

    def syncs(self) -> None:
        self.sync.work_once()
        self.sync._database.close()  # a killed database breaks its connection anyway


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with cluster() as found:
        yield found


@pytest.fixture
def empty(postgres: Postgres) -> Postgres:
    """The database without the rollouts of other tests."""
    with shared_transaction(postgres.url) as connection:
        connection.execute("DROP SCHEMA slipway_rollout CASCADE")
    return postgres


def write_copy(state: Path, model: Model, size: int = 1000) -> Path:
    place = copy_folder(state, model)
    (place / "bundle").mkdir(parents=True)
    (place / "bundle/model.onnx").write_bytes(os.urandom(size))
    (place / "certificate.json").write_text("{}")
    (place / "tried").touch()
    return place


def change_at_once(services: list[Service], changes_each: int) -> None:
    def change(one: Service) -> None:
        for number in range(changes_each):
            change_rollout(one.state, refused(f"{one.state.name} {number}"))

    threads = [threading.Thread(target=change, args=(one,)) for one in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


@pytest.mark.process
def test_killed_database_neither_forks_nor_repeats_the_history_that_services_share(
    tmp_path: Path,
    postgres: Postgres,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(DATABASE_URL, postgres.url)
    monkeypatch.setenv("SLIPWAY_STATE", str(tmp_path / "elsewhere"))
    first, second = (Service(tmp_path / name) for name in ("first", "second"))
    for one in (first, second):
        one.starts()
        one.starts()  # another worker
        one.syncs()
    entries = read_recorded(first.state).entries
    assert [(one.service, one.reason) for one in entries] == [
        (first.name, START),
        (second.name, START),
    ]
    first.syncs()
    names = [f"worker {os.getpid()}", f"worker {os.getpid()} of {second.name}"]
    assert [one.name for one in read_reports(first.state) if one.is_alive] == names

    change_at_once([first, second], changes_each=5)
    entries = read_recorded(first.state).entries
    assert [one.event for one in entries] == [None, None, *range(1, 11)]
    assert len({one.reason for one in entries}) == 1 + 10

    write_copy(first.state, NEW)
    publish(postgres.url, first.state, NEW)
    change_rollout(first.state, with_canary)
    second.syncs()
    assert read_rollout(second.state) == read_rollout(first.state)

    sync(tmp_path / "elsewhere")  # as a command does that has no service here
    assert read_rollout(tmp_path / "elsewhere") == read_rollout(first.state)
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o700

    postgres.stop()
    for call in (lambda: change_rollout(first.state, refused("no")), first.syncs):
        with pytest.raises(Exception, match="connect"):
            call()
    # Meanwhile a service starts, and one of the others returns from the candidate on its own.
    third = Service(tmp_path / "third")
    third.starts()
    assert return_alone(first.state, lambda rollout: rollout) is None
    alone = return_alone(first.state, returned)
    assert alone is not None
    assert (read_rollout(first.state).candidate, alone.num_logged) == (None, alone.num_events)
    assert read_rollout(second.state).candidate is not None
    postgres.start()
    change_rollout(second.state, refused("later"))
    for one in (second, first, third, second):
        one.syncs()
    assert [read_rollout(one.state).candidate for one in (first, second)] == [None, None]
    assert read_rollout(first.state) == read_rollout(second.state)
    entries = read_recorded(first.state).entries
    assert [(one.what, one.event) for one in entries[-4:]] == [
        ("proposed", 11),
        ("refused", 12),
        ("rolled_back", 13),
        ("started", None),
    ]
    assert entries[-2].time == alone.events[-1].time

    # The result of a delivery is lost: the entry is delivered again.
    draft = entries[0].model_dump(mode="json", exclude={"previous"})
    add_waiting(first.state, draft | {"what": "stopped", "time": entries[-3].time + 1})
    waiting = (first.state / WAITING).read_bytes()
    first.syncs()
    (first.state / WAITING).write_bytes(waiting)
    first.syncs()
    assert read_waiting(first.state).entries == []
    assert len(read_recorded(first.state).entries) == len(entries) + 1

    # `--at` goes by time: the candidate was returned before what the chain has first.
    before = datetime.fromtimestamp(entries[-3].time - 0.001, UTC).isoformat()
    at = json.loads(shown(capsys, "--at", before, "--json"))
    assert (at["what"], at["reason"]) == ("rolled_back", "NaN for a picture")
    printed = shown(capsys, "--at", before)
    for one in (first, second, third):
        assert f"served by    {one.name}, {VERSION}" in printed
    (line,) = postgres.fetch(
        "SELECT line FROM slipway_rollout.history ORDER BY number DESC LIMIT 1"
    )[0]
    assert hashlib.sha256(line.encode()).hexdigest() in shown(capsys)

    # The second service is silent for a minute, and comes back; the third one ends.
    with shared_transaction(postgres.url) as connection:
        connection.execute("UPDATE services SET seen = seen - 61 WHERE name = ?", (second.name,))
    third.syncs()
    second.syncs()
    write_report(third.state, third.report.model_copy(update={"stopped": True}))
    third.syncs()
    entries = read_recorded(first.state).entries
    assert [(one.what, one.service, one.reason) for one in entries[-3:]] == [
        ("stopped", second.name, "it has not reported for 60 s"),
        ("started", second.name, "it reports again"),
        ("stopped", third.name, "no worker serves"),
    ]

    with shared_transaction(postgres.url) as connection:
        connection.execute(
            "UPDATE history SET line = replace(line, ?, ?) WHERE number = 3", ("ann", "bob")
        )
    with pytest.raises(RolloutError, match="DATABASE_URL was changed or damaged: line 4"):
        read_recorded(first.state)


@pytest.mark.process
def test_services_fetch_a_models_files_only_if_they_are_unchanged(
    tmp_path: Path, postgres: Postgres
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    copy = write_copy(first, OTHER, 5 << 20)  # two parts
    with pytest.raises(RolloutError, match="has no files of model dddddddddddd"):
        fetch(postgres.url, second, OTHER)
    publish(postgres.url, first, OTHER)
    fetch(postgres.url, second, OTHER)
    names = ["bundle/model.onnx", "certificate.json"]  # `tried` is of one machine
    got = copy_folder(second, OTHER)
    found = [path.relative_to(got).as_posix() for path in got.rglob("*") if path.is_file()]
    assert sorted(found) == names
    assert all((got / one).read_bytes() == (copy / one).read_bytes() for one in names)

    parts = "SELECT count(*) FROM slipway_rollout.parts"
    (stored,) = postgres.fetch(parts)
    remove_unnamed(postgres.url, EMPTY)  # young: a command may be about to name it
    assert postgres.fetch(parts) == [stored]
    with shared_transaction(postgres.url) as connection:
        connection.execute("UPDATE parts SET content = ? WHERE part = 1", (b"changed",))
    with pytest.raises(RolloutError, match=r"model.onnx of model dddddddddddd .* was changed"):
        fetch(postgres.url, tmp_path / "third", OTHER)
    assert not copy_folder(tmp_path / "third", OTHER).exists()
    with shared_transaction(postgres.url) as connection:
        connection.execute("UPDATE models SET added = 0")
    remove_unnamed(postgres.url, EMPTY)
    assert postgres.fetch(parts) == [(0,)]


@pytest.mark.process
def test_files_of_an_upload_that_was_cut_off_are_removed_after_an_hour(
    tmp_path: Path, empty: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_copy(tmp_path, OTHER, 5 << 20)  # two parts
    opened = 0

    def ending(url: str) -> AbstractContextManager[SqlConnection]:
        nonlocal opened
        opened += 1
        if opened == 3:  # after the query and the first part
            raise KeyboardInterrupt
        return shared_transaction(url)

    with monkeypatch.context() as patched:
        patched.setattr(f"{publish.__module__}.shared_transaction", ending)
        with pytest.raises(KeyboardInterrupt):
            publish(empty.url, tmp_path, OTHER)
    parts = "SELECT count(*) FROM slipway_rollout.parts"
    remove_unnamed(empty.url, EMPTY)  # young: the upload may go on
    assert empty.fetch(parts) == [(1,)]
    with shared_transaction(empty.url) as connection:
        connection.execute("UPDATE uploads SET seen = seen - 3601")
    remove_unnamed(empty.url, EMPTY)
    assert empty.fetch(parts) == [(0,)]
    publish(empty.url, tmp_path, OTHER)
    assert empty.fetch("SELECT count(*) FROM slipway_rollout.uploads") == [(0,)]
    fetch(empty.url, tmp_path / "second", OTHER)


@pytest.mark.process
def test_models_are_uploaded_again_if_their_files_are_removed_or_changed(
    tmp_path: Path, empty: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATABASE_URL, empty.url)
    first = Service(tmp_path / "first")
    old, new = (write_copy(first.state, model) for model in (OTHER, NEW))
    publish(empty.url, first.state, OTHER)
    with shared_transaction(empty.url) as connection:
        connection.execute("UPDATE models SET added = 0")
    # Both have one file in common. Another service removes the older model meanwhile.
    (new / "bundle/model.onnx").write_bytes((old / "bundle/model.onnx").read_bytes())
    calls = list[str]()

    def removing(url: str) -> AbstractContextManager[SqlConnection]:
        calls.append(url)
        if len(calls) == 3:  # after the query and the first file
            with shared_transaction(url) as connection:
                connection.execute("DELETE FROM models WHERE added = 0")
                connection.execute("DELETE FROM parts")
        return shared_transaction(url)

    with monkeypatch.context() as patched:
        patched.setattr(f"{publish.__module__}.shared_transaction", removing)
        publish(empty.url, first.state, NEW)
    fetch(empty.url, tmp_path / "second", NEW)

    # A running service replaces a changed file of a model that the state names.
    change_rollout(first.state, with_canary)
    with shared_transaction(empty.url) as connection:
        connection.execute("UPDATE parts SET content = ? WHERE length(content) > 2", (b"x",))
    with pytest.raises(RolloutError, match="uploads it again"):
        fetch(empty.url, tmp_path / "third", NEW)
    first.syncs()
    fetch(empty.url, tmp_path / "third", NEW)

    # A model that a command is about to name stays, however old its upload is.
    with shared_transaction(empty.url) as connection:
        connection.execute("UPDATE models SET added = 0")
    publish(empty.url, first.state, NEW)
    remove_unnamed(empty.url, EMPTY)
    fetch(empty.url, tmp_path / "fourth", NEW)


@pytest.mark.process
def test_start_that_joins_late_does_not_change_the_stable_model_of_later_events(
    tmp_path: Path, empty: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATABASE_URL, empty.url)
    first, second = (Service(tmp_path / name) for name in ("first", "second"))
    second.starts()  # the entry waits
    write_copy(first.state, NEW)
    change_rollout(first.state, with_canary)
    change_rollout(first.state, lambda now: now.ended("promoted", "better"))
    with shared_transaction(empty.url) as connection:
        apply(connection, second.state, lambda now: now)
    change_rollout(first.state, refused("later"))
    entries = read_recorded(first.state).entries
    assert [one.what for one in entries] == ["proposed", "promoted", "started", "refused"]
    stable = [one.stable.version for one in entries if one.stable]
    assert stable == [NEW.version, VERSION, NEW.version]


def change_often(service: Service) -> None:
    """Change the state until the database needs another block."""
    for _ in range(1000):
        change_rollout(service.state, refused("x" * 400))


@pytest.mark.nightly(seconds=20)
def test_change_refused_by_a_full_database_leaves_no_trace_and_entries_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_cluster() as (small, disk):
        monkeypatch.setenv(DATABASE_URL, small.url)
        one = Service(tmp_path / "one")
        one.syncs()
        before = change_rollout(one.state, refused("first"))
        with filled(disk):
            one.starts()
            with pytest.raises(UnavailableError, match="No space left"):
                change_often(one)
            recorded = read_recorded(one.state)
            assert recorded.rollout == read_rollout(one.state)
        change_rollout(one.state, refused("last"))
        entries = read_recorded(one.state).entries
        assert entries[0].reason == "first"
        assert entries[-1].reason == "last"
        num_events = read_rollout(one.state).num_events
        assert [one.event for one in entries if one.event] == list(range(1, num_events + 1))
        assert sum(entry.what == "started" for entry in entries) == 1
        assert num_events > before.num_events
