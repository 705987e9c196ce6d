"""The history of a service, its chain of digests, and the command `slipway history`."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.loop.history import main
from slipway.serving.rollout import commands
from slipway.serving.rollout.history import Author, change_rollout, record_served
from slipway.serving.rollout.records.entries import HISTORY, Served, entry_at, read_history
from slipway.serving.rollout.state import EMPTY, Rollout, RolloutError
from slipway.serving.worker import ModelWorker
from slipway.system import files
from tests.serving.conftest import MakeSettings
from tests.serving.rolling import (
    propose,
    run,
    serves,
    settle,
)

VERSION = "0123456789ab"


def refused(reason: str, by: str = "") -> Callable[[Rollout], Rollout]:
    return lambda rollout: rollout.with_event("refused", VERSION, reason, by)


def write_bundle(folder: Path) -> None:
    (folder / "bundle").mkdir(parents=True)
    lineage = {"data": {"digest": "d1"}, "git_revision": "c0ffee", "git_dirty": True}
    (folder / "bundle/bundle.json").write_text(json.dumps({"lineage": lineage}))
    (folder / "certificate.json").write_text(json.dumps({"gates": "passed"}))


def record(state: Path, folder: Path, version: str = VERSION) -> None:
    record_served(state, version, folder / "bundle", folder / "certificate.json")


def test_history_has_one_entry_per_event_that_names_its_author(tmp_path: Path) -> None:
    change_rollout(tmp_path, refused("first", "ann@desk"))
    change_rollout(tmp_path, lambda rollout: refused("third")(refused("second")(rollout)))
    entries = read_history(tmp_path / HISTORY)
    assert [(one.number, one.event, one.reason) for one in entries] == [
        (1, 1, "first"),
        (2, 2, "second"),
        (3, 3, "third"),
    ]
    assert [one.by for one in entries] == ["ann@desk", "", ""]


def test_start_with_the_configured_bundle_is_recorded_once_with_its_origin(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    for _ in range(3):  # three workers
        record(tmp_path, tmp_path)
    (entry,) = read_history(tmp_path / HISTORY)
    assert (entry.what, entry.event) == ("started", None)
    assert entry.stable == Served(
        version=VERSION,
        certificate=files.sha256_file(tmp_path / "certificate.json"),
        gates="passed",
        data="d1",
        git_revision="c0ffee",
        git_dirty=True,
    )
    record(tmp_path, tmp_path, "another")
    assert len(read_history(tmp_path / HISTORY)) == 2


def test_history_of_a_refused_model_names_the_unchanged_served_model(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    record(tmp_path, tmp_path)
    change_rollout(tmp_path, refused("worse"))
    before, after = read_history(tmp_path / HISTORY)
    assert before.stable == after.stable


def test_events_of_a_killed_process_are_added_by_the_next_change(tmp_path: Path) -> None:
    change_rollout(tmp_path, refused("first"))
    path = tmp_path / HISTORY
    before = path.read_bytes()
    change_rollout(tmp_path, refused("second"))
    path.write_bytes(before + b'{"number": 2, "ev')  # killed while it wrote
    assert len(read_history(path)) == 1
    change_rollout(tmp_path, refused("third"))
    assert [one.reason for one in read_history(path)] == ["first", "second", "third"]


def test_rollout_continues_if_the_history_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / HISTORY).mkdir()
    after = change_rollout(tmp_path, refused("first"))
    assert after.num_events == 1
    assert "cannot write the history" in caplog.text


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda lines: [lines[0].replace(b"first", b"other"), *lines[1:]], 2),
        (lambda lines: lines[1:], 1),
        (lambda lines: [lines[0], *lines[2:]], 2),
        (lambda lines: [lines[0], b"{}", *lines[1:]], 2),
        (lambda lines: [lines[1], lines[0], lines[2]], 1),
    ],
    ids=["changed", "first removed", "removed", "added", "exchanged"],
)
def test_error_for_a_damaged_history_names_the_line(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], line: int
) -> None:
    for reason in ("first", "second", "third"):
        change_rollout(tmp_path, refused(reason))
    path = tmp_path / HISTORY
    path.write_bytes(b"".join(one + b"\n" for one in damage(path.read_bytes().splitlines())))
    with pytest.raises(RolloutError, match=f"changed or damaged: line {line}"):
        read_history(path)


def test_flipped_bytes_of_the_history_are_detected_except_in_the_last_line(tmp_path: Path) -> None:
    for reason in ("first", "second"):
        change_rollout(tmp_path, refused(reason))
    path = tmp_path / HISTORY
    good = path.read_bytes()
    for place in range(good.index(b"\n") + 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(RolloutError):
            read_history(path)


def test_entry_at_returns_the_last_history_entry_up_to_a_time(tmp_path: Path) -> None:
    for reason in ("first", "second"):
        change_rollout(tmp_path, refused(reason))
    first, second = read_history(tmp_path / HISTORY)
    assert entry_at([first, second], first.time - 1) is None
    assert entry_at([first, second], second.time + 1) == second
    assert entry_at([first], first.time) == first


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_service_records_its_start_a_deployment_and_the_return_to_its_bundle(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    first, second = (load_bundle(path).version for path in (settings.bundle, new_bundle))

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "deploy", new_bundle)
        await serves(worker, second)
        await asyncio.to_thread(commands.reset, settings, Author("ann", "it was slow"))
        await serves(worker, first)
        await settle(worker, lambda: len(read_history(settings.state / HISTORY)) == 6)

    run(settings, work)
    entries = read_history(settings.state / HISTORY)
    served = [one.stable and one.stable.version for one in entries]
    whats = ["started", "proposed", "swapped", "proposed", "swapped", "started"]
    assert [one.what for one in entries] == whats
    assert served == [first, first, second, second, None, first]
    assert (entries[3].by, entries[3].reason) == ("ann", "deploy by command: it was slow")


def test_event_by_an_author_without_a_reason_says_by_command() -> None:
    assert Author("ann").because == "by command"
    assert Author("ann", "accuracy fell").because == "by command: accuracy fell"


def test_history_command_prints_entries_and_the_last_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_STATE", str(tmp_path))
    write_bundle(tmp_path)
    record(tmp_path, tmp_path)
    change_rollout(tmp_path, refused("its accuracy is 0.5", "ann@desk"))
    main([])
    printed = capsys.readouterr().out
    last = (tmp_path / HISTORY).read_bytes().splitlines()[-1]
    assert f"{VERSION} refused by ann@desk: its accuracy is 0.5" in printed
    assert hashlib.sha256(last).hexdigest() in printed
    main(["--at", "2999-01-01"])
    answer = capsys.readouterr().out
    for part in (
        f"served       {VERSION}",
        "ann@desk",
        "passed",
        "d1",
        "c0ffee with local changes",
    ):
        assert part in answer
    main(["--at", "2999-01-01T00:00+02:00", "--json"])
    assert json.loads(capsys.readouterr().out)["stable"]["version"] == VERSION
    main(["--json"])
    assert [entry["number"] for entry in json.loads(capsys.readouterr().out)] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "there is no history"), (["--at", "2001-01-01"], "there is no history")],
)
def test_history_command_without_a_history_says_what_writes_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("SLIPWAY_STATE", str(tmp_path))
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_history_command_refuses_a_truncated_history_and_a_time_before_its_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_STATE", str(tmp_path))
    for reason in ("first", "second"):
        change_rollout(tmp_path, refused(reason))
    with pytest.raises(SystemExit):
        main(["--at", "2001-01-01"])
    assert "the history begins at" in capsys.readouterr().err
    path = tmp_path / HISTORY
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(SystemExit):
        main([])
    assert "lacks the last 1 of 2 events" in capsys.readouterr().err


def test_the_rollout_history_is_readable_by_the_owner_only(tmp_path: Path) -> None:
    change_rollout(tmp_path, refused("first"))
    assert (tmp_path / HISTORY).stat().st_mode & 0o777 == 0o600
    assert EMPTY.num_events == 0
