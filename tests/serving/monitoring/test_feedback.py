"""`POST /feedback`: parses labels strictly, joins each to its prediction, measures quality."""

import asyncio
import re
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipway.artifacts.bundle import Metric
from slipway.serving.monitoring import feedback, monitor, store
from slipway.serving.monitoring.extension import feedback_routes
from slipway.serving.monitoring.quality import compare, measure_joined
from slipway.serving.worker import ModelWorker
from slipway.traffic.monitoring_records import DATABASE, read_ground_truth
from tests.serving.bundles import LABELS, certify, log_of_mean, picture, table_row, write_bundle
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import error_of, metric, run, status_part, until
from tests.serving.monitoring.monitored import num_predictions

SHIPPED = {"GATHER_S": monitor.GATHER_S, "MERGE_S": monitor.MERGE_S}
PNG = {"content-type": "image/png"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("GATHER_S", 0.02), ("MERGE_S", 0.04), ("REFRESH_S", 0.04)):
        monkeypatch.setattr(monitor, name, seconds)


async def predict(client: httpx.AsyncClient, name: str, seed: int = 0) -> dict[str, Any]:
    response = await client.post(
        "/predict", content=picture(seed), headers=PNG | {"x-request-id": name}
    )
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


def tidy_now(worker: ModelWorker) -> None:
    (traffic,) = (one for one in worker.observers.all if isinstance(one, monitor.TrafficMonitor))
    traffic._due["tidy"] = 0.0


def counted(worker: ModelWorker, outcome: str) -> float:
    return metric(worker, f'slipway_feedback_total{{outcome="{outcome}"}}')


def quality(worker: ModelWorker) -> dict[str, Any]:
    metrics: dict[str, Any] = status_part(worker, "feedback").get("quality", {})
    return metrics


def test_label_joins_its_prediction_and_a_corrected_label_replaces_it(
    make_settings: MakeSettings,
) -> None:
    settings = make_settings()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = await predict(client, "one")
        await until(lambda: num_predictions(worker.settings.state) == 1)
        wrong = next(label for label in LABELS if label != answer["label"])
        response = await client.post(
            "/feedback",
            json={"request_id": "one", "ground_truth": wrong},
            headers={"x-request-id": "sent"},
        )
        assert (response.status_code, response.json()) == (
            200,
            {"joined": True, "duplicate": False, "request_id": "sent"},
        )
        await until(
            lambda: (
                metric(worker, 'slipway_feedback_quality{metric="accuracy"}') == 0
                and bool(quality(worker))
            )
        )
        response = await client.post(
            "/feedback", json={"request_id": "one", "ground_truth": answer["label"]}
        )
        assert response.status_code == 200
        assert response.json()["duplicate"] is True
        await until(lambda: metric(worker, 'slipway_feedback_quality{metric="accuracy"}') == 1)
        assert quality(worker)["accuracy"]["rows"] == status_part(worker, "feedback")["joined"] == 1
        assert metric(worker, "slipway_feedback_quality_rows") == 1
        assert (counted(worker, "joined"), counted(worker, "duplicate")) == (1, 1)

    run(settings, work)
    (truth,) = read_ground_truth(settings.state)
    assert (truth.request_id, truth.item, truth.value) == ("one", 0, None)


