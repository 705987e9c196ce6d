"""Finds rows whose label is probably wrong, by confident learning on out-of-fold probabilities.

Northcutt, Jiang and Chuang 2021, "Confident learning: estimating uncertainty in dataset labels", as
implemented by cleanlab. The result is a list of proposals; no label is changed.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.data.engine.rows import write_table

LABEL_ISSUES = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),  # path inside the data set, or row number
        pa.field("split", pa.string(), nullable=False),  # "train" or "val"
        pa.field("fold", pa.int32(), nullable=False),  # of the audit, counted from 0
        pa.field("label", pa.string(), nullable=False),  # as given, after data.label_map
        pa.field("suggested_label", pa.string(), nullable=False),  # the most probable class
        # out-of-fold probabilities of the given and of the suggested label
        pa.field("label_quality", pa.float32(), nullable=False),
        pa.field("confidence", pa.float32(), nullable=False),
        pa.field("is_candidate", pa.bool_(), nullable=False),  # probably wrong
    ]
)
# The estimated number of wrong labels is good, but the candidates also contain rows that the
# networks get wrong. In a table of 569 rows, the estimated number of candidates found 0.76 to 0.85
# of the planted wrong labels; a quarter more found 0.90 to 0.96 (three seeds).
_SLACK = 1.25


class Judgement(NamedTuple):
    """The verdict of confident learning on N labels."""

    estimated: int  # estimated number of wrong labels
    is_candidate: NDArray[np.bool_]  # (N,) True if probably wrong


@dataclass(frozen=True)
class LabelIssues:
    """The audited rows with their out-of-fold probabilities and the verdict."""

    classes: list[str]
    ids: list[str]
    sources: list[str]
    splits: list[str]
    folds: NDArray[np.int64]  # (N,)
    given: NDArray[np.int64]  # (N,) class index
    probabilities: NDArray[np.float32]  # (N, K) out of fold
    judgement: Judgement

    @property
    def is_candidate(self) -> NDArray[np.bool_]:
        """Mask (N,) of the rows whose label is probably wrong."""
        return self.judgement.is_candidate

    @cached_property
    def suggested(self) -> NDArray[np.int64]:
        """The index of the most probable class of each row, (N,); the first one in a tie."""
        return np.asarray(self.probabilities.argmax(axis=1))

    @cached_property
    def quality(self) -> NDArray[np.float32]:
        """The probability of each given label (N,): cleanlab's "self-confidence"."""
        return self.probabilities[np.arange(len(self.given)), self.given]

    @cached_property
    def confidence(self) -> NDArray[np.float32]:
        """The probability of each suggested label (N,)."""
        return np.asarray(self.probabilities.max(axis=1))

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """(N,) row numbers: candidates first, then the others; each by rising quality, then id."""
        return np.lexsort((np.array(self.ids), self.quality, ~self.is_candidate))

    @property
    def candidates(self) -> NDArray[np.int64]:
        """The row numbers of the candidates, the lowest label quality first."""
        return self.order[: int(self.is_candidate.sum())]

    @property
    def accuracy(self) -> float:
        """Fraction of rows whose given label is the most probable one."""
        return float((self.suggested == self.given).mean())

    @property
    def fold_accuracies(self) -> list[float]:
        """For each fold, the fraction of rows whose given label is the most probable one."""
        right = (self.suggested == self.given).astype(np.float64)
        return [float(value) for value in np.bincount(self.folds, right) / np.bincount(self.folds)]

    def pairs(self) -> list[tuple[str, str, int]]:
        """Return (given class, suggested class, candidates) for each pair, most frequent first."""
        found, counts = np.unique(
            np.stack([self.given, self.suggested])[:, self.is_candidate], axis=1, return_counts=True
        )
        order = np.argsort(-counts, kind="stable")
        ranked = zip(*found[:, order].tolist(), counts[order].tolist(), strict=True)
        return [
            (self.classes[given], self.classes[suggested], count)
            for given, suggested, count in ranked
        ]

    def class_counts(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of rows and candidates of each given class."""
        rows, candidates = (
            np.bincount(given, minlength=len(self.classes))
            for given in (self.given, self.given[self.is_candidate])
        )
        return {
            name: (int(rows[index]), int(candidates[index]))
            for index, name in enumerate(self.classes)
        }


def judge(given: NDArray[np.int64], probabilities: NDArray[np.float32]) -> Judgement:
    """Estimate how many of the labels `given` (N,) are wrong, and find candidates.

    Candidates are rows whose most probable class is not the given one. Those with the least
    probable labels are chosen, `_SLACK` times as many as the confident joint estimates to be wrong.
    `probabilities` are (N, K), out of fold.
    """
    from cleanlab.count import num_label_issues  # imports pandas and scikit-learn
    from cleanlab.filter import find_label_issues

    exact = probabilities.astype(np.float64)
    exact /= exact.sum(axis=1, keepdims=True)
    estimated = int(num_label_issues(given, exact, estimation_method="off_diagonal_calibrated"))
    ranked = find_label_issues(
        given,
        exact,
        filter_by="predicted_neq_given",
        return_indices_ranked_by="self_confidence",
        n_jobs=1,
    )
    is_candidate = np.zeros(len(given), np.bool_)
    is_candidate[ranked[: math.ceil(_SLACK * estimated)]] = True
    return Judgement(estimated, is_candidate)


def report(issues: LabelIssues | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `label_issues.json`.

    `settings` describe the audit. `issues` is None if no audit ran.
    """
    if issues is None:
        return {"requested": False, **settings}
    rows, num_candidates = len(issues.ids), len(issues.candidates)
    return {
        "requested": True,
        **settings,
        "rows": rows,
        "accuracy": issues.accuracy,
        "fold_rows": np.bincount(issues.folds).tolist(),
        "fold_accuracies": issues.fold_accuracies,
        "estimated_wrong": issues.judgement.estimated,
        "candidates": num_candidates,
        "candidates_fraction": num_candidates / rows,
        "pairs": [
            {"label": given, "suggested_label": suggested, "rows": count}
            for given, suggested, count in issues.pairs()
        ],
        "classes": {
            name: {"rows": count, "candidates": found}
            for name, (count, found) in issues.class_counts().items()
        },
    }


def write_rows(path: Path, issues: LabelIssues | None) -> None:
    """Write `label_issues.parquet`, one row per audited row in `LabelIssues.order`.

    Without issues the table is empty.
    """
    table = LABEL_ISSUES.empty_table()
    if issues is not None:
        table = pa.table(_columns(issues), schema=LABEL_ISSUES).take(pa.array(issues.order))
    write_table(path, table, LABEL_ISSUES)


def _columns(issues: LabelIssues) -> dict[str, Any]:
    return {
        "id": issues.ids,
        "source": issues.sources,
        "split": issues.splits,
        "fold": issues.folds.astype(np.int32),
        "label": [issues.classes[index] for index in issues.given],
        "suggested_label": [issues.classes[index] for index in issues.suggested],
        "label_quality": issues.quality,
        "confidence": issues.confidence,
        "is_candidate": issues.is_candidate,
    }
