"""The database of what is watched: a part is merged once, and a file that cannot be used is moved aside and removed in its turn."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from serving.monitoring.database import Database, remove_moved_aside
from serving.monitoring.models import WatchedModel
from serving.monitoring.settings import Limits
from serving.monitoring.store import _ROWS_AT_ONCE, Part, Prediction, Store, Told
from slipway.drift.window import Window
from slipway.system.errors import UnavailableError
from slipway.traffic.monitoring_records import DATABASE, SCHEMA_VERSION, read_ground_truths
from tests.serving.bundles import probabilities
from tests.serving.watched import pixels, watched_bundle

LIMITS = Limits(window_rows=1000, window_s=3600, feedback_rows=1000, feedback_s=3600)

_opened: list[Store] = []


def open_store(state: Path, limits: Limits) -> Store:
    """A store that is closed after the test: Python 3.13 warns of connections that nobody closed."""
    _opened.append(Store(state, limits))
    return _opened[-1]


@pytest.fixture(autouse=True)
def _close_stores() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


@pytest.fixture
def model(tmp_path: Path) -> WatchedModel:
    found = WatchedModel(watched_bundle(tmp_path), "fp32")
    found.read_reference()
    return found


def part(model: WatchedModel, sequence: int, num_rows: int) -> Part:
    rows = pixels(sequence, num_rows)
    window = model.window()
    window.add(
        model.features(
            rows,
            probabilities(rows),
            (rows.reshape(num_rows, -1).mean(axis=1) / 255).astype("float32"),
        )
    )
    predictions = [
        Prediction(f"{sequence}-{number}", 0, 1, 0.0, model.version, "dark", None)
        for number in range(num_rows)
    ]
    return Part(sequence, {model.key: window}, predictions)


def rows_in(state: Path) -> int:
    with closing(sqlite3.connect(state / DATABASE)) as connection:
        return int(connection.execute("SELECT total(num_rows) FROM windows").fetchone()[0])


def test_a_part_whose_end_was_not_seen_is_merged_once(tmp_path: Path, model: WatchedModel) -> None:
    store, other = open_store(tmp_path / "state", LIMITS), open_store(tmp_path / "state", LIMITS)
    first = part(model, 1, 40)
    for _ in range(3):
        store.merge(first, {model.key: model})
    other.merge(part(model, 1, 7), {model.key: model})  # of another worker, with the same number
    store.merge(part(model, 2, 10), {model.key: model})
    assert rows_in(tmp_path / "state") == 57
    found = store.open_rows(model.key)
    assert found is not None
    assert found[1] == 57


@pytest.mark.parametrize("num_rows", [1, _ROWS_AT_ONCE, 2 * _ROWS_AT_ONCE + 1])
def test_predictions_are_remembered_as_they_were_however_many(
    num_rows: int, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    predictions = [
        Prediction(
            f"{number}",
            number % 3,
            3,
            number / 7,
            "a" * 64,
            None if number % 2 else "ä\0\ud7ff'",
            number / 3 if number % 2 else None,
        )
        for number in range(num_rows)
    ]
    store.merge(Part(1, {}, predictions), {})
    store.merge(
        Part(2, {}, predictions[:1]), {}
    )  # of a replayed request: it takes the place of the former
    with closing(sqlite3.connect(tmp_path / "state" / DATABASE)) as connection:
        found = connection.execute(
            "SELECT request_id, item, num_items, time, model, label, value FROM predictions ORDER BY time"
        ).fetchall()
    assert [Prediction(*row) for row in found] == predictions


@pytest.mark.process
def test_a_part_that_was_not_written_leaves_nothing_and_can_be_merged_again(
    tmp_path: Path, model: WatchedModel
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    store.merge(part(model, 1, 10), {model.key: model})
    with closing(sqlite3.connect(tmp_path / "state" / DATABASE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            store.merge(part(model, 2, 10), {model.key: model})
        other.execute("ROLLBACK")
    assert rows_in(tmp_path / "state") == 10
    store.merge(part(model, 2, 10), {model.key: model})
    assert rows_in(tmp_path / "state") == 20


def told(request_id: str, label: str, item: int | None = None) -> Told:
    return Told(request_id, item, label, None)


def predicted(
    request_id: str, time: float, label: str = "dark", item: int = 0, num_items: int = 1
) -> Prediction:
    return Prediction(request_id, item, num_items, time, "1", label, None)


def test_truths_of_unknown_requests_push_out_none_that_was_joined_and_are_counted(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path / "state", Limits(1000, 3600, feedback_rows=100, feedback_s=3600))
    store.merge(
        Part(1, predictions=[predicted(f"{number}", time.time()) for number in range(60)]), {}
    )
    assert all(
        one.joined for one in store.tell([told(f"{number}", "dark") for number in range(60)])
    )
    store.tell([told(f"unknown-{number}", "dark") for number in range(130)])
    assert store.tidy() == 30
    assert len(store.joined("1", 1000)) == 60
    assert len(list(read_ground_truths(tmp_path / "state"))) == 160


def test_of_an_id_that_came_again_the_last_answer_counts_whoever_hands_it_over_first(
    tmp_path: Path,
) -> None:
    store, other = open_store(tmp_path / "state", LIMITS), open_store(tmp_path / "state", LIMITS)
    store.merge(Part(1, predictions=[predicted("a", 20.0, "grey")]), {})
    other.merge(
        Part(1, predictions=[predicted("a", 10.0, "dark", item, 3) for item in range(3)]), {}
    )
    assert store.tell([told("a", "grey")])[0].is_wrong is False
    assert (
        store.tell([told("a", "grey", item=2)])[0].joined is False
    )  # the last answer has no such item
    other.merge(Part(2, predictions=[predicted("b", 30.0)]), {})
    assert len(store.joined("1", 10)) == 1


@pytest.mark.parametrize("sequences", [(1, 1), (1, 2), (2, 1)])
def test_a_truth_that_waited_is_of_the_answer_before_it_though_the_id_was_used_again_meanwhile(
    tmp_path: Path, sequences: tuple[int, int]
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    now = time.time()
    assert store.tell([told("a", "grey")])[0].joined is False
    answers = {"grey": now - 0.5, "dark": now + 1.0}  # the second was answered after it
    for number in (1, 2):
        predictions = [
            predicted("a", moment, label)
            for (label, moment), at in zip(answers.items(), sequences, strict=True)
            if at == number
        ]
        store.merge(Part(number, predictions=predictions), {})
    assert store.joined("1", 10) == [("grey", "grey")]


def test_a_truth_leaves_an_old_answer_of_its_id_for_the_one_that_is_written_down_late(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    store.merge(
        Part(1, predictions=[predicted("7", 10.0, "grey"), predicted("8", 10.0, "grey")]), {}
    )
    now = time.time()
    assert [one.joined for one in store.tell([told("7", "grey"), told("8", "grey")])] == [
        True,
        True,
    ]
    _, latest = store.quality("1")
    assert latest is not None
    store.write_quality("1", {}, latest)
    today = [
        predicted("7", now - 0.1),
        *(predicted("8", now - 0.1, item=item, num_items=2) for item in range(2)),
    ]
    merged = store.merge(Part(2, predictions=today), {})
    assert (merged.num_joined, merged.num_ambiguous, merged.wrong) == (
        0,
        1,
        ["1"],
    )  # it was counted as joined before
    assert store.joined("1", 10) == [("grey", "dark")]
    assert store.quality("1")[1] is not None
    again = store.merge(Part(3, predictions=[predicted("9", now)]), {})
    assert (again.num_joined, again.num_ambiguous, again.wrong) == (0, 0, [])


@pytest.mark.parametrize(("early_s", "is_joined"), [(3.0, True), (8.0, False)])
def test_a_truth_may_be_some_seconds_older_than_its_answer_but_no_more(
    tmp_path: Path, early_s: float, is_joined: bool
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    store.tell([told("a", "dark")])
    assert (
        store.merge(Part(1, predictions=[predicted("a", time.time() + early_s)]), {}).num_joined
        == is_joined
    )
    assert len(store.joined("1", 10)) == is_joined


def test_told_again_when_its_prediction_is_forgotten_a_truth_stays_joined(tmp_path: Path) -> None:
    store = open_store(tmp_path / "state", Limits(1000, 3600, feedback_rows=100, feedback_s=3600))
    store.merge(Part(1, predictions=[predicted("a", time.time() - 4000)]), {})
    store.tell([told("a", "grey")])
    store.tidy()
    (heard,) = store.tell([told("a", "dark")])
    assert (heard.joined, heard.duplicate, heard.is_wrong) == (True, True, False)
    assert store.joined("1", 10) == [("dark", "dark")]


def test_a_truth_that_waited_is_told_as_wrong_and_asks_for_a_new_measurement(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    store.merge(Part(1, predictions=[predicted("known", time.time())]), {})
    assert [
        one.joined for one in store.tell([told("early", "grey"), told("early too", "dark")])
    ] == [False, False]
    store.tell([told("known", "dark")])
    _, latest = store.quality("1")
    assert latest is not None
    store.write_quality("1", {}, latest)
    assert store.quality("1")[1] is None
    merged = store.merge(
        Part(2, predictions=[predicted("early", time.time()), predicted("early too", time.time())]),
        {},
    )
    assert (merged.num_joined, merged.wrong) == (2, ["1"])
    assert store.quality("1")[1] is not None


def test_a_window_holds_the_time_of_its_first_row_whichever_worker_had_it(
    tmp_path: Path, model: WatchedModel
) -> None:
    store, other = open_store(tmp_path / "state", LIMITS), open_store(tmp_path / "state", LIMITS)
    first, second, third = (
        replace(part(model, number, 40), begun={model.key: begun})
        for number, begun in ((1, 50.0), (1, 40.0), (2, 60.0))
    )
    for one, by in ((first, store), (second, other), (third, store)):
        by.merge(one, {model.key: model})
        opened = store.open_rows(model.key)
        assert opened is not None
        assert opened[0] == min(
            each.begun[model.key] for each in (first, second, third)[: 1 + (one is not first)]
        )


def test_a_window_that_a_burst_fills_may_spend_what_the_quiet_time_before_it_left(
    tmp_path: Path, model: WatchedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: list[float] = []
    judge = model.judge

    def judged(window: Window, share: float) -> dict[str, Any] | None:
        seconds.append(share)
        return judge(window, share)

    monkeypatch.setattr(model, "judge", judged)
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    store = open_store(
        tmp_path / "state",
        Limits(window_rows=200, window_s=600, feedback_rows=1000, feedback_s=3600),
    )

    def burst(sequence: int, after_s: float) -> None:
        clock[0] += after_s
        store.merge(
            replace(part(model, sequence, 200), begun={model.key: clock[0] - 5}), {model.key: model}
        )

    burst(1, 100)
    burst(2, 300)
    burst(3, 5000)
    assert seconds == [
        5,
        300,
        600,
    ]  # of the first nothing is known before; none has more than a whole window


def no_database(path: Path) -> None:
    path.write_bytes(b"no database at all" * 500)


def damaged_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8192)


def another_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


@pytest.mark.parametrize("damage", [no_database, damaged_page, another_version])
def test_a_database_that_cannot_be_used_is_moved_aside_and_a_new_one_begun(
    tmp_path: Path, model: WatchedModel, damage: object
) -> None:
    state = tmp_path / "state"
    store = open_store(state, LIMITS)
    store.merge(part(model, 1, 10), {model.key: model})
    store.close()
    assert callable(damage)
    damage(state / DATABASE)
    again = open_store(state, LIMITS)
    with pytest.raises(sqlite3.DatabaseError, match="moved aside"):  # so that it is counted
        again.merge(part(model, 1, 10), {model.key: model})
    again.merge(part(model, 1, 5), {model.key: model})
    assert rows_in(state) == 5
    assert len(list(state.glob(f"{DATABASE}.*Z"))) == 1


def test_what_was_moved_aside_goes_when_its_rows_had_to_and_nothing_else_does(
    tmp_path: Path,
) -> None:
    day = 86400.0
    names = {
        days: f"{DATABASE}.{datetime.fromtimestamp(time.time() - days * day, UTC):%Y%m%dT%H%M%S.%fZ}"
        for days in (29, 31, -1)
    }
    old = [f"{names[31]}{suffix}" for suffix in ("", "-wal", "-shm")]
    others = [
        names[29], f"{names[29]}-wal", names[-1], f"{names[31]}.copy", f"my-{names[31]}",
        DATABASE, f"{DATABASE}-wal", f"{DATABASE}.20200101", f"{DATABASE}.bak", "rollout.json",
    ]  # fmt: skip
    for name in (*old, *others):
        (tmp_path / name).touch()
    remove_moved_aside(tmp_path, 30 * day)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
    remove_moved_aside(tmp_path / "not there yet", 30 * day)


def test_what_this_moves_aside_is_what_it_removes(tmp_path: Path) -> None:
    no_database(tmp_path / DATABASE)
    with (
        pytest.raises(sqlite3.DatabaseError, match="moved aside"),
        Database(tmp_path).transaction(),
    ):
        pass
    remove_moved_aside(tmp_path, 60)
    assert len(list(tmp_path.glob(f"{DATABASE}.*"))) == 1
    remove_moved_aside(tmp_path, 0)
    assert list(tmp_path.glob(f"{DATABASE}*")) == []


def test_a_sound_database_is_not_moved_and_an_empty_one_is_begun(
    tmp_path: Path, model: WatchedModel
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / DATABASE).touch()  # the disk was full when it was begun
    for number in range(3):
        open_store(state, LIMITS).merge(part(model, number, 10), {model.key: model})
    assert rows_in(state) == 30
    assert list(state.glob(f"{DATABASE}.*Z")) == []


def test_a_database_that_was_removed_is_noticed_by_who_has_it_open(
    tmp_path: Path, model: WatchedModel
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    store.merge(part(model, 1, 10), {model.key: model})
    for path in (tmp_path / "state").glob(f"{DATABASE}*"):
        path.unlink()
    store.merge(part(model, 2, 5), {model.key: model})
    assert rows_in(tmp_path / "state") == 5


def test_a_fault_inside_leaves_nothing_of_a_transaction(tmp_path: Path) -> None:
    database = Database(tmp_path)

    def fail() -> None:
        with database.transaction() as connection:
            connection.execute("INSERT INTO parts VALUES ('a', 1, 0.0)")
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    with database.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM parts").fetchone() == (0,)
    database.close()


def test_readers_refuse_what_is_no_database_of_this_form(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="is not there"):
        list(read_ground_truths(tmp_path))
    no_database(tmp_path / DATABASE)
    with pytest.raises(UnavailableError, match="cannot be read"):
        list(read_ground_truths(tmp_path))
    (tmp_path / DATABASE).unlink()
    open_store(tmp_path, LIMITS).tell([Told("a", None, "dark", None)])
    assert [truth.label for truth in read_ground_truths(tmp_path)] == ["dark"]
    another_version(tmp_path / DATABASE)
    with pytest.raises(UnavailableError, match="schema version"):
        list(read_ground_truths(tmp_path))
