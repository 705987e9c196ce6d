"""Tables in which a column such as Country repeats once per Year."""

import random
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path

import pytest

from slipway.config import edit
from slipway.project.creation import params_file
from slipway.project.inspection import inspect
from slipway.project.proposal import ProjectProposal, propose
from slipway.project.recipe import Machine
from slipway.system.errors import ParamsError
from tests.data.raw_files import write_csv
from tests.project.test_relations import command_lines

LAPTOP = Machine(cores=2, has_gpu=False, has_amx=False)
YEARS = range(1990, 2006)


def panel(
    folder: Path,
    groups: Sequence[object],
    times: Sequence[object] = YEARS,
    header: str = "Country,Year,gdp,life",
    gaps: float = 0.0,
) -> Path:
    draw = random.Random(1)
    rows = [
        f"{group},{time},{draw.randint(100, 9999)},{draw.gauss(70, 5):.1f}"
        for group in groups
        for time in times
        if draw.random() >= gaps
    ]
    return write_csv(folder / "t.csv", "\n".join([header, *rows]) + "\n")


def countries(number: int) -> list[str]:
    return [f"Land {place:02}" for place in range(number)]


def proposed(path: Path, target: str = "life", split_by: str | None = None) -> ProjectProposal:
    return propose(inspect(path), None, target, split_by=split_by, machine=LAPTOP)


def split_columns(proposal: ProjectProposal) -> tuple[str | None, str | None]:
    data = proposal.params["data"]
    return data.get("group_column"), data.get("time_column")


def test_a_panel_of_many_countries_is_split_by_country_with_the_reason(tmp_path: Path) -> None:
    proposal = proposed(panel(tmp_path, countries(30), gaps=0.1))
    assert split_columns(proposal) == ("Country", None)
    assert proposal.reasons["data.group_column"].startswith("it repeats once per 'Year'")


def test_a_panel_of_few_firms_is_split_by_time_with_the_reason(tmp_path: Path) -> None:
    proposal = proposed(panel(tmp_path, range(1, 11), header="firm,year,value,life"))
    assert split_columns(proposal) == (None, "year")
    assert "the test rows are the latest" in proposal.reasons["data.time_column"]
    assert "'firm' repeats once per 'year'" in "\n".join(proposal.warnings)


def test_a_panel_of_shops_and_days_is_split_by_day(tmp_path: Path) -> None:
    days = [date(2024, 1, 1) + timedelta(days=day) for day in range(40)]
    proposal = proposed(panel(tmp_path, countries(30), days, "shop,day,promotion,life"))
    assert split_columns(proposal) == (None, "day")


@pytest.mark.parametrize(
    ("split_by", "expected"),
    [("Country", ("Country", None)), ("Year", (None, "Year")), ("none", (None, None))],
)
def test_the_answer_to_the_question_decides_the_split_of_a_panel(
    tmp_path: Path, split_by: str, expected: tuple[str | None, str | None]
) -> None:
    path = panel(tmp_path, countries(30))
    question = proposed(path).panel
    assert question is not None
    assert question.option == "--split-by"
    assert question.text.startswith("'Country' repeats once per 'Year'.")
    assert question.candidates == ("Country", "Year", "none")
    assert split_columns(proposed(path, split_by=split_by)) == expected


def test_the_commands_of_the_warning_change_the_split_of_a_panel(tmp_path: Path) -> None:
    proposal = proposed(panel(tmp_path, countries(30)))
    before = params_file(tmp_path, proposal)
    _, by_time = command_lines(proposal)
    after = edit.changed_text(before, edit.read_assignments(by_time[2:]))
    assert "\n  group_column: null" in after
    assert "\n  time_column: Year" in after


@pytest.mark.parametrize("split_by", ["gdp", "country"])
def test_a_split_by_another_column_is_refused(tmp_path: Path, split_by: str) -> None:
    with pytest.raises(ParamsError, match="expected Country or Year or none"):
        proposed(panel(tmp_path, countries(30)), split_by=split_by)


def test_a_country_with_two_rows_in_a_year_is_no_panel(tmp_path: Path) -> None:
    proposal = proposed(panel(tmp_path, countries(30), [*YEARS, 1990]))
    assert proposal.panel is None
    assert split_columns(proposal) == (None, None)
    with pytest.raises(ParamsError, match="no column repeats once per year"):
        proposed(panel(tmp_path, countries(30), [*YEARS, 1990]), split_by="Year")


def test_numbers_that_are_no_times_make_no_panel(tmp_path: Path) -> None:
    path = panel(tmp_path, countries(30), range(16), "Country,rooms,gdp,life")
    assert proposed(path).panel is None


def test_the_target_is_no_column_of_a_panel(tmp_path: Path) -> None:
    assert proposed(panel(tmp_path, countries(30)), target="Year").panel is None
