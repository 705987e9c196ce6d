"""The refusal of a CSV whose rows all have another number of cells than its header."""

import re
import subprocess
from pathlib import Path

import pytest

from slipway.data.sources.raw_tables import column_names, read_raw_table
from slipway.project.inspection import inspect
from slipway.system.errors import DataError
from tests.data.raw_files import write_csv

ROWS = [("0.1257", "-0.3604", "g", "yes"), ("-0.1321", "0.5835", "r", "no")] * 20


def lines(header: str, row: str, mark: str = ",", end: str = "\n") -> str:
    """Return a CSV; `row` is a format with the row's number and its cells."""
    rows = [row.format(n, mark.join(cells)) for n, cells in enumerate(ROWS, start=1)]
    return end.join([header, *rows, ""])


CASES = {
    "each row ends with a comma": (
        lines("x,z,colour,target", "{1},"),
        "line 2 has 5 cells, the header names 4, and none of the first 40 rows fits it. "
        "Each row ends with a ',', and the header does not",
        ["x", "z", "colour", "target", ""],
    ),
    "the same with tabs and Windows line ends": (
        lines("x\tz\tcolour\ttarget", "{1}\t", "\t", "\r\n"),
        "Each row ends with a tab, and the header does not",
        ["x", "z", "colour", "target", ""],
    ),
    "the header ends with a semicolon": (
        lines("x;z;colour;target;", "{1}", ";"),
        "line 2 has 4 cells, the header names 5, and none of the first 40 rows fits it. "
        "The header ends with a ';', and the rows do not",
        ["x", "z", "colour", "target"],
    ),
    "the same with Windows line ends": (
        lines("x,z,colour,target,", "{1}", end="\r\n"),
        "The header ends with a ',', and the rows do not",
        ["x", "z", "colour", "target"],
    ),
    "R's write.table, below a comment": (
        "# by R\n" + lines('"x","z","colour","target"', '"{0}",{1}'),
        "line 3 has 5 cells, the header names 4, and none of the first 40 rows fits it. "
        "Each row begins with its own name or number, for which the header has no name, "
        "as R's write.table writes it",
        ["row", "x", "z", "colour", "target"],
    ),
    "a title above the header": (
        lines("Colours of 2024\nx,z,colour,target", "{1}"),
        "Line 1, 'Colours of 2024', looks like a title above the header",
        ["x", "z", "colour", "target"],
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_a_header_that_fits_no_row_is_refused_with_a_command_that_corrects_it(
    case: str, tmp_path: Path
) -> None:
    text, expected, names = CASES[case]
    path = write_csv(tmp_path / "my table.csv", text)
    with pytest.raises(DataError) as refused:
        inspect(path)
    assert expected in str(refused.value)
    command = re.search(r"^  (sed .*)$", str(refused.value), re.MULTILINE)
    assert command is not None
    subprocess.run(["bash", "-c", command[1]], cwd=tmp_path, check=True)
    corrected = tmp_path / "my table_fixed.csv"
    assert column_names(corrected) == names
    assert read_raw_table(corrected).malformed == []
    assert path.read_bytes() == text.encode()


def test_decimal_commas_that_divide_every_row_are_named_as_the_cause(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "x,target\n1,5,2\n2,5,3\n2,5,4\n")
    with pytest.raises(
        DataError, match=r"cells contain a ',', such as a decimal comma.* in quotes"
    ):
        read_raw_table(path)


def test_a_byte_order_mark_is_not_changed_by_a_command(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "\ufeffx,target\n1,2,\n3,4,\n")
    with pytest.raises(DataError, match="Add one to the end of the header") as refused:
        read_raw_table(path)
    assert "sed" not in str(refused.value)


def test_a_header_that_fits_one_row_is_not_refused(tmp_path: Path) -> None:
    table = read_raw_table(write_csv(tmp_path / "t.csv", "a,b\n1,2,\n3,4,\n5,6\n"))
    assert len(table.malformed) == 2
