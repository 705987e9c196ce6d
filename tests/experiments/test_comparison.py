"""`slipway compare`: rows, changed params, filters, orders and formats."""

import csv
import io

import pytest

from slipway.experiments.comparison import Comparison
from slipway.experiments.page import comparison_page
from slipway.experiments.records import ExperimentRecord
from slipway.system.errors import ParamsError
from tests.experiments.records import record, results

RECORDS = [
    record("wide", params={"seed": 7, "train.epochs": 50}, results=results(0.95), seconds=99.0),
    record("broken", status="failed", cause="<no> memory.\nUse less.", results=None),
    record("first", results=results(0.91, baseline=0.0)),
]
COMPARISON = Comparison(RECORDS, RECORDS)


def names(comparison: Comparison) -> list[str]:
    return [row.name for row in comparison.records]


def test_only_params_that_differ_between_experiments_are_shown() -> None:
    assert COMPARISON.changed == ["train.epochs"]
    assert "train.epochs=50" in COMPARISON.text()
    assert "seed=7" not in COMPARISON.text()


def test_a_row_has_metric_interval_baseline_log_loss_seconds_gate_and_certificate() -> None:
    columns, rows = COMPARISON.cells()
    cells = dict(zip(columns, rows[0], strict=True))
    assert cells["accuracy"] == "0.9500"
    assert cells["interval"] == "0.9400 to 0.9600"
    assert cells["log loss"] == "0.3000"
    assert (cells["seconds"], cells["gates"]) == ("99", "passed")
    assert cells["certificate"] == "certified"


def test_a_price_adds_the_cost_of_all_gpus_over_the_run() -> None:
    four = record("four", results=results(processes=4, gpus=4), seconds=900.0)
    killed = record("killed", results=None, seconds=None)
    on_cpu = record("on_cpu", results=results(processes=4, gpus=0), seconds=900.0)
    runs = [four, killed, on_cpu]
    priced = Comparison(runs, runs, gpu_hour=2.5)
    columns, rows = priced.filtered([]).sorted("name").cells()
    place = columns.index("cost")
    assert columns[place - 1] == "seconds"
    assert [row[place] for row in rows] == ["2.50", "", ""]
    assert [entry["cost"] for entry in priced.entries()] == [2.5, None, None]
    table = list(csv.DictReader(io.StringIO(priced.csv())))
    assert [row["cost"] for row in table] == ["2.5", "", ""]
    assert "cost" not in Comparison([four], [four]).cells()[0]
    assert "cost" not in Comparison([four], [four]).csv()


def test_a_failed_experiment_stays_with_its_cause() -> None:
    assert "broken failed: <no> memory. Use less." in COMPARISON.text()


def test_a_long_cause_is_shortened_in_its_middle_because_it_ends_with_the_remedy() -> None:
    long = record("long", status="failed", cause=f"no rows {'x' * 999}. Lower it.", results=None)
    table_and_cause = " ".join(Comparison([long], [long]).text().split())
    cause = table_and_cause.partition("long failed: ")[2]
    assert cause.startswith("no rows x")
    assert cause.endswith("Lower it.")
    assert len(cause) < 250


def test_a_run_whose_process_is_gone_is_shown_as_interrupted() -> None:
    killed = record("killed", status="running", seconds=None, results=None, process=2**22 + 1)
    assert "killed interrupted: killed; run" in Comparison([killed], [killed]).text()


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("train.epochs>30", ["wide"]),
        ("status=failed", ["broken"]),
        ("metric>=0.95", ["wide"]),
        ("train.epochs!=50", ["broken", "first"]),
        ("baseline<=0", ["first"]),
    ],
)
def test_a_filter_keeps_the_experiments_that_meet_it(condition: str, kept: list[str]) -> None:
    assert names(COMPARISON.filtered([condition])) == kept


def test_a_filter_that_nothing_meets_says_so() -> None:
    assert COMPARISON.filtered(["train.epochs>1000"]).text() == (
        "none of the 3 experiments meets the filter"
    )


