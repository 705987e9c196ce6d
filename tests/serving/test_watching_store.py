"""The database of what is watched: a part is merged once, and a file that cannot be used is moved aside and removed in its turn."""

import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from serving.watching.database import Database, remove_moved_aside
from serving.watching.models import WatchedModel
from serving.watching.store import _ROWS_AT_ONCE, Limits, Part, Prediction, Store, Told
from slipway.errors import UnavailableError
from slipway.watched import DATABASE, SCHEMA_VERSION, read_truths
from tests.serving.bundles import probabilities
from tests.serving.watched import pixels, watched_bundle

LIMITS = Limits(window_rows=1000, window_s=3600, feedback_rows=1000, feedback_s=3600)


@pytest.fixture
def model(tmp_path: Path) -> WatchedModel:
    found = WatchedModel(watched_bundle(tmp_path), "fp32")
    found.read_reference()
    return found


def part(model: WatchedModel, sequence: int, num_rows: int) -> Part:
    rows = pixels(sequence, num_rows)
    window = model.window()
    window.add(model.features(rows, probabilities(rows), (rows.reshape(num_rows, -1).mean(axis=1) / 255).astype("float32")))
    predictions = [Prediction(f"{sequence}-{number}", 0, 1, 0.0, model.version, "dark", None) for number in range(num_rows)]
    return Part(sequence, {model.key: window}, predictions)


def rows_in(state: Path) -> int:
    with closing(sqlite3.connect(state / DATABASE)) as connection:
        return int(connection.execute("SELECT total(num_rows) FROM windows").fetchone()[0])


def test_a_part_whose_end_was_not_seen_is_merged_once(tmp_path: Path, model: WatchedModel) -> None:
    store, other = Store(tmp_path / "state", LIMITS), Store(tmp_path / "state", LIMITS)
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
def test_predictions_are_remembered_as_they_were_however_many(num_rows: int, tmp_path: Path) -> None:
    store = Store(tmp_path / "state", LIMITS)
    predictions = [
        Prediction(
            f"{number}", number % 3, 3, number / 7, "a" * 64, None if number % 2 else "ä\0\ud7ff'", number / 3 if number % 2 else None
        )
        for number in range(num_rows)
    ]
    store.merge(Part(1, {}, predictions), {})
    store.merge(Part(2, {}, predictions[:1]), {})  # of a replayed request: it takes the place of the former
    with closing(sqlite3.connect(tmp_path / "state" / DATABASE)) as connection:
        found = connection.execute(
            "SELECT request_id, item, num_items, time, model, label, value FROM predictions ORDER BY time"
        ).fetchall()
    assert [Prediction(*row) for row in found] == predictions


def test_a_part_that_was_not_written_leaves_nothing_and_can_be_merged_again(tmp_path: Path, model: WatchedModel) -> None:
    store = Store(tmp_path / "state", LIMITS)
    store.merge(part(model, 1, 10), {model.key: model})
    with closing(sqlite3.connect(tmp_path / "state" / DATABASE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            store.merge(part(model, 2, 10), {model.key: model})
        other.execute("ROLLBACK")
    assert rows_in(tmp_path / "state") == 10
    store.merge(part(model, 2, 10), {model.key: model})
    assert rows_in(tmp_path / "state") == 20


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
def test_a_database_that_cannot_be_used_is_moved_aside_and_a_new_one_begun(tmp_path: Path, model: WatchedModel, damage: object) -> None:
    state = tmp_path / "state"
    store = Store(state, LIMITS)
    store.merge(part(model, 1, 10), {model.key: model})
    store.close()
    assert callable(damage)
    damage(state / DATABASE)
    again = Store(state, LIMITS)
    with pytest.raises(sqlite3.DatabaseError, match="moved aside"):  # so that it is counted
        again.merge(part(model, 1, 10), {model.key: model})
    again.merge(part(model, 1, 5), {model.key: model})
    assert rows_in(state) == 5
    assert len(list(state.glob(f"{DATABASE}.*Z"))) == 1


def test_what_was_moved_aside_goes_when_its_rows_had_to_and_nothing_else_does(tmp_path: Path) -> None:
    day = 86400.0
    names = {days: f"{DATABASE}.{datetime.fromtimestamp(time.time() - days * day, UTC):%Y%m%dT%H%M%S.%fZ}" for days in (29, 31, -1)}
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
    with pytest.raises(sqlite3.DatabaseError, match="moved aside"), Database(tmp_path).transaction():
        pass
    remove_moved_aside(tmp_path, 60)
    assert len(list(tmp_path.glob(f"{DATABASE}.*"))) == 1
    remove_moved_aside(tmp_path, 0)
    assert list(tmp_path.glob(f"{DATABASE}*")) == []


def test_a_sound_database_is_not_moved_and_an_empty_one_is_begun(tmp_path: Path, model: WatchedModel) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / DATABASE).touch()  # the disk was full when it was begun
    for number in range(3):
        Store(state, LIMITS).merge(part(model, number, 10), {model.key: model})
    assert rows_in(state) == 30
    assert list(state.glob(f"{DATABASE}.*Z")) == []


def test_a_database_that_was_removed_is_noticed_by_who_has_it_open(tmp_path: Path, model: WatchedModel) -> None:
    store = Store(tmp_path / "state", LIMITS)
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


def test_readers_refuse_what_is_no_database_of_this_form(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="is not there"):
        list(read_truths(tmp_path))
    no_database(tmp_path / DATABASE)
    with pytest.raises(UnavailableError, match="cannot be read"):
        list(read_truths(tmp_path))
    (tmp_path / DATABASE).unlink()
    Store(tmp_path, LIMITS).tell([Told("a", None, "dark", None)])
    assert [truth.label for truth in read_truths(tmp_path)] == ["dark"]
    another_version(tmp_path / DATABASE)
    with pytest.raises(UnavailableError, match="schema version"):
        list(read_truths(tmp_path))
