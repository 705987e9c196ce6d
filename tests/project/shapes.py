"""Data sets of many shapes, made from the shipped data, with the params to propose for each."""

import csv
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from slipway.config.params import filled, value_at
from tests.conftest import ROOT

SHARED = ROOT.parent / "shared" / "data"
_NUM_DIGITS = 160


@dataclass(frozen=True)
class Shape:
    """A data set, the user's choices, and the expected params."""

    make: Callable[[Path], Path]  # writes it into a folder; returns its path
    expected: Mapping[str, Any]  # params by key; "gate" is the name of the metric
    task: str | None = None
    target: str | None = None

    def check(self, params: Mapping[str, Any]) -> None:
        """Compare the params with the expected ones."""
        found = {key: _value(params, key) for key in self.expected}
        assert found == dict(self.expected)


def _value(params: Mapping[str, Any], key: str) -> Any:
    if key == "gate":
        return next(iter(params["evaluate"]["gates"]), None)
    return value_at(filled(params), key)


# Images ------------------------------------------------------------------------------------------


@cache
def digits() -> list[tuple[str, bytes]]:
    """Return the label and PNG of some digits."""
    table = pq.read_table(ROOT / "data/demo/digits.parquet").slice(0, _NUM_DIGITS).to_pylist()
    return [(str(row["label"]), row["image"]["bytes"]) for row in table]


def embedded_digits(_: Path) -> Path:
    return ROOT / "data/demo/digits.parquet"


def class_folders(folder: Path) -> Path:
    for number, (label, payload) in enumerate(digits()):
        _write(folder / "digits" / label / f"{number}.png", payload)
    return folder / "digits"


