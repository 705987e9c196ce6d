"""Tables that `init` accepts are accepted by the stages; it says or answers what they refuse."""

import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from slipway.config.params import parse_params
from slipway.project.inspection import inspect
from slipway.project.proposal import ProjectProposal, propose
from slipway.system.errors import DataError
from tests.data.raw_files import write_csv
from tests.project.stage_run import run_data_stages


def proposed(folder: Path, header: str, rows: list[str], target: str = "y") -> ProjectProposal:
    """Propose params for a table with these rows, and have the data stages accept them."""
    path = write_csv(folder / "t.csv", "\n".join([header, *rows]) + "\n")
    proposal = propose(inspect(path), target=target)
    assert not proposal.questions
    run_data_stages(proposal, folder / "project")
    return proposal


def refusal(folder: Path, header: str, rows: list[str], target: str = "y") -> str:
    path = write_csv(folder / "t.csv", "\n".join([header, *rows]) + "\n")
    with pytest.raises(DataError) as caught:
        propose(inspect(path), target=target)
    assert tempfile.gettempdir() not in str(caught.value).replace(str(folder), "")
    return str(caught.value)


def test_init_refuses_a_table_without_an_input_and_names_the_reasons(tmp_path: Path) -> None:
    found = refusal(tmp_path, ",y", [f"{row},{row * row % 17}" for row in range(40)])
    assert "`clean` would refuse this table, so nothing is written: no column is left" in found
    assert "its name is that of a row index" in found
    assert "--target" in found


def test_init_refuses_classes_that_are_as_many_as_the_rows(tmp_path: Path) -> None:
    found = refusal(tmp_path, "x,y", [f"{row * 7 % 11}.5,name {row}" for row in range(40)])
    assert "'y' has 40 different values in 40 rows" in found


def test_init_refuses_numbers_of_which_too_few_can_be_learned(tmp_path: Path) -> None:
    found = refusal(tmp_path, "x,y", ["1,2.5", "2,3.5", "5,4.5"])
    assert "`precompute` would refuse this table" in found
    assert "targets of the training split are" in found


def test_init_reads_years_that_count_the_rows_if_no_other_input_is_left(tmp_path: Path) -> None:
    rows = [f"{1855 + row},{row * row % 17}.5" for row in range(45)]
    proposal = proposed(tmp_path, "Year,y", rows)
    assert proposal.params["data"]["columns"]["Year"]["kind"] == "number"
    assert not any("will not read" in text for text in proposal.warnings)
    numbered = [f"{1 + row},{row * row % 17}.5" for row in range(45)]
    assert "it counts the rows from 1 to 45" in refusal(tmp_path, "n,y", numbered)


def test_init_leaves_out_classes_of_which_a_split_would_have_no_row(tmp_path: Path) -> None:
    labels = [*"ab" * 40, *(f"rare {place // 2}" for place in range(12))]
    rows = [f"{place * 37 % 101},{label}" for place, label in enumerate(labels)]
    proposal = proposed(tmp_path, "x,y", rows)
    assert proposal.params["data"]["classes"] == ["a", "b"]
    assert proposal.params["clean"]["max_bad_fraction"] == 0.14  # 12 of 92
    assert "too few rows for three splits" in proposal.reasons["data.classes"]


def test_init_allows_as_many_bad_rows_as_the_table_has_and_says_so(tmp_path: Path) -> None:
    rows = [f"{row * 37 % 101}" + f",{row % 13}.5" * (row % 10 > 0) for row in range(100)]
    proposal = proposed(tmp_path, "x,y", rows)
    assert proposal.params["clean"]["max_bad_fraction"] == 0.1
    assert "10 of 100 rows are bad" in proposal.reasons["clean.max_bad_fraction"]
    assert any("`clean` will refuse 10 (malformed_row)" in text for text in proposal.warnings)


def test_init_splits_at_random_if_a_split_by_time_lacks_a_class(tmp_path: Path) -> None:
    days = [f"2024-{1 + row // 28:02}-{1 + row % 28:02}" for row in range(84)]
    labels = [*"ab" * 38, *["late"] * 8]
    rows = [f"{day},{n * 37 % 84},{labels[n]}" for n, day in enumerate(days)]
    proposal = proposed(tmp_path, "day,x,y", rows)
    assert proposal.params["data"].get("time_column") is None
    assert "leave a split" in proposal.reasons["data.time_column"]


def test_init_splits_without_groups_that_hold_all_rows_of_a_class(tmp_path: Path) -> None:
    groups = [0] * 30 + [*range(1, 9)] * 6
    rows = [f"{group},{n * 37 % 101},{'ab'[group == 0]}" for n, group in enumerate(groups)]
    proposal = proposed(tmp_path, "patient_id,x,y", rows)
    assert proposal.params["data"].get("group_column") is None
    assert "too few or too large" in proposal.reasons["data.group_column"]


def test_init_ignores_a_column_that_no_training_row_has_a_value_of(tmp_path: Path) -> None:
    days = [f"2024-{1 + row // 28:02}-{1 + row % 28:02}" for row in range(84)]
    rows = [f"{day},{n * 37 % 84},{n if n > 75 else ''},{n % 13}" for n, day in enumerate(days)]
    proposal = proposed(tmp_path, "day,x,new,y", rows)
    assert proposal.params["data"]["columns"]["new"]["kind"] == "ignore"
    assert "'new': no value in the rows" in proposal.reasons["data.columns"]


def test_init_says_in_one_line_what_clean_will_refuse_flag_and_ignore(tmp_path: Path) -> None:
    rows = [f"{row * 37 % 101},5,{row % 2}" for row in range(100)] + ["3,5,1", "3,5,1", "4,4"]
    (found,) = (text for text in proposed(tmp_path, "x,same,y", rows).warnings if "`clean`" in text)
    assert found.startswith("of 103 rows, `clean` will refuse 1 (malformed_row); keep and flag ")
    assert "(duplicate_row)" in found


@pytest.mark.parametrize("doses", [3, 60])
def test_init_splits_repeated_measurements_at_random_if_few_different_inputs_repeat(
    tmp_path: Path, doses: int
) -> None:
    rows = [
        f"{dose}.5,{supplement},{number * 37 % 101}.{dose}"
        for dose in range(doses)
        for supplement in ("VC", "OJ")
        for number in range(10)
    ]
    proposal = proposed(tmp_path, "dose,supplement,y", rows)
    found = parse_params(copy.deepcopy(dict(proposal.params))).clean.rules.near_duplicate
    assert found == (None if doses == 3 else "flag")
    if doses == 3:
        assert "6 different inputs repeat" in proposal.reasons["clean.rules.near_duplicate"]


def test_only_the_sample_of_a_very_large_table_is_asked_about(tmp_path: Path) -> None:
    rows = [f"{row * 37 % 101},{'abc'[row % 3]}" for row in range(300)] + ["1,d"]
    summary = inspect(write_csv(tmp_path / "t.csv", "\n".join(["x,y", *rows])))
    (tmp_path / "t.csv").unlink()
    found = propose(replace(summary, num_rows=5_000_000), target="y")
    assert found.params["data"]["path"] == str(tmp_path / "t.csv")


def test_asking_the_stages_leaves_no_file_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{row * 37 % 101},{row % 2}" for row in range(100)]
    path = write_csv(tmp_path / "t.csv", "\n".join(["x,y", *rows]))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert propose(inspect(Path("..", path.name)), target="y").params["data"]["path"] == "../t.csv"
    assert list(Path().iterdir()) == []
