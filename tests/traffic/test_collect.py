"""`slipway dataset collect` writes labelled logged requests to a Parquet file for `clean`."""

import asyncio
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from slipway.artifacts.bundle import Lineage
from slipway.serving.monitoring import monitor
from slipway.serving.request_log.logger import RequestLogSettings
from slipway.serving.settings import Settings
from slipway.serving.worker import ModelWorker
from slipway.system.errors import DataError, UnavailableError
from slipway.traffic import collect as collecting_command
from slipway.traffic.monitoring_records import DriftedSpan, GroundTruth
from slipway.traffic.request_log import LoggedRequest, read_requests
from slipway.traffic.selection import LoggedItem, SelectedRows, _labelled, _ranked, collect
from tests.data.test_data_stages import prepare
from tests.data.test_table_stages import prepare_table
from tests.serving.bundles import (
    COLUMNS,
    CONTRACT,
    LABELS,
    ROW,
    certify,
    picture,
    row_classifier,
    table_row,
    write_bundle,
)
from tests.serving.conftest import MakeSettings, certified, certified_table, make_settings
from tests.serving.in_process import run, until
from tests.serving.monitoring.monitored import num_predictions, pictures
from tests.serving.server import ROOT

__all__ = ["certified", "certified_table", "make_settings"]  # fixtures

PNG = {"content-type": "image/png"}


def lineage(**data: Any) -> Lineage:
    """Return the lineage of a bundle that knows the columns of its data set."""
    params = {
        "data": {"image_column": "image", "target_column": "label", "group_column": None} | data
    }
    return Lineage(git_revision=None, git_dirty=False, params=params, data=None, digests={})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "GATHER_S", 0.02)
    monkeypatch.setattr(monitor, "MERGE_S", 0.04)


async def send_labels(client: httpx.AsyncClient, labels: list[dict[str, Any]]) -> bool:
    """Send labels. Returns True if all were joined at once."""
    response = await client.post("/feedback", json={"feedback": labels})
    assert response.status_code in (200, 202), response.text
    return response.status_code == 200


def log_folder(settings: Settings) -> Path:
    """Return the folder of the request log."""
    folder = settings.section(RequestLogSettings).request_log_directory
    assert folder
    return folder


def command(settings: Settings, out: Path, *arguments: str) -> list[str]:
    return [
        str(out),
        "--request-log",
        str(log_folder(settings)),
        "--state",
        str(settings.state),
        "--bundle",
        str(settings.bundle),
        *arguments,
    ]


