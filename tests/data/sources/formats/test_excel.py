import datetime
import random
import zipfile
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.tables.source import read_table_of
from slipway.project.inspection import inspect
from slipway.project.proposal import propose
from slipway.system.errors import DataError
from tests.data.raw_files import data_params

LIMITS = ArchiveLimits(100, 200)
pytestmark = pytest.mark.usefixtures("_own_folder")


@pytest.fixture
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def workbook(path: Path, rows: list[list[Any]], *more_sheets: str) -> Path:
    book = openpyxl.Workbook()
    sheet = book.worksheets[0]
    for row in rows:
        sheet.append(row)
    for name in more_sheets:
        book.create_sheet(name).append(["other"])
    book.save(path)
    return path


def columns(path: Path, limits: ArchiveLimits = LIMITS, **changes: Any) -> dict[str, list[Any]]:
    raw = read_table_of(unpacked(data_params(path, **changes), limits))
    return {
        name: [column.values[code].as_py() if code >= 0 else None for code in column.codes.tolist()]
        for name, column in raw.columns.items()
    }


def test_the_first_sheet_of_a_workbook_is_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day = datetime.datetime(2024, 2, 29)
    rows: list[list[Any]] = [
        [],
        [" size ", "day", "kind", "mixed", "is_new"],
        [1, day, "a", 1, True],
        [],
        [2.5, None, "#N/A", "x", False],
    ]
    assert columns(workbook(tmp_path / "t.xlsx", rows, "notes")) == {
        "size": [1.0, 2.5],
        "day": ["2024-02-29T00:00:00", None],
        "kind": ["a", None],
        "mixed": ["1", "x"],
        "is_new": [True, False],
    }
    assert capsys.readouterr().out == (
        "t.xlsx: reads the first of 2 sheets, 'Sheet'; data.sheet chooses another: 'notes'\n"
    )


TABLE: list[list[Any]] = [["x", "target"], [1, "yes"], [2, "no"]]


def sheets(path: Path, **rows: list[list[Any]]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, cells in rows.items():
        sheet = book.create_sheet(name)
        for row in cells:
            sheet.append(row)
    book.save(path)
    return path


@pytest.mark.parametrize(
    "notes",
    [
        [["Notes about this file"]],
        [["Notes"], ["by the clinic"], ["of 2024"]],
        [["A report"], ["x", "target"], [1, 2]],
        [["x", "target"]],
        [],
    ],
)
def test_a_first_sheet_that_is_no_table_is_refused_with_the_names_of_the_others(
    tmp_path: Path, notes: list[list[Any]]
) -> None:
    path = sheets(tmp_path / "t.xlsx", Readme=notes, Data=TABLE, Old=TABLE)
    with pytest.raises(DataError) as raised:
        columns(path)
    assert "the first sheet, 'Readme', is no table" in str(raised.value)
    assert "also has 'Data', 'Old': set data.sheet" in str(raised.value)
    assert columns(path, sheet="Data") == {"x": [1.0, 2.0], "target": ["yes", "no"]}


def test_a_sheet_that_is_not_in_the_workbook_is_refused_with_those_that_are(tmp_path: Path) -> None:
    path = sheets(tmp_path / "t.xlsx", A=TABLE, B=TABLE)
    with pytest.raises(DataError, match=r"data\.sheet is 'C', but .* has the sheets 'A', 'B'"):
        columns(path, sheet="C")


def test_each_sheet_has_a_copy_of_its_own(tmp_path: Path) -> None:
    path = sheets(tmp_path / "t.xlsx", A=TABLE, B=[["y", "z"], [3, 4]])
    assert list(columns(path)) == ["x", "target"]
    assert list(columns(path, sheet="B")) == ["y", "z"]
    assert list(columns(path)) == ["x", "target"]


def test_init_proposes_the_only_sheet_that_is_a_table(tmp_path: Path) -> None:
    rows = [TABLE[0], *([7 * n % 31, ["yes", "no"][n * n % 3 % 2]] for n in range(90))]
    path = sheets(tmp_path / "t.xlsx", Readme=[["Notes"]], Data=rows, Legend=[["a"], ["b"]])
    summary = inspect(path)
    assert summary.notes[0] == "the first sheet, 'Readme', is no table, so 'Data' is read"
    proposal = propose(summary, "table_classification", "target")
    assert proposal.params["data"]["sheet"] == "Data"
    assert "data.sheet" in proposal.text()
    several = sheets(tmp_path / "u.xlsx", Readme=[["Notes"]], Data=rows, Old=rows)
    with pytest.raises(DataError, match=r"'Data', 'Old': set data\.sheet .* with --sheet Data"):
        inspect(several)
    assert inspect(several, "Old").sheet == "Old"


def test_formulas_without_stored_values_are_counted_for_init_and_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[list[Any]] = [["x", "twice", "text"], *([n, f"=A{n}*2", "=no"] for n in range(2, 6))]
    path = workbook(tmp_path / "t.xlsx", rows)
    said = "column 'twice' has 4 formulas without stored values, which count as missing: open the"
    assert [note for note in inspect(path).notes if note.startswith(said)]
    assert columns(path)["twice"] == [None] * 4
    assert capsys.readouterr().out.startswith(said)


def test_a_formula_with_its_stored_value_is_that_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workbook(tmp_path / "t.xlsx", [["x", "twice"], [1, "=A2*2"]])
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    sheet = members["xl/worksheets/sheet1.xml"]
    stored = sheet.replace(b"<f>A2*2</f><v></v>", b"<f>A2*2</f><v>2</v>")
    stored = stored.replace(b"<f>A2*2</f><v/>", b"<f>A2*2</f><v>2</v>")
    stored = stored.replace(b"<f>A2*2</f><v />", b"<f>A2*2</f><v>2</v>")
    assert stored != sheet
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, stored if name == "xl/worksheets/sheet1.xml" else content)
    assert columns(path) == {"x": [1], "twice": [2]}
    assert capsys.readouterr().out == ""


