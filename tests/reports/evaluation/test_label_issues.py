"""Confident learning on simulated probabilities, its files and its page."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.data.engine.rows import read_table
from slipway.inputs.images import ImageContract
from slipway.reports.evaluation.label_issues import (
    LABEL_ISSUES,
    Judgement,
    LabelIssues,
    judge,
    report,
    write_rows,
)
from slipway.reports.pages.label_issues_page import label_issues_page, page_of_no_audit
from tests.packed_tables import fit_contract
from tests.planted_labels import found_of

CLASSES = ["ape", "bee", "<script>alert(1)</script>"]
INPUT = ImageContract(
    kind="images",
    transform=None,
    size_px=4,
    channels=1,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=10_000,
)


def answers(
    num_rows: int, num_classes: int = 10, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.float32], list[int]]:
    """Labels with 5 % wrong, probabilities of a network with 97 % accuracy, and the wrong rows."""
    generator = np.random.default_rng(seed)
    truth = generator.integers(0, num_classes, num_rows)
    believed = np.where(
        generator.random(num_rows) < 0.97, truth, generator.integers(0, num_classes, num_rows)
    )
    logits = generator.normal(0, 1, (num_rows, num_classes))
    logits[np.arange(num_rows), believed] += generator.normal(6, 1.5, num_rows)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    planted = generator.choice(num_rows, num_rows // 20, replace=False)
    given = truth.copy()
    given[planted] = (
        truth[planted] + generator.integers(1, num_classes, len(planted))
    ) % num_classes
    return given, probabilities.astype(np.float32), planted.tolist()


@pytest.mark.parametrize("num_classes", [2, 10])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_planted_wrong_labels_are_among_the_candidates(num_classes: int, seed: int) -> None:
    given, probabilities, planted = answers(2000, num_classes, seed)
    judgement = judge(given, probabilities)
    precision, recall = found_of(judgement.is_candidate, planted)
    assert precision >= 0.5
    assert recall >= 0.8
    assert 0.5 * len(planted) < judgement.estimated < 2 * len(planted)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_shuffled_probabilities_find_no_planted_labels(seed: int) -> None:
    """The twin: the probabilities find them, not the number of candidates."""
    given, probabilities, planted = answers(2000, seed=seed)
    precision, _ = found_of(
        judge(given, np.random.default_rng(seed).permutation(probabilities)).is_candidate, planted
    )
    assert precision < 0.15


def test_correct_labels_yield_few_candidates() -> None:
    _, probabilities, _ = answers(2000)
    assert judge(probabilities.argmax(axis=1), probabilities).is_candidate.sum() == 0


@pytest.fixture(name="issues")
def _issues() -> LabelIssues:
    probabilities = np.array(
        [[0.9, 0.1, 0], [0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.05, 0.9, 0.05], [0.1, 0.8, 0.1]],
        np.float32,
    )
    return LabelIssues(
        classes=CLASSES,
        ids=[f"{row:032x}" for row in range(5)],
        sources=[f"{row}.png" for row in range(5)],
        splits=["train", "train", "train", "val", "val"],
        folds=np.array([0, 1, 0, 1, 0]),
        given=np.array([0, 1, 2, 2, 2]),
        probabilities=probabilities,
        judgement=Judgement(2, np.array([False, True, False, True, False])),
    )


def test_the_table_has_one_row_for_each_audited_row_candidates_first(
    issues: LabelIssues, tmp_path: Path
) -> None:
    write_rows(tmp_path / "issues.parquet", issues)
    rows = read_table(tmp_path / "issues.parquet", LABEL_ISSUES).to_pylist()
    assert [row["source"] for row in rows] == ["3.png", "1.png", "4.png", "2.png", "0.png"]
    assert [row["is_candidate"] for row in rows] == [True, True, False, False, False]
    first = rows[0]
    assert (first["label"], first["suggested_label"], first["split"], first["fold"]) == (
        CLASSES[2],
        "bee",
        "val",
        1,
    )
    assert first["label_quality"] == pytest.approx(0.05)
    assert first["confidence"] == pytest.approx(0.9)


def test_the_report_counts_pairs_classes_and_folds(issues: LabelIssues) -> None:
    found = json.loads(json.dumps(report(issues, {"folds": 2})))
    assert found["requested"] is True
    assert (found["rows"], found["candidates"], found["estimated_wrong"], found["accuracy"]) == (
        5,
        2,
        2,
        0.4,
    )
    assert found["fold_accuracies"] == [pytest.approx(2 / 3), 0.0]
    pairs = [(pair["label"], pair["suggested_label"], pair["rows"]) for pair in found["pairs"]]
    assert pairs == [("bee", "ape", 1), (CLASSES[2], "bee", 1)]
    assert found["classes"]["ape"] == {"rows": 1, "candidates": 0}


def test_the_label_issues_page_shows_each_candidate_and_loads_nothing(issues: LabelIssues) -> None:
    page = label_issues_page(
        issues, np.zeros((5, 4, 4, 1), np.uint8), INPUT, "small_resnet, 2 folds"
    )
    assert page.count("<img ") == 2
    assert "bee, rather ape" in page
    assert "20.0% against 70.0%, 1.png" in page
    assert "<script" not in page
    assert "http" not in page
    assert "&lt;script&gt;" in page


def test_the_label_issues_page_of_a_table_shows_the_cells(issues: LabelIssues) -> None:
    contract = fit_contract({"height": [1.0, 2.0, 3.0], "colour": ["red", "green", "red"]})
    page = label_issues_page(
        issues, np.zeros((5, *contract.shape), np.float32), contract, "tabm, 2 folds"
    )
    assert "<img " not in page
    assert "<th>colour</th>" in page
    assert "bee, rather ape" in page


def test_the_outputs_of_a_disabled_audit_say_that_it_is_off(tmp_path: Path) -> None:
    write_rows(tmp_path / "issues.parquet", None)
    assert read_table(tmp_path / "issues.parquet", LABEL_ISSUES).num_rows == 0
    assert report(None, {"folds": 0}) == {"requested": False, "folds": 0}
    assert "The audit is off" in page_of_no_audit()
