import csv
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.inference.files import PredictedFile, predict_files
from slipway.inference.local import LoadedModel
from slipway.inference.parts import PartsFolder
from slipway.inference.predictions import ClassPrediction
from slipway.predictor.model import CertifiedModel
from slipway.system.errors import DataError, LockedError
from tests.inference.test_sources import (
    frame,
    write_csv,
    write_jsonl,
    write_parquet,
    write_xlsx,
)
from tests.sentences import sentences
from tests.serving.bundles import LABELS, certify, log_of_mean, picture, write_bundle


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_predicted_csv_has_the_answer_or_the_fault_of_each_row(
    table_model: LoadedModel, tmp_path: Path
) -> None:
    path = write_csv(tmp_path / "in.csv", frame(50))
    path.write_text(path.read_text().replace("7,20007.5", "999,20007.5"))
    seen: list[tuple[int, int | None]] = []
    done = predict_files(
        table_model,
        path,
        tmp_path / "out.csv",
        piece_rows=20,
        on_progress=lambda *rows: seen.append(rows),
    )
    assert (done.rows, done.answered, done.faults) == (50, 49, {"out_of_range": 1})
    assert seen[-1] == (50, None)
    assert seen == sorted(seen)
    rows = read_csv(tmp_path / "out.csv")
    assert [row["age"] for row in rows] == [str(n) if n != 7 else "999" for n in range(50)]
    answers = table_model.predict(frame(50))
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        if number == 7:
            assert row["prediction"] == row["is_ood"] == ""
            assert row["error_code"] == "out_of_range"
            assert row["error"].startswith("age: found 999, expected a finite number")
            continue
        assert row["prediction"] == answer.label
        found = {label: float(row[f"probability_{label}"]) for label in LABELS}
        # Another batch may differ in the last bits.
        assert found == pytest.approx(answer.probabilities, abs=1e-6)
        assert json.loads(row["prediction_set"]) == answer.prediction_set
        assert row["is_ood"] == str(answer.is_ood).lower()
        assert row["error"] == ""
    assert not (tmp_path / "out.csv.parts").exists()


def test_csv_parquet_and_json_lines_contain_the_same_answers(
    table_model: LoadedModel, tmp_path: Path
) -> None:
    sources = [
        write_csv(tmp_path / "in.csv", frame(30)),
        write_parquet(tmp_path / "in.parquet", frame(30)),
        write_jsonl(tmp_path / "in.jsonl", frame(30)),
    ]
    found = []
    for source, ending in itertools.product(sources, ["csv", "parquet", "jsonl"]):
        out = tmp_path / f"{source.suffix[1:]}.{ending}"
        predict_files(table_model, source, out, piece_rows=8)
        if ending == "csv":
            found.append([float(row["ood_score"]) for row in read_csv(out)])
        elif ending == "parquet":
            table = pq.read_table(out)
            found.append(table["ood_score"].to_pylist())
            assert table["prediction_set"][0].as_py()
        else:
            lines = [json.loads(line) for line in out.read_text().splitlines()]
            found.append([line["prediction"]["ood_score"] for line in lines])
            assert int(float(lines[4]["row"]["age"])) == 4
            assert lines[0]["error"] is None
    assert found == [found[0]] * 9


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_predicted_file_of_texts_has_the_answers_or_faults_of_its_rows(
    text_model: LoadedModel, tmp_path: Path, ending: str
) -> None:
    texts = [sentence.replace(",", "") for _, sentence in sentences(40, seed=2)]
    texts[3], texts[8] = "  ", "long " * 300
    table = pa.table({"id": [f"n{number}" for number in range(40)], "text": texts})
    write = {"csv": write_csv, "parquet": write_parquet, "jsonl": write_jsonl}[ending]
    source, out = write(tmp_path / f"in.{ending}", table), tmp_path / "out.csv"

    def stop(done: int, total: int | None) -> None:
        if done == 20:
            raise Killed

    with pytest.raises(Killed):
        predict_files(text_model, source, out, piece_rows=10, on_progress=stop)
    done = predict_files(text_model, source, out, piece_rows=10)
    assert (done.rows, done.resumed_rows) == (40, 10)
    assert done.faults == {"missing_value": 1, "out_of_range": 1}
    rows = read_csv(out)
    assert [number for number, row in enumerate(rows) if row["error_code"]] == [3, 8]
    assert "expected at most 1,000" in rows[8]["error"]
    good = [number for number in range(40) if number not in (3, 8)]
    answers = text_model.predict([texts[number] for number in good])
    for number, answer in zip(good, answers, strict=True):
        assert isinstance(answer, ClassPrediction)
        assert f"n{number}" in ",".join(rows[number].values())
        assert rows[number]["prediction"] == answer.label
        assert float(rows[number]["ood_score"]) == pytest.approx(answer.ood_score, rel=1e-6)
        assert rows[number]["truncated"] == str(answer.truncated).lower()


