"""The closed loop on a real table, service and training: from labels to a promoted model.

The training starts from the served weights, and a person approves. Some of the labelled rows are
copies of test rows, which would leak into the training.
"""

import csv
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.loop.journal import JOURNAL, Cycle, cycles, read_journal
from slipway.training.networks.initialization import is_former_model
from slipway.training.networks.networks import read_model_manifest
from tests import plain_http
from tests.end_to_end.project import Project, copy_checkout, shown_params, wait_until_ready
from tests.loop.cases import SECTION

pytestmark = [pytest.mark.nightly(seconds=300), pytest.mark.timeout(1800)]
SETTINGS = {"SLIPWAY_STATE": "state", "SLIPWAY_REQUEST_LOG_DIRECTORY": "log"}
PREFIX = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
BATCH = 16  # rows of a request
OTHER = {"yes": "no", "no": "yes"}
LOOP = SECTION | {
    "triggers": {"drift": False, "objective": None, "new_labels": 100},
    "start": "served",
    "max_forgetting": 0.5,
    "require_gain": False,
    "shadow_requests": None,
    "canary": {"steps": [1.0], "hold_seconds": 0, "hold_requests": 20},
}


def table(num_rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows whose class follows from two numbers and a category."""
    random = np.random.default_rng(seed)
    for _ in range(num_rows):
        a, b = (round(float(one), 4) for one in random.normal(size=2))
        city = str(random.choice(["Bonn", "Kiel"]))
        is_yes = a - b + (city == "Kiel") + 0.3 * random.normal() > 0.5
        yield {"a": a, "b": b, "city": city, "bought": "yes" if is_yes else "no"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project after a run, whose model is deployed as a copy."""
    made = copy_checkout(tmp_path_factory.mktemp("loop"))
    rows = list(table(600, seed=1))
    with (made.path / "data/rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    made.set_params(shown_params()[1])
    made.keep_own_keys()
    made.set_params(
        {
            "data": {"path": "data/rows.csv", "target_column": "bought"},
            "split": {"assignment": "stable"},
            "train": {"epochs": 6},
            "evaluate": {"gates": {}},
            "verify": {"timing_rounds": 5},
        }
    )
    with (made.path / "params.yaml").open("a") as file:
        file.write(f"\nloop: {json.dumps(LOOP)}\n")
    made.shell("git add -A && git commit -qm 'A table' && dvc repro", timeout_s=900)
    made.shell("git add -A && git commit -qm 'A first model'")
    made.shell(f"{PREFIX} slipway rollout deploy artifacts/bundle")
    return made


def last_cycle(project: Project) -> Cycle:
    return cycles(read_journal(project.path / "state/loop" / JOURNAL))[-1]


def inputs_of(row: dict[str, Any]) -> tuple[float, float, str]:
    return float(row["a"]), float(row["b"]), str(row["city"])


def split_of_inputs(project: Project, data: str) -> dict[tuple[float, float, str], set[str]]:
    """Return the splits that hold a row, by its inputs, in the last run on the data at `data`."""
    path = project.path / data
    raw = pq.read_table(path).to_pylist() if path.suffix == ".parquet" else list(read_csv(path))
    rows = pq.read_table(project.path / "data/split/rows.parquet").select(["source", "split"])
    found: dict[tuple[float, float, str], set[str]] = {}
    for row in rows.to_pylist():
        number = int(row["source"].partition(":")[0])
        found.setdefault(inputs_of(raw[number]), set()).add(row["split"])
    return found


def read_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def ask(service: str, rows: list[dict[str, Any]]) -> str:
    """Send rows without their labels; return the request id."""
    inputs = [{name: row[name] for name in ("a", "b", "city")} for row in rows]
    answer = plain_http.post(f"{service}/predict", json={"rows": inputs})
    assert answer.status_code == 200, answer.text
    request_id: str = answer.json()["request_id"]
    return request_id


def served_version(service: str) -> str:
    return str(plain_http.get(f"{service}/model").json()["model_version"])


def wait_for(is_done: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_labels_lead_to_a_promoted_model_that_started_from_the_served_weights(
    project: Project,
) -> None:
    first = load_bundle(project.path / "artifacts/bundle").version
    with project.service(**SETTINGS) as service:
        wait_until_ready(service)
        before = split_of_inputs(project, "data/rows.csv")
        base = read_csv(project.path / "data/rows.csv")
        tested = [row for row in base if before.get(inputs_of(row)) == {"test"}][: BATCH // 2]
        same = [row | {"a": float(row["a"]), "b": float(row["b"])} for row in tested]
        other = [row | {"bought": OTHER[row["bought"]]} for row in same[: BATCH // 4]]
        rows = [*table(BATCH * 25, seed=2), *same[BATCH // 4 :], *other]
        for begin in range(0, len(rows), BATCH):
            some = rows[begin : begin + BATCH]
            name = ask(service, some)
            labels = [
                {"request_id": name, "item": item, "ground_truth": row["bought"]}
                for item, row in enumerate(some)
            ]
            sent = plain_http.post(f"{service}/feedback", json={"feedback": labels})
            assert sent.status_code in (200, 202), sent.text
        said: list[str] = []

        def is_requested() -> bool:
            said.append(project.shell(f"{PREFIX} slipway loop", timeout_s=900))
            return "is awaited" in said[-1]

        wait_for(is_requested, 900)  # labels are stored a moment later
        cycle = last_cycle(project)
        assert not cycle.failures, cycle.failures
        started = Path(cycle.detail("merged")["assignments"][-1].partition("=")[2])
        assert is_former_model(project.path / started)
        trained = read_model_manifest(project.path / "artifacts/model")
        assert trained.params["pretrained"] == started.as_posix()
        assert trained.digests["former_model"]
        compared = cycle.detail("compared")["comparison"]
        assert compared["recent"]["difference"]["rows"] >= 20
        assert compared["latest"]["difference"]["rows"] >= 20
        # Collected copies of test rows are in no other split, whatever label they came with.
        merged = cycle.detail("merged")
        assert merged["conflicts"] == len(other)
        after = split_of_inputs(project, merged["path"])
        assert all(len(splits) == 1 for splits in after.values())
        assert {inputs_of(row) for row in other}.isdisjoint(after)  # refused, with a reason
        kept = {inputs for inputs, splits in before.items() if splits == {"test"}}
        kept -= {inputs_of(row) for row in other}
        assert all(after[inputs] == {"test"} for inputs in kept)
        leaks = json.loads((project.path / "reports/split.json").read_bytes())["leaks"]
        assert leaks["rows"] == 0
        version = cycle.detail("requested")["version"]
        assert served_version(service) == first != version

        project.shell(f"{PREFIX} slipway loop approve {version} --by anna --reason tested")

        def is_promoted() -> bool:
            for _ in range(5):
                ask(service, rows[:BATCH])
            return "promoted" in project.shell(f"{PREFIX} slipway loop")

        wait_for(is_promoted, 120)
        assert last_cycle(project).detail("ended")["outcome"] == "promoted"
        wait_for(lambda: served_version(service) == version)
    assert "anna" in project.shell(f"{PREFIX} slipway history")
