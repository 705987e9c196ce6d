"""Entries of a history that several services share, without a database."""

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
    common: dict[str, Any] = {"event": None, "by": "", "reason": "", "candidate": None, "share": 0}
    lines = chained(
        (
            common
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