def test_predicted_folder_has_a_row_for_each_image_file(tmp_path: Path) -> None:
    certify(tmp_path / "m/certificate.json", write_bundle(tmp_path / "m/bundle", log_of_mean()))
    (tmp_path / "in").mkdir()
    for number in range(5):
        (tmp_path / f"in/{number}.png").write_bytes(picture(number, (9, 12)))
    (tmp_path / "in/broken.png").write_bytes(picture(1)[:-40])
    black = np.zeros((8, 8, 3), np.uint8)
    from PIL import Image

    Image.fromarray(black).save(tmp_path / "in/black.png")
    done = predict_files(tmp_path / "m", tmp_path / "in", tmp_path / "out.jsonl", piece_rows=3)
    assert done.faults == {"invalid_answer": 1, "truncated": 1}
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["row"]["file"] for line in lines] == [
        *(f"{number}.png" for number in range(5)),
        "black.png",
        "broken.png",
    ]
    assert lines[5] == {
        "row": {"file": "black.png"},
        "prediction": None,
        "error": {"code": "invalid_answer", "message": "the model answered NaN or an infinity"},
    }
    assert lines[0]["prediction"]["interval"]


class Killed(BaseException):
    """Ends a run between two batches, as a signal would."""


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_interrupted_file_prediction_ends_with_the_same_bytes(
    table_model: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
) -> None:
    source = write_csv(tmp_path / "in.csv", frame(100))
    predict_files(table_model, source, tmp_path / f"whole.{ending}", piece_rows=10)
    out, random_numbers = tmp_path / f"out.{ending}", random.Random(3)
    done: PredictedFile | None = None
    interruptions, answer_rows = 0, CertifiedModel.answer_rows
    while done is None:
        countdown = random_numbers.randint(1, 5)

        def interrupted(self: CertifiedModel, batch: object) -> object:
            nonlocal countdown
            countdown -= 1
            if not countdown:
                raise Killed
            return answer_rows(self, batch)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(CertifiedModel, "answer_rows", interrupted)
            try:
                done = predict_files(table_model, source, out, piece_rows=10)
            except Killed:
                interruptions += 1
                assert not out.exists()
    assert interruptions > 2
    assert done.resumed_rows >= 50
    assert done.rows == 100
    assert out.read_bytes() == (tmp_path / f"whole.{ending}").read_bytes()


