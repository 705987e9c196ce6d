"""The parts of bench/gpu.py, each of which yields a section of its results, line by line."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from bench.projects import ROOT, join_cifar10, run_stages, served, set_params, write_project_of
from slipway.artifacts.certificate import read_certificate
from slipway.config.training import Offload
from slipway.profiling.utilisation import flop_of_step, matrix_rate
from slipway.reports.console import interval, number
from slipway.reports.evaluation.record import read_metrics
from slipway.system import files
from slipway.system.errors import TrainingError
from slipway.training.networks.networks import read_model_manifest
from tests.project_params import NO_AUGMENTATION

SCRATCH = ROOT / "tmp/bench/gpu"
STAGES = ("code", "clean", "split", "precompute", "augment", "train", "evaluate")
EXPORT = ("prune", "export", "compile", "verify")
LOAD_SECONDS, CONNECTIONS = 10.0, 32
STRATEGIES: tuple[tuple[str, Offload | None], ...] = (
    ("single", None),
    ("deepspeed_stage_1", None),
    ("deepspeed_stage_2", None),
    ("deepspeed_stage_2", "optimizer"),
    ("deepspeed_stage_3", None),
    ("deepspeed_stage_3", "optimizer_and_parameters"),
    ("fsdp", None),  # without a loss scale, so not in float16
)
# On one GPU stages 1 and 2 are alike. A large network takes half a minute to start.
LARGE = [each for each in STRATEGIES if each not in (STRATEGIES[1], STRATEGIES[2])]


@dataclass(frozen=True)
class Machine:
    """The device of a part, and the size of its work."""

    on_gpu: bool

    @property
    def accelerator(self) -> str:
        return "gpu" if self.on_gpu else "cpu"

    def size(self, full: int, small: int) -> int:
        """Return `full` on a GPU, `small` for a trial on the CPU."""
        return full if self.on_gpu else small


@dataclass(frozen=True)
class Part:
    """One section of the results."""

    title: str
    seconds: int  # limit
    run: Callable[[Machine], Iterator[str]]  # lines of Markdown


def rates(machine: Machine) -> Iterator[str]:
    """Measure the machine's limits: matrix products of each dtype, and copies to the GPU."""
    device = "cuda" if machine.on_gpu else "cpu"
    yield "| Products of square matrices | TFLOP/s |"
    yield "|---|---|"
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rate = matrix_rate(dtype, device)
        yield f"| {str(dtype).removeprefix('torch.')} | {rate / 1e12:,.2f} |"
    if machine.on_gpu:
        pinned = torch.empty(2**28, dtype=torch.uint8).pin_memory()
        seconds = statistics.median(_copy_seconds(pinned) for _ in range(10))
        yield f"\nPinned memory is copied to the GPU at {len(pinned) / seconds / 1e9:.1f} GB/s."


def _copy_seconds(pinned: torch.Tensor) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def strategies(machine: Machine) -> Iterator[str]:
    """Run a small training with each strategy in half precision, seven at a time."""
    from tests.training.conftest import write_project

    shutil.rmtree(SCRATCH / "strategies", ignore_errors=True)  # of an earlier run
    wide = {"width": 128, "blocks": [1, 1], "dropout": 0.0, "stochastic_depth": 0.0}
    setups = [
        (precision, strategy, offload)
        for precision in ("16-mixed", "bf16-mixed")
        for strategy, offload in STRATEGIES
        if (precision, strategy) != ("16-mixed", "fsdp")
        and (machine.on_gpu or (precision, strategy) != ("16-mixed", "single"))
    ][: machine.size(99, 2)]

    def train(setup: tuple[str, str, str | None]) -> str:
        precision, strategy, offload = setup
        project = write_project(
            SCRATCH / "strategies" / "-".join(map(str, setup)),
            precision=precision,
            strategy=strategy,
            offload=offload,
            accelerator=machine.accelerator,
            network_arguments=wide | {"normalisation": "batch"},
            epochs=machine.size(8, 2),
            learning_rate=0.002,
        )
        begin = time.perf_counter()
        run_stages(project, ("train",))
        seconds = time.perf_counter() - begin
        actual = read_model_manifest(project / "artifacts/model").actual
        accuracy = json.loads((project / "metrics/train.json").read_text())["val_accuracy"]
        return (
            f"| {strategy} | {offload or 'none'} | {precision} | {actual.accelerator}, "
            f"parameters {actual.parameter_dtype} | {accuracy:.3f} | {seconds:.0f} s |"
        )

    yield "| Strategy | Offload | Precision | Actual | Validation accuracy | With its start |"
    yield "|---|---|---|---|---|---|"
    with ThreadPoolExecutor(machine.size(7, 1)) as threads:
        for setup, line in zip(setups, threads.map(_or_error(train), setups), strict=True):
            yield (
                line
                if line.startswith("|")
                else f"| {setup[1]} | {setup[2]} | {setup[0]} | {line} |"
            )


