"""Files beside a table, in the inspection for `slipway init`."""

from pathlib import Path

import pytest

from slipway.project.inspection import inspect
from slipway.project.proposal import propose
from slipway.system.errors import DataError

pytestmark = pytest.mark.unit


def test_a_file_of_splits_beside_the_table_is_proposed_as_the_given_split(tmp_path: Path) -> None:
    rows = [f"r{number},{number * 37 % 101},{number % 2}" for number in range(60)]
    (tmp_path / "counts.csv").write_text("\n".join(["name,x,y", *rows]))
    splits = [f"r{number},{('train', 'val', 'test')[number % 3]}" for number in range(60)]
    (tmp_path / "split.csv").write_text("\n".join(["name,split", *splits]))
    summary = inspect(tmp_path)
    assert summary.given == {"train": 20, "val": 20, "test": 20}
    proposal = propose(summary, target="y")
    assert proposal.params["data"]["split_file"] == str(tmp_path / "split.csv")
    assert "20 train, 20 val, 20 test" in proposal.reasons["data.split_file"]


def test_a_second_table_that_is_no_file_of_splits_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "counts.csv").write_text("name,x\na,1\nb,2\n")
    (tmp_path / "split.csv").write_text("name,amount\na,1\nb,2\n")
    with pytest.raises(DataError, match=r"holds 2 CSV files"):
        inspect(tmp_path)