def split_folders(folder: Path) -> Path:
    for number, (label, payload) in enumerate(digits()):
        split = ("train", "train", "valid", "test")[number // 10 % 4]
        _write(folder / split / label / f"{number}.png", payload)
    return folder


def csv_of_paths(folder: Path) -> Path:
    rows = [(f"images/{number}.png", f"digit {label}") for number, (label, _) in _numbered()]
    for number, (_, payload) in _numbered():
        _write(folder / "images" / f"{number}.png", payload)
    return _csv(folder / "labels.csv", ("file", "label"), rows)


def zip_of_class_folders(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "digits.zip", "w") as archive:
        for number, (label, payload) in _numbered():
            archive.writestr(f"digits/{label}/{number}.png", payload)
    return folder / "digits.zip"


def tar_of_csv_and_images(folder: Path) -> Path:
    csv_of_paths(folder / "content")
    with tarfile.open(folder / "digits.tar.gz", "w:gz") as archive:
        archive.add(folder / "content", "digits")
    return folder / "digits.tar.gz"


def folders_with_metadata(folder: Path) -> Path:
    for split, chosen in (("train", slice(0, 120)), ("test", slice(120, None))):
        rows = []
        for number, (label, payload) in _numbered()[chosen]:
            _write(folder / split / f"{number}.png", payload)
            rows.append((f"{number}.png", f"no. {label}"))
        _csv(folder / split / "metadata.csv", ("file_name", "label"), rows)
    return folder


def named_shards(folder: Path) -> Path:
    for split, chosen in (("train", slice(0, 120)), ("test", slice(120, None))):
        rows = [
            {"img": {"bytes": payload, "path": None}, "label": int(label)}
            for label, payload in digits()[chosen]
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    return folder


def numbers_of_images(folder: Path) -> Path:
    rows = []
    for number, (_, payload) in _numbered():
        _write(folder / f"{number}.png", payload)
        pixels = Image.open(io.BytesIO(payload)).convert("L")
        rows.append((f"{number}.png", sum(pixels.tobytes()) / 1000))
    return _csv(folder / "brightness.csv", ("picture", "brightness"), rows)


def photographs(folder: Path) -> Path:
    draw = random.Random(3)
    for number in range(120):
        label = ("left hand", "right hand")[number % 2]
        size = (draw.randint(90, 200), draw.randint(90, 150))
        image = Image.effect_noise((24, 24), 60).convert("RGB")
        image.putpixel((3, 3), (255, 0, 0))
        tinted = Image.blend(image, Image.new("RGB", (24, 24), (200, 90, 40)), 0.5)
        path = folder / "photographs" / label / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        tinted.resize(size).save(path)
    return folder / "photographs"


def bccd(_: Path) -> Path:
    return _shared("bccd")


def cifar10(_: Path) -> Path:
    return _shared("cifar10/train.parquet")


# Tables ------------------------------------------------------------------------------------------


def wine(_: Path) -> Path:
    return ROOT / "data/demo/wine.csv"


def wine_rows() -> list[dict[str, str]]:
    """Return the rows of the shipped table."""
    with (ROOT / "data/demo/wine.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def wine_parquet(folder: Path) -> Path:
    rows = [
        {name: float(cell) for name, cell in row.items() if name != "cultivar"}
        | {"class": int(row["cultivar"])}
        for row in wine_rows()
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "wine.parquet")
    return folder / "wine.parquet"


def wine_workbook(folder: Path) -> Path:
    book = openpyxl.Workbook()
    names = [name for name in wine_rows()[0] if name != "cultivar"]
    book.active.append(["Label", *names])
    for row in wine_rows():
        name = ("Barolo", "Grignolino", "Barbera")[int(row["cultivar"]) - 1]
        book.active.append([name, *(float(row[column]) for column in names)])
    book.save(folder / "wine.xlsx")
    return folder / "wine.xlsx"


def housing(_: Path) -> Path:
    return _shared("housing/housing.csv")


def visits(folder: Path) -> Path:
    """Write a table with several rows for each patient."""
    draw = random.Random(1)
    rows = [
        (
            f"p{number // 4}",
            round(draw.gauss(60, 9), 1),
            draw.choice("abc"),
            draw.choice(("y", "n")),
        )
        for number in range(240)
    ]
    return _csv(folder / "visits.csv", ("Patient ID", "age", "ward", "Outcome"), rows)


def sales(folder: Path) -> Path:
    """Write a German table in windows-1252, with semicolons, dates and a numeric target."""
    draw = random.Random(2)
    places = ("S\u00fcd", "Nord")
    lines = ["Datum;Stra\u00dfe;Menge;target"]
    lines += [
        f"2024-{1 + day // 28:02d}-{1 + day % 28:02d};"
        f"{draw.choice(places)};{draw.random() * 9:.2f};{draw.random() * 80:.2f}"
        for day in range(300)
    ]
    path = folder / "sales.csv"
    path.write_bytes("\n".join(lines).encode("windows-1252"))
    return path


def rows_with_split(folder: Path) -> Path:
    draw = random.Random(4)
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(200):
            split = ("train", "train", "train", "val", "test")[number % 5]
            row = {
                "x": draw.random(),
                "kind": draw.choice("uvw"),
                "y": draw.random(),
                "split": split,
            }
            file.write(json.dumps(row) + "\n")
    return folder / "rows.jsonl"


def several_csvs(folder: Path) -> Path:
    rows = [tuple(row.values()) for row in wine_rows()]
    names = [name if name != "cultivar" else "class" for name in wine_rows()[0]]
    for part in range(3):
        _csv(folder / f"part{part}.csv", names, rows[part::3])
    return folder


def rare_failures(folder: Path) -> Path:
    """Write a table with one positive row in twenty, and "?" for missing cells."""
    draw = random.Random(5)
    rows = [
        (
            "?" if number % 9 == 0 else f"{draw.random():.3f}",
            draw.randint(1, 900),
            int(number % 20 == 0),
        )
        for number in range(1000)
    ]
    return _csv(folder / "machines.csv", ("heat", "speed", "target"), rows)


# Texts -------------------------------------------------------------------------------------------


def messages(_: Path) -> Path:
    return ROOT / "data/demo/messages.csv"


def reviews(_: Path) -> Path:
    return ROOT / "data/demo/reviews.csv"


def message_rows() -> list[dict[str, str]]:
    """Return some of the shipped messages."""
    with (ROOT / "data/demo/messages.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))[:400]


def hub_texts(folder: Path) -> Path:
    """Write texts in the Hugging Face hub's layout: shards named by split, classes as numbers."""
    rows = [{"text": row["text"], "label": int(row["label"] == "spam")} for row in message_rows()]
    for split, chosen in (("train", slice(0, 300)), ("test", slice(300, None))):
        path = folder / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist(rows[chosen]), path)
    return folder


def titled_texts(folder: Path) -> Path:
    """Write a table with two texts in each row, an id, and a given split."""
    with (folder / "news.jsonl").open("w", encoding="utf-8") as file:
        for number, row in enumerate(message_rows()):
            title, split = f"{row['text'][:40]}, part {number}", ("train", "train", "val", "test")
            content = {"id": f"n{number:05}", "title": title, "body": row["text"]}
            content |= {"category": row["label"], "split": split[number % 4]}
            file.write(json.dumps(content, ensure_ascii=False) + "\n")
    return folder / "news.jsonl"


def rated_texts(folder: Path) -> Path:
    draw = random.Random(6)
    rows = [(row["text"], round(draw.uniform(1, 5), 2)) for row in message_rows()]
    return _csv(folder / "rated.csv", ("review", "stars"), rows)


def texts_with_topics(folder: Path) -> Path:
    draw = random.Random(7)
    topics = ("money", "love", "work", "food")
    rows = [
        (row["text"], "|".join(sorted(draw.sample(topics, draw.randint(0, 3)))))
        for row in message_rows()
    ]
    return _csv(folder / "topics.csv", ("message", "topics"), rows)


def texts_of_authors(folder: Path) -> Path:
    """Write Chinese texts with their authors, in GB 18030, with semicolons."""
    with (ROOT / "data/demo/reviews.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = ["author_id;\u5185\u5bb9;label"]
    lines += [f"u{number // 5};{row['text']};{row['label']}" for number, row in enumerate(rows)]
    path = folder / "authors.csv"
    path.write_bytes("\n".join(lines).encode("gb18030"))
    return path


def sms_spam(_: Path) -> Path:
    return _shared("text/sms_spam.csv")


def ag_news(_: Path) -> Path:
    return _shared("text/ag_news_7600.csv")


def waimai(_: Path) -> Path:
    return _shared("text/waimai_10k.csv")


# ---- Helpers


def _numbered() -> list[tuple[int, tuple[str, bytes]]]:
    return list(enumerate(digits()))


def _write(path: Path, payload: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(payload)


def _csv(path: Path, names: Any, rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)
    return path


def _shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"../shared/data/{name} is not there")
    return path


_SIGNS = {
    "data.task": "image_classification",
    "precompute.image_size_px": 16,
    "precompute.channels": 1,
    "train.network": "small_resnet",
    "gate": "accuracy",
}
_ROWS = {"train.network": "tabm"}
_TEXTS = {
    "data.task": "text_classification",
    "data.target_column": "label",
    "data.text_columns": ["text"],
    "train.network": "hashed_ngrams",
}
SHAPES = {
    "embedded digits": Shape(embedded_digits, {**_SIGNS, "data.target_column": "label"}),
    "class folders": Shape(class_folders, _SIGNS),
    "train, valid and test folders": Shape(split_folders, {**_SIGNS, "data.split_folders": "auto"}),
    "a CSV of paths": Shape(csv_of_paths, {**_SIGNS, "data.image_column": "file"}),
    "a zip of class folders": Shape(zip_of_class_folders, _SIGNS),
    "a tar of a CSV and images": Shape(
        tar_of_csv_and_images, {**_SIGNS, "data.image_column": "file"}
    ),
    "split folders with metadata.csv": Shape(folders_with_metadata, _SIGNS),
    "Parquet shards named after splits": Shape(
        named_shards, {**_SIGNS, "data.image_column": "img"}
    ),
    "numbers of images": Shape(
        numbers_of_images,
        {
            **_SIGNS,
            "data.task": "image_regression",
            "data.target_column": "brightness",
            "gate": "r2",
            "augment.crop_padding_px": 0,
        },
    ),
    "photographs": Shape(
        photographs,
        {
            **_SIGNS,
            "precompute.image_size_px": 64,
            "precompute.channels": 3,
            "precompute.resize_mode": "crop",
            "augment.horizontal_flip": 0.0,
        },
    ),
    "blood cells": Shape(
        bccd,
        {
            **_SIGNS,
            "data.task": "image_regression",
            "data.target_column": "red_cells",
            "precompute.image_size_px": 64,
            "precompute.channels": 3,
            "precompute.resize_mode": "stretch",
            "gate": "r2",
        },
        target="red_cells",
    ),
    "CIFAR-10": Shape(
        cifar10,
        {
            **_SIGNS,
            "precompute.image_size_px": 32,
            "precompute.channels": 3,
            "augment.horizontal_flip": 0.5,
        },
    ),
    "a table and two answers": Shape(
        wine,
        {**_ROWS, "data.task": "table_classification", "gate": "accuracy"},
        "table_classification",
        "cultivar",
    ),
    "a Parquet table": Shape(
        wine_parquet,
        {
            **_ROWS,
            "data.task": "table_classification",
            "data.target_column": "class",
            "gate": "accuracy",
        },
    ),
    "a workbook": Shape(
        wine_workbook,
        {
            **_ROWS,
            "data.task": "table_classification",
            "data.target_column": "Label",
            "gate": "accuracy",
        },
    ),
    "housing": Shape(
        housing,
        {**_ROWS, "data.task": "table_regression", "gate": "r2", "data.group_column": None},
        target="median_house_value",
    ),
    "rows of patients": Shape(
        visits,
        {
            **_ROWS,
            "data.task": "table_classification",
            "data.target_column": "Outcome",
            "data.group_column": "Patient ID",
            "gate": "accuracy",
        },
    ),
    "rows in time": Shape(
        sales,
        {
            **_ROWS,
            "data.task": "table_regression",
            "data.time_column": "Datum",
            "data.encoding": "windows-1252",
            "gate": "r2",
        },
    ),
    "rows with a split": Shape(
        rows_with_split,
        {
            **_ROWS,
            "data.task": "table_regression",
            "data.target_column": "y",
            "data.split_column": "split",
            "gate": "r2",
        },
    ),
    "several CSVs": Shape(
        several_csvs,
        {
            **_ROWS,
            "data.task": "table_classification",
            "data.sources": None,  # the folder is one table, as of Parquet files
            "gate": "accuracy",
        },
    ),
    "a rare class": Shape(
        rare_failures,
        {
            **_ROWS,
            "data.task": "table_classification",
            "data.missing_values": ["?"],
            "train.class_weights": "balanced",
            "gate": "balanced_accuracy",
        },
    ),
    "English messages": Shape(
        messages, {**_TEXTS, "gate": "balanced_accuracy", "train.class_weights": "balanced"}
    ),
    "Chinese reviews": Shape(reviews, {**_TEXTS, "gate": "accuracy"}),
    "Parquet shards of texts": Shape(hub_texts, {**_TEXTS, "gate": "balanced_accuracy"}),
    "texts with titles and a split": Shape(
        titled_texts,
        {
            **_TEXTS,
            "data.text_columns": ["title", "body"],
            "data.target_column": "category",
            "data.split_column": "split",
        },
    ),
    "rated texts": Shape(
        rated_texts,
        {
            **_TEXTS,
            "data.task": "text_regression",
            "data.text_columns": ["review"],
            "data.target_column": "stars",
            "gate": "r2",
        },
    ),
    "texts with several topics": Shape(
        texts_with_topics,
        {
            **_TEXTS,
            "data.task": "text_multilabel",
            "data.text_columns": ["message"],
            "data.target_column": "topics",
        },
        "text_multilabel",
    ),
    "texts of authors": Shape(
        texts_of_authors,
        {
            **_TEXTS,
            "data.text_columns": ["\u5185\u5bb9"],
            "data.group_column": "author_id",
            "data.encoding": "gb18030",
            "gate": "accuracy",
        },
    ),
    "SMS": Shape(sms_spam, {**_TEXTS, "gate": "balanced_accuracy"}),
    "news": Shape(ag_news, {**_TEXTS, "data.text_columns": ["title", "text"], "gate": "accuracy"}),
    "meals": Shape(waimai, {**_TEXTS, "gate": "accuracy"}),
}
