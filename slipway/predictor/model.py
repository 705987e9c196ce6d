"""A certified model and its answers; slipway/predictor/loader.py loads it.

Runtimes are imported only for type checking: the server process never loads a model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle, Metric
from slipway.artifacts.golden_rows import GoldenResult
from slipway.artifacts.uncertainty import Calibration, Conformal, decided_classes
from slipway.system.errors import SlipwayError

if TYPE_CHECKING:
    from slipway.artifacts.certificate import Certificate
    from slipway.predictor.batches import Run
    from slipway.predictor.selection import Selection


class InvalidAnswerError(SlipwayError):
    """The model returned an invalid output: NaN, an infinity, or a wrong shape."""


# (most probable class or "", its probability or 0, True for an OOD row)
Counted = tuple[str, float, bool]


class AnsweredRow(NamedTuple):
    """The answer to one image, table row or text, with the outputs that it comes from."""

    outputs: NDArray[np.float32]  # (outputs,)
    score: np.float32  # OOD score
    answer: dict[str, Any] | None  # for the caller; None if a number is not finite
    counted: Counted  # for monitoring, without parsing the answer


@dataclass(frozen=True, eq=False)
class CertifiedModel:
    """A loaded model with a certificate, ready to answer.

    Two objects are equal only if they are the same, because a bundle may be loaded twice.
    """

    bundle: LoadedBundle
    certificate: "Certificate"
    selection: "Selection"
    max_batch_size: int
    run: "Run"
    golden_rows: GoldenResult | None  # None if the bundle has none
    num_threads: int  # of ONNX Runtime
    quick_rows: int = 0  # largest batch that the CPU answers within QUICK_S

    @cached_property
    def version(self) -> str:
        return self.bundle.version

    @cached_property
    def input_kind(self) -> str:
        return self.bundle.manifest.input.kind

    def answer_rows(self, batch: NDArray[Any]) -> list[AnsweredRow]:
        """Answer a batch of (rows, ...) that meets the bundle's input contract."""
        rows = self._rows(*self.run(batch))
        remarks = self.bundle.manifest.input.remarks(batch)
        for row, remark in zip(rows, remarks, strict=False):  # most inputs have no remarks
            if row.answer is not None:
                row.answer.update(remark)
        return rows

    def answer(self, outputs: NDArray[np.float32], score: np.float32) -> dict[str, Any]:
        """Return the caller's answer for one row, from its outputs (outputs,) and OOD score.

        Raises InvalidAnswerError if a number is not finite.
        """
        return finite_answers(self._rows(outputs[np.newaxis], np.asarray([score])))[0]

    def explained_place(self, outputs: NDArray[np.float32]) -> int:
        """Return the position of the output to explain, in `outputs` (outputs,).

        It is the position of the predicted label; of the most probable label for a multi-label
        model; 0 for a value.
        """
        match self.bundle.manifest.output.kind:
            case "value":
                return 0
            case "label_probabilities":
                return int(np.argmax(outputs))
            case "probabilities":
                return int(decided_classes(outputs, self.calibration.thresholds))
            case kind:
                assert_never(kind)

    def _rows(self, outputs: NDArray[np.float32], scores: NDArray[np.float32]) -> list[AnsweredRow]:
        """Create the answers of a batch at once: numpy is as quick with 32 rows as with one."""
        finite = (np.isfinite(outputs).all(axis=1) & np.isfinite(scores)).tolist()
        are_ood = self.calibration.is_ood(scores).tolist()
        describe = {
            "value": self._values,
            "probabilities": self._classes,
            "label_probabilities": self._label_sets,
        }[self.bundle.manifest.output.kind]
        described = describe(outputs, scores.tolist(), are_ood)
        return [
            AnsweredRow(output, score, answer if is_finite else None, counted)
            for output, score, is_finite, (answer, counted) in zip(
                outputs, scores, finite, described, strict=True
            )
        ]

    def _values(
        self, outputs: NDArray[np.float32], scores: list[float], are_ood: list[bool]
    ) -> Iterator[tuple[dict[str, Any], Counted]]:
        for value, score, is_ood in zip(outputs[:, 0].tolist(), scores, are_ood, strict=True):
            interval = self.calibration.interval(value)
            answer = {
                "value": value,
                "interval": interval and list(interval),
                "ood_score": score,
                "is_ood": is_ood,
            }
            yield answer, ("", 0.0, is_ood)

    def _classes(
        self, outputs: NDArray[np.float32], scores: list[float], are_ood: list[bool]
    ) -> Iterator[tuple[dict[str, Any], Counted]]:
        labels = self._labels
        best_first = np.argsort(-outputs, axis=1, kind="stable").tolist()
        # A prediction set holds the most probable classes.
        set_sizes = self.calibration.prediction_sets(outputs).sum(axis=1).tolist()
        if self.calibration.decision is not None:
            yield from self._decided(outputs, best_first, set_sizes, scores, are_ood)
            return
        rows = zip(outputs.tolist(), best_first, set_sizes, scores, are_ood, strict=True)
        for probabilities, order, set_size, score, is_ood in rows:
            first = order[0]
            best = labels[first]
            answer = {
                "label": best,
                "probabilities": dict(zip(labels, probabilities, strict=True)),
                "prediction_set": [labels[index] for index in order[:set_size]],
                "ood_score": score,
                "is_ood": is_ood,
            }
            yield answer, (best, probabilities[first], is_ood)

    def _decided(
        self,
        outputs: NDArray[np.float32],
        best_first: list[list[int]],
        set_sizes: list[int],
        scores: list[float],
        are_ood: list[bool],
    ) -> Iterator[tuple[dict[str, Any], Counted]]:
        """Create the answers of a classifier with a decision threshold for two classes.

        The predicted label may not be the most probable one. A prediction set of one label is
        always the predicted label.
        """
        labels, calibration = self._labels, self.calibration
        assert calibration.decision is not None
        assert calibration.thresholds is not None
        chosen = decided_classes(outputs, calibration.thresholds).tolist()
        facts = calibration.decision.facts(outputs, calibration.thresholds)
        rows = zip(
            outputs.tolist(), chosen, best_first, set_sizes, facts, scores, are_ood, strict=True
        )
        for probabilities, own, order, set_size, fact, score, is_ood in rows:
            likely = order if set_size > 1 else [own]
            answer = {
                "label": labels[own],
                "probabilities": dict(zip(labels, probabilities, strict=True)),
                "prediction_set": [labels[index] for index in likely],
                **fact,
                "ood_score": score,
                "is_ood": is_ood,
            }
            yield answer, (labels[own], probabilities[own], is_ood)

    def _label_sets(
        self, outputs: NDArray[np.float32], scores: list[float], are_ood: list[bool]
    ) -> Iterator[tuple[dict[str, Any], Counted]]:
        labels = self._labels
        given = self.calibration.given(outputs).tolist()
        best_first = np.argsort(-outputs, axis=1, kind="stable").tolist()
        inside = self.calibration.prediction_sets(outputs).tolist()
        rows = zip(outputs.tolist(), given, best_first, inside, scores, are_ood, strict=True)
        for probabilities, own, order, likely, score, is_ood in rows:
            answer = {
                "labels": [label for label, is_given in zip(labels, own, strict=True) if is_given],
                "probabilities": dict(zip(labels, probabilities, strict=True)),
                "prediction_set": [labels[index] for index in order if likely[index]],
                "ood_score": score,
                "is_ood": is_ood,
            }
            yield answer, ("", 0.0, is_ood)

    @cached_property
    def _labels(self) -> list[str]:
        return self.bundle.manifest.output.labels

    @cached_property
    def calibration(self) -> Calibration:
        """The calibration of the variant that runs: temperature, thresholds and decision."""
        return self.bundle.manifest.calibration_of(self.selection.actual.variant)

    def info(self) -> dict[str, Any]:
        """Return the content of `GET /model`: the model, its quality, and how it runs here."""
        from slipway.runtimes.runtime import describe_session  # loaded with a model only

        manifest, target = self.bundle.manifest, self.selection.target_certificate
        actual = self.selection.actual
        return {
            "model_version": self.version,
            "bundle_digest": self.bundle.digest,
            "task": manifest.task,
            "labels": manifest.output.labels,
            "input": manifest.input.describe(),
            "calibration": manifest.calibration_of(self.selection.actual.variant).model_dump(
                mode="json"
            ),
            "coverage": describe_coverage(
                self.calibration.conformal, manifest.coverage_of(self.selection.actual.variant)
            ),
            "metrics": {
                name: metric.model_dump(mode="json") for name, metric in manifest.metrics.items()
            },
            "baseline": manifest.baseline,
            "execution": {
                "requested": self.selection.requested,
                "actual": actual.model_dump(mode="json"),
                "why": self.selection.why,
                "passed_over": self.selection.passed_over,
                "max_batch_size": self.max_batch_size,
                "num_threads": self.num_threads,
                "session_options": describe_session(self.num_threads)
                if actual.backend == "onnxruntime"
                else None,
                "certified_session_options": self.certificate.hardware.get("session_options"),
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


def finite_answers(rows: Sequence[AnsweredRow]) -> list[dict[str, Any]]:
    """Return the answer of each row. Raises InvalidAnswerError if a row has none."""
    answers = [row.answer for row in rows if row.answer is not None]
    if len(answers) < len(rows):
        raise InvalidAnswerError("the model answered NaN or an infinity")
    return answers


def describe_coverage(conformal: Conformal, measured: Metric | None) -> dict[str, Any]:
    """Describe the coverage of prediction sets or intervals: target, test-set estimate, caveats."""
    return {
        "target": conformal.coverage,
        "measured": measured.model_dump(mode="json") if measured else None,
        "verdict": conformal.verdict(measured.low, measured.high) if measured else None,
        "fitting_rows": conformal.rows,
        "few_rows": conformal.has_few_rows,
    }
