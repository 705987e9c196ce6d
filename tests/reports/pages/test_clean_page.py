"""`reports/clean.html` shows every count, loads nothing, and has no pictures for tables."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipway.data.images.cleaning import image_report
from slipway.data.rules.report import (
    CleanReport,
    Clusters,
    ColumnSummary,
    Example,
    RuleCount,
    SharedPassage,
    TextProfile,
    target_summary,
)
from slipway.data.sources.sources import read_samples
from slipway.reports.pages.clean_page import MAX_PICTURES, clean_page, pictures_of, shown_sources
from tests.data.pictures import cleaned_by, data_params, encode, picture, write_folder
from tests.project_params import clean_params


def rule(count: int, severity: Any = "error") -> RuleCount:
    examples = [
        Example(source=f"cat/{index}.png", detail=f"detail {index} <b>")
        for index in range(min(count, 20))
    ]
    return RuleCount(count=count, severity=severity, meaning="a meaning", examples=examples)


def report(**changes: Any) -> CleanReport:
    values: dict[str, Any] = {
        "read": 1000,
        "kept": 900,
        "refused": {"truncated": rule(60), "exact_duplicate": rule(40, "duplicate")},
        "flagged": {"blurred": rule(12, "flag")},
        "corrections": {"label: Cat -> cat": 7},
        "classes": {"cat": 500, "dog": 400},
        "target": None,
        "checks": ["truncated", "blurred"],
        "not_checked": {"digest_mismatch": "data.checksums is null"},
        "columns": [],
    }
    return CleanReport.model_validate(values | changes)


def test_the_clean_page_counts_rows_without_a_target_apart_from_bad_ones() -> None:
    refused = {"missing_label": rule(300, "unlabelled"), "truncated": rule(70)}
    text = clean_page(report(refused=refused), {})
    for words in ("missing_label", "without a target", "300", "10.00% of those read"):
        assert words in text


def test_the_clean_page_shows_every_count() -> None:
    text = clean_page(report(), {})
    for words in (
        "900 of 1,000 samples are kept",
        "truncated",
        "60",
        "exact_duplicate",
        "blurred",
        "label: Cat -&gt; cat",
        "data.checksums is null",
    ):
        assert words in text


def test_the_clean_page_of_texts_shows_scripts_words_passages_and_excerpts_as_text() -> None:
    script = "<script>alert(1)</script>"
    profile = TextProfile(
        scripts={"Latin": 890, "Han": 10},
        sampled=900,
        terms={f"{script}spam": ["free prize", script], "ham": []},
        passages=[SharedPassage(of="ham", text=f"sent by {script}", fraction=0.25)],
    )
    flagged = {"personal_data": rule(1, "flag")}
    excerpts = {"cat/0.png": f"call [phone] {script}"}
    text = clean_page(report(texts=profile, flagged=flagged, excerpts=excerpts), {})
    escaped = "&lt;script&gt;alert(1)&lt;/script&gt;"
    for words in ("Latin", "890", "Han", "Of 900 texts", "25%"):
        assert words in text
    for words in (f"{escaped}spam", f"free prize, {escaped}", f"sent by {escaped}"):
        assert words in text
    assert f"call [phone] {escaped}" in text
    assert script not in text


def test_the_clean_page_escapes_texts_of_the_data_and_loads_nothing() -> None:
    text = clean_page(report(), {"cat/0.png": np.zeros((4, 4, 3), np.uint8)})
    assert "detail 0 &lt;b&gt;" in text
    assert "<script" not in text
    assert "http" not in text
    assert text.count("data:image/png;base64,") == 3


def test_the_clean_page_of_a_table_has_no_pictures() -> None:
    columns = [ColumnSummary(name="age", kind="number", missing=3, note="")]
    target = target_summary([1.0, 2.0, 2.5, 9.0])
    text = clean_page(report(classes=None, target=target, columns=columns), {})
    assert "<img" not in text
    assert "<svg" in text
    assert "age" in text


def test_the_clean_page_draws_a_bar_for_each_rule() -> None:
    text = clean_page(report(), {})
    assert re.findall(r'width:([\d.]+)%" title="([^"]+)"', text) == [
        ("100.0", "refused: 60"),
        ("66.7", "left out, not bad: 40"),
        ("20.0", "flagged, and kept: 12"),
    ]
    assert "Rows that broke each rule" not in clean_page(report(refused={}, flagged={}), {})


def test_the_clean_page_has_histograms_of_the_sizes_of_images(tmp_path: Path) -> None:
    pictures = {"cat": [picture(0, 40), picture(1, 60)], "dog": [picture(2, 40)]}
    data = data_params(write_folder(tmp_path / "images", pictures))
    found = image_report(
        cleaned_by(partial(read_samples, data, read_files=False), clean_params(), data.task),
        clean_params(),
        data,
    )
    assert (found.sizes["width"].min, found.sizes["width"].max) == (40, 60)
    assert sum(found.sizes["bytes"].histogram) == 3
    assert clean_page(found, {}).count("<svg") == 3
    large = found.sizes["width"].model_copy(update={"median": 23456.0, "max": 42620.0})
    assert "40 to 42,620, median 23,460" in clean_page(
        found.model_copy(update={"sizes": {"width": large}}), {}
    )
    same = found.sizes["width"].model_copy(update={"max": 40.0})
    text = clean_page(found.model_copy(update={"sizes": {"width": same}}), {})
    assert "All rows have 40 pixels of width." in text
    assert "<svg" not in text


def test_the_clean_page_requests_a_limited_number_of_pictures_for_each_rule() -> None:
    clusters = Clusters(count=1, rows=2, largest=2, examples=[["dog/1.png", "dog/2.png"]])
    assert shown_sources(report(clusters=clusters)) == [
        *(f"cat/{index}.png" for index in range(MAX_PICTURES)),
        "dog/1.png",
        "dog/2.png",
    ]


@pytest.mark.parametrize(("choice", "shown"), [("flag", True), ("refuse", False), (None, False)])
def test_clusters_are_shown_only_if_near_duplicates_are_flagged(
    tmp_path: Path, choice: str, shown: bool
) -> None:
    smooth = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    ).resize((64, 64), Image.Resampling.BICUBIC)
    copy = encode(smooth.resize((80, 80), Image.Resampling.BICUBIC))
    data = data_params(
        write_folder(tmp_path / "images", {"cat": [encode(smooth), copy], "dog": [picture(1, 40)]})
    )
    params = clean_params(rules={"near_duplicate": choice})
    found = image_report(
        cleaned_by(partial(read_samples, data, read_files=False), params, data.task), params, data
    )
    assert (found.clusters is not None) == shown
    assert ("2 kept rows are in one cluster." in clean_page(found, {})) == shown


def test_the_clean_page_names_the_file_with_the_examples_it_omits() -> None:
    text = clean_page(report(refused={"truncated": rule(60), "empty": rule(MAX_PICTURES)}), {})
    assert (
        f"These are {MAX_PICTURES} of 60; all are in data/clean/quarantine.parquet, column rule."
        in text
    )
    assert (
        f"These are {MAX_PICTURES} of 12; all are in data/clean/rows.parquet, column flags." in text
    )
    assert text.count("These are") == 2


def test_pictures_are_read_from_the_samples_shown_on_the_page(tmp_path: Path) -> None:
    root = write_folder(
        tmp_path / "images",
        {"cat": [picture(0, 40), picture(1, 40)[:-300]], "dog": [picture(0, 40), picture(2, 40)]},
    )
    data, params = data_params(root), clean_params(rules={"conflicting_label": "flag"})
    found = image_report(
        cleaned_by(partial(read_samples, data, read_files=False), params, data.task), params, data
    )
    pictures = pictures_of(found, data, 10_000)
    assert found.refused["truncated"].count == 1
    assert "cat/1.png" not in pictures  # nothing to show of it but its name
    assert set(pictures) == set(shown_sources(found)) - {"cat/1.png"}
    assert {array.shape for array in pictures.values()} == {(40, 40, 3)}
    assert "cat/1.png" in clean_page(found, pictures)
