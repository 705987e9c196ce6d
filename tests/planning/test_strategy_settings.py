"""The strategies possible for a training, with the memory and the work of each GPU."""

import pytest

from slipway.planning.gpu_choice import GPU_TYPES, choose_gpus, describe_choices, step_seconds
from slipway.planning.memory_plan import STRATEGIES, device_memory
from slipway.planning.strategy_settings import (
    STRATEGIES_BY_TRAFFIC,
    Setting,
    possible_settings,
    settings_of_strategies,
)
from slipway.training.distributed.placement import TrainingHost, place
from slipway.training.job import step_shape
from slipway.training.networks.networks import Network
from tests.planning.adam_states import traces
from tests.project_params import PROJECT
from tests.training.networks.test_text_networks import network

pytestmark = pytest.mark.unit


@pytest.mark.process
def test_tensor_parallel_and_pipeline_are_proposed_only_for_networks_that_can_be_divided() -> None:
    built = network("small_transformer", width=64, num_layers=2, num_heads=2)
    params = PROJECT.train.model_copy(update={"batch_size": 4})
    found, refusals = possible_settings(built, params, "32-true", traces(10**6), rows=4)
    sizes = {(each.name, each.num_gpus) for each in found}
    assert {("tensor_parallel", 2), ("pipeline", 2), ("ddp", 4)} <= sizes
    assert not sizes & {("tensor_parallel", 4), ("pipeline", 4)}
    by_name = {each.strategy: each for each in found if each.num_gpus == 2}
    shared, copied = by_name["tensor_parallel"], by_name["ddp"]
    # Half of the columns for four rows, or all columns for half of the rows.
    assert shared.flop == pytest.approx(copied.flop, rel=0.25)
    # Two micro-batches of two stages take three turns, of half the blocks each.
    assert by_name["pipeline"].flop == pytest.approx(1.5 * copied.flop, rel=0.25)
    assert shared.memory.parameters < 0.8 * copied.memory.parameters
    # Two sums in each direction of each block: 17 positions of 64 values, 4 rows, float32.
    assert shared.sent_bytes == 2 * 4 * (17 * 64) * 4 * 4
    # Two copies, which average the gradients of each process's part.
    assert {(f"{name}, model_parallel 2", 4) for name in ("tensor_parallel", "pipeline")} <= sizes
    copies = next(each for each in found if each.name == "tensor_parallel, model_parallel 2")
    assert copies.memory.parameters == shared.memory.parameters
    assert copies.averaged_bytes == pytest.approx(shared.memory.parameters)
    assert (copies.sent_bytes, copies.flop) == (shared.sent_bytes / 2, shared.flop / 2)
    # The same work; states are divided over the copies, and weights are gathered from them.
    sharded = next(each for each in found if each.name == "fsdp, model_parallel 2")
    assert (sharded.num_gpus, sharded.sent_bytes) == (4, copies.sent_bytes)
    assert sharded.flop == copies.flop
    assert sharded.memory.parameters == copies.memory.parameters // 2
    assert sharded.memory.optimizer == copies.memory.optimizer // 2
    # Each of two copies sends half of its part: weights twice, and gradients once.
    assert sharded.averaged_bytes == pytest.approx(1.5 * shared.memory.parameters)
    refused = " ".join(refusals)
    assert "tensor_parallel on 4 GPUs" in refused
    assert "share the 2 heads" in refused
    assert "pipeline on 4 GPUs" in refused
    assert "only 2 blocks" in refused


def of_strategies(
    built: Network, num_processes: int
) -> tuple[dict[str, dict[str, Setting]], list[str]]:
    """Return what the plan says about every strategy on processes of a CPU."""
    changes = {"batch_size": 4, "devices": num_processes, "strategy": "auto", "precision": "auto"}
    params = PROJECT.train.model_copy(update=changes)
    placement = place(params, TrainingHost(0, has_bfloat16=True, launch=None))
    shape = step_shape(params, placement)
    return settings_of_strategies(built, params, placement, shape, traces(built.num_parameters))


