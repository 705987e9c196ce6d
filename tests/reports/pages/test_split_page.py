"""`reports/split.html`: shared values, purged rows and deviations, with every text escaped."""

from typing import Any

import pyarrow as pa

from slipway.config.sections import SplitParams
from slipway.data.engine.rows import ROWS
from slipway.data.splits.report import report
from slipway.data.splits.split import split_rows
from slipway.reports.pages.split_page import split_page
from tests.data.pictures import row
from tests.project_params import split_params


def written(rows: list[dict[str, Any]], params: SplitParams) -> str:
    return split_page(report(split_rows(pa.Table.from_pylist(rows, schema=ROWS), params, 7), 7))


def test_the_page_of_a_split_without_leaks_says_that_nothing_is_shared() -> None:
    page = written(
        [row(seed, ("a", "<script>")[seed % 2]) for seed in range(400)],
        split_params(assignment="exact", folds=5),
    )
    assert "Nothing is shared" in page
    assert "exact fractions in each class" in page
    assert "Folds of the rows outside the test split" in page
    assert "the largest has one row." in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert page.count('class="third"') == 3, "the key, and a bar of test for each class"


def test_the_split_page_names_leaks_of_a_given_split() -> None:
    rows = [
        {**row(seed, "ab"[seed % 2]), "given_split": ("train", "val", "test")[seed // 2 % 3]}
        for seed in range(60)
    ]
    rows[0]["group"] = rows[4]["group"] = "person 7"
    page = written(rows, split_params(on_leak="report"))
    assert "One row of val and test leaks" in page
    assert "1 (person 7)" in page


def test_the_page_of_a_split_by_time_shows_the_order_and_the_purged_rows() -> None:
    rows = [
        {
            **row(seed, None, float(seed), group=f"g{seed if seed != 190 else 0}"),
            "time": float(seed),
        }
        for seed in range(200)
    ]
    page = written(rows, split_params())
    assert "Time order" in page
    assert "1 rows were left out" in page
    assert "standard deviation" in page
    assert page.count("<polyline") == 3