def certified(machine: Machine) -> Iterator[str]:
    """Run the digits from files to the certificate, with each backend of this machine."""
    project = SCRATCH / "digits"
    write_project_of("image_classification", project, {"train": {"epochs": machine.size(30, 3)}})
    if not machine.on_gpu:
        set_params(project, {"evaluate": {"gates": {}}})
    run_stages(project, STAGES + EXPORT)
    certificate = read_certificate(project / "artifacts/certificate.json")
    yield f"{certificate.status}, gates {certificate.gates}.\n"
    yield "| Backend | Status | Largest difference | Flipped | One row | Rows/s |"
    yield "|---|---|---|---|---|---|"
    for backend in certificate.hops:
        if backend.actual is None:
            yield f"| {backend.name} | {backend.reason} | | | | |"
            continue
        yield (
            f"| {backend.name} | {backend.status} | {backend.max_difference or 0:.1e} "
            f"| {len(backend.flipped)} | {backend.latency_ms or 0:.2f} ms "
            f"| {backend.rows_per_second or 0:,.0f} |"
        )


def service(machine: Machine) -> Iterator[str]:
    """Measure the digits' service under load; needs the part `certificate` first."""
    project = SCRATCH / "digits"
    if not (project / "artifacts/certificate.json").exists():
        raise FileNotFoundError("no certificate: run the part `certificate` first")
    images = pq.read_table(ROOT / "data/demo/digits.parquet", columns=["image"])["image"]
    image = images[0].as_py()
    body = image["bytes"] if isinstance(image, dict) else image
    yield (
        f"{CONNECTIONS} connections; the client in Python, on the same processor, sets the limit.\n"
    )
    yield "| Provider | Answers/s | Half within | 99 % within | Statuses |"
    yield "|---|---|---|---|---|"
    for provider in ("cuda", "cpu")[not machine.on_gpu :]:
        with served(project, {"SLIPWAY_PROVIDER": provider}) as address:
            yield f"| {provider} | {_load(address, body, machine)} |"


