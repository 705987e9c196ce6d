"""Pages are self-contained, every text is escaped, and pictures are exact."""

import base64
import io
import re
import xml.etree.ElementTree
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipway.artifacts.bundle import Metric
from slipway.config.sections import Gate
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.images import ImageContract
from slipway.metrics.scores import Resampling, measure
from slipway.reports.evaluation.gates import apply_gates
from slipway.reports.evaluation.record import Evaluation
from slipway.reports.pages import charts, html_page
from slipway.reports.pages.charts import BarGroup, Series
from slipway.reports.pages.evaluation_page import evaluation_page
from slipway.reports.pages.html_page import Html
from slipway.reports.pages.intervals import IntervalRow, interval_chart
from slipway.system.errors import MetricError

EVIL = "<script>alert('1')</script>\"&"
FOREIGN = re.compile(r"https?:|[\"'(]//|<script|<link|<iframe|@import|url\(", re.IGNORECASE)
CONTRACT = ImageContract(
    kind="images",
    transform=None,
    size_px=4,
    channels=3,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=10**6,
)
METRIC = Metric(value=0.8, low=0.7, high=0.9, confidence=0.95, rows=100)
_VOID = {"meta", "img", "link", "br"}


class Balance(HTMLParser):
    """Collects tags that are closed in the wrong order or never."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return


def faults(document: str) -> list[str]:
    parser = Balance()
    parser.feed(document)
    return parser.faults + parser.open


def evaluation(classes: list[str], num_rows: int = 40) -> Evaluation:
    generator = np.random.default_rng(0)
    if classes:
        outputs = generator.dirichlet(np.ones(len(classes)), size=num_rows).astype(np.float32)
        targets = generator.integers(len(classes), size=num_rows).astype(np.float64)
        task = "image_classification"
    else:
        outputs, targets, task = (
            generator.normal(size=(num_rows, 1)).astype(np.float32),
            generator.normal(size=num_rows),
            "image_regression",
        )
    metrics = measure(task, targets, outputs, Resampling(0, 100, 0.95))
    ids = [f"{row:032x}" for row in range(num_rows)]
    return Evaluation(
        task,
        classes,
        ids,
        [f"{EVIL}{row}" for row in range(num_rows)],
        targets,
        outputs,
        metrics,
    )


def whole_page(classes: list[str]) -> str:
    found = evaluation(classes)
    name = "accuracy" if classes else "rmse"
    other = "log_loss" if classes else "mae"
    bounds = {
        name: Gate(min=99, max=None),
        other: Gate(min=None, max=99),
        "top_k_accuracy": Gate(min=0.5, max=None),
    }
    gates = apply_gates(bounds, found.metrics, {"top_k_accuracy": EVIL})
    curves = {EVIL: [Series(EVIL, [1, 2], [3, 4]), Series("val", [1, 2], [2, 2])]}
    pixels = np.random.default_rng(0).integers(0, 256, size=(40, 4, 4, 3), dtype=np.uint8)
    return evaluation_page(found, gates, pixels, CONTRACT, curves, f"about {EVIL}")


@pytest.mark.parametrize(
    "classes", [["ape", EVIL, "bee"], [f"{EVIL}{index}" for index in range(60)], []]
)
def test_the_evaluation_page_is_valid_escaped_and_loads_nothing(classes: list[str]) -> None:
    document = whole_page(classes)
    assert not FOREIGN.search(document)
    assert faults(document) == []
    assert "&lt;script&gt;" in document
    assert "✗ missed" in document
    assert "✓ passed" in document
    assert "✗ unjudged" in document
    assert "2 of 3 missed or unjudged" in document


def test_the_worst_rows_of_a_table_are_shown_with_their_cells() -> None:
    column: dict[str, Any] = {
        "required": False,
        "min": None,
        "max": None,
        "categories": [],
        "fill": 0.0,
        "quantiles": [],
        "mean": 0,
        "std": 1,
    }
    contract = ColumnContract(
        kind="columns",
        columns=[
            Column.model_validate(
                column
                | {"name": "place", "kind": "category", "has_missing": True, "categories": [EVIL]}
            ),
            Column.model_validate(
                column
                | {"name": "rooms", "kind": "number", "has_missing": True, "mean": 10, "std": 4}
            ),
            Column.model_validate(
                column
                | {"name": "day", "kind": "date", "has_missing": False, "mean": 20000, "std": 2}
            ),
            Column.model_validate(
                column
                | {"name": "garden", "kind": "boolean", "has_missing": False}
                | {"mean": 0.5, "std": 0.5}
            ),
        ],
    )  # fmt: skip
    rows = np.tile(
        np.array([0.5, 1, -1, 0, 1], dtype=np.float32), (40, 1)
    )  # rooms, day, garden, rooms is missing, place
    found = evaluation([])
    rows[found.worst(1)[0]] = [9.0, 0, 1, 1, 0]
    document = evaluation_page(found, [], rows, contract, {}, "about")
    assert not FOREIGN.search(document)
    assert faults(document) == []
    for text in (
        "<td>&lt;script&gt;",
        ">12<",
        "2024-10-06",
        ">false<",
        ">missing<",
        "2024-10-04",
        ">true<",
        "missing or unknown",
    ):
        assert text in document, text


def test_the_checks_find_a_foreign_reference_and_an_unclosed_tag() -> None:
    for body in (
        '<img src="https://a.b/c.png">',
        "<script>1</script>",
        '<img src="//cdn/x.png">',
        '<i style="background: url(x)"></i>',
    ):
        assert FOREIGN.search(html_page.page("t", "s", [html_page.section("a", Html(body))]))
    assert faults(html_page.page("t", "s", [html_page.section("a", Html("<b>"))]))


def test_every_html_builder_escapes_its_texts() -> None:
    parts = [
        html_page.paragraph(EVIL),
        html_page.table([EVIL], [[EVIL]]),
        html_page.tiles([(EVIL, EVIL, EVIL)]),
        html_page.figure(Html(""), EVIL, EVIL),
        html_page.image(np.zeros((2, 2), dtype=np.uint8), EVIL),
        html_page.heat_map(np.eye(2, dtype=np.int64), [EVIL, EVIL]),
        charts.line_chart([Series(EVIL, [0, 1], [0, 1]), Series("b", [0], [1])], EVIL, EVIL),
        charts.scatter([0, 1], [0, 1], EVIL, EVIL),
        charts.histogram([0, 1], EVIL),
        charts.bar_groups([BarGroup(EVIL, {EVIL: 1.0}, EVIL)], [EVIL], EVIL),
        interval_chart({EVIL: IntervalRow(METRIC, line=0.5)}, EVIL),
    ]
    document = html_page.page(
        EVIL,
        EVIL,
        [html_page.section(EVIL, html_page.beside(parts), html_page.gallery(parts))],
    )
    assert "<script" not in document
    assert faults(document) == []


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3)])
def test_an_embedded_image_keeps_its_pixels(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, size=shape, dtype=np.uint8)
    encoded = re.search(r"base64,([^\"]+)", html_page.image(pixels, "noise"))
    assert encoded
    decoded = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded[1]))))
    assert (decoded.reshape(shape) == pixels).all()


def test_each_cell_of_a_heat_map_states_its_count() -> None:
    cells = html_page.heat_map(np.array([[3, 1], [0, 2]]), ["ape", "bee"])
    assert 'title="1 of 4 rows of ape were predicted bee">1</td>' in cells
    assert 'title="0 of 2 rows of bee were predicted ape"></td>' in cells


def test_the_worst_errors_are_the_wrong_rows_by_loss() -> None:
    outputs = np.array([[0.9, 0.1], [0.1, 0.9], [0.4, 0.6], [0.7, 0.3]], dtype=np.float32)
    metrics: dict[str, Metric] = {}
    found = Evaluation(
        "image_classification",
        ["a", "b"],
        ["0"] * 4,
        ["0"] * 4,
        np.array([1.0, 1.0, 0.0, 0.0]),
        outputs,
        metrics,
    )
    assert found.worst(12) == [0, 2]
    values = Evaluation(
        "image_regression",
        [],
        ["0"] * 3,
        ["0"] * 3,
        np.array([1.0, 2.0, 3.0]),
        np.array([[1.0], [5.0], [2.0]]),
        metrics,
    )
    assert values.worst(12) == [1, 2]
    assert values.worst(1) == [1]


# charts


@pytest.mark.parametrize(
    "values",
    [[0.0, 1.0], [3.0, 3.0], [0.0, 0.0], [-1e-9, 1e9], [0.1, 0.30000000000000004], [-5.0, -4.999]],
)
def test_a_chart_keeps_every_mark_inside_its_frame(values: list[float]) -> None:
    for drawing in (
        charts.scatter(values, values[::-1], "x", "y"),
        charts.line_chart([Series("a", [0, 1], values)], "x", "y"),
    ):
        root = xml.etree.ElementTree.fromstring(drawing)
        places = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.iter("circle")]
        for line in root.iter("polyline"):
            places += [
                (float(x), float(y))
                for x, y in (pair.split(",") for pair in line.attrib["points"].split())
            ]
        assert len(places) == 2
        assert all(0 <= x <= 480 and 0 <= y <= 280 for x, y in places)


def test_a_chart_of_zeros_has_no_axis_below_zero() -> None:
    drawing = charts.line_chart(
        [Series("score", [0.1, 0.5, 1.0], [0.0, 0.0, 0.0])],
        "fraction of rows answered",
        "error rate",
    )
    assert not re.search(r">[-\u2212]\d", drawing)
    assert re.search(
        r">-\d", charts.line_chart([Series("a", [0.0, 1.0], [-2.0, -2.0])], "x", "y")
    ), "the twin"


def test_histogram_bars_are_as_high_as_their_counts() -> None:
    root = xml.etree.ElementTree.fromstring(
        charts.histogram([0.0, 0.0, 0.0, 10.0], "x", num_bins=10)
    )
    heights = [float(bar.attrib["height"]) for bar in root.iter("rect")]
    assert len(heights) == 2
    assert heights[0] == pytest.approx(3 * heights[1], abs=0.2)


def test_bars_of_a_group_are_as_long_as_their_values_on_one_scale() -> None:
    groups = [BarGroup("a", {"train": 0.2, "val": 0.1}, ""), BarGroup("b", {"train": 0.05}, "")]
    drawn = charts.bar_groups(groups, ["train", "val", "test"], "fractions")
    assert re.findall(r'class="(\w+)" style="width:([\d.]+)%', drawn) == [
        ("first", "100.0"),
        ("second", "50.0"),
        ("first", "25.0"),
    ]
    assert "test" not in drawn, "a series without a bar needs no colour in the legend"


def test_histograms_over_each_other_are_fractions_of_their_own_rows() -> None:
    drawn = charts.step_chart({"train": [30, 10], "val": [3, 1]}, 0.0, 2.0, "target")
    first, second = re.findall(r'points="([^"]+)"', drawn)
    assert first == second
    assert len(first.split()) == 4


def test_an_interval_chart_places_values_and_lines_on_one_scale() -> None:
    other = METRIC.model_copy(update={"value": 0.6, "low": 0.5, "high": 0.7})
    drawn = interval_chart(
        {"new": IntervalRow(METRIC, line=0.1), "old": IntervalRow(other, line=0.1)}, "baseline"
    )
    assert re.findall(r'<b style="left:([\d.]+)%', drawn) == ["87.5", "62.5"]
    assert re.findall(r'<u style="left:([\d.]+)%', drawn) == ["0.0", "0.0"]
    assert drawn.index("new") < drawn.index("old")
    assert "Line: baseline." in drawn


def test_large_numbers_on_an_axis_are_abbreviated() -> None:
    root = xml.etree.ElementTree.fromstring(
        charts.residuals([0.0, 550_000.0], [-350_000.0, 1.0], "target", "error")
    )
    texts = [text.text for text in root.iter("text")]
    assert {"600k", "-400k", "0"} <= set(texts)
    assert max(len(text) for text in texts if text and text[-1] == "k") <= 5


@pytest.mark.parametrize("values", [[], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_charts_refuse_empty_and_non_finite_numbers(values: list[float]) -> None:
    with pytest.raises(MetricError, match="finite"):
        charts.scatter(values, values, "x", "y")