def test_an_empty_last_column_of_a_workbook_is_kept(tmp_path: Path) -> None:
    path = workbook(tmp_path / "t.xlsx", [["a", "note"], [1], [2]])
    assert columns(path) == {"a": [1, 2], "note": [None, None]}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([["A report"], ["a", "b"], [1, 2]], "row 2 has 2 cells, the first row 1"),
        ([["a", None, "a"], [1, 2, 3]], r"empty or repeated names \('a', ''\)"),
        ([[], [None]], "is empty"),
    ],
)
def test_a_sheet_that_is_not_a_table_is_refused(
    tmp_path: Path, rows: list[list[Any]], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        columns(workbook(tmp_path / "t.xlsx", rows))


def test_a_workbook_that_decompresses_too_much_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = workbook(tmp_path / "t.xlsx", [["a"], [1]])
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/comments.xml", bytes(20 << 20))
    with pytest.raises(DataError, match=r"which clean\.max_archive_ratio does not allow"):
        columns(path)
    with pytest.raises(DataError, match=r"which clean\.max_archive_members does not allow"):
        columns(path, ArchiveLimits(3, 10**6))


def test_a_sheet_that_expands_too_much_as_a_table_is_refused(tmp_path: Path) -> None:
    name = random.Random(0).randbytes(5000).hex()  # written again for each row
    path = workbook(tmp_path / "t.xlsx", [[name], *([number] for number in range(1000))])
    with pytest.raises(DataError, match=r"which clean\.max_archive_ratio does not allow"):
        columns(path)
    assert not [file for file in Path(".work").rglob("*") if file.is_file()]
    assert columns(path, ArchiveLimits(100, 2000)) == {name: [float(n) for n in range(1000)]}


def test_a_workbook_with_a_row_number_beyond_the_sheet_is_refused_quickly(tmp_path: Path) -> None:
    path = workbook(tmp_path / "t.xlsx", [["a"], [1]])
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    sheet = members["xl/worksheets/sheet1.xml"]
    assert b'r="2"' in sheet
    members["xl/worksheets/sheet1.xml"] = sheet.replace(b'r="2"', b'r="99999999999"')
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(DataError, match="more than 1048576 rows"):
        columns(path)


@pytest.mark.parametrize("damaged", [b"", b"PK\x03\x04", b"a,b\n1,2\n" * 9])
def test_a_file_that_is_not_a_workbook_is_refused(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "t.xlsx").write_bytes(damaged)
    with pytest.raises(DataError, match="damaged or cut off"):
        columns(tmp_path / "t.xlsx")
    with zipfile.ZipFile(tmp_path / "t.xlsx", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(DataError, match="not a readable Excel workbook"):
        columns(tmp_path / "t.xlsx")


def test_a_workbook_that_names_images_is_refused(tmp_path: Path) -> None:
    path = workbook(tmp_path / "t.xlsx", [["image", "target"], ["1.png", 1]])
    with pytest.raises(DataError, match=r"Save it as \.csv in the folder of its images"):
        unpacked(data_params(path, "image_regression"), LIMITS)
