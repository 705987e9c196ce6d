"""The planner's predictions, compared with real steps and trainings, and its refusals."""

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipway.config.params import Params, load_params
from slipway.config.training import Offload
from slipway.planning import resource_plan
from slipway.planning.memory_plan import (
    STRATEGIES,
    DeviceMemory,
    Traces,
    device_memory,
    trace_all,
    trace_share,
)
from slipway.planning.plan import describe
from slipway.planning.plan_checks import Findings, check_disks
from slipway.planning.resource_plan import ResourcePlan, make_plan, process_bytes
from slipway.planning.step_memory import StepMemory, trace_step
from slipway.reports.console import size
from slipway.training.distributed.placement import TrainingHost, place
from slipway.training.job import PROJECT_PATHS
from slipway.training.networks.blocks import parallel_blocks
from slipway.training.networks.networks import Network, build_network
from slipway.training.telemetry.costs import read_costs
from tests import warm_starts
from tests.project_params import PROJECT
from tests.training.conftest import ROOT, spec, write_project
from tests.training.networks.test_text_networks import network as text_network
from tests.training.real_runs import environment, run_command

NO_GPU = TrainingHost(num_gpus=0, has_bfloat16=True, launch=None)
ONE_GPU = TrainingHost(num_gpus=1, has_bfloat16=True, launch=None)
SMALL = {
    "width": 64,
    "blocks": [1, 1, 1],
    "dropout": 0.0,
    "stochastic_depth": 0.0,
    "normalisation": "batch",
}
TABM = {
    "num_submodels": 16,
    "num_blocks": 2,
    "width": 256,
    "dropout": 0.1,
    "embedding_size": 32,
    "num_bins": 24,
}
# Kernels of some layers take memory of their own: see bench/results/memory_plan.md.
TENSORS_TOLERANCE, PROCESS_TOLERANCE = 0.2, 0.35


@pytest.fixture(name="in_project")
def _in_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(write_project(tmp_path))
    return tmp_path


def plan(**train: Any) -> tuple[ResourcePlan, Params]:
    params = load_params(Path("params.yaml"))
    params = params.model_copy(update={"train": params.train.model_copy(update=train)})
    return make_plan(params, PROJECT_PATHS, NO_GPU, 0), params


def run_plan(
    project: Path, run: Callable[..., subprocess.CompletedProcess[str]] = warm_starts.run
) -> subprocess.CompletedProcess[str]:
    return run(["slipway.planning.plan", "--seconds", "2"], project, environment(), timeout=120)