def collected(settings: Settings, out: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the command, and return the rows that it writes."""
    collecting_command.main(command(settings, out, *arguments))
    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    return rows


@pytest.fixture
def served(
    certified: Path, make_settings: MakeSettings
) -> tuple[Settings, list[bytes], list[str], list[str]]:
    """Serve 60 pictures, label 40, and stop. Returns settings, pictures, predictions and labels."""
    certify(certified / "certificate.json", write_bundle(certified / "bundle", lineage=lineage()))
    settings = make_settings(request_log_directory=certified / "log")
    payloads, predicted, labels = pictures(3, 60), [""] * 60, [""] * 60

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for number, payload in enumerate([*payloads, payloads[7]]):  # one of them is sent twice
            answer = await client.post(
                "/predict", content=payload, headers=PNG | {"x-request-id": f"id-{number}"}
            )
            if number < 60:
                predicted[number] = answer.json()["label"]
                others = [label for label in LABELS if label != predicted[number]]
                labels[number] = others[0] if number % 4 == 0 else predicted[number]
        await send_labels(
            client,
            [
                {"request_id": f"id-{number}", "ground_truth": labels[number]}
                for number in range(40)
            ],
        )

    run(settings, work)
    return settings, payloads, predicted, labels


def test_collect_writes_labelled_pictures_once_each_with_wrong_predictions_first(
    served: tuple[Settings, list[bytes], list[str], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings, payloads, predicted, labels = served
    rows = collected(settings, tmp_path / "out.parquet")
    assert {row["image"]["bytes"]: row["label"] for row in rows} == dict(
        zip(payloads[:40], labels[:40], strict=True)
    )
    positions = [payloads.index(row["image"]["bytes"]) for row in rows]
    mistakes = [order for order, place in enumerate(positions) if labels[place] != predicted[place]]
    assert len(mistakes) == 10
    assert sum(mistakes) / 10 < 12  # of 0 to 39: by chance it would be 19.5
    printed = capsys.readouterr().out
    assert "40 of 61 logged items" in printed
    assert "10 wrong predictions" in printed
    assert "20 without a label" in printed
    assert "1 copies" in printed
    assert (
        f"next: slipway dataset merge data/next.parquet --new {tmp_path / 'out.parquet'}\n"
        in printed
    )
    assert f"these rows only:\n  slipway run data.path={tmp_path / 'out.parquet'}\n" in printed

    first = [
        row["image"]["bytes"]
        for row in collected(settings, tmp_path / "few.parquet", "--rows", "5")
    ]
    assert first == [row["image"]["bytes"] for row in rows[:5]]
    everything = collected(settings, tmp_path / "all.parquet", "--unlabelled")
    assert len(everything) == 60
    assert sum(row["label"] is None for row in everything) == 20


@pytest.mark.process
def test_clean_accepts_collected_pictures(
    served: tuple[Settings, list[bytes], list[str], list[str]], tmp_path: Path
) -> None:
    settings, *_ = served
    folder = tmp_path / "project"
    folder.mkdir()
    run_collect = [
        sys.executable,
        "-m",
        "slipway.traffic.collect",
        *command(settings, folder / "next.parquet"),
    ]
    subprocess.run(
        run_collect,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    prepare(folder, folder / "next.parquet", clean__min_side_px=4, clean__max_bad_fraction=0.9)
    done = subprocess.run(
        [sys.executable, "-m", "slipway.stages.clean"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(folder / "data/clean/rows.parquet").to_pylist()
    quarantine = pq.read_table(folder / "data/clean/quarantine.parquet").to_pylist()
    assert len(rows) + len(quarantine) == 40
    assert len(rows) >= 20, quarantine
    assert {row["label"] for row in rows} <= set(LABELS)


@pytest.mark.process
def test_clean_accepts_collected_table_rows(
    certified: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    contract = COLUMNS.model_copy(update={"ignored": ["customer"]})
    bundle = write_bundle(
        certified / "bundle", row_classifier(), lineage=lineage(image_column=None), input=contract
    )
    certify(certified / "certificate.json", bundle)
    settings = make_settings(request_log_directory=certified / "log")
    rows = [table_row(number) | {"income": 20000.5 + number} for number in range(60)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for name, part in (("a", rows[:30]), ("b", rows[30:])):
            answers = (
                await client.post(
                    "/predict", json={"rows": sent(part)}, headers={"x-request-id": name}
                )
            ).json()["predictions"]
            await send_labels(
                client,
                [
                    {"request_id": name, "item": item, "ground_truth": answer["label"]}
                    for item, answer in enumerate(answers)
                ],
            )

    def sent(part: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            row | {"customer": number} for number, row in enumerate(part)
        ]  # a column that training ignored

    run(settings, work)
    folder = tmp_path / "project"
    folder.mkdir()
    found = collected(settings, folder / "next.parquet")
    assert len(found) == 60
    assert list(found[0]) == [*ROW, "label"]
    as_sent = [{name: row.get(name) for name in ROW} for row in rows]
    assert sorted(row["income"] for row in found) == [row["income"] for row in as_sent]
    assert {name: value for name, value in found[0].items() if name != "label"} in as_sent
    prepare_table(folder, folder / "next.parquet", "table_classification", "label")
    done = subprocess.run(
        [sys.executable, "-m", "slipway.stages.clean"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert pq.read_table(folder / "data/clean/rows.parquet").num_rows == 60


def test_collect_writes_one_row_for_each_picture_of_a_request(
    certified: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    certify(certified / "certificate.json", write_bundle(certified / "bundle", lineage=lineage()))
    settings = make_settings(request_log_directory=certified / "log")
    payloads = [picture(seed) for seed in range(3)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        files = [("image", (f"{number}.png", payload)) for number, payload in enumerate(payloads)]
        await client.post("/predict", files=files, headers={"x-request-id": "three"})
        await send_labels(client, [{"request_id": "three", "item": 2, "ground_truth": "dark"}])

    run(settings, work)
    (row,) = collected(settings, tmp_path / "out.parquet")
    assert (row["image"]["bytes"], row["label"]) == (payloads[2], "dark")


def test_collect_uses_the_last_label_and_prediction_of_a_reused_id(
    certified: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    certify(certified / "certificate.json", write_bundle(certified / "bundle", lineage=lineage()))
    settings = make_settings(request_log_directory=certified / "log")

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for seed in (1, 2):
            await client.post(
                "/predict", content=picture(seed), headers=PNG | {"x-request-id": "same"}
            )
            await asyncio.sleep(0.01)
        for label in ("dark", "bright"):
            await send_labels(client, [{"request_id": "same", "ground_truth": label}])

    run(settings, work)
    (row,) = collected(settings, tmp_path / "out.parquet")
    assert (row["image"]["bytes"], row["label"]) == (picture(2), "bright")


@pytest.mark.parametrize("waits", [False, True])
def test_label_joins_the_prediction_before_it_and_not_a_later_one_with_the_same_id(
    certified: Path,
    make_settings: MakeSettings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    waits: bool,
) -> None:
    if waits:  # answers are written down at the end
        monkeypatch.setattr(monitor, "GATHER_S", 60.0)
    certify(certified / "certificate.json", write_bundle(certified / "bundle", lineage=lineage()))
    settings = make_settings(request_log_directory=certified / "log")

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await client.post("/predict", content=picture(1), headers=PNG | {"x-request-id": "7"})
        await until(lambda: waits or num_predictions(worker.settings.state) == 1)
        assert await send_labels(client, [{"request_id": "7", "ground_truth": "dark"}]) != waits
        await asyncio.sleep(0.01)
        await client.post("/predict", content=picture(2), headers=PNG | {"x-request-id": "7"})

    run(settings, work)
    (row,) = collected(settings, tmp_path / "out.parquet")
    assert (row["image"]["bytes"], row["label"]) == (picture(1), "dark")
    assert "left out: 1 after the label of their id\n" in capsys.readouterr().out
    everything = collected(settings, tmp_path / "all.parquet", "--unlabelled")
    assert {row["image"]["bytes"]: row["label"] for row in everything} == {
        picture(1): "dark",
        picture(2): None,
    }


@pytest.mark.parametrize(
    ("seconds", "is_taken"), [(0.0, True), (-4.0, True), (-60.0, False), (86400.0, True)]
)
def test_label_may_arrive_a_few_seconds_before_its_prediction(
    served: tuple[Settings, list[bytes], list[str], list[str]], seconds: float, is_taken: bool
) -> None:
    settings, *_ = served
    request = next(
        one for one in read_requests(log_folder(settings)) if isinstance(one, LoggedRequest)
    )
    truth = GroundTruth(request.request_id, 0, "dark", None, request.time.timestamp() + seconds)
    found = collect(log_folder(settings), [truth], [], CONTRACT, LABELS)
    assert [(one.key[0], one.truth) for one in found.items] == [
        (request.request_id, "dark")
    ] * is_taken
    assert found.left_out["after the label of their id"] == (not is_taken)


def test_label_of_a_daily_reused_id_joins_the_last_prediction_before_it() -> None:
    same = [item(0, key=("7", 0, 86400.0 * day), digest=f"{day}", truth=None) for day in range(5)]
    for day in range(5):
        left_out = SelectedRows([], {})
        found = _labelled(
            same, {("7", 0): GroundTruth("7", 0, "dark", None, 86400.0 * day + 60)}, True, left_out
        )
        assert [(one.digest, one.truth) for one in found] == [(f"{day}", "dark")] + [
            ("4", None)
        ] * (day < 4)
        assert left_out.left_out["of a reused id"] == 5 - len(found)


@pytest.mark.parametrize("umask", [0o022, 0o000])
@pytest.mark.parametrize("more", [[], ["--unlabelled"]])
def test_collected_file_is_private_for_any_umask(
    served: tuple[Settings, list[bytes], list[str], list[str]],
    tmp_path: Path,
    more: list[str],
    umask: int,
) -> None:
    settings, *_ = served
    before = os.umask(umask)
    try:
        collected(settings, tmp_path / "out.parquet", *more)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out.parquet").stat().st_mode) == 0o600


def item(number: int, **changes: Any) -> LoggedItem:
    fields: dict[str, Any] = {
        "key": (f"id-{number}", 0, float(number)),
        "model": "m",
        "digest": f"{number}",
        "truth": "a",
        "predicted": "a",
    }
    return LoggedItem(
        **fields | {"doubt": 0.1, "ood_score": 0.1, "is_ood": False, "drifted": False} | changes
    )


@pytest.mark.parametrize(
    "worth", [{"predicted": "b"}, {"doubt": 0.6}, {"ood_score": 3.0}, {"drifted": True}]
)
def test_collect_ranks_rows_by_error_uncertainty_ood_score_and_drift(
    worth: dict[str, Any],
) -> None:
    items = [item(number) for number in range(20)]
    items[7] = item(7, **worth)
    ranked = _ranked(items)
    assert ranked[0].key == ("id-7", 0, 7.0)
    assert [one.key[2] for one in ranked[1:4]] == [19.0, 18.0, 17.0]  # of equals the newest


def test_collect_marks_rows_of_a_drifted_window_by_model_and_time(
    served: tuple[Settings, list[bytes], list[str], list[str]],
) -> None:
    settings, *_ = served
    logged = [
        request
        for request in read_requests(log_folder(settings))
        if isinstance(request, LoggedRequest)
    ]
    version, middle = logged[0].model_version, logged[30].time.timestamp()
    labels = [GroundTruth(request.request_id, 0, "dark", None, time.time()) for request in logged]
    spans = [DriftedSpan(version, middle, middle + 60), DriftedSpan("another", 0.0, middle)]
    found = collect(log_folder(settings), labels, spans, CONTRACT, LABELS)
    assert sum(one.drifted for one in found.items) >= 29
    assert all(one.drifted == (one.key[2] >= middle) for one in found.items)


def test_collect_without_labels_fails_with_the_reason(
    served: tuple[Settings, list[bytes], list[str], list[str]], tmp_path: Path
) -> None:
    settings, *_ = served
    found = collect(log_folder(settings), [], [], CONTRACT, LABELS)
    assert (found.items, found.left_out["without a label"]) == ([], 60)
    of_tables = collect(log_folder(settings), [], [], COLUMNS, LABELS)
    assert of_tables.left_out["of another model"] == 61
    with pytest.raises(UnavailableError, match="SLIPWAY_STATE"):
        collecting_command.main(
            [*command(settings, tmp_path / "out.parquet"), "--state", str(tmp_path / "nowhere")]
        )
    with pytest.raises(UnavailableError, match="SLIPWAY_REQUEST_LOG_DIRECTORY"):
        collecting_command.main(
            [
                *command(settings, tmp_path / "out.parquet"),
                "--request-log",
                str(tmp_path / "nowhere"),
            ]
        )
    with pytest.raises(DataError, match=r"\.parquet"):
        collecting_command.main(command(settings, tmp_path / "out.csv"))
    assert not list(tmp_path.glob("out*"))


def test_next_command_sets_columns_missing_from_requests_to_null(
    certified: Path,
) -> None:
    bundle = write_bundle(certified / "bundle", lineage=lineage(group_column="person"))
    assert collecting_command.next_command(bundle.manifest, Path("a b.parquet")) == (
        "slipway run 'data.path=a b.parquet' data.group_column=null"
    )
