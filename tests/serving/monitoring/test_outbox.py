"""Feedback that services share through PostgreSQL is joined once, and no fault loses it."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slipway.serving.metrics.service_metrics import ServiceMetrics
from slipway.serving.monitoring.labels import FeedbackItem, OutboxFullError, Prediction
from slipway.serving.monitoring.metrics import MonitoringMetrics
from slipway.serving.monitoring.outbox import Forwarder
from slipway.serving.monitoring.settings import Limits, MonitoringSettings
from slipway.serving.monitoring.store import Part, Store
from slipway.serving.settings import Settings, SettingsError, read_settings
from slipway.traffic.erasure import count_records, erase_records
from slipway.traffic.monitoring_records import read_ground_truth, read_joined_labels
from slipway.traffic.postgres import DATABASE_URL
from tests import plain_http
from tests.serving.monitoring.monitored import monitored_bundle, pictures
from tests.serving.monitoring.postgres import cluster, filled, small_cluster
from tests.serving.server import Server, running, until

NOBODY = "postgresql://nobody@127.0.0.1:1/none"  # nothing listens there


def limits(url: str = NOBODY, rows: int = 1000) -> Limits:
    return Limits(
        window_rows=1000, window_s=3600, feedback_rows=rows, feedback_s=3600, database_url=url
    )


def predictions(*names: str, moment: float | None = None) -> list[Prediction]:
    time_of = time.time() if moment is None else moment
    return [Prediction(name, 0, 1, time_of, "1", "dark", None) for name in names]


def labels(*names: str, label: str = "dark") -> list[FeedbackItem]:
    return [FeedbackItem(name, None, label, None, "shop") for name in names]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[[str, str], "Service"]]:
    opened: list[Service] = []

    def make(name: str, url: str) -> Service:
        opened.append(Service(tmp_path / name, url))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


class Service:
    """A service's part in the database: its outbox and its delivery."""

    def __init__(self, state: Path, url: str) -> None:
        settings = Settings(state=state)
        self.store, self.wrong = Store(state, limits(url)), list[str]()
        self._all = ServiceMetrics()
        self.metrics = MonitoringMetrics(self._all)
        self.forwarder = Forwarder(
            settings, limits(url), self.metrics, lambda: None, self.wrong.append
        )
        self._sequence = 0

    def predict(self, *names: str) -> None:
        self._sequence += 1
        self.store.merge(Part(self._sequence, {}, predictions(*names)), {})

    def joined(self) -> float:
        return float(self.metrics.feedback["joined"]._value.get())

    def close(self) -> None:
        self.store.close()
        self._all.close()
        self.forwarder._shared.close()
        self.forwarder._store.close()
        self.forwarder._outbox.close()


def test_full_outbox_refuses_labels_and_drops_the_oldest_predictions(
    tmp_path: Path,
) -> None:
    with closing(Store(tmp_path, limits(rows=100))) as store:
        store.add_feedback(labels(*(f"{number}" for number in range(60))))
        with pytest.raises(OutboxFullError):
            store.add_feedback(labels(*(f"{number}" for number in range(60, 120))))
        assert store.num_waiting() == 60
        done = [
            store.merge(Part(sequence, {}, predictions(*(f"{n}" for n in range(40)))), {})
            for sequence in (1, 2, 3)
        ]
        assert [one.num_dropped for one in done] == [0, 0, 40]
        assert store.num_waiting() == 60 + 80
        (result,) = store.add_feedback(labels("0"))
        assert (result.joined, result.duplicate) == (False, False)


def test_database_that_is_down_delays_no_end_of_a_worker_and_counts_as_a_fault(
    service: Callable[[str, str], Service],
) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    one = service("one", NOBODY)
    one.predict("a")
    one.forwarder.rounds.start()
    one.forwarder.rounds.close()
    assert not one.forwarder.rounds._thread.is_alive()
    assert one._all._faults_by_part["database"]._value.get() == 1


def test_error_for_an_invalid_database_address_hides_its_password() -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    for wrong in ("postgresql://me:secret@host/x?no=1", "user=me password=secret x"):
        with pytest.raises(SettingsError, match="SLIPWAY_DATABASE_URL") as error:
            read_settings([MonitoringSettings], {DATABASE_URL: wrong})
        assert "expected postgresql://USER@HOST/NAME" in str(error.value)
        assert "secret" not in str(error.value)
    for unset in ({}, {DATABASE_URL: ""}):
        settings = read_settings([MonitoringSettings], unset)
        assert settings.section(MonitoringSettings).limits.database_url is None


