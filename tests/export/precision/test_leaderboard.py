"""The leaderboard with fake models: a slow one, a lossy one, one that depends on its batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.bundle import OutputContract, Ratio
from slipway.artifacts.certificate import Execution
from slipway.artifacts.uncertainty import Answers
from slipway.config.sections import GoalParams
from slipway.export.certification import timings
from slipway.export.certification.timings import fewest_rounds, measure_in_turns, median_ratio
from slipway.export.precision import leaderboard
from slipway.export.precision.choice import MAX_BATCH_DEPENDENCE, choose
from slipway.export.precision.leaderboard import (
    Contest,
    Effort,
    MeasuredVariant,
    measure_provider,
    metric_loss,
)
from slipway.metrics.scores import Resampling
from slipway.system.errors import ParityError
from tests.calibrations import CALIBRATION
from tests.fake_clock import CLOCK
from tests.packed_rows import packed_split

NUM_ROWS, NUM_CLASSES = 40, 4
TARGETS = np.arange(NUM_ROWS) % NUM_CLASSES
RESAMPLING = Resampling(seed=7, num_samples=100, confidence=0.95)
OUTPUT = OutputContract(kind="probabilities", labels=list("abcd"))
IDS = [f"{row:016x}" for row in range(NUM_ROWS)]
GRAPHS = dict.fromkeys(["fp32", "int8"], Path(__file__))  # only their size is read


@pytest.fixture(autouse=True)
def _fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (leaderboard, timings):
        monkeypatch.setattr(module, "time", CLOCK)


class PlantedRunner:
    """A fake model that reads the class from the row; it can be wrong, slow or batch-dependent."""

    actual = Execution(backend="onnxruntime", provider="cpu", precision="fp32", variant="fp32")

    def __init__(
        self,
        num_wrong: int = 0,
        delay_s: float = 0.0002,
        per_neighbour: float = 0.0,
        delay_per_row_s: float = 0.0,
    ) -> None:
        self._num_wrong, self._delay_s, self._per_neighbour, self._delay_per_row_s = (
            num_wrong,
            delay_s,
            per_neighbour,
            delay_per_row_s,
        )

    def run(self, batch: NDArray[Any]) -> Answers:
        CLOCK.sleep(self._delay_s + len(batch) * self._delay_per_row_s)
        rows = batch[:, 0].astype(int)
        classes = (rows + (rows < self._num_wrong)) % NUM_CLASSES
        share = 0.7 + self._per_neighbour * (len(batch) - 1)
        answers = np.full(
            (len(batch), NUM_CLASSES), (1 - share) / (NUM_CLASSES - 1), dtype=np.float32
        )
        answers[np.arange(len(batch)), classes] = share
        return Answers(answers, np.ones(len(batch), dtype=np.float32))


def contest() -> Contest:
    inputs = np.arange(NUM_ROWS, dtype=np.float32)[:, None]
    return Contest(
        "table_classification",
        OUTPUT,
        packed_split(inputs, TARGETS, IDS, IDS),
        RESAMPLING,
        largest_batch=8,
    )


def measured(int8: PlantedRunner, fp32: PlantedRunner | None = None) -> dict[str, MeasuredVariant]:
    return measure_provider(
        "cpu",
        {"fp32": fp32 or PlantedRunner(), "int8": int8},
        GRAPHS,
        contest(),
        Effort(limit_s=0.2, memory=False),
    )


def verdict(lines: dict[str, MeasuredVariant]) -> tuple[str, str]:
    goal = GoalParams(max_metric_loss=0.03, prefer="fastest")
    figures = {variant: line.figures for variant, line in lines.items()}
    choice = choose(figures, {"fp32": True, "int8": True}, goal, "table_classification", "cpu", {})
    return choice.variant, choice.figures["int8"].verdict


def test_a_planted_slow_variant_is_not_chosen_and_the_reason_is_recorded() -> None:
    chosen, reason = verdict(measured(PlantedRunner(delay_s=0.02)))
    assert chosen == "fp32"
    assert reason.startswith("slower than fp32: 0.")


def test_a_planted_fast_variant_is_chosen() -> None:
    assert verdict(measured(PlantedRunner(), fp32=PlantedRunner(delay_s=0.02)))[0] == "int8"


def test_planted_lossy_variant_exceeds_the_budget_and_its_flipped_rows_are_listed() -> None:
    lines = measured(PlantedRunner(num_wrong=2), fp32=PlantedRunner(delay_s=0.02))
    figures = lines["int8"].figures
    assert verdict(lines) == ("fp32", "over the budget: loses 5.00 points, at most 3.00 points")
    assert (lines["int8"].flipped, figures.num_flipped) == (IDS[:2], 2)
    assert figures.metric.value == 0.95
    assert figures.metric_loss.value == pytest.approx(0.05)
    assert figures.metric_loss.low <= 0.05 <= figures.metric_loss.high
    assert (
        verdict(measured(PlantedRunner(num_wrong=1), fp32=PlantedRunner(delay_s=0.02)))[0] == "int8"
    )


def test_leaderboard_flags_ood_rows_by_the_variants_own_threshold() -> None:
    strict = CALIBRATION.model_copy(
        update={"ood": CALIBRATION.ood.model_copy(update={"threshold": 1.5})}
    )
    rivals = replace(
        contest(), calibrations={"fp32": CALIBRATION, "int8": strict}
    )  # every planted score is 1
    runners = {"fp32": PlantedRunner(), "int8": PlantedRunner()}
    figures = {
        name: line.figures
        for name, line in measure_provider(
            "cpu", runners, GRAPHS, rivals, Effort(limit_s=0.2, memory=False)
        ).items()
    }
    flagged = {name: found.ood_fraction for name, found in figures.items()}
    assert {name: found and found.value for name, found in flagged.items()} == {
        "fp32": 1.0,
        "int8": 0.0,
    }
    assert figures["int8"].score_rank is None  # all equal


def test_leaderboard_detects_predictions_that_depend_on_their_batch() -> None:
    lines = measured(PlantedRunner(per_neighbour=0.001), fp32=PlantedRunner(delay_s=0.02))
    assert verdict(lines)[1].startswith(
        "an answer depends on the other rows of its batch, by up to 0.0"
    )
    assert lines["fp32"].figures.batch_dependence == 0.0


class PlantedValues:
    """A fake model that predicts about 200,000, shifted by the batch size."""

    actual = PlantedRunner.actual

    def __init__(self, per_neighbour: float = 0.0) -> None:
        self._per_neighbour = per_neighbour

    def run(self, batch: NDArray[Any]) -> Answers:
        values = 200_000 + batch[:, :1] + self._per_neighbour * (len(batch) - 1)
        return Answers(values.astype(np.float32), np.ones(len(batch), dtype=np.float32))


@pytest.mark.parametrize(
    ("per_neighbour", "depends"), [(0.02, False), (0.2, True)]
)  # float32 has a number every 0.016 there
def test_rounding_of_large_values_does_not_count_as_batch_dependence(
    per_neighbour: float, depends: bool
) -> None:
    inputs = np.arange(NUM_ROWS, dtype=np.float32)[:, None]
    rows = packed_split(inputs, 200_000 + inputs[:, 0], IDS, IDS)
    values = Contest(
        "table_regression",
        OutputContract(kind="value", labels=[]),
        rows,
        RESAMPLING,
        largest_batch=8,
    )
    runners = {"fp32": PlantedValues(), "int8": PlantedValues(per_neighbour)}
    found = measure_provider("cpu", runners, GRAPHS, values, Effort(limit_s=0.2, memory=False))[
        "int8"
    ].figures
    assert (found.batch_dependence > MAX_BATCH_DEPENDENCE) == depends


def test_leaderboard_refuses_a_variant_that_predicts_other_labels() -> None:
    with pytest.raises(ParityError, match=r"int8 graph keeps 0\.0% of fp32's labels"):
        measured(PlantedRunner(num_wrong=NUM_ROWS))


def test_metric_loss_of_a_numeric_target_is_the_relative_growth_of_the_rmse() -> None:
    targets = np.linspace(0, 1, 50)
    before, after = ((targets[:, None] + shift).astype(np.float32) for shift in (0.1, 0.12))
    found = metric_loss("table_regression", targets, before, after, RESAMPLING)
    assert found.value == pytest.approx(0.2, rel=1e-3)
    assert found.low <= found.value <= found.high
    assert metric_loss("table_regression", targets, after, before, RESAMPLING).value < 0


def test_models_are_timed_in_the_same_rounds_at_the_same_batch_sizes() -> None:
    runners = {"fp32": PlantedRunner(), "int8": PlantedRunner(delay_s=0.0005)}
    timings = measure_in_turns(runners, contest().validation.inputs, 6, 5.0, 0.95)
    assert [list(sizes) for sizes in timings.blocks.values()] == [[1, 2, 4, 6], [1, 2, 4, 6]]
    assert {len(rounds) for sizes in timings.blocks.values() for rounds in sizes.values()} == {11}
    p50, p99 = timings.p50_ms("int8"), timings.p99_ms("int8")
    assert p99 is not None
    assert 0.5 <= p50 <= p99
    assert timings.best_batch_size("int8") == 6


def test_slow_model_is_timed_at_few_batch_sizes_without_p99_but_with_an_interval() -> None:
    timings = measure_in_turns(
        {"fp32": PlantedRunner(delay_per_row_s=0.005)}, contest().validation.inputs, 8, 0.0, 0.95
    )
    assert list(timings.blocks["fp32"]) == [1]
    assert timings.p99_ms("fp32") is None
    assert timings.latency("fp32", "fp32", 0.95) == Ratio(value=1, low=1, high=1)


def test_bounds_of_a_median_are_the_order_statistics_around_it() -> None:
    ratios = [float(number) for number in range(1, 12)]
    assert median_ratio(ratios, 0.95) == Ratio(
        value=6, low=2, high=10
    )  # 98.8 %; from the third to the ninth it would be 93.5 %
    assert median_ratio(ratios, 0.999) == Ratio(value=6, low=1, high=11)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99, 0.999])
def test_fewest_rounds_is_the_smallest_number_with_an_interval(confidence: float) -> None:
    fewest = fewest_rounds(confidence)
    median_ratio([1.0] * fewest, confidence)
    with pytest.raises(ValueError, match=f"needs at least {fewest} ratios"):
        median_ratio([1.0] * (fewest - 1), confidence)


def test_median_intervals_reach_their_confidence() -> None:
    generator = np.random.default_rng(0)
    found = [median_ratio(list(generator.exponential(size=11)), 0.95) for _ in range(1000)]
    assert np.mean([interval.low <= np.log(2) <= interval.high for interval in found]) > 0.97
