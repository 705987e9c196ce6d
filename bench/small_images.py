"""Trains CIFAR-10 from scratch within a limit of time: `python -m bench.small_images`.

It measures the machine's rate of matrix products and the steps of the recipe in each precision,
chooses the number of epochs that fit, trains, and tests on the data set's own test images. The goal
of 90 % applies if the machine can compute the operations of airbench94 in the time, at 45 % of its
rate. With `--minutes` or `--images` it is a trial, whose table goes to tmp/. CIFAR-10 is read from
../shared/data, or from the folder in the variable CIFAR10.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.conditions import conditions
from bench.projects import ROOT, join_cifar10, python_path, run_stages, set_params, write_project_of
from slipway.config.params import load_params
from slipway.profiling.measured_run import MeasuredRun, ProfiledProject
from slipway.profiling.step_times import PARTS, Round
from slipway.profiling.utilisation import flop_of_step, matrix_rate
from slipway.reports.console import interval, number
from slipway.reports.evaluation.record import read_metrics
from slipway.system import files
from slipway.training.job import network_spec, open_data
from slipway.training.networks.networks import build_network
from tests.project_params import NO_AUGMENTATION

SCRATCH = ROOT / "tmp/bench/small_images"
RESULT, TRIAL = ROOT / "bench/results/small_images.md", ROOT / "tmp/small_images.md"
FULL_MINUTES, GOAL = 25.0, 0.90
AIRBENCH_FLOP, UTILISATION = 3.6e14, 0.45  # Jordan 2024, arXiv:2404.00498: 94 %
MOST_EPOCHS = 16
RESERVE_S = 45.0  # start, validation and the model's files
NUM_IMAGES, NUM_ROUNDS, MEASURING_S = 50_000, 3, 60.0
RECIPE: dict[str, dict[str, Any]] = {
    "data": {"split_column": "part"},
    "clean": {"max_bad_fraction": 0.2},
    "precompute": {"image_size_px": 32, "channels": 3},
    "augment": NO_AUGMENTATION | {"crop_padding_px": 2, "horizontal_flip": 0.5},
    "train": {
        "network": "transforms.small_image_network:SmallImageNetwork",
        "network_arguments": {"widths": [64, 256, 256]},
        "batch_size": 500,
        "optimizer": "sgd",
        "momentum": 0.9,
        "nesterov": True,
        "learning_rate": 0.3,
        "weight_decay": 0.0005,
        "label_smoothing": 0.1,
        "schedule": "one_cycle",
        "gradient_clip_norm": None,
        "ema_decay": 0.99,
        "accelerator": "cpu",
        "devices": 1,
        "keep": "last",
        "checkpoint_every_epochs": MOST_EPOCHS,
        "checkpoint_every_minutes": None,
    },
    "evaluate": {"gates": {}},
}


def steps_of(project: ProfiledProject, precision: str) -> Round:
    """Return the quickest of up to three rounds of real steps, within a minute."""
    begin, rounds = time.perf_counter(), list[Round]()
    with MeasuredRun(project, precision, precision=precision) as run:
        while len(rounds) < NUM_ROUNDS and time.perf_counter() - begin < MEASURING_S:
            rounds.append(run.time_steps())
    return min(rounds, key=lambda each: each.step_ms)


def operations(network: torch.nn.Module, rows: int, precision: str) -> list[tuple[str, float]]:
    """Return (operation, fraction of the time) of a forward and backward pass."""
    images = torch.randint(0, 256, (rows, 32, 32, 3), dtype=torch.uint8)
    network.to(memory_format=torch.channels_last)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = network(images).float().logsumexp(dim=1).mean()
        network.zero_grad()
        loss.backward()

    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    times = {each.key: each.self_cpu_time_total for each in profiler.key_averages()}
    total = sum(times.values())
    return sorted(((name, each / total) for name, each in times.items()), key=lambda p: -p[1])[:8]


def train(project: Path, seconds: float) -> float | None:
    """Run the stage `train`; return its seconds, or None if it was ended at the limit."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "slipway.stages.train"],
        cwd=project,
        env=os.environ | {"PYTHONPATH": python_path()},
        start_new_session=True,
    )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    if code:
        raise RuntimeError(f"the stage train ended with {code}")
    return time.perf_counter() - begin