def _load(address: str, body: bytes, machine: Machine) -> str:
    """Ask on all connections at once; return the rate, the latencies and the statuses."""
    import httpx

    times: list[float] = []
    png = {"content-type": "image/png"}
    codes: dict[int, int] = {}
    begin = time.perf_counter()
    end = begin + machine.size(int(LOAD_SECONDS), 2)

    def ask() -> None:
        with httpx.Client(base_url=address) as client:
            while (asked := time.perf_counter()) < end:
                answer = client.post("/predict", content=body, headers=png)
                times.append(time.perf_counter() - asked)
                codes[answer.status_code] = codes.get(answer.status_code, 0) + 1

    threads = [threading.Thread(target=ask) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if set(codes) - {200, 429, 503}:
        raise RuntimeError(f"the service answered with the statuses {codes}")
    middle, late = np.quantile(times, [0.5, 0.99]) * 1000
    return f"{len(times) / seconds:,.0f} | {middle:.1f} ms | {late:.1f} ms | {codes}"


def cifar10(machine: Machine) -> Iterator[str]:
    """Train CIFAR-10 from scratch and test on its own test images; the goal is 94 %."""
    source = Path(os.environ.get("CIFAR10", ROOT.parent / "shared/data/cifar10"))
    joined = SCRATCH / "cifar10.parquet"
    join_cifar10(source, joined, machine.size(50_000, 1_000))
    project = SCRATCH / "cifar10"
    width, epochs = machine.size(64, 16), machine.size(30, 1)
    changes: dict[str, dict[str, Any]] = {
        "data": {"path": str(joined), "split_column": "part"},
        "clean": {"max_bad_fraction": 0.2},
        "precompute": {"image_size_px": 32, "channels": 3},
        "augment": NO_AUGMENTATION
        | {"crop_padding_px": 4, "horizontal_flip": 0.5, "erasing": 0.25},
        "train": {
            "network_arguments": {
                "width": width,
                "blocks": [2, 2, 2, 2][: machine.size(4, 2)],
                "dropout": 0.0,
                "stochastic_depth": 0.0,
                "normalisation": "batch",
            },
            "epochs": epochs,
            "batch_size": 512,
            "optimizer": "sgd",
            "momentum": 0.9,
            "nesterov": True,
            "learning_rate": 0.3,
            "weight_decay": 0.0005,
            "label_smoothing": 0.1,
            "schedule": "one_cycle",
            "warmup_epochs": epochs / 4,
            "gradient_clip_norm": None,
            "ema_decay": 0.99,
            "precision": "bf16-mixed",
            "accelerator": machine.accelerator,
            "keep": "last",
            "checkpoint_every_minutes": None,
        },
        "evaluate": {"gates": {}},
    }
    write_project_of("image_classification", project, changes)
    run_stages(project, STAGES[:-2])
    begin = time.perf_counter()
    run_stages(project, ("train",))
    seconds = time.perf_counter() - begin
    yield f"`small_resnet` of width {width}, {epochs} epochs: trained in {seconds:.0f} s."
    run_stages(project, ("evaluate",))
    accuracy = read_metrics(project / "metrics/evaluate.json")["accuracy"]
    yield (
        f"Accuracy {number(accuracy.value)} ({interval(accuracy)}), {accuracy.rows:,} test images."
    )


def transformer(machine: Machine) -> Iterator[str]:
    """Time steps of a byte transformer of 1.0e9 parameters with each strategy and offload."""
    from slipway.config.params import load_params
    from slipway.planning.memory_plan import device_memory
    from slipway.planning.resource_plan import make_plan
    from slipway.profiling.measured_run import MeasuredRun, ProfiledProject
    from slipway.training.distributed.placement import this_host
    from slipway.training.job import PROJECT_PATHS

    width, layers = machine.size(2048, 64), machine.size(30, 2)
    project = SCRATCH / "transformer"
    table = SCRATCH / "sentences.csv"
    files.write_text(table, "text,label\n" + "\n".join(_sentences(600)) + "\n")
    batch = machine.size(64, 8)
    changes: dict[str, dict[str, Any]] = {
        "data": {"path": str(table), "target_column": "label", "text_columns": ["text"]},
        "precompute": {"max_text_bytes": 512},
        "train": {
            "network": "small_transformer",
            "network_arguments": {
                "width": width,
                "num_layers": layers,
                "num_heads": width // 64,
                "patch": 4,
                "dropout": 0.0,
            },
            "batch_size": batch,
            "learning_rate": 1e-4,
            "accelerator": machine.accelerator,
            "devices": 1,
            "precision": "bf16-mixed",
        },
    }
    write_project_of("text_classification", project, changes)
    run_stages(project, STAGES[:-2])
    profiled = ProfiledProject(
        load_params(project / "params.yaml"),
        project / "data/packed",
        project / "data/augmented",
        project,
        project / "scratch",
    )
    paths = replace(PROJECT_PATHS, packed=profiled.packed, augmented=profiled.augmented)
    plan = make_plan(profiled.params, paths, this_host(), 0)
    assert plan.network is not None
    assert plan.memory is not None
    yield f"{plan.network.num_parameters:,} weights, batches of {batch} texts.\n"
    yield "| Strategy | Offload | Step | TFLOP/s | Planned | Allocated at most |"
    yield "|---|---|---|---|---|---|"
    for strategy, offload in LARGE[: machine.size(99, 1)]:
        changed: dict[str, Any] = {"strategy": strategy, "offload": offload}
        planned = device_memory(plan.memory.traces, strategy, "bf16-mixed", 1, offload=offload)
        try:
            with MeasuredRun(profiled, f"{strategy} {offload}", **changed) as run:
                run.time_steps()
                rounds = [run.time_steps() for _ in range(3)]
        except TrainingError as error:  # the other strategies go on
            yield f"| {strategy} | {offload or 'none'} | {in_a_line(error)} | | | |"
            continue
        step = statistics.median(each.step_ms for each in rounds)
        flop = flop_of_step(profiled, rounds)
        peak = rounds[-1].gpu_peak_bytes
        yield (
            f"| {strategy} | {offload or 'none'} | {step:,.0f} ms "
            f"| {flop / step / 1e9:,.1f} | {planned.total / 2**30:.2f} GiB "
            f"| {f'{peak / 2**30:.2f} GiB' if peak else 'not measured on a CPU'} |"
        )


def _sentences(num_rows: int) -> Iterator[str]:
    generator = np.random.default_rng(7)
    words = ["".join(generator.choice(list("abcdefghij"), 5)) for _ in range(400)]
    for row in range(num_rows):
        label = row % 2
        chosen = generator.choice(words[label * 150 : label * 150 + 250], 80)
        yield f"{' '.join(chosen)},{'ab'[label]}"


def gpu_tests(machine: Machine) -> Iterator[str]:
    """Run `pytest -m gpu`, and name each test with its outcome as it ends."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-rs", "--no-header"]
    command += ["--numprocesses", str(machine.size(10, 2))]
    all_tests = sorted(Path("tests").rglob("test_*.py"))
    command += [str(path) for path in all_tests if "mark.gpu" in path.read_text()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if ended := re.match(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR) (.+)", line):
                yield f"* {ended[1].lower()} `{ended[2].strip()}`"
            elif line.startswith("SKIPPED") or re.search(
                r"(passed|failed|error).* in [\d.]+s", line
            ):
                yield f"* {line.strip(' =' + chr(10))[:300]}"


def ladder(machine: Machine) -> Iterator[str]:
    """Run the ladder's rows of the expensive function, which writes its own results file."""
    return _other_bench(machine, "ladder", "ladder_denoised", "--only", "denoised")


def overhead(machine: Machine) -> Iterator[str]:
    """Compare a training step with a hand-written loop, which writes its own results file."""
    return _other_bench(machine, "training_overhead", "training_overhead_gpu")


def _other_bench(machine: Machine, name: str, result: str, *options: str) -> Iterator[str]:
    """Run a bench that measures a GPU if it finds one; yield the table of its results file."""
    if not machine.on_gpu:
        yield f"not executed: its rows on the CPU are in {name}.md."
        return
    subprocess.run([sys.executable, "-m", f"bench.{name}", *options], check=True)
    lines = (ROOT / f"bench/results/{result}.md").read_text().splitlines()
    yield from (line for line in lines if line.startswith("|"))


# Limits are for an H200 with 16 cores, where a process takes 10 to 20 s to start.
PARTS = {
    "certificate": Part("Certificate of the digits", 150, certified),
    "service": Part("The digits' service under load", 80, service),
    "strategies": Part("Strategies in half precision", 100, strategies),
    "transformer": Part("A transformer with 1.0e9 parameters", 270, transformer),
    "rates": Part("The machine's own rates", 30, rates),
    "tests": Part("Tests that need a GPU", 330, gpu_tests),
    "cifar10": Part("CIFAR-10 from scratch", 220, cifar10),
    "ladder": Part("The ladder", 240, ladder),
    "overhead": Part("A training step beside a hand-written loop", 120, overhead),
}


def _or_error(call: Callable[[Any], str]) -> Callable[[Any], str]:
    def guarded(argument: Any) -> str:
        try:
            return call(argument)
        except Exception as error:  # one setup must not hide the others
            return in_a_line(error)

    return guarded


def in_a_line(error: BaseException) -> str:
    text = getattr(error, "stderr", None) or str(error)
    last = [line for line in text.splitlines() if line.strip()][-1:]
    return f"failed: {type(error).__name__}: {' '.join(last)[:300]}".replace("|", "/")
