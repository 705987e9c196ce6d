"""Memory of a training by Adam, made up without tracing a network."""

from slipway.planning.memory_plan import Traces
from slipway.planning.step_memory import StepMemory


def traces(num_parameters: int, activations: int = 0, block: int = 0) -> Traces:
    """States of Adam without a step."""
    full = StepMemory(4 * num_parameters, 4 * num_parameters, 8 * num_parameters, 0, activations)
    cast = StepMemory(2 * num_parameters, 2 * num_parameters, 0, 0, activations)
    return Traces(full, full, cast, block)
