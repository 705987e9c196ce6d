"""The data stages run on tables in real processes, as a user runs them, and on damaged files."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from slipway.config.network_arguments import TabmArguments
from slipway.data.store.packed import open_split, read_manifest
from slipway.system import files
from tests.data.raw_files import numbered_csv, write_csv
from tests.data.test_data_stages import ROOT, digests, ended, prepare, refusal, run

pytestmark = pytest.mark.process
WINE = ROOT / "data" / "demo" / "wine.csv"


def prepare_table(folder: Path, path: Path, task: str, target: str) -> None:
    gates = (
        {"accuracy": {"min": 0.9, "max": None}}
        if task == "table_classification"
        else {"rmse": {"min": None, "max": 1.0}}
    )
    network = {
        "train__network": "tabm",
        "train__network_arguments": TabmArguments().model_dump(),
    }
    prepare(
        folder, path, data__task=task, data__target_column=target, evaluate__gates=gates, **network
    )


def test_two_runs_of_the_data_stages_on_the_wines_are_identical(tmp_path: Path) -> None:
    prepare_table(tmp_path, WINE, "table_classification", "cultivar")
    run(tmp_path, "clean", "split", "precompute")
    manifest = read_manifest(tmp_path / "data" / "packed")
    assert manifest.input.kind == "columns"
    assert len(manifest.classes) == 3
    assert (
        sum(
            len(open_split(tmp_path / "data/packed", manifest, name, verify=True))
            for name in manifest.splits
        )
        == 178
    )
    first = digests(tmp_path, "data", "reports")
    run(tmp_path, "clean", "split", "precompute")
    assert digests(tmp_path, "data", "reports") == first


def test_pasting_columns_yaml_into_params_changes_no_result(tmp_path: Path) -> None:
    prepare_table(tmp_path, WINE, "table_classification", "cultivar")
    run(tmp_path, "clean")
    first = digests(tmp_path, "data/clean")
    params = yaml.safe_load((tmp_path / "params.yaml").read_text())
    params["data"]["columns"] = yaml.safe_load((tmp_path / "reports" / "columns.yaml").read_text())
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    run(tmp_path, "clean")
    assert digests(tmp_path, "data/clean") == first


def test_too_many_bad_rows_fail_clean_with_a_list_of_them(tmp_path: Path) -> None:
    path = numbered_csv(tmp_path / "t.csv", a_1="x", target_2="", target_3="y")
    prepare_table(tmp_path, path, "table_regression", "target")
    errors = refusal(tmp_path, "clean")
    assert "2 of 29 samples that have a target are bad" in errors
    assert "missing_target: 1 (these do not count as bad)" in errors
    assert "a: found 'x', expected a finite number" in errors
    assert pq.read_table(tmp_path / ".work/clean/quarantine.parquet").num_rows == 3
    assert not (tmp_path / "data").exists()


def test_the_clean_report_names_the_columns_that_are_not_inputs(tmp_path: Path) -> None:
    lines = numbered_csv(tmp_path / "t.csv", num_rows=200).read_text().splitlines()
    rows = [f"{line},name {number}" for number, line in enumerate(lines[1:])]
    path = write_csv(tmp_path / "t.csv", "\n".join([f"{lines[0]},name", *rows]) + "\n")
    prepare_table(tmp_path, path, "table_regression", "target")
    run(tmp_path, "clean")
    report = json.loads((tmp_path / "reports" / "clean.json").read_text())
    assert report["columns"][2]["kind"] == "ignore"
    assert report["columns"][2]["note"] == "ids or free text: 200 different values in 200 cells"


def test_a_failed_clean_writes_the_inferred_kinds_for_correction(tmp_path: Path) -> None:
    path = numbered_csv(tmp_path / "t.csv", num_rows=40, a_3="x", a_4="x", b_5="x")
    prepare_table(tmp_path, path, "table_regression", "target")
    assert "the columns' kinds are in .work/clean/columns.yaml" in refusal(tmp_path, "clean")
    kinds = yaml.safe_load((tmp_path / ".work/clean/columns.yaml").read_text())
    assert kinds["b"] == {"kind": "number", "min": None, "max": None, "required": False}


def mixed_file(folder: Path, suffix: str) -> Path:
    """Write a table with every kind of column, quotes and missing cells."""
    towns = ["Oslo", '"Bergen, south"', "", "Tromsø"]
    rows = [
        f"{7 * row % 31}.25,{towns[row % 4]},{['yes', 'no'][row % 2]},"
        f"2026-11-{row % 28 + 1:02},{5 * row % 29}"
        for row in range(80)
    ]
    path = write_csv(folder / "t.csv", "\n".join(["size,town,owned,day,target", *rows]) + "\n")
    if suffix == ".parquet":
        pq.write_table(pyarrow.csv.read_csv(path), folder / "t.parquet")
    return path.with_suffix(suffix)


@pytest.mark.parametrize(
    ("suffix", "seed"),
    [pytest.param(".csv", 11, marks=pytest.mark.nightly(seconds=17)), (".parquet", 99)],
)  # 99: row counts that are damaged, too
def test_500_files_with_a_flipped_bit_give_a_result_or_a_data_error(
    tmp_path: Path, suffix: str, seed: int
) -> None:
    path = mixed_file(tmp_path, suffix)
    command = [sys.executable, "-m", "tests.data.bit_flips", str(path), "500", str(seed)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    results, errors = map(int, process.stdout.split())
    assert results + errors == 500
    assert min(results, errors) > 10  # both ways are tried


def test_a_table_that_differs_from_its_checksum_stops_the_stage(tmp_path: Path) -> None:
    path = numbered_csv(tmp_path / "t.csv")
    prepare_table(tmp_path, path, "table_regression", "target")
    params = yaml.safe_load((tmp_path / "params.yaml").read_text())
    params["data"]["checksums"] = str(tmp_path / "SHA256SUMS")
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    (tmp_path / "SHA256SUMS").write_text(f"{files.sha256_file(path)}  t.csv\n")
    run(tmp_path, "clean")
    path.write_text(path.read_text() + "\n")
    assert "altered after it was listed" in refusal(tmp_path, "clean")


def test_settings_of_images_are_refused_for_a_table(tmp_path: Path) -> None:
    prepare_table(tmp_path, WINE, "table_classification", "cultivar")
    params = yaml.safe_load((tmp_path / "params.yaml").read_text())
    params["precompute"] |= {"encoding": "jpeg", "train_size_px": 64}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    said = ended(tmp_path, "clean").stderr
    assert "precompute.train_size_px is 64, but data.task is 'table_classification'" in said
    assert "(and precompute.encoding) is for images only" in said


def test_split_names_a_near_copy_of_the_target(tmp_path: Path) -> None:
    header, *lines = WINE.read_text().splitlines()
    names = {"1": "nebbiolo", "2": "grignolino", "3": "barbera"}
    rows = [
        f"{line},{names[line[0]] if number else 'barbera'}" for number, line in enumerate(lines)
    ]
    path = write_csv(tmp_path / "t.csv", "\n".join([f"{header},grape", *rows]) + "\n")
    prepare_table(tmp_path, path, "table_classification", "cultivar")
    run(tmp_path, "clean")
    assert (
        "suspected leak: 'grape' alone predicts the target (balanced accuracy "
        in ended(tmp_path, "split").stdout
    )
    (found,) = json.loads((tmp_path / "reports" / "split.json").read_text())["target_copies"]
    assert found["column"] == "grape"
