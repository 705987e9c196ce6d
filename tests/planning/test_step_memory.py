"""The memory of a step, traced on tensors without content."""

import pytest

from slipway.planning.step_memory import trace_step
from tests.project_params import PROJECT
from tests.training.networks.test_text_networks import TOKENS, network

pytestmark = pytest.mark.unit


@pytest.mark.process
def test_a_step_on_texts_is_traced_at_their_whole_length() -> None:
    traced = [
        trace_step(network("small_transformer", TOKENS, patch=1), PROJECT.train, rows)
        for rows in (2, 4)
    ]
    assert traced[1].activations > 1.5 * traced[0].activations
    assert traced[1].parameters == traced[0].parameters