def test_label_that_arrives_before_its_prediction_waits_for_it(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        response = await client.post(
            "/feedback", json={"request_id": "early", "ground_truth": "dark"}
        )
        assert (response.status_code, response.json()["joined"]) == (202, False)
        assert counted(worker, "joined") == 0
        await predict(client, "early")
        await until(lambda: counted(worker, "joined") == 1)
        assert counted(worker, "unknown_request") == 0

    run(make_settings(), work)


def test_response_to_an_early_label_states_the_expected_join_time(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in SHIPPED.items():
        monkeypatch.setattr(monitor, name, seconds)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await until(lambda: status_part(worker, "feedback")["state"] != "starting")  # merged once
        await predict(client, "now")
        response = await client.post(
            "/feedback", json={"request_id": "now", "ground_truth": "dark"}
        )
        assert response.status_code == 202
        within_s = response.json()["joins_within_s"]
        assert sum(SHIPPED.values()) <= within_s
        again = await client.post("/feedback", json={"request_id": "now", "ground_truth": "dark"})
        assert again.json()["duplicate"] is True
        assert again.json()["joins_within_s"] == within_s
        await until(lambda: counted(worker, "joined") == 1)

    run(make_settings(), work)


def test_response_to_a_label_that_cannot_join_later_states_no_join_time(
    certified_table: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in SHIPPED.items():
        monkeypatch.setattr(monitor, name, seconds)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await until(lambda: status_part(worker, "feedback")["state"] != "starting")  # merged once
        rows = {"rows": [table_row(1), table_row(2)]}
        await client.post("/predict", json=rows, headers={"x-request-id": "two"})
        labels: list[dict[str, Any]] = [{"request_id": "unknown"}] * 2  # a duplicate
        labels += [{"request_id": "two"}, *({"request_id": "two", "item": item} for item in (1, 2))]
        (traffic,) = (
            one for one in worker.observers.all if isinstance(one, monitor.TrafficMonitor)
        )
        for _ in range(2):  # waiting for the monitor, then for the database
            response = await client.post(
                "/feedback",
                json={"feedback": [label | {"ground_truth": "dark"} for label in labels]},
            )
            answers = response.json()["feedback"]
            assert ["joins_within_s" in answer for answer in answers] == [False] * 3 + [True, False]
            assert not any(answer["joined"] for answer in answers)
            await until(lambda: not traffic.queue._waiting)

    run(make_settings(), work)


def test_label_of_an_unknown_request_expires_and_is_counted(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "TIDY_S", 0.05)
    monkeypatch.setattr(store, "PENDING_S", 0.2)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        tidy_now(worker)
        await client.post("/feedback", json={"request_id": "nobody", "ground_truth": "dark"})
        await until(lambda: counted(worker, "unknown_request") == 1)
        assert list(read_ground_truth(worker.settings.state)) == []

    run(make_settings(), work)


def test_labels_of_a_request_with_several_rows_must_name_their_item(
    certified_table: Path, make_settings: MakeSettings
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        rows = [table_row(number) for number in range(4)]
        answers = (
            await client.post("/predict", json={"rows": rows}, headers={"x-request-id": "list"})
        ).json()["predictions"]
        await until(lambda: num_predictions(worker.settings.state) == 4)
        items = [
            {"request_id": "list", "item": item, "ground_truth": answer["label"]}
            for item, answer in enumerate(answers)
        ]
        response = await client.post(
            "/feedback",
            json={"feedback": [*items, {"request_id": "unknown", "ground_truth": "dark"}]},
        )
        assert response.status_code == 202
        assert [one["joined"] for one in response.json()["feedback"]] == [
            True,
            True,
            True,
            True,
            False,
        ]
        await until(lambda: metric(worker, 'slipway_feedback_quality{metric="accuracy"}') == 1)

        error = error_of(
            await client.post(
                "/feedback",
                json={"feedback": [items[0], {"request_id": "list", "ground_truth": "dark"}]},
            )
        )
        assert (error["code"], error["field"]) == ("missing_field", "feedback[1].item")
        assert "4 items" in error["message"]
        assert counted(worker, "duplicate") == 0  # all or nothing
        assert counted(worker, "invalid") == 1

    run(make_settings(), work)


def test_waiting_label_without_item_is_invalid_for_a_request_with_several_rows(
    certified_table: Path, make_settings: MakeSettings
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await client.post("/feedback", json={"request_id": "list", "ground_truth": "dark"})
        await client.post(
            "/predict",
            json={"rows": [table_row(1), table_row(2)]},
            headers={"x-request-id": "list"},
        )
        await until(lambda: counted(worker, "invalid") == 1)
        assert counted(worker, "joined") == 0

    run(make_settings(), work)


@pytest.mark.parametrize(
    ("content", "code", "field"),
    [
        ([], "not_a_row", None),
        ({"feedback": []}, "no_rows", "feedback"),
        ({"feedback": {}}, "type_violation", "feedback"),
        ({"feedback": [7]}, "not_a_row", "feedback[0]"),
        ({"request_id": "a"}, "missing_field", "ground_truth"),
        ({"ground_truth": "dark"}, "missing_field", "request_id"),
        ({"request_id": "a", "ground_truth": None}, "missing_field", "ground_truth"),
        ({"request_id": "a", "ground_truth": "dark", "label": 1}, "unknown_field", "label"),
        ({"request_id": "../a", "ground_truth": "dark"}, "type_violation", "request_id"),
        ({"request_id": 7, "ground_truth": "dark"}, "type_violation", "request_id"),
        ({"request_id": "a", "ground_truth": "blue"}, "unknown_label", "ground_truth"),
        ({"request_id": "a", "ground_truth": 7}, "type_violation", "ground_truth"),
        ({"request_id": "a", "ground_truth": ["dark"]}, "type_violation", "ground_truth"),
        ({"request_id": "a", "item": "0", "ground_truth": "dark"}, "type_violation", "item"),
        ({"request_id": "a", "item": True, "ground_truth": "dark"}, "type_violation", "item"),
        ({"request_id": "a", "item": -1, "ground_truth": "dark"}, "out_of_range", "item"),
        ({"request_id": "a", "item": 10**30, "ground_truth": "dark"}, "type_violation", "item"),
        (
            {
                "feedback": [
                    {"request_id": "a", "ground_truth": "dark"},
                    {"request_id": "b", "ground_truth": "x"},
                ]
            },
            "unknown_label",
            "feedback[1].ground_truth",
        ),
        (
            {"feedback": [{"request_id": "a", "ground_truth": "dark"}] * 1001},
            "too_many_rows",
            "feedback",
        ),
    ],
)
def test_invalid_feedback_is_refused_with_its_place(
    make_settings: MakeSettings, content: Any, code: str, field: str | None
) -> None:
    settings = make_settings()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(await client.post("/feedback", json=content))
        assert (error["code"], error["field"]) == (code, field)
        assert counted(worker, "invalid") == 1

    run(settings, work)
    assert not (settings.state / DATABASE).exists() or list(read_ground_truth(settings.state)) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"request_id": "a", "ground_truth": NaN}',
        b'{"ground_truth": "dark", "ground_truth": "dark"}',
        b"[" * 100_000,
    ],
)
def test_feedback_in_malformed_json_is_refused(make_settings: MakeSettings, body: bytes) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(
            await client.post(
                "/feedback", content=body, headers={"content-type": "application/json"}
            )
        )
        assert error["code"] in ("malformed_json", "too_many_rows")

    run(make_settings(), work)


def test_error_for_a_wrong_content_type_shows_an_example_of_feedback(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(await client.post("/feedback", content=b"{}", headers=PNG))
        assert error["code"] == "unsupported_media_type"
        assert '"ground_truth"' in error["message"]
        assert "row" not in error["message"]  # that is the body of /predict

    run(make_settings(), work)


@pytest.mark.parametrize(
    ("truth", "shown"), [(7, "found 7,"), (["dark"], 'found ["dark"],'), (True, "found true,")]
)
def test_feedback_error_shows_values_as_json_so_that_numbers_differ_from_text(
    make_settings: MakeSettings, truth: Any, shown: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(
            await client.post("/feedback", json={"request_id": "a", "ground_truth": truth})
        )
        assert shown in error["message"]

    run(make_settings(), work)


@pytest.mark.parametrize("is_number", [False, True], ids=["labels", "numbers"])
def test_example_in_the_api_documentation_is_accepted(
    certified: Path, make_settings: MakeSettings, is_number: bool
) -> None:
    if is_number:
        certify(certified / "certificate.json", write_bundle(certified / "bundle", log_of_mean()))

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        describe = feedback_routes(worker, None)["/feedback"].describe
        assert describe is not None
        *_, body = shlex.split(describe(worker.require_model().bundle.manifest).example)
        assert (
            await client.post(
                "/feedback", content=body, headers={"content-type": "application/json"}
            )
        ).status_code == 202

    run(make_settings(), work)


def test_one_request_may_hold_a_thousand_labels(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        items = [
            {"request_id": f"id-{number}", "item": 0, "ground_truth": "dark"}
            for number in range(feedback.MAX_LABELS)
        ]
        response = await client.post("/feedback", json={"feedback": items})
        assert (response.status_code, len(response.json()["feedback"])) == (202, 1000)
        assert len(list(read_ground_truth(worker.settings.state))) == 1000

    run(make_settings(), work)


def test_feedback_on_numeric_targets_gives_rmse_and_mse(
    certified: Path, make_settings: MakeSettings
) -> None:
    tested = {"rmse": Metric(value=0.1, low=0.05, high=0.15, confidence=0.95, rows=100)}
    certify(
        certified / "certificate.json",
        write_bundle(certified / "bundle", log_of_mean(), metrics=tested),
    )

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for number in range(40):
            answer = await predict(client, f"id-{number}", number)
            error = 1.0 if number % 2 else 3.0
            await client.post(
                "/feedback",
                json={"request_id": f"id-{number}", "ground_truth": answer["value"] + error},
            )
        await until(lambda: metric(worker, "slipway_feedback_quality_rows") == 40)
        assert metric(worker, 'slipway_feedback_quality{metric="mse"}') == pytest.approx(5.0)
        found = quality(worker)
        assert found["rmse"]["value"] == pytest.approx(5**0.5)
        assert found["rmse"]["low"] < found["rmse"]["value"] < found["rmse"]["high"]
        assert found["rmse"]["is_worse"] is True
        assert found["rmse"]["tested"]["value"] == 0.1
        refused = error_of(
            await client.post("/feedback", json={"request_id": "id-1", "ground_truth": "dark"})
        )
        assert (refused["code"], refused["field"]) == ("type_violation", "ground_truth")

    run(make_settings(), work)


@pytest.mark.parametrize("is_number", [False, True], ids=["labels", "numbers"])
def test_metrics_and_status_show_the_same_quality_intervals(
    certified: Path, make_settings: MakeSettings, is_number: bool
) -> None:
    if is_number:
        certify(certified / "certificate.json", write_bundle(certified / "bundle", log_of_mean()))

    def shown(worker: ModelWorker) -> dict[str, dict[str, float]]:
        found = re.findall(
            r'^slipway_feedback_quality(|_low|_high)\{metric="(\w+)"\} (\S+)$',
            worker.metrics.exposition().decode(),
            re.MULTILINE,
        )
        return {
            metric: {part: float(number) for part, of, number in found if of == metric}
            for metric in {of for _, of, _ in found}
        }

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert shown(worker) == {}
        for number in range(12):
            answer = await predict(client, f"id-{number}", number)
            wrong = next(label for label in LABELS if label != answer.get("label"))
            truth = (
                answer["value"] + number if is_number else answer["label"] if number % 3 else wrong
            )
            await client.post(
                "/feedback", json={"request_id": f"id-{number}", "ground_truth": truth}
            )
        await until(lambda: metric(worker, "slipway_feedback_quality_rows") == 12)
        found = quality(worker)
        assert set(found) == ({"rmse", "mse"} if is_number else {"accuracy", "f1_macro"})
        assert shown(worker) == {
            name: {"": one["value"], "_low": one["low"], "_high": one["high"]}
            for name, one in found.items()
        }
        assert all(one["low"] < one["value"] < one["high"] for one in found.values())

    run(make_settings(), work)


def test_accuracy_and_macro_f1_of_feedback_match_hand_computed_values(
    certified: Path,
) -> None:
    bundle = write_bundle(certified / "bundle")
    joined = [("dark", "dark")] * 6 + [("grey", "dark")] * 2 + [("grey", "grey")] * 2
    measured = measure_joined(bundle.manifest, joined)
    assert measured["accuracy"].value == pytest.approx(0.8)
    assert measured["f1_macro"].value == pytest.approx((12 / 14 + 4 / 6) / 2)
    assert measured["accuracy"].low < 0.8 < measured["accuracy"].high
    assert measure_joined(bundle.manifest, []) == {}
    assert measure_joined(bundle.manifest, [("grey", "grey")])["accuracy"].value == 1


@pytest.mark.parametrize(("num_rows", "is_worse"), [(1, None), (29, None), (30, True)])
def test_quality_is_compared_with_the_test_split_from_thirty_labels_on(
    certified: Path, num_rows: int, is_worse: bool | None
) -> None:
    tested = {
        name: Metric(value=0.9, low=0.8, high=0.95, confidence=0.95, rows=100)
        for name in ("accuracy", "f1_macro")
    }
    manifest = write_bundle(certified / "bundle", metrics=tested).manifest
    found = compare(manifest, measure_joined(manifest, [("dark", "grey")] * num_rows))
    assert {name: one["is_worse"] for name, one in found.items()} == dict.fromkeys(tested, is_worse)


def test_tidy_keeps_the_newest_predictions_and_labels(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for number in range(150):
            await predict(client, f"id-{number}")
        await until(lambda: num_predictions(worker.settings.state) == 150)
        for number in range(120):
            await client.post(
                "/feedback", json={"request_id": f"id-{number}", "ground_truth": "dark"}
            )
        tidy_now(worker)
        await until(lambda: num_predictions(worker.settings.state) == 100)
        assert len(list(read_ground_truth(worker.settings.state))) == 100

    run(make_settings(feedback_rows=100), work)


@pytest.mark.process
def test_locked_database_refuses_feedback_while_predictions_continue(
    make_settings: MakeSettings,
) -> None:
    settings = make_settings()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await predict(client, "one")
        await until(lambda: num_predictions(worker.settings.state) == 1)
        with closing(sqlite3.connect(settings.state / DATABASE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            response = await client.post(
                "/feedback", json={"request_id": "one", "ground_truth": "dark"}
            )
            assert error_of(response)["code"] == "feedback_unavailable"
            assert response.headers["retry-after"] == "1"
            assert metric(worker, 'slipway_monitoring_errors_total{part="feedback"}') == 1
            await predict(client, "two")
            other.execute("ROLLBACK")
        assert (
            await client.post("/feedback", json={"request_id": "one", "ground_truth": "dark"})
        ).status_code == 200
        await until(lambda: num_predictions(worker.settings.state) == 2)

    run(settings, work)


@pytest.mark.process
def test_error_for_a_full_feedback_queue_has_a_separate_code(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MAX_WAITING", 1)
    settings = make_settings()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await predict(client, "one")
        await until(lambda: num_predictions(worker.settings.state) == 1)
        with closing(sqlite3.connect(settings.state / DATABASE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # the first request waits
            requests = [
                client.post("/feedback", json={"request_id": "one", "ground_truth": "dark"})
                for _ in range(3)
            ]
            answers = sorted(await asyncio.gather(*requests), key=lambda answer: answer.status_code)
            other.execute("ROLLBACK")
        assert [error_of(answer)["code"] for answer in answers] == [
            "feedback_full",
            "feedback_full",
            "feedback_unavailable",
        ]
        assert [answer.headers["retry-after"] for answer in answers] == ["1", "1", "1"]
        assert metric(worker, 'slipway_errors_total{error="feedback_full"}') == 2
        assert metric(worker, 'slipway_errors_total{error="queue_full"}') == 0
        described = (await client.get("/docs.json")).json()["paths"]["/feedback"]["post"][
            "responses"
        ]
        assert "feedback_full" in described["429"]["description"]

    run(settings, work)


def test_feedback_is_unavailable_if_monitoring_is_off(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(
            await client.post("/feedback", json={"request_id": "one", "ground_truth": "dark"})
        )
        assert error["code"] == "feedback_unavailable"
        assert "SLIPWAY_MONITORING" in error["message"]

    run(make_settings(monitoring=False), work)
