"""A loaded model, and what it answers to rows. serving/models/loading.py loads one.

The runtimes are imported for types only: the server process above the workers never loads a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.api_docs.description import describe_coverage, describe_input
from serving.settings import Settings
from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.golden_rows import GoldenResult
from slipway.artifacts.uncertainty import Calibration
from slipway.system.errors import SlipwayError

if TYPE_CHECKING:
    from serving.models.batching import Run
    from serving.models.selection import Selection
    from slipway.artifacts.certificate import Certificate


class InvalidAnswerError(SlipwayError):
    """The model answered something that is no answer: NaN, an infinity, or another shape."""


# Of every row: the most probable class and its probability, "" and 0 where the answer is a number; and whether it is an outlier.
Counted = tuple[str, float, bool]


class AnsweredRow(NamedTuple):
    """What the model says of one image or row."""

    outputs: NDArray[np.float32]  # (outputs,)
    score: np.float32  # of outliers
    answer: dict[str, Any] | None  # as the caller gets it; None if a number is not finite
    counted: Counted  # at hand without looking through its answer


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model that is ready to answer. Equal to itself alone: a bundle may be served in two ways, one after the other."""

    bundle: LoadedBundle
    certificate: "Certificate"
    selection: "Selection"
    max_batch_size: int
    run: "Run"
    golden_rows: GoldenResult | None  # None where the bundle has no golden rows
    settings: Settings  # that it was loaded with
    quick_rows: int = 0  # so many at most are answered within QUICK_S, on the CPU

    @cached_property
    def version(self) -> str:
        """The model version shown to callers."""
        return self.bundle.version

    @cached_property
    def input_kind(self) -> str:
        """What it is asked about."""
        return self.bundle.manifest.input.kind

    def answer_rows(self, batch: NDArray[Any]) -> list[AnsweredRow]:
        """(rows, ...) of the bundle's input contract to what is answered to each."""
        return self._rows(*self.run(batch))

    def answer(self, outputs: NDArray[np.float32], score: np.float32) -> dict[str, Any]:
        """(outputs,) float32 of one image or row, and its outlier score, to what the caller gets.

        InvalidAnswerError if a number is not finite.
        """
        return finite_answer(self._rows(outputs[np.newaxis], np.asarray([score]))[0].answer)

    def _rows(self, outputs: NDArray[np.float32], scores: NDArray[np.float32]) -> list[AnsweredRow]:
        """For a whole batch at once: numpy takes as long for one row as for thirty-two."""
        finite = (np.isfinite(outputs).all(axis=1) & np.isfinite(scores)).tolist()
        outliers = self._calibration.is_outlier(scores).tolist()
        described = (self._values if self._is_value else self._classes)(
            outputs, scores.tolist(), outliers
        )
        return [
            AnsweredRow(output, score, answer if is_finite else None, counted)
            for output, score, is_finite, (answer, counted) in zip(
                outputs, scores, finite, described, strict=True
            )
        ]

    def _values(
        self, outputs: NDArray[np.float32], scores: list[float], outliers: list[bool]
    ) -> list[tuple[dict[str, Any], Counted]]:
        described = []
        for value, score, is_outlier in zip(outputs[:, 0].tolist(), scores, outliers, strict=True):
            interval = self._calibration.interval(value)
            answer = {
                "value": value,
                "interval": interval and list(interval),
                "outlier_score": score,
                "is_outlier": is_outlier,
            }
            described.append((answer, ("", 0.0, is_outlier)))
        return described

    def _classes(
        self, outputs: NDArray[np.float32], scores: list[float], outliers: list[bool]
    ) -> list[tuple[dict[str, Any], Counted]]:
        labels = self._labels
        best_first = np.argsort(-outputs, axis=1, kind="stable").tolist()
        set_sizes = (
            self._calibration.prediction_sets(outputs).sum(axis=1).tolist()
        )  # a set holds the most probable ones
        described = []
        rows = zip(outputs.tolist(), best_first, set_sizes, scores, outliers, strict=True)
        for probabilities, order, set_size, score, is_outlier in rows:
            first = order[0]
            best = labels[first]
            answer = {
                "label": best,
                "probabilities": dict(zip(labels, probabilities, strict=True)),
                "prediction_set": [best]
                if set_size == 1
                else [labels[index] for index in order[:set_size]],
                "outlier_score": score,
                "is_outlier": is_outlier,
            }
            described.append((answer, (best, probabilities[first], is_outlier)))
        return described

    @cached_property
    def _is_value(self) -> bool:
        return self.bundle.manifest.output.kind == "value"

    @cached_property
    def _labels(self) -> list[str]:
        return self.bundle.manifest.output.labels

    @cached_property
    def _calibration(self) -> Calibration:
        return self.bundle.manifest.calibration_of(self.selection.actual.variant)

    def card(self) -> dict[str, Any]:
        """What `/model` shows: everything known about this model and how it runs here."""
        manifest, target = self.bundle.manifest, self.selection.target_certificate
        return {
            "model_version": self.version,
            "bundle_digest": self.bundle.digest,
            "task": manifest.task,
            "labels": manifest.output.labels,
            "input": describe_input(manifest.input),
            "calibration": manifest.calibration_of(self.selection.actual.variant).model_dump(
                mode="json"
            ),
            "coverage": describe_coverage(
                self._calibration.conformal, manifest.coverage_of(self.selection.actual.variant)
            ),
            "metrics": {
                name: metric.model_dump(mode="json") for name, metric in manifest.metrics.items()
            },
            "baseline": manifest.baseline,
            "execution": {
                "requested": self.selection.requested,
                "actual": self.selection.actual.model_dump(mode="json"),
                "why": self.selection.why,
                "passed_over": self.selection.passed_over,
                "max_batch_size": self.max_batch_size,
            },
            "golden_rows": self.golden_rows.model_dump(mode="json") if self.golden_rows else None,
            "choice": {
                provider: choice.model_dump(mode="json")
                for provider, choice in manifest.choice.items()
            },
            "left_out": manifest.left_out,
            "certificate": self.certificate.model_dump(mode="json"),
            "target_certificate": target.model_dump(mode="json") if target else None,
            "lineage": manifest.lineage.model_dump(mode="json"),
            "versions": manifest.versions,
        }


def finite_answer(answer: dict[str, Any] | None) -> dict[str, Any]:
    """The answer; InvalidAnswerError if there is none."""
    if answer is None:
        raise InvalidAnswerError("the model answered NaN or an infinity")
    return answer


def finite_answers(rows: Sequence[AnsweredRow]) -> list[dict[str, Any]]:
    """The answer of each row; InvalidAnswerError if there is none of one."""
    return [finite_answer(row.answer) if row.answer is None else row.answer for row in rows]