@pytest.mark.process
def test_every_strategy_has_its_memory_and_sent_bytes_in_the_plan_or_a_reason() -> None:
    built = network("small_transformer", width=64, num_layers=2, num_heads=2)
    found, refused = of_strategies(built, 2)
    assert (list(found), refused) == (list(STRATEGIES[1:]), [])
    assert all(list(settings) == ["32-true", "bf16-mixed"] for settings in found.values())
    size = built.num_parameters
    sent = {name: settings["32-true"].every_sent_byte for name, settings in found.items()}
    # Each of two processes sends half of the gradients, and then half of the sums or weights.
    assert sent["ddp"] == sent["deepspeed_stage_2"] == 4 * size
    assert sent["fsdp"] == sent["deepspeed_stage_3"] == 6 * size
    # Two sums in each direction of each block; the values of one block in each direction.
    assert sent["tensor_parallel"] == 2 * 4 * (17 * 64) * 4 * 4
    assert sent["pipeline"] == 2 * (17 * 64) * 4 * 4
    stage_1 = device_memory(traces(size), "deepspeed_stage_1", "bf16-mixed", 2)
    assert found["deepspeed_stage_1"]["bf16-mixed"].memory == stage_1
    undivided, refused = of_strategies(network(), 2)
    assert set(undivided) == set(STRATEGIES[1:6])
    assert [text.split()[0] for text in refused] == ["tensor_parallel:", "pipeline:"]
    assert "no method parallel_layers() names layers" in refused[0]
    assert "'hashed_ngrams' has no stages" in refused[1]


@pytest.mark.process
def test_one_process_has_no_settings_of_strategies_that_need_several() -> None:
    found, refused = of_strategies(network(), 1)
    assert set(found) == {*STRATEGIES} - {"tensor_parallel", "pipeline"}
    assert found["single"]["32-true"].every_sent_byte == 0
    assert refused == [
        "pipeline and tensor_parallel: they divide the network over several processes"
    ]


@pytest.mark.process
def test_offload_is_planned_with_deepspeed_and_refused_by_name_with_other_strategies() -> None:
    built = network("small_transformer", width=64, num_layers=2, num_heads=2)
    changes = {"batch_size": 2, "strategy": "deepspeed_stage_2", "offload": "optimizer"}
    params = PROJECT.train.model_copy(update=changes)
    found, refusals = possible_settings(built, params, "16-mixed", traces(10**6), rows=2)
    assert {(each.strategy, each.num_gpus) for each in found} == {
        (f"deepspeed_stage_{stage}", num_gpus) for stage in (1, 2, 3) for num_gpus in (1, 2)
    }
    one, two = (each for each in found if each.strategy == "deepspeed_stage_2")
    # 16 bytes of each parameter in one host; gradients go there and weights come back in fp16.
    assert one.host_bytes == 16 * 10**6
    assert two.host_bytes == pytest.approx(16 * built.num_parameters, rel=0.01)
    assert one.moved_bytes == 2 * two.moved_bytes == 2 * 2 * built.num_parameters
    kind = GPU_TYPES["H100"]
    assert step_seconds(one, kind, "16-mixed") > one.moved_bytes / (64e9)
    assert [text.split()[0] for text in refusals] == ["ddp", "fsdp", "pipeline", "tensor_parallel"]
    assert all("offload is 'optimizer', which needs" in text for text in refusals)
    text = describe_choices(choose_gpus(found, "auto", 1, {}), {})
    assert "memory of each host" in text


def test_strategies_without_a_loss_scale_are_refused_in_fp16() -> None:
    params = PROJECT.train.model_copy(update={"batch_size": 2})
    found, refusals = possible_settings(network(), params, "16-mixed", traces(10**6), rows=2)
    assert {each.strategy for each in found} == {"single", *STRATEGIES_BY_TRAFFIC} - {"fsdp"}
    assert [text.split()[0] for text in refusals] == ["fsdp", "pipeline", "tensor_parallel"]
    assert all("no loss scaling" in text for text in refusals)
