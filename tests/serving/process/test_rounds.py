"""A failed exchange with the shared database is counted, logged once, and tried again later."""

import logging
from collections.abc import Callable

import pytest

from slipway.serving.process.rounds import Rounds, pause_s
from slipway.system.errors import LockedError


def last_round(exchange: Callable[[], None], calls: list[str], failures: int = 0) -> Rounds:
    """Runs the last round, the only one of a closing worker; `calls` receives what it calls."""
    rounds = Rounds(
        "slipway-test",
        exchange,
        lambda: calls.append("fault"),
        lambda: calls.append("end"),
        failing="cannot exchange",
        working="exchanges again",
    )
    rounds._failures = failures
    rounds._closing.set()
    rounds._work()
    return rounds


def broken() -> None:
    raise OSError("no route")


def locked() -> None:
    raise LockedError("another worker exchanges")


def test_first_failed_round_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    calls = list[str]()
    last_round(broken, calls)
    assert calls == ["fault", "end"]
    assert caplog.messages == ["cannot exchange: OSError: no route"]


def test_failed_rounds_after_the_first_are_counted_but_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = list[str]()
    rounds = last_round(broken, calls, failures=10_000)  # days without the database
    assert calls == ["fault", "end"]
    assert caplog.messages == []
    assert rounds._failures == 10_001


def test_round_that_succeeds_after_failures_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bentoml.slipway")
    calls = list[str]()
    rounds = last_round(lambda: calls.append("exchange"), calls, failures=2)
    assert calls == ["exchange", "end"]
    assert caplog.messages == ["exchanges again"]
    assert rounds._failures == 0


def test_round_of_another_worker_is_neither_a_failure_nor_a_success(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = list[str]()
    rounds = last_round(locked, calls, failures=2)
    assert (calls, caplog.messages, rounds._failures) == (["end"], [], 2)


def test_pauses_double_after_each_failure_up_to_30_seconds() -> None:
    assert [pause_s(failures) for failures in (0, 1, 2, 5, 10_000)] == [1, 2, 4, 30, 30]


def test_closing_runs_a_last_round_and_ends_the_thread() -> None:
    calls = list[str]()
    rounds = Rounds(
        "slipway-test",
        lambda: calls.append("exchange"),
        lambda: calls.append("fault"),
        lambda: calls.append("end"),
        failing="cannot exchange",
        working="exchanges again",
    )
    rounds.start()
    rounds.close()
    assert calls == ["exchange", "end"]
    assert not rounds._thread.is_alive()
