"""Rows whose label is probably wrong, by confident learning on out-of-fold probabilities; and the files that say so.

Confident learning: Northcutt, Jiang and Chuang 2021, "Confident learning: estimating uncertainty in dataset labels", as cleanlab does it.
It proposes; no label is changed here or anywhere else.
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
        pa.field(
            "label_quality", pa.float32(), nullable=False
        ),  # out-of-fold probability of the given label
        pa.field(
            "confidence", pa.float32(), nullable=False
        ),  # out-of-fold probability of the suggested label
        pa.field("is_candidate", pa.bool_(), nullable=False),  # probably wrong
    ]
)


# The estimate counts well, but rows that the networks themselves get wrong take some of the places: with as many candidates as
# estimated 0.76 to 0.85 of planted labels were found in a table of 569 rows, with a quarter more 0.90 to 0.96 (three seeds).
_SLACK = 1.25


class Judgement(NamedTuple):
    """What confident learning says of N labels."""

    estimated: int  # how many are wrong
    is_candidate: NDArray[np.bool_]  # (N,) which probably are


@dataclass(frozen=True)
class LabelIssues:
    """The audited rows and what is said of each."""

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
        """(N,) whether the label is probably wrong."""
        return self.judgement.is_candidate

    @cached_property
    def suggested(self) -> NDArray[np.int64]:
        """(N,) the most probable class, the first of equals."""
        most_probable: NDArray[np.int64] = self.probabilities.argmax(axis=1)
        return most_probable

    @cached_property
    def quality(self) -> NDArray[np.float32]:
        """(N,) probability of the given label: cleanlab's "self-confidence"."""
        return self.probabilities[np.arange(len(self.given)), self.given]

    @cached_property
    def confidence(self) -> NDArray[np.float32]:
        """(N,) probability of the suggested label."""
        largest: NDArray[np.float32] = self.probabilities.max(axis=1)
        return largest

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """(N,) the rows with candidates first, each part by rising quality, equals by id."""
        return np.lexsort((np.array(self.ids), self.quality, ~self.is_candidate))

    @property
    def candidates(self) -> NDArray[np.int64]:
        """The candidates, the lowest quality first."""
        return self.order[: int(self.is_candidate.sum())]

    @property
    def accuracy(self) -> float:
        """Share of the rows whose given label is the most probable one."""
        return float((self.suggested == self.given).mean())

    @property
    def fold_accuracies(self) -> list[float]:
        """The same of each fold."""
        right = (self.suggested == self.given).astype(np.float64)
        return [float(value) for value in np.bincount(self.folds, right) / np.bincount(self.folds)]

    def pairs(self) -> list[tuple[str, str, int]]:
        """Given class, suggested class and number of candidates, the most frequent first."""
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
        """Rows and candidates of each given class."""
        rows, candidates = (
            np.bincount(given, minlength=len(self.classes))
            for given in (self.given, self.given[self.is_candidate])
        )
        return {
            name: (int(rows[index]), int(candidates[index]))
            for index, name in enumerate(self.classes)
        }


def judge(given: NDArray[np.int64], probabilities: NDArray[np.float32]) -> Judgement:
    """From class indices (N,) and out-of-fold probabilities (N, K): how many labels are wrong, and which probably.

    Candidates are the rows of which another class is the most probable, the least probable labels first, `_SLACK` times as many
    as the confident joint estimates to be wrong.
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
    """What `label_issues.json` holds; `settings` are how it was found. Without issues: that no audit was asked for."""
    if issues is None:
        return {"asked_for": False, **settings}
    rows, num_candidates = len(issues.ids), len(issues.candidates)
    return {
        "asked_for": True,
        **settings,
        "rows": rows,
        "accuracy": issues.accuracy,
        "fold_rows": np.bincount(issues.folds).tolist(),
        "fold_accuracies": issues.fold_accuracies,
        "estimated_wrong": issues.judgement.estimated,
        "candidates": num_candidates,
        "candidates_share": num_candidates / rows,
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
    """Write `label_issues.parquet`, one row for each audited row, in `LabelIssues.order`; without issues an empty table."""
    table = (
        LABEL_ISSUES.empty_table()
        if issues is None
        else pa.table(_columns(issues), schema=LABEL_ISSUES).take(pa.array(issues.order))
    )
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