def test_file_prediction_killed_after_joining_its_parts_finishes(
    table_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_csv(tmp_path / "in.csv", frame(40)), tmp_path / "out.csv"

    def killed(folder: Path) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("slipway.system.files.remove_directory", killed)
        with pytest.raises(Killed):
            predict_files(table_model, source, out, piece_rows=10)
    before = out.read_bytes()
    done = predict_files(table_model, source, out, piece_rows=10)
    assert (done.rows, done.resumed_rows) == (40, 40)
    assert out.read_bytes() == before
    assert not (tmp_path / "out.csv.parts").exists()


def leave_parts(model: LoadedModel, source: Path, out: Path) -> None:
    def stop(done: int, total: int | None) -> None:
        if done == 20:
            raise Killed

    with pytest.raises(Killed):
        predict_files(model, source, out, piece_rows=10, on_progress=stop)


def test_parts_of_another_model_or_source_are_refused(
    table_model: LoadedModel, tmp_path: Path
) -> None:
    source, out = write_csv(tmp_path / "in.csv", frame(40)), tmp_path / "out.csv"
    leave_parts(table_model, source, out)
    with pytest.raises(DataError, match=r"another piece_rows. Remove '.*out.csv.parts' to start"):
        predict_files(table_model, source, out)
    write_csv(source, frame(41))
    with pytest.raises(DataError, match="unfinished answers of a run with another source"):
        predict_files(table_model, source, out, piece_rows=10)


@pytest.mark.process
def test_second_run_into_the_same_destination_is_refused(
    table_project: Path, table_model: LoadedModel, tmp_path: Path
) -> None:
    source, out = write_csv(tmp_path / "in.csv", frame(40)), tmp_path / "out.csv"
    leave_parts(table_model, source, out)
    hold = (
        "import sys, time\nfrom pathlib import Path\nfrom slipway.system import files\n"
        "with files.lock(Path(sys.argv[1]), 'x'):\n    print('held', flush=True); time.sleep(60)"
    )
    lock = PartsFolder(out).folder / "lock"
    with subprocess.Popen([sys.executable, "-c", hold, lock], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout
            assert other.stdout.readline()
            with pytest.raises(LockedError, match=r"predicting into .* is already running"):
                predict_files(table_model, source, out, piece_rows=10)
        finally:
            other.kill()
    assert predict_files(table_model, source, out, piece_rows=10).resumed_rows == 10


def read_xlsx(path: Path) -> list[dict[str, Any]]:
    names, *rows = openpyxl.load_workbook(path).active.values
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_a_workbook_is_predicted_into_a_workbook_as_a_parquet_into_a_parquet(
    table_model: LoadedModel, tmp_path: Path
) -> None:
    table = frame(30)
    source = write_xlsx(tmp_path / "in.xlsx", table)
    done = predict_files(table_model, source, tmp_path / "out.xlsx", piece_rows=20)
    assert done.rows == done.answered == 30
    rows = read_xlsx(tmp_path / "out.xlsx")
    predict_files(
        table_model, write_parquet(tmp_path / "in.parquet", table), tmp_path / "o.parquet"
    )
    expected = pq.read_table(tmp_path / "o.parquet").to_pylist()
    for row, other in zip(rows, expected, strict=True):
        assert [*row] == [*other]
        assert row["prediction"] == other["prediction"]
        assert row["ood_score"] == pytest.approx(other["ood_score"], abs=1e-6)
        assert row["is_ood"] is other["is_ood"]
        assert json.loads(row["prediction_set"]) == other["prediction_set"]
        assert {name: row[name] for name in table.column_names} == pytest.approx(
            {name: other[name] for name in table.column_names}
        )


def test_a_workbook_of_answers_depends_on_the_rows_only_and_keeps_text_as_text(
    table_model: LoadedModel, tmp_path: Path
) -> None:
    notes = ["=1+1", "-3", "\x01", "0017"]
    table = frame(4).append_column("note", [notes]).append_column("far", [[2**60] * 4])
    source = write_parquet(tmp_path / "in.parquet", table)
    for name, piece_rows in (("a", 2), ("b", 2)):
        predict_files(table_model, source, tmp_path / f"{name}.xlsx", piece_rows=piece_rows)
        time.sleep(2.1)  # a zip counts the time in steps of two seconds
    assert (tmp_path / "a.xlsx").read_bytes() == (tmp_path / "b.xlsx").read_bytes()
    rows = read_xlsx(tmp_path / "a.xlsx")
    assert [row["note"] for row in rows] == ["=1+1", "-3", "\ufffd", "0017"]
    assert [row["far"] for row in rows] == [str(2**60)] * 4
    cell = openpyxl.load_workbook(tmp_path / "a.xlsx").active.cell(2, 1 + [*rows[0]].index("note"))
    assert cell.data_type == "s"


def test_more_answers_than_a_sheet_holds_are_refused_and_their_parts_stay(
    table_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipway.inference.outputs.MOST_ROWS", 10)
    source = write_csv(tmp_path / "in.csv", frame(10))
    with pytest.raises(DataError, match=r"a sheet of Excel holds 10 rows.* \.parquet"):
        predict_files(table_model, source, tmp_path / "out.xlsx")
    assert not (tmp_path / "out.xlsx").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.txt", "has an unknown ending, expected one of .csv, .parquet"),
        (
            "there.csv",
            "exists, expected a new name. Choose another, or overwrite",
        ),
        ("out.csv", "the input has the columns 'is_ood', which the answers have too"),
    ],
)
def test_a_destination_that_cannot_be_written_is_refused(
    table_model: LoadedModel, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "there.csv").write_text("")
    table = frame(3)
    table = table.append_column("is_ood", [["a", "b", "c"]])
    source = write_csv(tmp_path / "in.csv", table)
    with pytest.raises(DataError, match=message):
        predict_files(table_model, source, tmp_path / name)
    assert (tmp_path / "there.csv").read_text() == ""


def test_an_older_destination_is_replaced_only_on_request(
    table_model: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "out.jsonl").write_text("older")
    source = write_csv(tmp_path / "in.csv", frame(3))
    predict_files(table_model, source, tmp_path / "out.jsonl", overwrite=True)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


# Kills itself so many seconds after its first batch; 0: never.
RUN = """
import os, signal, sys, threading
import slipway
def on_progress(done, total):
    global delay
    if delay:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        delay = 0
delay = float(sys.argv[4])
done = slipway.predict_files(*sys.argv[1:4], piece_rows=50, on_progress=on_progress)
print(done.seconds, done.resumed_rows)
"""


@pytest.mark.nightly(seconds=20)
@pytest.mark.parametrize("kind", ["table", "text"])
def test_kill_9_at_any_moment_loses_and_repeats_no_row(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    project = request.getfixturevalue(f"{kind}_project")
    rows = frame(6000)
    if kind == "text":
        rows = pa.table({"text": [t.replace(",", "") for _, t in sentences(6000, seed=6)]})
    source = write_csv(tmp_path / "in.csv", rows)

    def run(name: str, delay: float = 0) -> subprocess.CompletedProcess[str]:
        places = map(str, (project, source, tmp_path / name))
        command = [sys.executable, "-c", RUN, *places, str(delay)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True)

    seconds = float(run("whole.csv").stdout.split()[0])
    random_numbers = random.Random(0)
    for _ in range(2):
        killed = run("out.csv", seconds * random_numbers.uniform(0.1, 0.3))
        assert killed.returncode == -signal.SIGKILL
        assert not (tmp_path / "out.csv").exists()
    assert int(run("out.csv").stdout.split()[1]) > 0
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not (tmp_path / "out.csv.parts").exists()


PEAK = """
import sys
from slipway.inference.files import predict_files
from slipway.system.memory import status_bytes
done = predict_files(*sys.argv[1:4])
print(done.answered, status_bytes("VmHWM"))
"""


@pytest.mark.nightly(seconds=60)
def test_memory_does_not_grow_with_the_number_of_rows(table_project: Path, tmp_path: Path) -> None:
    """Both files are larger than what the reader of CSVs reads ahead, 32 blocks of 4 MiB."""
    rows = frame(10_000).append_column("note", pa.array(["x" * 700] * 10_000))
    block = write_csv(tmp_path / "block.csv", rows).read_text().partition("\n")

    def peak_bytes(num_blocks: int) -> int:
        source, destination = tmp_path / "in.csv", tmp_path / f"{num_blocks}.csv"
        with source.open("w") as file:
            file.write(block[0] + "\n")
            file.writelines(block[2] for _ in range(num_blocks))
        command = [sys.executable, "-c", PEAK, *map(str, (table_project, source, destination))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        answered, peak = map(int, done.stdout.split())
        assert answered == 10_000 * num_blocks
        return peak

    few, many = peak_bytes(25), peak_bytes(75)
    assert (tmp_path / "75.csv").stat().st_size - (tmp_path / "25.csv").stat().st_size > 350e6
    assert many - few < 64e6
