"""The facts and the collected rows of the loop, from a real database, request log and bundle."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from slipway.artifacts.bundle import Lineage
from slipway.drift.features import extract
from slipway.drift.reference import read_reference
from slipway.drift.verdict import judge
from slipway.drift.window import Window
from slipway.loop.label_keys import key_name
from slipway.loop.steps import LoopProject
from slipway.serving.monitoring.settings import Limits
from slipway.serving.monitoring.store import Store
from slipway.serving.settings import Settings
from slipway.traffic.monitoring_records import CHOSEN, DATABASE
from slipway.traffic.request_log import SegmentWriter, encode_line
from tests.loop.cases import loop_params, write_steps
from tests.project_params import PROJECT
from tests.serving.bundles import (
    COLUMNS,
    LABELS,
    ROW,
    probabilities,
    row_classifier,
    write_bundle,
    write_inert_bundle,
)
from tests.serving.monitoring.monitored import monitored_bundle, pixels
from tests.traffic.test_request_log import logged

HOUR_S = 3600.0


def test_drift_of_a_cycle_without_a_gain_is_a_reason_again_only_if_the_traffic_moves_further(
    tmp_path: Path,
) -> None:
    bundle = monitored_bundle(tmp_path)
    reference = read_reference(bundle, "fp32")
    assert reference is not None
    settings = Settings(state=tmp_path / "state", bundle=bundle.root)
    project = LoopProject(
        PROJECT.model_copy(update={"loop": loop_params(pause_days=0)}), settings, tmp_path
    )
    with closing(Store(settings.state, Limits(1000, 3600.0, 1000, 3600.0))) as store:
        store.tidy()  # creates the database

    def add_window(hour: int, shift: int) -> None:
        """Store an hour of traffic like the service, with its verdict."""
        rows = pixels(hour, 120, shift)
        window = Window(reference)
        scores = (rows.reshape(len(rows), -1).mean(axis=1) / 255).astype(np.float32)
        window.add(extract(bundle.manifest.input, rows, probabilities(rows), scores))
        features = [one.model_dump(mode="json") for one in judge(reference, window).features]
        values = {
            "model": f"{bundle.version}/fp32",
            "opened": HOUR_S * hour,
            "since": HOUR_S * hour,
            "closed": HOUR_S * (hour + 1),
            "num_rows": len(rows),
            "content": window.to_bytes(),
            "drifted": any(one["drifted"] for one in features),
            "judgement": json.dumps({"features": features, "seconds": HOUR_S}),
        }
        with closing(sqlite3.connect(settings.state / DATABASE)) as connection, connection:
            connection.execute(
                f"INSERT INTO windows ({', '.join(values)}) VALUES ({', '.join('?' * 8)})",
                list(values.values()),
            )

    for hour in range(3, 7):
        add_window(hour, 40)
    assert "in two windows in a row" in project.facts(None, 7 * HOUR_S).reasons[0]
    steps: dict[str, Any] = {
        "triggered": {"since": HOUR_S, "served": bundle.version},
        "collected": {},
        "compared": {"comparison": {"contradicted": []}},
        "ended": {"outcome": "no_gain"},
    }
    cycle = write_steps(project.folder, steps, now=5 * HOUR_S)
    assert project.facts(cycle, 7 * HOUR_S).reasons == ()
    for hour in (7, 8):
        add_window(hour, 80)
    assert "in two windows in a row" in project.facts(cycle, 9 * HOUR_S).reasons[0]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_labels_that_arrive_during_a_cycle_count_for_the_next_one(
    is_replaced: bool, tmp_path: Path
) -> None:
    """Those of a model that the cycle replaced count as well: they have trained no model yet."""
    bundle = write_inert_bundle(tmp_path / "bundle")
    settings = Settings(state=tmp_path / "state", bundle=bundle.root)
    before = "replaced" if is_replaced else bundle.version
    loop = loop_params(triggers={"drift": False, "objective": None, "new_labels": 2})
    project = LoopProject(PROJECT.model_copy(update={"loop": loop}), settings, tmp_path)
    with closing(Store(settings.state, Limits(1000, 3600.0, 1000, 3600.0))) as store:
        store.tidy()  # creates the database
    with closing(sqlite3.connect(settings.state / DATABASE)) as connection, connection:
        connection.executemany(
            "INSERT INTO labels (request_id, item, names_item, received, label, predicted_label, "
            "model, answered, joined) VALUES (?, 0, 1, 0, 'cat', 'cat', ?, 0, ?)",
            [(str(joined), before, joined) for joined in (1500.0, 2500.0, 3500.0)],
        )
    assert project.facts(None, 500.0).reasons == (() if is_replaced else ("3 new labels",))
    write_steps(project.folder, {"triggered": {"since": 0.0, "served": before}})
    write_steps(project.folder, {"collected": {}}, now=2000.0)
    last = write_steps(project.folder, {"ended": {"outcome": "worse"}}, now=4000.0)
    assert project.facts(last, 5000.0).reasons == ("2 new labels",)


def test_collected_rows_end_with_the_recent_ones_of_which_the_drift_reference_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lineage = Lineage(
        git_revision=None,
        git_dirty=False,
        params={"data": {"target_column": "label"}},
        data=None,
        digests={},
    )
    bundle = write_bundle(tmp_path / "bundle", row_classifier(), input=COLUMNS, lineage=lineage)
    settings = Settings(state=tmp_path / "state", bundle=bundle.root)
    project = LoopProject(
        PROJECT.model_copy(update={"loop": loop_params()}), settings, tmp_path / "log"
    )
    with closing(Store(settings.state, Limits(1000, 3600.0, 1000, 3600.0))) as store:
        store.tidy()  # creates the database
    callers = ["a", "b", f"{CHOSEN}anna", "a", "b", "a"]
    writer = SegmentWriter(project.request_log, 1 << 20, 1)
    for number, caller in enumerate(callers):
        answer = {
            "label": "dark",
            "probabilities": dict.fromkeys(LABELS, 1 / 3),
            "ood_score": 0.1,
            "is_ood": False,
        }
        request = replace(
            logged(number),
            request_id=f"r{number}",
            time=datetime.fromtimestamp(1000.0 * (number + 1), UTC),
            content_type="application/json",
            payload=json.dumps(ROW | {"age": number}).encode(),
            answers=[answer],
            bundle_digest=bundle.digest,
        )
        writer.append(encode_line(request))
        with closing(sqlite3.connect(settings.state / DATABASE)) as connection, connection:
            connection.execute(
                "INSERT INTO labels (request_id, item, names_item, received, label, caller) "
                "VALUES (?, 0, 1, 1e6, 'grey', ?)",
                (f"r{number}", caller),
            )
    writer.close()
    steps = {"triggered": {"since": 3000.0, "served": bundle.version}}
    detail = project._collect(write_steps(project.folder, steps))
    keys = json.loads(Path(detail["keys"]).read_bytes())
    answered = json.loads(Path(detail["answered"]).read_bytes())
    assert keys == ["", "", "", *map(key_name, ("a", "b", "a"))]
    assert answered == [1000.0, 2000.0, 3000.0, 4000.0, 5000.0, 6000.0]
    assert pq.read_table(detail["path"])["age"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert detail["recent_from"] == 3
    without_drift = {"triggered": {"since": 0.0, "served": bundle.version}}
    again = project._collect(write_steps(project.folder, without_drift, cycle=2))
    assert again["recent_from"] is None