def main() -> None:
    """Prepare, measure, train and test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES, help="of the training")
    parser.add_argument("--images", type=int, default=NUM_IMAGES, help="training images of a trial")
    given = parser.parse_args()
    minutes, is_full = given.minutes, (given.minutes, given.images) == (FULL_MINUTES, NUM_IMAGES)
    source = Path(os.environ.get("CIFAR10", ROOT.parent / "shared/data/cifar10"))
    join_cifar10(source, SCRATCH / "cifar10.parquet", given.images)
    folder = SCRATCH / "project"
    write_project_of("image_classification", folder, RECIPE)
    set_params(folder, {"data": {"path": str(SCRATCH / "cifar10.parquet")}})
    files.write_text(folder / "transforms/__init__.py", "")
    shutil.copy(ROOT / "bench/small_image_network.py", folder / "transforms")
    os.chdir(folder)  # the network's module is found here, also by the processes of the rounds
    os.environ["PYTHONPATH"] = python_path()
    sys.path.insert(0, str(folder))
    run_stages(folder, ("code", "clean", "split", "precompute", "augment"))

    params = load_params(folder / "params.yaml")
    rows = params.train.batch_size
    paths = folder / "data/packed", folder / "data/augmented"
    profiled = ProfiledProject(params, *paths, folder, SCRATCH / "rounds")
    data = open_data(*paths)
    network = build_network(network_spec(params.train, data.manifest))
    dtypes = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
    rates, steps = dict[str, float](), dict[str, Round]()
    for name, dtype in dtypes.items():
        steps[name] = steps_of(profiled, name)
        rates[name] = max(matrix_rate(dtype) for _ in range(NUM_ROUNDS))
    flop = flop_of_step(profiled, list(steps.values()))
    chosen = min(steps, key=lambda name: steps[name].step_ms)
    steps_per_epoch = data.num_train // rows
    epoch_s = steps_per_epoch * steps[chosen].step_ms / 1000
    epochs = int(min(MOST_EPOCHS, (minutes * 60 - RESERVE_S) * 0.95 / epoch_s))
    print(f"{chosen}: {epoch_s:.0f} s an epoch, {epochs} epochs", flush=True)
    cells = [
        [
            name,
            f"{rates[name] / 1e9:,.0f}",
            f"{steps[name].step_ms:,.0f}",
            f"{flop / steps[name].step_ms / 1e6:,.0f}",
            f"{flop / steps[name].step_ms * 1000 / rates[name]:.0%}",
            *(f"{steps[name].parts_ms[part]:,.1f}" for part in PARTS),
        ]
        for name in dtypes
    ]
    columns = ["precision", "matrix product, GFLOP/s", "step, ms", "GFLOP/s", "share"]
    lines = [_markdown([*columns, *(f"{part}, ms" for part in PARTS)], cells)]
    shares = operations(network, rows, chosen)
    lines.append(f"Operations of the network in {chosen}, share of their processor time: ")
    lines[-1] += ", ".join(f"`{name}` {share:.0%}" for name, share in shares) + "."
    reachable = max(rates.values()) * minutes * 60 * UTILISATION
    counts = reachable > AIRBENCH_FLOP and is_full
    lines.append(
        f"45 % of the best rate for {minutes:g} minutes is {reachable:.1e} FLOP, airbench94 takes "
        f"{AIRBENCH_FLOP:.1e}: the goal of {GOAL:.0%} is {'judged' if counts else 'not judged'}."
    )
    lines.append(_trained(folder, minutes, epochs, chosen, flop * steps_per_epoch * epochs))
    text = "\n\n".join(lines)
    result = RESULT if is_full else TRIAL
    files.write_text(
        result, f"# CIFAR-10 from scratch on two cores\n\n{text}\n\n{conditions('torch')}\n"
    )
    print(text)


def _trained(folder: Path, minutes: float, epochs: int, precision: str, flop: float) -> str:
    """Train and test; describe the result in a sentence."""
    if epochs < 1:
        return "No epoch fits into the time."
    changes = {"epochs": epochs, "warmup_epochs": epochs / 4, "precision": precision}
    set_params(folder, {"train": changes})
    run_stages(folder, ("code",))
    seconds = train(folder, minutes * 60)
    if seconds is None:
        return f"{epochs} epochs were ended after {minutes:g} minutes without a model."
    run_stages(folder, ("evaluate",))
    accuracy = read_metrics(folder / "metrics/evaluate.json")["accuracy"]
    return (
        f"{epochs} epochs ({flop:.1e} FLOP) in {seconds:,.0f} s: accuracy {number(accuracy.value)} "
        f"({interval(accuracy)}) on {accuracy.rows:,} test images."
    )


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
