"""Trackers record trainings in real processes; their own clients read the records."""

import json
import struct
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from slipway.training.telemetry.run_log import read_log
from tests.training.conftest import write_project
from tests.training.real_runs import kill_after, run_training, weights_digest

pytestmark = pytest.mark.process
_BLOCK, _HEADER = 32768, 7  # bytes of the record format of LevelDB's log, which W&B's files have


def mlflow_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[MlflowClient, Run]:
    """Return the MLflow client of the local folder, and the only run in it."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((project / ".work/mlflow").as_uri())
    experiment = client.get_experiment_by_name(project.name)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def wandb_records(path: Path) -> Iterator[Any]:
    """Return the records of a W&B file, parsed by W&B's own schema.

    The file must be shorter than one block.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    content, place = path.read_bytes(), _HEADER
    assert content.startswith(b":W&B")
    assert len(content) < _BLOCK
    while place + _HEADER <= len(content):
        length, kind = struct.unpack_from("<HB", content, place + 4)
        assert kind == 1  # a whole record
        place += _HEADER + length
        yield Record.FromString(content[place - length : place])


def wandb_history(path: Path) -> list[dict[str, float]]:
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for record in wandb_records(path)
        if (items := record.history.item)
    ]


@pytest.mark.nightly(seconds=29)
def test_a_resumed_training_continues_its_tracker_runs_and_keeps_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    plain = write_project(tmp_path / "plain", log_every_steps=2)
    tracked = write_project(tmp_path / "tracked", log_every_steps=2, loggers=["mlflow", "wandb"])
    assert run_training(plain).returncode == 0
    kill_after(tracked, "epoch 2/4")
    done = run_training(tracked)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout
    assert weights_digest(tracked) == weights_digest(plain)
    assert list(home.iterdir()) == []

    log = [event for event in read_log(tracked / ".work/log") if event["event"] == "epoch"]
    losses = {event["step"]: event["val/loss"] for event in log}
    client, run = mlflow_run(tracked, monkeypatch)
    assert run.info.status == "FINISHED"
    assert run.data.params["train/learning_rate"] == "0.01"
    assert run.data.params["seed"] == "7"
    found = client.get_metric_history(run.info.run_id, "val/loss")
    assert {metric.step: metric.value for metric in found} == losses
    steps = {metric.step for metric in client.get_metric_history(run.info.run_id, "step/loss")}
    assert steps == {1, 2, 4, 6, 8, 10, 12, 14, 16}
    assert client.list_artifacts(run.info.run_id) == []  # no model

    first, second = sorted((tracked / ".work/wandb").glob("offline-run-*/*.wandb"))
    assert first.name == second.name  # the same run
    rows = [*wandb_history(first), *wandb_history(second)]
    logged = {row["trainer/global_step"]: row["val/loss"] for row in rows if "val/loss" in row}
    assert logged == losses
    settings = {
        update.key: json.loads(update.value_json)
        for record in wandb_records(second)
        for update in [*record.run.config.update, *record.config.update]
    }
    assert settings["train"]["learning_rate"] == 0.01


class _FailingServer(BaseHTTPRequestHandler):
    """A server with MLflow's REST interface for one run, which refuses the metrics of epochs."""

    def do_GET(self) -> None:
        self._answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none yet"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path.endswith("runs/create"):
            facts = {"run_id": "r1", "experiment_id": "1", "status": "RUNNING", "start_time": 0}
            self._answer(200, {"run": {"info": facts, "data": {}}})
        elif "val/loss" in body:
            self._answer(400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "quota is used"})
        else:
            self._answer(200, {"experiment_id": "1"})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_failing_tracker_is_reported_once_and_the_training_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write_project(tmp_path, loggers=["mlflow"], epochs=2)
    with ThreadingHTTPServer(("127.0.0.1", 0), _FailingServer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@{host}")
        done = run_training(project)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("logger mlflow failed and is left out") == 1
    assert "quota is used" in done.stdout
    assert "secret" not in done.stdout
    assert json.loads((project / "metrics/train.json").read_text())["failed_loggers"] == "mlflow"
    failed = [e for e in read_log(project / ".work/log") if e["event"] == "logger_failed"]
    assert [event["logger"] for event in failed] == ["mlflow"]


def test_only_the_first_of_two_processes_reports_to_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    project = write_project(
        tmp_path, loggers=["mlflow", "wandb"], epochs=2, strategy="ddp", devices=2
    )
    done = run_training(project)
    assert done.returncode == 0, done.stderr
    client, run = mlflow_run(project, monkeypatch)  # there is one
    assert run.info.status == "FINISHED"
    epochs = client.get_metric_history(run.info.run_id, "val/loss")
    assert len(epochs) == len({metric.step for metric in epochs}) == 2
    (path,) = (project / ".work/wandb").glob("offline-run-*/*.wandb")
    assert sum("val/loss" in row for row in wandb_history(path)) == 2