@pytest.mark.process
def test_label_and_prediction_of_two_services_join_once_although_the_database_is_killed(
    service: Callable[[str, str], Service], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with cluster() as postgres:
        first, second = (service(name, postgres.url) for name in ("first", "second"))
        first.predict("a", "b", "reused")
        second.store.add_feedback(labels("a") + labels("b", label="bright"))
        for one in (second, first, second, first):  # the labels come first
            one.forwarder.work_once()
        assert first.joined() + second.joined() == 2
        assert first.wrong + second.wrong == ["1"]
        assert first.store.num_waiting() == second.store.num_waiting() == 0

        # The result of a delivery is lost: the same rows are delivered again.
        outbox = first.forwarder._outbox
        first.predict("c")
        with outbox.transaction() as connection:
            kept = connection.execute("SELECT * FROM outbox").fetchall()
        first.forwarder.work_once()
        second.store.add_feedback(labels("c"))
        second.forwarder.work_once()
        with outbox.transaction() as connection:
            connection.executemany("INSERT INTO outbox VALUES (?, ?, ?, ?)", kept)
        first.forwarder.work_once()
        assert first.joined() + second.joined() == 3

        postgres.stop()
        second.store.add_feedback(labels("d"))
        first.predict("d")
        for one in (first, second):
            with pytest.raises(Exception, match="connect"):
                one.forwarder.work_once()
        postgres.start()
        first.forwarder.work_once()
        second.forwarder.work_once()
        assert postgres.fetch("SELECT count(*), count(joined) FROM slipway.labels") == [(4, 4)]
        monkeypatch.setenv(DATABASE_URL, postgres.url)
        assert sorted(one.request_id for one in read_ground_truth(tmp_path)) == list("abcd")
        found = read_joined_labels(tmp_path, "1")
        assert sorted((one.truth, one.predicted) for one in found) == [
            ("bright", "dark"),
            *[("dark", "dark")] * 3,
        ]
        first.store.add_feedback(labels("a", "e"))  # still in the outbox
        erased = {"predictions": 1, "labels": 2}
        assert count_records(tmp_path / "first", {"a": None}) == erased
        assert sum(count_records(tmp_path / "first", {"a": frozenset({1})}).values()) == 0
        assert erase_records(tmp_path / "first", {"a": frozenset({0})}) == erased
        assert sorted(one.request_id for one in read_ground_truth(tmp_path)) == list("bcd")
        first.forwarder.work_once()
        assert sorted(one.request_id for one in read_ground_truth(tmp_path)) == list("bcde")


def feedback(server: Server, names: list[str]) -> int:
    """Send the labels of several requests in one body. Returns the status."""
    items = [{"request_id": name, "ground_truth": "dark"} for name in names]
    content = {"feedback": items}
    return plain_http.post(server.url + "/feedback", json=content).status_code


def predict(server: Server, names: list[str]) -> None:
    for name, payload in zip(names, pictures(11, len(names)), strict=True):
        headers = {"content-type": "image/png", "x-request-id": name}
        url = server.url + "/predict"
        answer = plain_http.post(url, content=payload, headers=headers)
        assert answer.status_code == 200


def counted(server: Server, line: str) -> float:
    text = plain_http.get(server.url + "/metrics").text
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.nightly(seconds=60)
def test_two_services_predict_and_share_feedback_while_the_database_is_killed_and_hangs(
    tmp_path: Path,
) -> None:
    """Predictions at one service, their labels at the other; each joins and counts once."""
    for name in ("a", "b"):
        monitored_bundle(tmp_path / name)
    with (
        cluster() as postgres,
        running(tmp_path / "a", database_url=postgres.url) as first,
        running(tmp_path / "b", database_url=postgres.url) as second,
    ):

        def joined() -> float:
            line = 'slipway_feedback_total{outcome="joined"}'
            return counted(first, line) + counted(second, line)

        def share(begin: int, count: int) -> None:
            names = [f"id-{number}" for number in range(begin, begin + count)]
            started = time.monotonic()
            predict(first, names)
            assert feedback(second, names) == 202
            assert time.monotonic() - started < 10

        for server in (first, second):
            server.wait(seconds=60)
        fault = 'slipway_monitoring_errors_total{part="database"}'
        share(0, 40)
        until(lambda: joined() == 40)
        rows = "slipway_feedback_quality_rows"
        until(lambda: [counted(one, rows) for one in (first, second)] == [40, 40])
        postgres.send(signal.SIGSTOP)
        share(40, 20)
        until(lambda: counted(second, "slipway_feedback_waiting_rows") == 20)
        postgres.send(signal.SIGCONT)
        until(lambda: joined() == 60)
        postgres.stop()
        share(60, 20)
        until(lambda: min(counted(first, fault), counted(second, fault)) > 0)
        postgres.start()
        until(lambda: joined() == 80, seconds=90)
        assert postgres.fetch("SELECT count(*), count(joined) FROM slipway.labels") == [(80, 80)]
        assert postgres.fetch("SELECT count(*) FROM slipway.predictions") == [(80,)]


@pytest.mark.nightly(seconds=20)
def test_rows_that_a_full_database_refuses_are_delivered_later(
    service: Callable[[str, str], Service],
) -> None:
    with small_cluster() as (postgres, disk):
        one = service("full", postgres.url)
        one.predict("first")
        one.forwarder.work_once()
        with filled(disk):
            one.predict(*(f"{'x' * 50}-{number}" for number in range(900)))
            with pytest.raises(Exception, match="No space left"):
                one.forwarder.work_once()
            assert one.store.num_waiting() == 900
        one.forwarder.work_once()
        assert postgres.fetch("SELECT count(*) FROM slipway.predictions") == [(901,)]
        assert one.store.num_waiting() == 0
