import pytest

from slipway.artifacts.bundle import MeasuredFigures, Metric, Ratio
from slipway.config.sections import GoalParams
from slipway.export.precision.choice import choose

MEANT_FOR = {"fp32": True, "fp16": False, "int8": True, "int8_dynamic": True}


def metric(value: float) -> Metric:
    return Metric(value=value, low=value - 0.01, high=value + 0.01, confidence=0.95, rows=400)


def ratio(value: float) -> Ratio:
    return Ratio(value=value, low=0.9 * value, high=1.1 * value)


def figures(
    loss: float = 0.0,
    throughput: float = 2.0,
    latency: float = 1.5,
    num_bytes: int = 25,
    batch_dependence: float = 0.0,
) -> MeasuredFigures:
    return MeasuredFigures(
        metric=metric(0.98 - loss),
        metric_loss=metric(loss),
        max_difference=0.01,
        num_flipped=1,
        batch_dependence=batch_dependence,
        p50_ms=1.0,
        p99_ms=2.0,
        rows_per_second=1000 * throughput,
        batch_size=32,
        latency=ratio(latency),
        throughput=ratio(throughput),
        bytes=num_bytes,
        memory_bytes=None,
    )


FP32 = figures(throughput=1.0, latency=1.0, num_bytes=100).model_copy(
    update={"latency": Ratio(value=1, low=1, high=1), "throughput": Ratio(value=1, low=1, high=1)}
)


def verdicts(prefer: str = "fastest", **others: MeasuredFigures) -> tuple[str, dict[str, str]]:
    goal = GoalParams.model_validate({"max_metric_loss": 0.005, "prefer": prefer})
    choice = choose({"fp32": FP32} | others, MEANT_FOR, goal, "image_classification", "cpu", {})
    return choice.variant, {variant: found.verdict for variant, found in choice.figures.items()}


def test_goal_fastest_chooses_the_fastest_variant_within_the_budget() -> None:
    assert verdicts(int8=figures(throughput=2.0), int8_dynamic=figures(throughput=1.5)) == (
        "int8",
        {"fp32": "the reference", "int8": "chosen", "int8_dynamic": "fits, but int8 is faster"},
    )


def test_goal_smallest_chooses_the_smallest_variant_within_the_budget() -> None:
    chosen, verdict = verdicts(
        "smallest",
        int8=figures(throughput=3.0, num_bytes=30),
        int8_dynamic=figures(throughput=1.0, num_bytes=25),
    )
    assert (chosen, verdict["int8"]) == (
        "int8_dynamic",
        "not smaller than int8_dynamic: 30 B, 25 B",
    )


@pytest.mark.parametrize("prefer", ["fastest", "smallest"])
@pytest.mark.parametrize(
    ("planted", "verdict"),
    [
        (
            figures(throughput=0.5),
            "slower than fp32: 0.50 times (0.45 to 0.55) its rows per second",
        ),
        (figures(latency=0.7), "slower than fp32 for one row: 0.70 times (0.63 to 0.77) as fast"),
        (figures(loss=0.0051), "over the budget: loses 0.51 points, at most 0.50 points"),
        (
            figures(batch_dependence=0.02),
            "an answer depends on the other rows of its batch, by up to 0.02",
        ),
    ],
)
def test_an_unfit_variant_is_not_chosen_and_the_reason_is_recorded(
    prefer: str, planted: MeasuredFigures, verdict: str
) -> None:
    assert verdicts(prefer, int8=planted) == ("fp32", {"fp32": "chosen", "int8": verdict})
    assert verdicts(prefer, int8=figures())[0] == "int8"


def test_variant_counts_as_faster_only_if_the_interval_of_its_speedup_is_above_1() -> None:
    chosen, verdict = verdicts(int8=figures(throughput=1.05))
    assert chosen == "fp32"
    assert (
        verdict["int8"]
        == "not shown to be faster than fp32: 1.05 times (0.95 to 1.16) its rows per second"
    )
    assert verdicts("smallest", int8=figures(throughput=1.05))[0] == "int8", (
        "nor is it shown to be slower"
    )


def test_a_variant_for_another_provider_is_measured_but_not_chosen() -> None:
    assert verdicts(fp16=figures(throughput=9.0))[1]["fp16"] == "not meant for cpu"


def test_variant_with_a_loss_equal_to_the_budget_may_be_chosen() -> None:
    assert verdicts(int8=figures(loss=0.98 - 0.975))[0] == "int8"  # above 0.005 in binary


def test_the_reason_for_choosing_fp32_lists_the_verdicts_on_the_others() -> None:
    goal = GoalParams(max_metric_loss=0.005, prefer="fastest")
    found = {"fp32": FP32, "fp16": figures(), "int8": figures(throughput=0.5)}
    assert choose(found, MEANT_FOR, goal, "image_classification", "cpu", {}).reason == (
        "Goal: lose at most 0.50 points, then the fastest. Nothing else is better. "
        "int8: slower than fp32: 0.50 times (0.45 to 0.55) its rows per second."
    )


def test_the_reason_of_a_choice_states_goal_and_figures() -> None:
    goal = GoalParams(max_metric_loss=0.005, prefer="fastest")
    reason = choose(
        {"fp32": FP32, "int8": figures()}, MEANT_FOR, goal, "table_regression", "cpu", {}
    ).reason
    assert reason == (
        "Goal: lose at most 0.50 %, then the fastest. int8 loses 0.00 %, "
        "answers 2.00 times (1.80 to 2.20) the rows of fp32 per "
        "second and one row 1.50 times (1.35 to 1.65) as fast, in 25 B instead of 100 B."
    )


def test_the_reason_of_a_choice_calls_a_negative_loss_a_gain() -> None:
    goal = GoalParams(max_metric_loss=0.005, prefer="fastest")
    found = {"fp32": FP32, "int8": figures(loss=-0.0149)}
    reason = choose(found, MEANT_FOR, goal, "image_classification", "cpu", {}).reason
    assert "int8 gains 1.49 points, answers" in reason
