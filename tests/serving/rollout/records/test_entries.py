"""Entries of a history that several services share, without a database."""

import json
from typing import Any

from slipway.serving.rollout.records.entries import (
    Entry,
    chained,
    entry_at,
    in_time,
    parse_lines,
    serving_at,
)

OLD, NEW = "a" * 12, "b" * 12


def entries(*drafts: tuple[float, str, str, str]) -> list[Entry]:
    """Return history entries of the given (time, what, service, model)."""
    common: dict[str, Any] = {"event": None, "by": "", "reason": "", "candidate": None}
    lines = chained(
        (
            common
            | {"fraction": 0}
            | {"time": time, "what": what, "service": service, "model": model}
            | {"stable": {"version": model}}
            for time, what, service, model in drafts
        ),
        0,
        b"",
    )
    return parse_lines(lines, "here")


def test_history_entry_added_late_is_sorted_by_its_own_time() -> None:
    found = entries(
        (1, "started", "one", OLD), (5, "promoted", "", NEW), (3, "started", "two", OLD)
    )
    last = entry_at(in_time(found), 9)
    assert last is not None
    assert last.what == "promoted"
    assert [one.number for one in in_time(found)] == [1, 3, 2]


def test_history_of_one_service_keeps_its_order_when_the_clock_jumps_back() -> None:
    found = entries((5, "promoted", "", OLD), (1, "promoted", "", NEW))
    assert in_time(found) == found
    assert entry_at(in_time(found), 9) == found[-1]


def test_history_lists_services_that_started_and_did_not_stop_as_serving() -> None:
    found = entries(
        (1, "started", "one", OLD),
        (2, "started", "two", OLD),
        (3, "stopped", "one", OLD),
        (4, "swapped", "", NEW),
    )
    assert serving_at(found[:2]) == {"one": OLD, "two": OLD}
    assert serving_at(found) == {"two": NEW}


def test_history_of_format_1_which_says_share_is_read_and_continued() -> None:
    (now,) = entries((1, "promoted", "", NEW))
    former = now.model_dump(mode="json", exclude={"service", "fraction"})
    line = json.dumps(former | {"format_version": 1, "share": 0.25}).encode()
    (read,) = parse_lines([line], "here")
    (added,) = chained([now.model_dump()], 1, line)
    assert read.fraction == 0.25
    assert [one.fraction for one in parse_lines([line, added], "here")] == [0.25, 0]
    assert json.loads(added)["fraction"] == 0
    assert b'"format_version": 2' in added
    assert b'"share"' not in added


def test_history_line_without_a_service_has_the_format_of_older_versions() -> None:
    line, other = chained(
        [
            entries((1, what, service, OLD))[0].model_dump()
            for what, service in (("promoted", ""), ("started", "one"))
        ],
        0,
        b"",
    )
    assert (b'"service"' in line, b'"service"' in other) == (False, True)
