"""`slipway dataset erase` shows, asks, removes and names the models; a killed call is repeated."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.artifacts.bundle import DataSource, Lineage
from slipway.curation import erasure
from slipway.curation.erasure import carry_out, find, main
from slipway.curation.models_of_rows import folder_digest
from slipway.data.sources.raw_tables import COLLECTED
from slipway.loop.journal import FOLDER
from slipway.replay.__main__ import main as replay
from slipway.serving.monitoring.labels import FeedbackItem, Prediction
from slipway.serving.monitoring.settings import Limits
from slipway.serving.monitoring.store import Part, Store
from slipway.system import files
from slipway.traffic.label_queue import QUEUE, LabelQueue, QueuedRow
from slipway.traffic.request_log import SegmentWriter, encode_line, read_requests
from tests.data.test_table_stages import prepare_table
from tests.loop.cases import write_steps
from tests.serving.bundles import COLUMNS, row_classifier, table_row, write_bundle
from tests.traffic.test_request_log import MIB, logged

pytestmark = pytest.mark.process
DATA = "person,target\nanna,1\nann,2\nanna2,3\nanna,4\n"
LEFT = "person,target\nann,2\nanna2,3\n"
ARGUMENTS = [
    "--group",
    "anna",
    "--request-id",
    "r-1",
    "--request-log",
    "log",
    "--state",
    "state",
    "--whole-requests",
]
# Requests by id; r-3 sent the same row as the second one of r-1.
REQUESTS = {"r-1": [1, 2], "r-10": [4], "r-2": [5], "r-3": [2]}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two persons in its data, four logged requests and rows collected from them."""
    monkeypatch.chdir(tmp_path)
    for name in ("REQUEST_LOG_DIRECTORY", "ACCESS_LOG_DIRECTORY", "STATE", "BUNDLE"):
        monkeypatch.delenv(f"SLIPWAY_{name}", raising=False)
    (tmp_path / "raw.csv").write_text(DATA)
    shutil.copyfile(Path(__file__).parents[2] / "dvc.yaml", tmp_path / "dvc.yaml")
    prepare_table(tmp_path, Path("raw.csv"), "table_regression", "target")
    params = (tmp_path / "params.yaml").read_text()
    assert "group_column: null" in params
    (tmp_path / "params.yaml").write_text(
        params.replace("group_column: null", "group_column: person")
    )
    source = DataSource(
        path="raw.csv", hash="md5", digest=files.md5_file(Path("raw.csv")), bytes=None, files=None
    )
    lineage = Lineage(git_revision=None, git_dirty=False, params={}, data=source, digests={})
    write_bundle(tmp_path / "artifacts/bundle", row_classifier(), input=COLUMNS, lineage=lineage)
    write_requests(tmp_path / "log", REQUESTS)
    _write_collected(tmp_path / "data/collected.parquet")
    store = Store(tmp_path / "state", Limits(1000, 3600.0, 1000, 3600.0))
    predictions = [Prediction(name, 0, 1, 1.8e9, "v", "dark", None) for name in REQUESTS]
    store.merge(Part(1, {}, predictions), {})
    store.add_feedback([FeedbackItem(name, 0, "dark", None) for name in REQUESTS])
    store.close()
    return tmp_path


def write_requests(folder: Path, requests: Mapping[str, list[int]], **cells: str) -> None:
    """Log requests of rows by id; `cells` replace those of every row."""
    writer = SegmentWriter(folder, MIB, 1)
    for number, (name, rows) in enumerate(requests.items()):
        request = replace(
            logged(number),
            request_id=name,
            content_type="application/json",
            payload=json.dumps({"rows": [table_row(row) | cells for row in rows]}).encode(),
            answers=[{}] * len(rows),
        )
        writer.append(encode_line(request))
    writer.close()


def _write_collected(path: Path) -> None:
    """Rows 1 to 5 as collected ones, and row 1 once more as a row of the base data."""
    names = [column.name for column in COLUMNS.columns]
    rows = [{name: table_row(row).get(name) for name in names} for row in (1, 2, 4, 5, 1)]
    marks = [True, True, True, True, False]
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist(rows).append_column(COLLECTED, pa.array(marks)), path)


