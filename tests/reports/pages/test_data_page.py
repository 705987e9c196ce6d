"""`reports/data.html`: images and their brightness, columns of a table, lengths of texts."""

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.contract import InputContract
from slipway.inputs.texts import TextContract, encode_texts
from slipway.kinds.registry import Task
from slipway.reports.pages.data_page import data_page
from tests.packed_rows import packed_split
from tests.reports.conftest import INPUT
from tests.reports.test_pages import EVIL, FOREIGN, faults

NUM_ROWS = 120


def manifest(task: Task, contract: InputContract, classes: list[str]) -> PackedManifest:
    return PackedManifest(
        format_version=3,
        task=task,
        input=contract,
        classes=classes,
        mean=[],
        std=[],
        target_scale=None,
        splits={},
    )


def rows(inputs: NDArray[Any], targets: Any) -> PackedSplit:
    names = [f"{EVIL}{row}" for row in range(len(inputs))]
    return packed_split(inputs, targets, names, names)


def images(num_rows: int, most: int = 256) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, most, (num_rows, 8, 8, 1), dtype=np.uint8)


def column(name: str, kind: str, **changes: Any) -> Column:
    values: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "required": False,
        "min": None,
        "max": None,
        "has_missing": False,
        "categories": [],
        "fill": 0.0,
        "quantiles": [],
        "mean": 0.0,
        "std": 1.0,
    }
    return Column.model_validate(values | changes)


@pytest.fixture(name="table_page")
def _table_page() -> str:
    contract = ColumnContract(
        kind="columns",
        columns=[
            column("rooms", "number", has_missing=True, mean=10, std=4),
            column(EVIL, "category", categories=["a", f"{EVIL} and more than that"]),
            column("day", "date", mean=20000, std=2),
        ],
    )
    number = np.arange(NUM_ROWS) % 60
    missing = np.arange(NUM_ROWS) < 6
    codes = 1 + (np.arange(NUM_ROWS) % 4 == 0)
    days = np.zeros(NUM_ROWS)
    block = np.stack([(number - 10) / 4, days, missing, codes], axis=1).astype(np.float32)
    found = rows(block, number.astype(float))
    return data_page({"train": found}, manifest("table_regression", contract, []))


def cells(page: str, name: str) -> list[str]:
    line = next(line for line in page.split("<tr>") if line.startswith(f"<td>{name}</td>"))
    return re.findall(r"<td[^>]*>([^<]*)</td>", line)


def test_a_column_has_its_kind_missing_values_bounds_and_frequent_values(table_page: str) -> None:
    assert cells(table_page, "rooms")[:7] == ["rooms", "number", "6", "60", "0", "31", "59"]
    assert "a 75.0%, " in next(line for line in table_page.split("<tr>") if "category" in line)
    day = cells(table_page, "day")
    assert day[3:7] == ["1", "2024-10-04", "2024-10-04", "2024-10-04"]
    assert "2024-10-04 100.0%" in table_page


def test_the_bars_of_a_column_count_its_rows(table_page: str) -> None:
    (bars,) = re.findall(r'<svg class="spark"[^>]*distribution of rooms">(.*?)</svg>', table_page)
    heights = [float(height) for height in re.findall(r'height="([\d.]+)"', bars)]
    assert len(heights) == 24
    assert max(heights) == 28


def test_the_relation_with_the_target_is_drawn_from_the_best_column(table_page: str) -> None:
    scores = re.findall(r'<div class="log"><span>(\w+)</span>.*?<b>(-?[\d.]+)</b>', table_page)
    assert scores[0][0] == "rooms"
    assert float(scores[0][1]) > 0.9


@pytest.fixture(name="text_page")
def _text_page() -> str:
    contract = TextContract(kind="texts", columns=[EVIL], max_bytes=64, max_characters=None)
    texts = [EVIL, "call 0301 2345678", "short", "a" * 100]
    split = rows(encode_texts(texts, contract), [0, 0, 1, 1])
    return data_page({"train": split}, manifest("text_classification", contract, [EVIL, "b"]))


def test_the_lengths_of_each_class_count_its_rows_and_those_that_were_cut(text_page: str) -> None:
    assert cells(text_page, "b") == ["b", "2", "5", "5", "64", "50.0%"]
    assert text_page.count('class="spark"') == 2


def test_examples_of_texts_have_no_personal_data(text_page: str) -> None:
    assert "call [phone]" in text_page
    assert "2345678" not in text_page


def test_numbers_of_texts_have_one_row_of_lengths() -> None:
    contract = TextContract(kind="texts", columns=["text"], max_bytes=8, max_characters=None)
    split = rows(encode_texts(["ab", "abcd", "abc"], contract), [0.5, 1.5, 2.5])
    page = data_page({"train": split}, manifest("text_regression", contract, []))
    assert cells(page, "all")[:6] == ["all", "3", "2", "3", "4", "0.0%"]


def test_the_pages_of_the_data_load_nothing_and_escape_every_text(
    table_page: str, text_page: str
) -> None:
    split = rows(images(6), [0, 0, 0, 1, 1, 1])
    pictures = data_page(
        {"train": split, "val": split}, manifest("image_classification", INPUT, ["cat", EVIL])
    )
    for page in (table_page, text_page, pictures):
        assert not FOREIGN.search(page)
        assert faults(page) == []


def test_each_class_shows_a_bounded_number_of_small_pictures() -> None:
    classes = [f"class {index}" for index in range(40)]
    split = rows(images(400).repeat(32, 1).repeat(32, 2), np.arange(400) % 40)
    page = data_page(
        {"train": split, "val": split}, manifest("image_classification", INPUT, classes)
    )
    assert page.count("<img ") == 24 * 6
    assert "And 16 smaller classes." in page
    assert len(page) < 2_500_000
    assert page.count("<polyline") == 2


def test_images_with_a_numeric_target_are_shown_by_rising_target() -> None:
    split = rows(images(80), np.arange(80)[::-1].astype(float))
    page = data_page({"train": split}, manifest("image_regression", INPUT, []))
    assert re.findall(r"<td>(\d+) to (\d+)</td>", page)[::7] == [("0", "9"), ("70", "79")]


def test_a_dark_split_is_left_of_a_bright_one() -> None:
    dark, bright = rows(images(50, 40), np.zeros(50)), rows(images(50), np.zeros(50))
    page = data_page({"train": bright, "val": dark}, manifest("image_classification", INPUT, ["a"]))
    places = [
        min((float(y), float(x)) for x, y in (pair.split(",") for pair in points.split()))[1]
        for points in re.findall(r'<polyline[^>]*points="([^"]+)"', page)
    ]
    assert places[1] < places[0], "the highest point of val is further left"