def run_fresh(
    command: list[str], folder: Path, variables: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """`python -m` in a process of its own, so that its memory is only what the command needs."""
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("network", "arguments", "rows", "precision"),
    [
        ("small_resnet", SMALL, 128, "32-true"),
        ("small_resnet", SMALL, 128, "bf16-mixed"),
        ("timm/resnet18", {}, 128, "32-true"),
        ("tabm", TABM, 2048, "32-true"),
    ],
)
def test_the_predicted_memory_is_close_to_that_of_real_steps(
    network: str, arguments: dict[str, Any], rows: int, precision: str
) -> None:
    if precision == "bf16-mixed" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT"):
        pytest.skip("this processor has no bf16 convolutions: the emulation keeps its own copies")
    done = run_fresh(
        ["tests.planning.measured_step", network, json.dumps(arguments), str(rows), precision],
        ROOT,
        environment(),
        300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["allocated"] > 100e6  # so that rounding does not matter
    assert found["predicted"] == pytest.approx(found["allocated"], rel=TENSORS_TOLERANCE)
    assert found["process"] == pytest.approx(found["grown"], rel=PROCESS_TOLERANCE)


@pytest.mark.process
def test_a_traced_step_holds_parameters_optimizer_state_and_activations() -> None:
    network = build_network(spec())
    num_bytes = 4 * sum(parameter.numel() for parameter in network.parameters())
    found = trace_step(network, PROJECT.train, 64)
    assert found.parameters == num_bytes
    assert (
        2 * num_bytes <= found.optimizer < 2 * num_bytes + 100 * len(list(network.parameters()))
    )  # AdamW's moments and its counters
    assert found.activations > 64 * 8 * 8 * 16 * 4  # the first layer's answer alone
    assert trace_step(network, PROJECT.train, 128).activations > 1.9 * found.activations
    assert (
        trace_step(network, PROJECT.train, 64, half=torch.bfloat16).activations
        < 0.75 * found.activations
    )
    half = trace_step(network, PROJECT.train, 64, half=torch.bfloat16, casts_parameters=True)
    assert (half.parameters, half.optimizer) == (num_bytes // 2, 0)
    assert trace_step(network, PROJECT.train, 64, accumulates=True).gradients == num_bytes


def test_tracing_a_step_leaves_the_network_unchanged() -> None:
    network = build_network(spec())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    trace_step(network, PROJECT.train, 16)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(
        parameter.grad is None and type(parameter) is torch.nn.Parameter
        for parameter in network.parameters()
    )


def test_each_zero_stage_shards_the_state_that_its_paper_names() -> None:
    # 10,000,000 parameters. Engines of two processes were seen to hold 8 bytes of each between
    # steps in half precision (stages 1 and 2), 10 in float32.
    full, half = (
        StepMemory(40_000_000, 40_000_000, 80_000_000, 0, 0),
        StepMemory(20_000_000, 20_000_000, 0, 0, 0),
    )
    traces = Traces(full, full, half)
    found = {name: device_memory(traces, name, "bf16-mixed", 2) for name in STRATEGIES[2:5]}
    assert [memory.parameters + memory.optimizer for memory in list(found.values())[:2]] == [
        80_000_000,
        80_000_000,
    ]
    assert [memory.gradients for memory in found.values()] == [20_000_000, 10_000_000, 10_000_000]
    # The partition, and gathered weights: all of a network this small.
    assert found["deepspeed_stage_3"].parameters == 10_000_000 + 20_000_000
    in_full = device_memory(traces, "deepspeed_stage_2", "32-true", 2)
    assert in_full.parameters + in_full.optimizer == 100_000_000
    assert device_memory(traces, "ddp", "32-true", 2).buckets == 40_000_000


def test_zero_buffers_grow_with_the_largest_block_of_the_network() -> None:
    large, block = 1_000_000_000, 30_000_000
    full = StepMemory(4 * large, 4 * large, 8 * large, 0, 0)
    traces = Traces(full, full, StepMemory(2 * large, 2 * large, 0, 0, 0), 4 * block)
    second, third, alone = (
        device_memory(traces, f"deepspeed_stage_{stage}", "bf16-mixed", size)
        for stage, size in ((2, 4), (3, 4), (3, 1))
    )
    assert second.buckets == third.buckets == 2 * 2 * block
    assert second.float32_gradients == 4 * large // 4
    assert third.float32_gradients == 4 * block
    # Two blocks, and one that is being gathered; a single process gathers nothing.
    assert third.parameters == 2 * large // 4 + 2 * 3 * block
    assert alone.parameters == 2 * large


def test_an_average_adds_float32_weights_divided_as_the_strategy_divides_them() -> None:
    averaged = TRACES._replace(averages=True)
    for strategy, precision, average, copied in (
        ("ddp", "32-true", 40_000_000, 40_000_000),
        ("fsdp", "32-true", 20_000_000, 20_000_000),
        ("deepspeed_stage_2", "bf16-mixed", 40_000_000, 40_000_000),
        ("deepspeed_stage_3", "bf16-mixed", 20_000_000, 10_000_000),
    ):
        without = device_memory(TRACES, strategy, precision, 2)
        memory = device_memory(averaged, strategy, precision, 2)
        assert (memory.average, memory.copied_weights) == (average, copied), strategy
        after_step = max(memory.float32_gradients, copied)
        added = max(memory.activations, after_step) - max(
            memory.activations, memory.float32_gradients
        )
        assert memory.total == without.total + average + added


TRACES = Traces(  # 10,000,000 parameters, and activations smaller than any state
    StepMemory(40_000_000, 40_000_000, 80_000_000, 0, 1_000_000),
    StepMemory(40_000_000, 40_000_000, 80_000_000, 0, 500_000),
    StepMemory(20_000_000, 20_000_000, 0, 0, 500_000),
)


def zero(stage: int, offload: Offload | None, world_size: int = 2) -> DeviceMemory:
    name = f"deepspeed_stage_{stage}"
    return device_memory(TRACES, name, "bf16-mixed", world_size, offload=offload)


def test_fsdp_shards_everything_and_gathers_blocks() -> None:
    traces = TRACES._replace(block=8_000_000)
    full, half = (
        device_memory(traces, "fsdp", precision, 4) for precision in ("32-true", "bf16-mixed")
    )
    assert (full.parameters, full.gradients, full.optimizer) == (10_000_000, 10_000_000, 20_000_000)
    assert (half.parameters, half.gradients, half.optimizer) == (10_000_000, 10_000_000, 20_000_000)
    # Three of weights, two of gradients, which exist when the activations are freed.
    assert full.buckets == 5 * 8_000_000 - 1_000_000
    assert half.buckets == 3 * 4_000_000 + 2 * 8_000_000 - 500_000
    assert (full.activations, half.activations) == (1_000_000, 500_000)


@pytest.fixture(scope="module", name="divided")
def _divided() -> tuple[Network, Traces]:
    """A transformer of two layers, and its traces for two processes and four micro-batches."""
    built = text_network("small_transformer", width=64, num_heads=4, num_layers=2)
    return built, trace_all(
        built,
        PROJECT.train,
        16,
        accumulates=False,
        update="singly",
        model_parallel=2,
        num_micro_batches=4,
    )


def test_a_tensor_parallel_process_holds_its_part_of_weights_and_activations(
    divided: tuple[Network, Traces],
) -> None:
    built, traces = divided
    one = traces.full
    assert traces.shared
    two, four = (
        traces.shared.full,
        trace_share(built, PROJECT.train, 16, 4, None, accumulates=False),
    )
    # Of each block: queries, keys, values, their answer, and twice the wide layer.
    layers = 4 * 2 * (3 * 64 * 64 + 64 * 64 + 2 * 64 * 128)
    biases = 4 * 2 * (3 * 64 + 128)  # those of the layers by inputs are whole
    for share, number in ((two, 2), (four, 4)):
        expected = one.parameters - (layers + biases) * (number - 1) // number
        assert share.parameters == expected
        assert share.optimizer - one.optimizer == 2 * (expected - one.parameters)
    assert four.activations < two.activations < one.activations
    planned = device_memory(traces, "tensor_parallel", "32-true", 2)
    assert planned.total == two.peak


def test_fsdp_with_shared_layers_divides_a_processs_states_over_the_copies(
    divided: tuple[Network, Traces],
) -> None:
    _, traces = divided
    assert traces.shared
    share = traces.shared._replace(block=8_000_000)
    traces = traces._replace(shared=share, block=12_000_000)
    for precision, activations in (
        ("32-true", share.full.activations),
        ("bf16-mixed", share.cast.activations),
    ):
        memory = device_memory(traces, "fsdp", precision, 8, model_parallel=2)  # four copies
        alone = device_memory(traces, "fsdp", precision, 8)
        assert memory.parameters == memory.gradients == share.full.parameters // 4
        assert memory.optimizer == share.full.optimizer // 4
        assert memory.activations == activations < alone.activations
        assert alone.buckets - memory.buckets > 2 * 4_000_000  # of smaller blocks
        # Embeddings and norms are divided over the copies only.
        assert alone.parameters < memory.parameters < traces.full.parameters // 4


def test_a_network_that_the_processes_cannot_divide_has_no_traces_of_shares() -> None:
    built = text_network("small_transformer", width=16, num_heads=2, num_layers=1)
    traces = trace_all(
        built, PROJECT.train, 2, accumulates=False, update="singly", model_parallel=3
    )
    assert traces.shared is None


def test_the_memory_of_a_pipeline_is_that_of_its_largest_stage(
    divided: tuple[Network, Traces],
) -> None:
    built, traces = divided
    own = [block.parameters() for block in parallel_blocks(built)]
    blocks = 4 * sum(weight.numel() for weights in own for weight in weights)
    after = 4 * (2 * 64 + 64 * 3 + 3)  # the norm and the head
    assert traces.stage
    first = traces.stage[0]
    assert first.parameters == traces.full.parameters - after - blocks // 2
    assert first.gradients == first.parameters
    assert first.optimizer == pytest.approx(2 * first.parameters, rel=0.001)
    # Two micro-batches of a quarter of the rows in half of the blocks.
    assert 0.2 < first.activations / traces.full.activations < 0.4
    planned = device_memory(traces, "pipeline", "32-true", 2)
    assert planned.total == first.peak


@pytest.mark.nightly(seconds=40)
@pytest.mark.parametrize(
    ("strategy", "num_processes"),
    [
        ("ddp", 2),
        ("fsdp", 2),
        ("tensor_parallel", 2),
        ("pipeline", 2),
        ("tensor_parallel", 4),  # two copies
        ("pipeline", 4),
        ("fsdp+shared", 4),
        ("deepspeed_stage_3", 2),
    ],
)
def test_the_planned_memory_of_sharded_strategies_is_close_to_that_of_real_steps(
    strategy: str, num_processes: int
) -> None:
    is_zero = strategy == "deepspeed_stage_3"
    shards = ["tests.planning.measured_shards", strategy, f"512,{24 if is_zero else 8},8"]
    processes = f"--nproc_per_node={num_processes}"
    launcher = ["torch.distributed.run", "--standalone", processes, "-m"]
    done = run_fresh([*launcher, *shards], ROOT, environment(), 300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["allocated"] > 100e6
    assert found["predicted"] == pytest.approx(found["allocated"], rel=0.1)
    if is_zero:  # no process ever holds the whole network
        assert found["gathered"] < 0.4 * found["weights"]


@pytest.mark.parametrize(("stage", "on_device"), [(1, 20_000_000), (2, 0), (3, 0)])
def test_offload_moves_16_bytes_per_parameter_and_shard_to_the_host(
    stage: int, on_device: int
) -> None:
    memory = zero(stage, "optimizer")
    assert memory.host == 16 * 10_000_000 // 2
    assert (memory.optimizer, memory.float32_gradients) == (0, 0)
    assert memory.gradients == on_device
    assert memory.total < zero(stage, None).total
    assert zero(stage, None).host == 0


def test_an_offload_path_leaves_only_gradients_and_parameters_in_the_hosts_memory() -> None:
    args = (TRACES, "deepspeed_stage_3", "bf16-mixed", 2)
    cases: list[tuple[Offload, int]] = [("optimizer", 4), ("optimizer_and_parameters", 6)]
    for offload, in_memory in cases:
        memory = device_memory(*args, offload=offload, on_disk=True)
        assert memory.host == in_memory * 10_000_000 // 2
        assert memory.disk == 12 * 10_000_000 // 2
        assert memory.total == zero(3, offload).total


def test_offloaded_parameters_leave_only_gathered_layers_on_the_device() -> None:
    memory = zero(3, "optimizer_and_parameters")
    assert memory.host == 18 * 10_000_000 // 2
    assert memory.parameters == zero(3, "optimizer").parameters - 20_000_000 // 2


def test_the_float32_copy_of_the_gradients_counts_only_beyond_the_activations() -> None:
    memory = zero(2, None)
    assert memory.float32_gradients == 4 * 10_000_000 // 2
    without = memory.parameters + memory.gradients + memory.optimizer + memory.buckets
    assert memory.total == without + memory.float32_gradients
    assert replace(memory, activations=10**9).total == without + 10**9


def test_a_plan_for_a_gpu_predicts_the_memory_of_the_host_too(in_project: Path) -> None:
    network = build_network(spec())
    traces = trace_all(network, PROJECT.train, 8, accumulates=False, update="together")
    placement = place(PROJECT.train.model_copy(update={"strategy": "single"}), ONE_GPU)
    found = process_bytes(traces, placement, 10**9)
    assert found > 10**9 + traces.full.parameters
    assert found < process_bytes(traces, replace(placement, accelerator="cpu"), 10**9)


def test_a_plan_predicts_steps_disk_and_memory(in_project: Path) -> None:
    found, params = plan()
    assert found.findings.mismatches == []
    assert found.steps_per_epoch == 4
    text = describe(found, params)
    assert "steps     4 per epoch, 16 in 4 epochs" in text
    line = next(line for line in text.splitlines() if line.startswith("  single "))
    assert found.memory is not None
    expected = found.memory.device.total, found.memory.process_bytes, found.disk["checkpoint"]
    assert all(size(value) in line for value in expected)
    assert line.endswith(" 0 B")
    assert "refused   pipeline and tensor_parallel: they divide" in text
    assert found.disk["packed store"] == sum(
        path.stat().st_size for path in Path("data/packed").rglob("*") if path.is_file()
    )


def test_a_plan_without_the_packed_store_names_it_and_predicts_the_rest(
    in_project: Path,
) -> None:
    shutil.rmtree("data/packed")
    found, params = plan()
    assert found.findings.mismatches == []
    assert found.memory is not None
    assert found.steps_per_epoch is None
    assert "data/packed/manifest.json is missing" in describe(found, params)
    assert "the last layer is counted for 2" in describe(found, params)


def test_a_plan_lists_every_mismatch_at_once(
    in_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    monkeypatch.setattr(resource_plan, "available_bytes", lambda *, on_gpu: 1000)
    found, _ = plan(
        accelerator="gpu", precision="16-mixed", strategy="single", batch_size=200, num_workers=64
    )
    text = "\n".join(found.findings.mismatches)
    for part in (
        "train.accelerator is 'gpu', but torch finds no GPU",
        "'16-mixed', which strategy 'single' cannot do",
        "train.batch_size is 200, but there are only 150",
        "of shared memory, but /dev/shm has 1 B free",
        "which has 1 B free. Free space there",
        "needs about",
    ):
        assert part in text, part
    assert "more than the" in "\n".join(found.findings.remarks)


OFFLOADED: dict[str, Any] = {
    "strategy": "deepspeed_stage_3",
    "devices": 2,
    "offload": "optimizer",
}


def test_a_plan_adds_an_offloaded_state_to_the_checkpoints_of_the_same_disk(
    in_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    found, _ = plan(**OFFLOADED, offload_path=".")
    assert found.memory is not None
    written = sum(found.disk[name] for name in ("checkpoints", "model", "TensorBoard"))
    offloaded = 2 * found.memory.device.disk
    assert offloaded > 0
    wanted = f"writes up to {size(written + offloaded)} to the disk of {Path.cwd()}, which"
    assert wanted in found.findings.mismatches[-1]


def test_folders_on_one_disk_share_its_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 0, 100))
    findings, written = Findings(), [(tmp_path / "work", 60), (tmp_path / "state", 40)]
    check_disks(written, findings)
    assert findings.mismatches == []
    check_disks([*written, (tmp_path, 1)], findings)
    assert f"101 B to the disk of {tmp_path}, which has 100 B free" in findings.mismatches[0]


def test_a_plan_refuses_an_offload_path_that_is_no_folder(in_project: Path) -> None:
    (mismatch,) = plan(**OFFLOADED, offload_path="missing")[0].findings.mismatches
    assert "train.offload_path is 'missing', which is no folder" in mismatch


def test_a_plan_lists_an_indivisible_batch_with_the_other_mismatches(in_project: Path) -> None:
    found, _ = plan(devices=3, strategy="ddp", network="timm/nothing", network_arguments={})
    assert len(found.findings.mismatches) == 2
    assert "which timm" in found.findings.mismatches[0]
    assert "which 3 processes cannot share equally" in found.findings.mismatches[1]


@pytest.mark.nightly(seconds=30)
def test_a_plan_after_a_training_reports_its_prediction_errors(tmp_path: Path) -> None:
    project = write_project(tmp_path)
    assert run_command(project).returncode == 0
    costs = read_costs(project / ".work/plan/costs.json")
    assert costs is not None
    done = run_plan(project, run_fresh)
    assert done.returncode == 0, done.stderr
    assert "the last training of these params, in its first process" in done.stdout
    errors = {
        line[:18].strip(): float(line.split()[-1].rstrip("%")) / 100
        for line in done.stdout.splitlines()
        if line.endswith("%")
    }
    assert errors["parameters"] == 0
    assert abs(errors["peak memory, MB"]) < 0.25
    assert abs(errors["checkpoint, MB"]) < 0.25
    assert abs(errors["model, MB"]) < 0.25
    assert {"a step, ms", "TensorBoard, MB"} <= errors.keys()
    changed = (
        (project / "params.yaml").read_text().replace("learning_rate: 0.01", "learning_rate: 0.02")
    )
    (project / "params.yaml").write_text(changed)
    assert "nothing to compare" in run_plan(project).stdout


@pytest.mark.process
def test_a_plan_with_mismatches_ends_with_exit_code_1(tmp_path: Path) -> None:
    refused = run_plan(write_project(tmp_path, batch_size=151, precision="16-mixed"))
    assert refused.returncode == 1
    assert "there are only 150 training rows" in refused.stderr
    assert "cannot do on the CPU" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "trainable parameters" in refused.stdout
