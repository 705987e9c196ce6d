"""From the answers of the trained network to all that is said of them: metrics, slices, the comparison with the released model, gates."""

from collections.abc import Sequence

from numpy import float64
from numpy.typing import NDArray

from slipway.artifacts.gates import GateResult
from slipway.config.sections import EvaluateParams
from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.kinds.registry import is_classification
from slipway.metrics.baseline import baseline_scores
from slipway.metrics.scores import Resampling, measure, why_absent
from slipway.metrics.target_errors import errors_by_target
from slipway.reports.evaluation.gates import apply_gates, apply_slice_gates
from slipway.reports.evaluation.record import Evaluation, measure_without_leaked
from slipway.reports.evaluation.reference_comparison import ReleasedAnswers, compare, released_gate
from slipway.reports.evaluation.slice_scores import RowAnswers, score_slices
from slipway.reports.evaluation.slices import Dimension
from slipway.reports.evaluation.uncertainty import UncertaintyReport

_NUM_RANGES = 5  # of a numeric target


def measure_rows(
    test: PackedSplit,
    manifest: PackedManifest,
    train_targets: NDArray[float64],
    worth: UncertaintyReport,
    dimensions: Sequence[Dimension],
    released: ReleasedAnswers | None,
    wanted: EvaluateParams,
) -> Evaluation:
    """`worth` and `released` have answers to the rows of `test`, which `dimensions` cut.

    The baseline is fitted on `train_targets`.
    """
    outputs, resampling = worth.answers.outputs, worth.resampling
    answers = RowAnswers(manifest.task, test.targets, outputs, wanted.top_k)
    return Evaluation(
        manifest.task,
        manifest.classes,
        test.ids,
        test.sources,
        test.targets,
        outputs,
        measure(manifest.task, test.targets, outputs, resampling, top_k=wanted.top_k),
        test.leaked,
        measure_without_leaked(
            manifest.task, test.targets, outputs, test.leaked, resampling, wanted.top_k
        ),
        score_slices(dimensions, answers, wanted.slice_min_rows, resampling),
        compare(answers, released, resampling) if released else None,
        []
        if is_classification(manifest.task)
        else errors_by_target(test.targets, outputs, _NUM_RANGES, resampling),
        worth,
        baseline_scores(
            manifest.task, train_targets, test.targets, len(manifest.classes), wanted.top_k
        ),
    )


def judge(
    evaluation: Evaluation, wanted: EvaluateParams, resampling: Resampling
) -> list[GateResult]:
    """Every gate in the params: passed, missed or unjudged."""
    absent = why_absent(evaluation.task, evaluation.targets, len(evaluation.classes), wanted.top_k)
    gates = apply_gates(wanted.gates, evaluation.metrics, absent)
    if evaluation.slices is not None:
        answers = RowAnswers(evaluation.task, evaluation.targets, evaluation.outputs, wanted.top_k)
        gates += apply_slice_gates(wanted.slice_gates, evaluation.slices, answers, resampling)
    return gates + (
        [released_gate(evaluation.released, wanted.max_regression)] if evaluation.released else []
    )