def test_sorting_by_metric_puts_the_best_first_and_rows_without_one_last() -> None:
    assert names(COMPARISON.sorted("metric")) == ["wide", "first", "broken"]
    errors = [
        record(name, results=results(value, headline="rmse"))
        for name, value in (("bad", 9.0), ("good", 2.0))
    ]
    assert names(Comparison(errors, errors).sorted("metric")) == ["good", "bad"]


def test_sorting_by_a_param_puts_the_least_first_unless_it_is_reversed() -> None:
    assert names(COMPARISON.sorted("train.epochs"))[-1] == "wide"
    assert names(COMPARISON.sorted("train.epochs", reverse=True))[0] == "wide"


@pytest.mark.parametrize("condition", ["train.epoch>3", "epochs", "metrc=1", "train.epochs>"])
def test_an_unknown_column_or_condition_is_refused_with_an_example(condition: str) -> None:
    with pytest.raises(ParamsError, match=r"did you mean|expected KEY|a key of params\.yaml"):
        COMPARISON.filtered([condition])


def of_network(name: str, network: str, arguments: dict[str, int]) -> ExperimentRecord:
    values = {f"train.network_arguments.{key}": value for key, value in arguments.items()}
    return record(name, params={"train.network": network, **values, "train.epochs": len(name)})


def test_a_changed_network_stands_for_its_arguments_and_all_lines_fit_the_terminal() -> None:
    tabm = of_network("tabm", "tabm", {"num_blocks": 2, "width": 128})
    trees = {f"setting_{number}_of_trees": number for number in range(9)}
    small = of_network("small", "lightgbm", trees | {"num_leaves": 31})
    large = of_network("largest", "lightgbm", trees | {"num_leaves": 63})
    text = Comparison([tabm, small], [tabm, small]).text(width=120)
    assert "tabm: train.network='tabm' with its 2 arguments; train.epochs=4" in text
    assert "train.network_arguments" not in text
    three = Comparison([tabm, small, large], [tabm, small, large])
    said = " ".join(three.text(width=120).split())
    assert "small: train.network='lightgbm' with its 9 other arguments; " in said
    assert "train.epochs=5; train.network_arguments.num_leaves=31 " in said
    two = Comparison([small, large], [small, large])
    assert "with its" not in two.text()
    assert max(map(len, three.text(width=120).splitlines())) <= 120
    assert three.entries()[1]["params"]["train.network_arguments.setting_8_of_trees"] == 8


def test_a_table_that_fits_the_terminal_has_the_changed_params_as_a_column() -> None:
    assert "changed params:" in COMPARISON.text(width=100)
    wide = COMPARISON.text(width=200)
    assert "changed params:" not in wide
    assert "changed params" in wide.splitlines()[0]


def test_a_failed_run_names_its_stage_in_place_of_the_verdict_of_gates() -> None:
    failed = record("failed", status="failed", ended_at="export", results=results(certificate=""))
    older = record("older", status="failed", results=results())
    both = Comparison([failed, older], [failed, older])
    assert [row[-2:] for row in both.cells()[1]] == [["failed at export", ""], ["failed", ""]]
    assert "failed at export" in comparison_page(both)
    assert both.entries()[0]["ended_at"] == "export"


def test_csv_has_a_column_for_each_changed_param() -> None:
    rows = list(csv.DictReader(io.StringIO(COMPARISON.csv())))
    assert [row["train.epochs"] for row in rows] == ["50", "30", "30"]
    assert (rows[0]["metric"], rows[0]["value"]) == ("accuracy", "0.95")
    assert rows[1]["cause"] == "<no> memory. Use less."


def test_entries_for_programs_have_full_precision() -> None:
    entry = COMPARISON.entries()[0]
    assert entry["params"] == {"train.epochs": 50}
    assert entry["results"]["metric"]["value"] == 0.95


def test_the_page_shows_every_experiment_and_escapes_causes() -> None:
    page = comparison_page(COMPARISON)
    assert all(name in page for name in ("wide", "broken", "first"))
    assert "&lt;no&gt; memory" in page
    assert "Line: the trivial baseline on the same rows." in page
    assert page.index("wide") < page.index("first"), "the newest is first"
    assert "<script" not in page


def test_without_experiments_the_text_says_how_to_make_one() -> None:
    assert "slipway run" in Comparison([], []).text()
    assert "slipway run" in comparison_page(Comparison([], []))
