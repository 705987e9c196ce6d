"""The monitoring database merges each part once, and replaces an unusable file."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from slipway.drift.window import Window
from slipway.serving.monitoring.database import Database, remove_moved_aside
from slipway.serving.monitoring.labels import ROWS_PER_INSERT, FeedbackItem, Prediction
from slipway.serving.monitoring.models import MonitoredModel
from slipway.serving.monitoring.settings import Limits
from slipway.serving.monitoring.store import Part, Store
from slipway.system.errors import UnavailableError
from slipway.traffic.monitoring_records import DATABASE, SCHEMA_VERSION, read_ground_truth
from tests.serving.bundles import probabilities
from tests.serving.monitoring.monitored import monitored_bundle, pixels

LIMITS = Limits(window_rows=1000, window_s=3600, feedback_rows=1000, feedback_s=3600)

_opened: list[Store] = []


def open_store(state: Path, limits: Limits) -> Store:
    """Open a store that is closed after the test: Python 3.13 warns of unclosed connections."""
    _opened.append(Store(state, limits))
    return _opened[-1]


@pytest.fixture(autouse=True)
def _close_stores() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


@pytest.fixture
def model(tmp_path: Path) -> MonitoredModel:
    found = MonitoredModel(monitored_bundle(tmp_path), "fp32")
    found.read_reference()
    return found


def part(model: MonitoredModel, sequence: int, num_rows: int) -> Part:
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


def test_store_merges_a_repeated_part_only_once(tmp_path: Path, model: MonitoredModel) -> None:
    store, other = open_store(tmp_path / "state", LIMITS), open_store(tmp_path / "state", LIMITS)
    first = part(model, 1, 40)
    for _ in range(3):
        store.merge(first, {model.key: model})
    other.merge(part(model, 1, 7), {model.key: model})  # of another worker, with the same number
    store.merge(part(model, 2, 10), {model.key: model})
    assert rows_in(tmp_path / "state") == 57
    found = store.open_window(model.key)
    assert found is not None
    assert found[1] == 57


@pytest.mark.parametrize("num_rows", [1, ROWS_PER_INSERT, 2 * ROWS_PER_INSERT + 1])
def test_predictions_are_stored_unchanged_in_any_number(num_rows: int, tmp_path: Path) -> None:
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
    store.merge(Part(2, {}, predictions[:1]), {})  # a repeated request replaces the first
    with closing(sqlite3.connect(tmp_path / "state" / DATABASE)) as connection:
        found = connection.execute(
            "SELECT request_id, item, num_items, time, model, label, value FROM predictions "
            "ORDER BY time"
        ).fetchall()
    assert [Prediction(*row) for row in found] == predictions


@pytest.mark.process
def test_part_is_merged_later_if_the_database_was_locked(
    tmp_path: Path, model: MonitoredModel
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


def feedback(request_id: str, label: str, item: int | None = None) -> FeedbackItem:
    return FeedbackItem(request_id, item, label, None)


def predicted(
    request_id: str, time: float, label: str = "dark", item: int = 0, num_items: int = 1
) -> Prediction:
    return Prediction(request_id, item, num_items, time, "1", label, None)


def test_labels_of_unknown_requests_do_not_displace_joined_labels(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path / "state", Limits(1000, 3600, feedback_rows=100, feedback_s=3600))
    store.merge(
        Part(1, predictions=[predicted(f"{number}", time.time()) for number in range(60)]), {}
    )
    assert all(
        one.joined
        for one in store.add_feedback([feedback(f"{number}", "dark") for number in range(60)])
    )
    store.add_feedback([feedback(f"unknown-{number}", "dark") for number in range(130)])
    assert store.tidy() == 30
    assert len(store.joined("1", 1000)) == 60
    assert len(list(read_ground_truth(tmp_path / "state"))) == 160


def test_label_of_a_reused_id_joins_the_last_prediction_of_any_worker(
    tmp_path: Path,
) -> None:
    store, other = open_store(tmp_path / "state", LIMITS), open_store(tmp_path / "state", LIMITS)
    store.merge(Part(1, predictions=[predicted("a", 20.0, "grey")]), {})
    other.merge(
        Part(1, predictions=[predicted("a", 10.0, "dark", item, 3) for item in range(3)]), {}
    )
    assert store.add_feedback([feedback("a", "grey")])[0].is_wrong is False
    assert (
        store.add_feedback([feedback("a", "grey", item=2)])[0].joined is False
    )  # the last answer has one item
    other.merge(Part(2, predictions=[predicted("b", 30.0)]), {})
    assert len(store.joined("1", 10)) == 1


@pytest.mark.parametrize("sequences", [(1, 1), (1, 2), (2, 1)])
def test_waiting_label_joins_the_preceding_prediction_even_if_the_id_is_reused(
    tmp_path: Path, sequences: tuple[int, int]
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    now = time.time()
    assert store.add_feedback([feedback("a", "grey")])[0].joined is False
    answers = {"grey": now - 0.5, "dark": now + 1.0}  # the second came after the label
    for number in (1, 2):
        predictions = [
            predicted("a", moment, label)
            for (label, moment), at in zip(answers.items(), sequences, strict=True)
            if at == number
        ]
        store.merge(Part(number, predictions=predictions), {})
    assert store.joined("1", 10) == [("grey", "grey")]


def test_label_moves_from_an_old_prediction_to_a_newer_one_stored_late(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    store.merge(
        Part(1, predictions=[predicted("7", 10.0, "grey"), predicted("8", 10.0, "grey")]), {}
    )
    now = time.time()
    assert [
        one.joined for one in store.add_feedback([feedback("7", "grey"), feedback("8", "grey")])
    ] == [
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
    assert (merged.joins.num_joined, merged.joins.num_ambiguous, merged.joins.wrong_models) == (
        0,
        1,
        ("1",),
    )  # it was counted as joined before
    assert store.joined("1", 10) == [("grey", "dark")]
    assert store.quality("1")[1] is not None
    again = store.merge(Part(3, predictions=[predicted("9", now)]), {})
    assert (again.joins.num_joined, again.joins.num_ambiguous, again.joins.wrong_models) == (
        0,
        0,
        (),
    )


@pytest.mark.parametrize(("early_s", "is_joined"), [(3.0, True), (8.0, False)])
def test_label_may_arrive_a_few_seconds_before_its_prediction(
    tmp_path: Path, early_s: float, is_joined: bool
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    store.add_feedback([feedback("a", "dark")])
    assert (
        store.merge(
            Part(1, predictions=[predicted("a", time.time() + early_s)]), {}
        ).joins.num_joined
        == is_joined
    )
    assert len(store.joined("1", 10)) == is_joined


def test_corrected_label_stays_joined_after_its_prediction_was_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path / "state", Limits(1000, 3600, feedback_rows=100, feedback_s=3600))
    store.merge(Part(1, predictions=[predicted("a", time.time() - 4000)]), {})
    store.add_feedback([feedback("a", "grey")])
    store.tidy()
    (result,) = store.add_feedback([feedback("a", "dark")])
    assert (result.joined, result.duplicate, result.is_wrong) == (True, True, False)
    assert store.joined("1", 10) == [("dark", "dark")]


def test_late_join_reports_a_wrong_prediction_and_makes_quality_stale(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    store.merge(Part(1, predictions=[predicted("known", time.time())]), {})
    assert [
        one.joined
        for one in store.add_feedback([feedback("early", "grey"), feedback("early too", "dark")])
    ] == [False, False]
    store.add_feedback([feedback("known", "dark")])
    _, latest = store.quality("1")
    assert latest is not None
    store.write_quality("1", {}, latest)
    assert store.quality("1")[1] is None
    merged = store.merge(
        Part(2, predictions=[predicted("early", time.time()), predicted("early too", time.time())]),
        {},
    )
    assert (merged.joins.num_joined, merged.joins.wrong_models) == (2, ("1",))
    assert store.quality("1")[1] is not None


def test_window_opens_with_the_earliest_row_of_all_workers(
    tmp_path: Path, model: MonitoredModel
) -> None:
    store, other = open_store(tmp_path / "state", LIMITS), open_store(tmp_path / "state", LIMITS)
    first, second, third = (
        replace(part(model, number, 40), opened={model.key: opened})
        for number, opened in ((1, 50.0), (1, 40.0), (2, 60.0))
    )
    for one, by in ((first, store), (second, other), (third, store)):
        by.merge(one, {model.key: model})
        found = store.open_window(model.key)
        assert found is not None
        assert found[0] == min(
            each.opened[model.key] for each in (first, second, third)[: 1 + (one is not first)]
        )


def test_window_filled_by_a_burst_includes_the_preceding_quiet_time_in_its_budget(
    tmp_path: Path, model: MonitoredModel, monkeypatch: pytest.MonkeyPatch
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
            replace(part(model, sequence, 200), opened={model.key: clock[0] - 5}),
            {model.key: model},
        )

    burst(1, 100)
    burst(2, 300)
    burst(3, 5000)
    assert seconds == [
        5,
        300,
        600,
    ]  # the first counts from its opening; none has more than one window


def no_database(path: Path) -> None:
    path.write_bytes(b"no database at all" * 500)


def damaged_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8192)


def another_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


def test_database_of_the_previous_schema_is_migrated(tmp_path: Path, model: MonitoredModel) -> None:
    state = tmp_path / "state"
    store = open_store(state, LIMITS)
    store.add_feedback([FeedbackItem("id", None, "cat", None)])
    store.close()
    with closing(sqlite3.connect(state / DATABASE)) as connection:
        connection.execute("ALTER TABLE labels DROP COLUMN caller")
        connection.execute("PRAGMA user_version = 3")
    again = open_store(state, LIMITS)
    again.add_feedback([FeedbackItem("other", None, "dog", None, "shop-1")])
    again.close()
    found = {label.request_id: label.caller for label in read_ground_truth(state)}
    assert found == {"id": None, "other": "shop-1"}


@pytest.mark.parametrize("damage", [no_database, damaged_page, another_version])
def test_unusable_database_is_moved_aside_and_replaced(
    tmp_path: Path, model: MonitoredModel, damage: object
) -> None:
    state = tmp_path / "state"
    store = open_store(state, LIMITS)
    store.merge(part(model, 1, 10), {model.key: model})
    store.close()
    assert callable(damage)
    damage(state / DATABASE)
    again = open_store(state, LIMITS)
    with pytest.raises(sqlite3.DatabaseError, match="moved aside"):  # and counted as an error
        again.merge(part(model, 1, 10), {model.key: model})
    again.merge(part(model, 1, 5), {model.key: model})
    assert rows_in(state) == 5
    assert len(list(state.glob(f"{DATABASE}.*Z"))) == 1


def test_databases_moved_aside_are_deleted_by_age_and_other_files_stay(
    tmp_path: Path,
) -> None:
    day, now = 86400.0, time.time()
    names = {
        days: f"{DATABASE}.{datetime.fromtimestamp(now - days * day, UTC):%Y%m%dT%H%M%S.%fZ}"
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


def test_database_moved_aside_is_recognised_for_deletion(tmp_path: Path) -> None:
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


def test_empty_file_becomes_a_database_and_is_not_moved_aside(
    tmp_path: Path, model: MonitoredModel
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / DATABASE).touch()  # as left by a full disk
    for number in range(3):
        open_store(state, LIMITS).merge(part(model, number, 10), {model.key: model})
    assert rows_in(state) == 30
    assert list(state.glob(f"{DATABASE}.*Z")) == []


def test_removed_database_is_created_again_by_a_worker_that_had_it_open(
    tmp_path: Path, model: MonitoredModel
) -> None:
    store = open_store(tmp_path / "state", LIMITS)
    store.merge(part(model, 1, 10), {model.key: model})
    for path in (tmp_path / "state").glob(f"{DATABASE}*"):
        path.unlink()
    store.merge(part(model, 2, 5), {model.key: model})
    assert rows_in(tmp_path / "state") == 5


def test_exception_in_a_transaction_rolls_it_back(tmp_path: Path) -> None:
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


def test_readers_refuse_missing_damaged_and_newer_databases(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="does not exist"):
        list(read_ground_truth(tmp_path))
    no_database(tmp_path / DATABASE)
    with pytest.raises(UnavailableError, match="cannot be read"):
        list(read_ground_truth(tmp_path))
    (tmp_path / DATABASE).unlink()
    open_store(tmp_path, LIMITS).add_feedback([FeedbackItem("a", None, "dark", None)])
    assert [truth.label for truth in read_ground_truth(tmp_path)] == ["dark"]
    another_version(tmp_path / DATABASE)
    with pytest.raises(UnavailableError, match="schema version"):
        list(read_ground_truth(tmp_path))
