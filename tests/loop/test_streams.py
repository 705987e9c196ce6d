"""The closed loop over 60 simulated days; bench/loop.py measures more streams."""

import pytest

from bench.loop import SimulatedLoop
from bench.loop_traffic import PLANS, StreamPlan

BY_NAME = {plan.name: plan for plan in PLANS}


@pytest.mark.nightly(seconds=40)
def test_traffic_without_drift_starts_no_training() -> None:
    end = SimulatedLoop(StreamPlan("clean"), seed=1).run()
    assert (end.trainings, end.deployments) == (0, 0)


@pytest.mark.nightly(seconds=40)
def test_after_a_shift_accuracy_is_within_one_point_of_an_oracle() -> None:
    end = SimulatedLoop(BY_NAME["sudden shift on day 20"], seed=101).run()
    assert (end.trainings, end.deployments, end.undecided) == (1, 1, 0)  # no further cycle
    assert end.oracle - end.accuracy < 0.01
    assert end.accuracy > end.unchanged + 0.1


@pytest.mark.nightly(seconds=40)
def test_after_slow_drift_the_loop_is_within_a_point_of_an_oracle() -> None:
    end = SimulatedLoop(BY_NAME["slow drift from day 15 to 45"], seed=100).run()
    assert end.deployments >= 2
    assert end.undecided == 0
    assert end.oracle - end.accuracy < 0.01


@pytest.mark.nightly(seconds=40)
def test_without_a_decision_nothing_is_deployed() -> None:
    end = SimulatedLoop(BY_NAME["sudden shift, nobody decides"], seed=100).run()
    assert end.requests >= 1
    assert end.deployments == 0


@pytest.mark.nightly(seconds=40)
def test_a_key_with_wrong_labels_is_named_and_nothing_is_deployed() -> None:
    end = SimulatedLoop(BY_NAME["clean, one key with 30 % wrong labels"], seed=100).run()
    assert end.named == {"shop-5"}
    assert end.deployments == 0