def state_of(project: Path) -> dict[str, Any]:
    """The content of a project that an erasure may change."""
    requests = list(read_requests(project / "log"))
    return {
        "raw": (project / "raw.csv").read_text(),
        "collected": pq.read_table(project / "data/collected.parquet").to_pylist(),
        "requests": [one.request_id for one in requests],  # type: ignore[union-attr]
    }


def test_erase_removes_the_persons_rows_and_keeps_similar_names(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state_of(project)
    main([*ARGUMENTS, "--json", "--yes"])
    after, report = state_of(project), json.loads(capsys.readouterr().out)
    assert after["raw"] == LEFT
    assert after["requests"] == ["r-10", "r-2", "r-3"]
    # Row 2 is r-3's as well; the last row is one of the base data.
    assert after["collected"] == before["collected"][1:]
    removed = {(one["place"], one["what"]): one["count"] for one in report["removed"]}
    assert removed == {
        ("raw.csv", "rows"): 2,
        ("data/collected.parquet", "rows"): 1,
        ("state/monitoring.sqlite", "predictions"): 1,
        ("state/monitoring.sqlite", "labels"): 1,
        ("log", "requests"): 1,
    }
    assert any("r-3" in text for text in report["left"])
    (model,) = report["models"]
    assert (model["saw"], model["data"]) == ("yes", hashlib.md5(DATA.encode()).hexdigest())
    assert {"clean", "precompute", "train", "export", "verify"} <= set(report["stages"])
    assert any("dvc gc --workspace" in text for text in report["next"])
    assert "anna" not in json.dumps(report)


def test_erase_removes_one_row_of_a_request_from_every_store(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state_of(project)
    queue = LabelQueue(project / "state" / QUEUE)
    queue.add([QueuedRow("r-1", item, 1.8e9, by_gain=True) for item in (0, 1)])
    row = ["--request-item", "r-1", "0", *ARGUMENTS[4:-1]]
    main([*row, "--json", "--yes"])
    removed = {
        (one["place"], one["what"]): one["count"]
        for one in json.loads(capsys.readouterr().out)["removed"]
    }
    assert removed == {
        ("data/collected.parquet", "rows"): 1,
        ("state/monitoring.sqlite", "predictions"): 1,
        ("state/monitoring.sqlite", "labels"): 1,
        ("state/label_queue.sqlite", "rows to label"): 1,
        ("log", "requests with these rows"): 1,
    }
    after = state_of(project)
    assert after["requests"] == before["requests"]
    assert after["collected"] == before["collected"][1:]
    assert [row.key[:2] for row in queue.rows()] == [("r-1", 1)]
    assert "no row of the selection" in refusal(*row, capsys=capsys)
    with pytest.raises(SystemExit):
        replay(["r-1", "--request-log", "log", "--bundle", "artifacts/bundle"])
    assert "rows 0 of r-1 were erased" in capsys.readouterr().err


def test_only_experiments_of_this_project_are_listed_as_models(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@localhost")

    def git(*command: str) -> None:
        subprocess.run(["git", *author, *command], cwd=project, check=True, capture_output=True)

    git("init")
    # Of another project in the same repository, whose folder is beside this one.
    git("commit", "--allow-empty", "--message", "other")
    git("update-ref", "refs/exps/00/1111/other", "HEAD")
    git("add", "dvc.yaml")
    git("commit", "--message", "own")
    git("update-ref", "refs/exps/00/1111/own", "HEAD")
    main([*ARGUMENTS, "--json"])
    models = json.loads(capsys.readouterr().out)["models"]
    assert [one["version"] for one in models[1:]] == ["own"]


def test_erase_removes_nothing_without_confirmation(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state_of(project)
    main(ARGUMENTS)
    said = capsys.readouterr()
    assert "raw.csv" in said.out
    assert "2 rows" in said.out
    assert "nothing was removed" in said.err
    assert state_of(project) == before


def test_a_model_of_older_data_is_judged_only_if_dvcs_cache_has_that_version(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = b"person,target\nbob,1\n"
    digest = hashlib.md5(old).hexdigest()
    source = DataSource(path="raw.csv", hash="md5", digest=digest, bytes=None, files=None)
    lineage = Lineage(git_revision=None, git_dirty=False, params={}, data=source, digests={})
    other = write_bundle(
        project / "artifacts/old", row_classifier(), input=COLUMNS, lineage=lineage
    )
    cached = project / ".dvc/cache/files/md5" / digest[:2] / digest[2:]
    for content, saw in ((None, "cannot tell"), (old, "no"), (DATA.encode(), "yes")):
        if content is not None:
            files.write_bytes(cached, content)
        main([*ARGUMENTS, "--json"])
        models = json.loads(capsys.readouterr().out)["models"]
        assert {one["version"]: one["saw"] for one in models}[other.version] == saw


def test_a_folder_has_the_digest_that_dvc_gives_it(tmp_path: Path) -> None:
    from dvc_data.hashfile.build import build
    from dvc_data.hashfile.db import HashFileDB
    from dvc_objects.fs.local import localfs

    for name in ("b/2.txt", "a.txt", "b/10.txt", "B/é.txt"):
        files.write_text(tmp_path / "raw" / name, name)
    store = HashFileDB(localfs, str(tmp_path / "store"))
    _, _, tree = build(store, str(tmp_path / "raw"), localfs, "md5")
    assert folder_digest(tmp_path / "raw") == tree.hash_info.value


def refusal(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--state", "state"])
    assert ended.value.code == 1
    return capsys.readouterr().err


def test_erase_refuses_a_selection_that_is_empty_or_ambiguous(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no row is selected" in refusal(capsys=capsys)
    assert "compared as a whole" in refusal("--group", "Anna", capsys=capsys)
    writer = SegmentWriter(project / "log", MIB, 1)
    writer.append(encode_line(replace(logged(50), request_id="r-2")))
    writer.close()
    again = ["--request-id", "r-2", "--request-log", "log", "--whole-requests"]
    assert "2 requests have the id r-2" in refusal(*again, capsys=capsys)
    several = ["--request-id", "r-1", "--request-log", "log"]
    assert "the request r-1 has 2 rows" in refusal(*several, capsys=capsys)
    assert "--request-item r-1 0" in refusal(*several, capsys=capsys)
    for item, message in (("2", "numbers from 0 to 1, not 2"), ("x", "names no row")):
        one = ["--request-item", "r-1", item, "--request-log", "log"]
        assert message in refusal(*one, capsys=capsys)
    write_steps(project / "state" / FOLDER, {"triggered": {}, "collected": {}})
    assert "slipway loop stop" in refusal("--group", "anna", capsys=capsys)


def test_a_killed_erasure_ends_with_the_same_files_and_report_when_repeated(
    project: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    untouched = tmp_path_factory.mktemp("untouched") / "project"
    shutil.copytree(project, untouched)
    main([*ARGUMENTS, "--json", "--yes"])
    expected, report = state_of(project), json.loads(capsys.readouterr().out)
    num_steps = len(report["removed"])
    for step in range(num_steps + 1):
        shutil.rmtree(project)
        shutil.copytree(untouched, project)
        os.chdir(project)
        killed = multiprocessing.get_context("fork").Process(target=_erase_and_die, args=(step,))
        killed.start()
        killed.join()
        assert killed.exitcode == -signal.SIGKILL
        main([*ARGUMENTS, "--json", "--yes"])
        repeated = json.loads(capsys.readouterr().out)
        assert state_of(project) == expected
        assert {**repeated, "created": ""} == {**report, "created": ""}
        assert not list((project / "state" / "erasures").glob("*.pending.json"))


def _erase_and_die(step: int) -> None:
    options = erasure._parser().parse_args([*ARGUMENTS, "--yes"])
    found = find(options)
    found.steps.insert(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    carry_out(found, found.report, options.state, None)
