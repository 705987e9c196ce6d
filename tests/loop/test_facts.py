"""The facts of the loop, read from a real monitoring database and bundle."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from slipway.drift.features import extract
from slipway.drift.reference import read_reference
from slipway.drift.verdict import judge
from slipway.drift.window import Window
from slipway.loop.steps import LoopProject
from slipway.serving.monitoring.settings import Limits
from slipway.serving.monitoring.store import Store
from slipway.serving.settings import Settings
from slipway.traffic.monitoring_records import DATABASE
from tests.loop.cases import loop_params, write_steps
from tests.project_params import PROJECT
from tests.serving.bundles import probabilities
from tests.serving.monitoring.monitored import monitored_bundle, pixels

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
        rows = pixels(hour, 200, shift)
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
