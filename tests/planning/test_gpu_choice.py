"""The smallest GPUs for a training, and their price."""

import pytest

from slipway.planning.gpu_choice import (
    GPU_TYPES,
    GpuChoice,
    choose_gpus,
    describe_choices,
    parse_prices,
    step_seconds,
)
from slipway.planning.memory_plan import Traces, device_memory
from slipway.planning.strategy_settings import STRATEGIES_BY_TRAFFIC, Setting
from slipway.system.errors import ParamsError
from tests.planning.adam_states import traces

pytestmark = pytest.mark.unit


def settings(
    states: Traces, flop: float = 1e15, sent: float = 0.0, batch_size: int = 64
) -> list[Setting]:
    """Return the data-parallel settings of a step of `flop` operations, which all send as much."""
    found = []
    for num_gpus in (1, 2, 4, 8, 16, 32, 64):
        for strategy in STRATEGIES_BY_TRAFFIC if num_gpus > 1 else ("single",):
            memory = device_memory(states, strategy, "bf16-mixed", num_gpus)
            found.append(Setting(strategy, num_gpus, memory, flop / num_gpus, sent))
    return [each for each in found if each.num_gpus <= batch_size]


def smallest(choices: list[GpuChoice]) -> dict[str, Setting]:
    """Return the first setting of each type."""
    return {choice.name: choice.setting for choice in reversed(choices)}


def test_a_larger_network_is_planned_on_more_gpus_with_more_sharding() -> None:
    small, large = (
        smallest(choose_gpus(settings(traces(size)), "bf16-mixed", 1, {}))
        for size in (10**9, 8 * 10**9)
    )
    assert (small["H100"].num_gpus, small["H100"].strategy) == (1, "single")
    assert large["H100"].num_gpus > 1
    assert large["H100"].strategy in ("deepspeed_stage_2", "fsdp", "deepspeed_stage_3")
    assert large["H100"].memory.total <= 0.9 * 80e9
    assert large["A100-40GB"].num_gpus > large["H100"].num_gpus
    assert "T4" not in small  # it has no bfloat16


def test_the_price_counts_all_gpus_and_hours_and_a_type_without_price_is_named() -> None:
    prices = parse_prices(["H100=2.5"])
    flop = 989e12 * 0.4 * 3600  # an hour
    choices = choose_gpus(settings(traces(10**9), flop, batch_size=1), "bf16-mixed", 1, prices)
    chosen = {choice.name: choice for choice in choices}
    assert chosen["H100"].price == pytest.approx(2.5)
    assert chosen["A100-80GB"].price is None
    text = describe_choices(choices, prices)
    assert "cheapest  1 x H100 with single, 2.50" in text
    missing = ", ".join(choice.name for choice in choices if choice.name != "H100")
    assert f"no price for {missing}: add --price-per-gpu-hour NAME=PRICE" in text


def test_the_fastest_setting_is_named_even_if_it_has_fewer_gpus() -> None:
    quick = choose_gpus(settings(traces(10**8)), "bf16-mixed", 1, {})
    assert "fastest   64 x H100 with ddp" in describe_choices(quick, {})
    # Within a machine 450 GB/s, between machines 12.5: a step of 0.32 s on 8 GPUs sends for 2 s.
    slow = choose_gpus(settings(traces(10**8), sent=25e9), "bf16-mixed", 1, {})
    assert "fastest   8 x H100 with ddp" in describe_choices(slow, {})


def test_pipeline_and_tensor_parallel_steps_take_the_sum_of_computing_and_sending() -> None:
    memory = device_memory(traces(10**8), "ddp", "bf16-mixed", 2)
    kind = GPU_TYPES["H100"]
    flop, sent = kind.half_rate * 0.4e12, kind.link_rate * 1e9  # a second each
    found = [
        step_seconds(Setting(strategy, 2, memory, flop, sent), kind, "bf16-mixed")
        for strategy in ("ddp", "fsdp", "tensor_parallel", "pipeline")
    ]
    assert found == pytest.approx([1, 1, 2, 2])


def test_copies_send_values_within_a_machine_and_only_gradients_between_machines() -> None:
    memory = device_memory(traces(10**8), "ddp", "bf16-mixed", 2)
    kind = GPU_TYPES["H100"]
    whole = Setting("tensor_parallel", 64, memory, 0, 1e9, model_parallel=64)
    copies = Setting("tensor_parallel", 64, memory, 0, 1e9, 8, averaged_bytes=1e9)
    assert (whole.name, copies.name) == ("tensor_parallel", "tensor_parallel, model_parallel 8")
    assert step_seconds(whole, kind, "bf16-mixed") == pytest.approx(1 / 12.5)
    assert step_seconds(copies, kind, "bf16-mixed") == pytest.approx(1 / 450 + 1 / 12.5)
    # FSDP2 gathers weights of the next block while a process computes and waits for values.
    flop = kind.half_rate * 0.4e12
    for sent, seconds in ((1e9, 1 + 1 / 450), (25e9, 2)):
        sharded = Setting("fsdp", 64, memory, flop, 1e9, 8, averaged_bytes=sent)
        assert step_seconds(sharded, kind, "bf16-mixed") == pytest.approx(seconds)


def test_auto_is_fp16_on_a_t4_and_leaves_out_strategies_without_a_loss_scale() -> None:
    choices = choose_gpus(settings(traces(10**8)), "auto", 1, {})
    found = {(each.name, each.setting.strategy): each.precision for each in choices}
    assert found["T4", "single"] == found["T4", "ddp"] == "16-mixed"
    assert ("T4", "fsdp") not in found
    assert (found["H100", "single"], found["H100", "ddp"]) == ("bf16-mixed", "16-mixed")
    assert found["H100", "fsdp"] == "bf16-mixed"


def test_a_training_that_fits_on_no_gpu_type_is_reported_as_such() -> None:
    nowhere = settings(traces(10**9, activations=10**12))
    assert choose_gpus(nowhere, "bf16-mixed", 1, {}) == []
    assert "fits on none of T4, L4" in describe_choices([], {})


@pytest.mark.parametrize("text", ["H100", "H100=cheap", "H100=-1", "H100=inf", "GTX=1"])
def test_a_wrong_price_is_refused(text: str) -> None:
    with pytest.raises(ParamsError, match=r"--price-per-gpu-hour .* Write for example"):
        parse_prices([text])
