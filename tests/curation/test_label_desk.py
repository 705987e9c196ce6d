"""Labels from the page become feedback with a name and a mark; expired rows leave the queue."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.config.sections import Gate
from slipway.curation.label_desk import LabelDesk, LabelError, label_server
from slipway.loop.label_keys import suspicious_keys
from slipway.loop.triggers import missed_objective
from slipway.serving.monitoring.labels import FeedbackItem, Prediction
from slipway.serving.monitoring.settings import Limits
from slipway.serving.monitoring.store import Part, Store
from slipway.traffic.erasure import erase_lines
from slipway.traffic.label_queue import QUEUE, LabelQueue, QueuedRow
from slipway.traffic.monitoring_records import JoinedLabel, read_ground_truth, read_joined_labels
from slipway.traffic.postgres import DATABASE_URL
from slipway.traffic.request_log import LoggedRequest, read_requests
from tests.curation.test_erasure import write_requests
from tests.serving.bundles import COLUMNS, LABELS, row_classifier, write_bundle
from tests.serving.monitoring.postgres import cluster

MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[LabelDesk]:
    """A desk with two rows, of r-1 by gain and of r-2 at random, that the service answered."""
    answer_rows(tmp_path)
    made = open_desk(tmp_path, "anna")
    yield made
    made.close()


def answer_rows(tmp_path: Path) -> None:
    """Write a bundle, the log of two requests that it answered, and the queue with both."""
    write_bundle(tmp_path / "bundle", row_classifier(), input=COLUMNS)
    write_requests(tmp_path / "log", {"r-1": [1], "r-2": [2]}, city=MARKUP)
    requests = [one for one in read_requests(tmp_path / "log") if isinstance(one, LoggedRequest)]
    times = {one.request_id: one.time.timestamp() for one in requests}
    store = Store(tmp_path / "state", Limits(1000, 3600.0, 1000, 3600.0))
    predictions = [Prediction(name, 0, 1, times[name], "v", LABELS[0], None) for name in times]
    store.merge(Part(1, {}, predictions), {})
    store.close()
    queue = LabelQueue(tmp_path / "state" / QUEUE)
    rows = [QueuedRow(name, 0, time, name == "r-1") for name, time in times.items()]
    queue.add(rows)


def open_desk(tmp_path: Path, labeller: str, opinions: int = 1) -> LabelDesk:
    """Open the desk of one person."""
    manifest = load_bundle(tmp_path / "bundle").manifest
    queue = LabelQueue(tmp_path / "state" / QUEUE, opinions)
    return LabelDesk(queue, tmp_path / "state", tmp_path / "log", manifest, labeller)


def answer(name: str, truth: Any) -> dict[str, Any]:
    return {"request_id": name, "item": 0, "ground_truth": truth}


def callers(state: Path) -> dict[str, tuple[str | None, str | None]]:
    return {one.request_id: (one.label, one.caller) for one in read_ground_truth(state)}


def test_labels_are_stored_with_the_labeller_and_chosen_rows_do_not_count_as_quality(
    desk: LabelDesk, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    desk.answer(answer("r-1", LABELS[1]))
    desk.answer(answer("r-2", LABELS[1]))
    assert callers(state) == {
        "r-1": (LABELS[1], "chosen:anna"),
        "r-2": (LABELS[1], "label-queue:anna"),
    }
    assert [one.is_chosen for one in read_joined_labels(state, "v")].count(True) == 1
    store = Store(state, Limits(1000, 3600.0, 1000, 3600.0))
    assert store.joined("v", 10) == [(LABELS[1], LABELS[0])]  # of r-2 only
    store.close()
    desk.undo()
    assert list(callers(state)) == ["r-1"]
    assert desk.next_row()["row"]["request_id"] == "r-2"


def test_an_invalid_answer_is_refused_and_stores_nothing(desk: LabelDesk, tmp_path: Path) -> None:
    wrong: list[Any] = [
        answer("r-9", LABELS[0]),
        answer("r-1", "purple"),
        answer("r-1", 7),
        [],
        None,
    ]
    for content in wrong:
        with pytest.raises(LabelError, match="expected"):
            desk.answer(content)
    assert callers(tmp_path / "state") == {}
    assert desk.next_row()["left"] == 2


def test_rows_leave_the_queue_when_expired_labelled_elsewhere_or_their_id_is_reused(
    desk: LabelDesk, tmp_path: Path
) -> None:
    erase_lines(tmp_path / "log", {"r-1": None})
    assert desk.next_row()["row"]["request_id"] == "r-2"
    assert [row.request_id for row in desk.queue.rows()] == ["r-2"]
    store = Store(tmp_path / "state", Limits(1000, 3600.0, 1000, 3600.0))
    store.add_feedback([FeedbackItem("r-2", 0, LABELS[0], None, "shop")])
    store.close()
    assert desk.next_row()["row"] is None
    assert callers(tmp_path / "state") == {"r-2": (LABELS[0], "shop")}


def test_a_label_whose_process_was_killed_is_stored_at_the_next_start(
    desk: LabelDesk, tmp_path: Path
) -> None:
    (row, _) = desk.queue.rows()
    desk.queue.give(row, "ben", LABELS[2])
    LabelDesk(desk.queue, tmp_path / "state", tmp_path / "log", desk.manifest, "anna").close()
    assert callers(tmp_path / "state") == {"r-1": (LABELS[2], "chosen:ben")}


def test_labels_of_chosen_rows_trigger_no_training_and_make_no_key_suspicious(
    desk: LabelDesk,
) -> None:
    wrong = [JoinedLabel("chosen:anna", LABELS[1], LABELS[0], 1.0, 2.0)] * 100
    right = [JoinedLabel("shop", LABELS[0], LABELS[0], 1.0, 2.0)] * 100
    objective = {"accuracy": Gate(min=0.9, max=None)}
    assert missed_objective(desk.manifest, wrong + right, objective) == ""
    assert suspicious_keys(wrong + right) == []
    unmarked = [JoinedLabel("anna", one.truth, one.predicted, 1.0, 2.0) for one in wrong]
    assert missed_objective(desk.manifest, unmarked + right, objective) != ""
    assert [one.key for one in suspicious_keys(unmarked + right)] == ["anna"]


@pytest.mark.process
def test_the_page_needs_its_secret_address_and_shows_markup_as_text(
    desk: LabelDesk,
) -> None:
    server = label_server(desk, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with httpx.Client(base_url=server.address) as client:
            page = client.get("")
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "require-trusted-types-for 'script'" in policy
            assert "<script>" not in page.text
            assert client.get("label.js").status_code == client.get("label.css").status_code == 200
            row = client.get("next").json()["row"]
            assert row["cells"]["city"] == MARKUP  # JSON; the script sets it as text
            assert "innerHTML" not in client.get("label.js").text
            left = client.post("answer", json=answer("r-1", LABELS[0])).json()["left"]
            assert left == 1
            assert client.post("undo", json={}).json()["left"] == 2
            assert "purple" in client.post("answer", json=answer("r-1", "purple")).json()["error"]
            form = client.post("answer", data={"a": "b"})
            assert form.status_code == 400
            assert client.get("next", headers={"host": "evil.example:80"}).status_code == 404
            assert client.get(f"http://127.0.0.1:{server.server_port}/next").status_code == 404
            assert client.get("picture?request_id=r-1&item=0").status_code == 404
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.nightly
def test_labels_are_written_to_the_database_that_services_share(
    desk: LabelDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster() as postgres:
        monkeypatch.setenv(DATABASE_URL, postgres.url)
        desk.answer(answer("r-1", LABELS[1]))
        desk.answer(answer("r-2", LABELS[0]))
        desk.undo()
        query = "SELECT request_id, label, caller FROM slipway.labels"
        assert postgres.fetch(query) == [("r-1", LABELS[1], "chosen:anna")]
        desk.answer(answer("r-2", LABELS[0]))
        assert ("r-2", LABELS[0], "label-queue:anna") in postgres.fetch(query)
