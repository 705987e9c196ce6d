"""Samples of tables for `slipway init`, and errors for unreadable tables."""

from pathlib import Path

import pytest

from slipway.project.table_sample import sample_table
from slipway.system.errors import DataError


def test_error_for_an_unreadable_csv_names_its_path(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"\x81\x8d\x90,b\n1,2\n")  # of no encoding that is tried
    with pytest.raises(DataError) as error:
        sample_table(path)
    assert str(path) in str(error.value)
