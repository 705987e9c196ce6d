"""`python -m slipway.planning.tuning batch|learning-rate`: proposes a batch size or a learning rate by trying them on this machine.

It prints a patch of params.yaml and changes nothing; `--apply` writes it. Both run in one process, on the data and with the network,
loss, optimizer, augmentation and precision of the training.
"""

import argparse
import gc
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from slipway.config.command import run_stage
from slipway.config.edit import propose
from slipway.config.params import Params
from slipway.planning.available_memory import available_bytes
from slipway.planning.batch_size_search import (
    BatchSizeTrial,
    candidate_sizes,
    fastest,
    largest,
    search,
)
from slipway.planning.memory_plan import trace_all
from slipway.planning.planning import process_bytes
from slipway.planning.range_test import RangeTest, run_range_test
from slipway.planning.rehearsal import Rehearsal
from slipway.reports.console import size, text_table
from slipway.system import files
from slipway.system.broken_pipe import quiet_when_unread
from slipway.system.errors import UnavailableError
from slipway.training.batches.batches import StepShape, cut_step
from slipway.training.distributed.process_memory import own_bytes
from slipway.training.distributed.strategies import Placement, place, this_host
from slipway.training.job import PROJECT_PATHS, Paths, TrainingData, network_spec, open_data
from slipway.training.networks.networks import build_network

PLOT = Path("reports/learning_rate.svg")
_PARAMS = Path("params.yaml")


def tune_batch(
    params: Params, paths: Paths, seconds: float, *, changes_step: bool
) -> dict[str, int | float]:
    """Print what each size of a device's batch does; the changes to propose.

    `max_batch_per_device` becomes the largest that fits, which changes no result but rounding. With `changes_step` also
    `batch_size` becomes the fastest over all devices, which does.
    """
    placement, data = place(params.train, this_host()), open_data(paths.packed, paths.augmented)
    trials = _batch_trials(params, data, placement, seconds)
    print(text_table(["rows", "predicted", "rows/s"], [_cells(trial) for trial in trials]))
    most, best = largest(trials), fastest(trials)
    if most is None or best is None:
        raise UnavailableError(
            "not even one row fits into the memory here. Take a smaller network or smaller images."
        )
    print(f"largest that fits or that there are rows for: {most}; fastest: {best}")
    changes: dict[str, int | float] = {"train.max_batch_per_device": most}
    return changes | ({"train.batch_size": best * placement.world_size} if changes_step else {})


def _batch_trials(
    params: Params, data: TrainingData, placement: Placement, seconds: float
) -> list[BatchSizeTrial]:
    on_gpu = placement.accelerator == "gpu"
    base_bytes = own_bytes()
    network = build_network(network_spec(params.train, data.manifest))

    def predict(rows: int) -> int:
        traces = trace_all(network, params.train, rows, accumulates=True)
        return (process_bytes(traces, placement, base_bytes) - base_bytes) * placement.devices

    def step_seconds(rows: int, most_steps: int) -> float:
        gc.collect()  # what the size before has left
        return Rehearsal(
            params.seed, params.train, data, placement, StepShape(rows, rows, 1, 1)
        ).step_seconds(most_steps, seconds)

    sizes = candidate_sizes(data.num_train // placement.world_size)
    return search(sizes, None if on_gpu else predict, available_bytes(on_gpu=on_gpu), step_seconds)


def _cells(trial: BatchSizeTrial) -> list[str]:
    rate = "does not fit" if trial.rows_per_second is None else f"{trial.rows_per_second:,.0f}"
    return [
        str(trial.rows),
        "" if trial.predicted_bytes is None else size(trial.predicted_bytes),
        rate,
    ]


def tune_learning_rate(
    params: Params, paths: Paths, num_steps: int, lowest: float, highest: float, plot: Path
) -> dict[str, int | float]:
    """Run the range test with the batch of the params, draw it into `plot` (SVG or PNG); the change to propose."""
    placement, data = place(params.train, this_host()), open_data(paths.packed, paths.augmented)
    shape = cut_step(params.train.batch_size, 1, params.train.max_batch_per_device)
    rehearsal = Rehearsal(params.seed, params.train, data, placement, shape)
    found = run_range_test(rehearsal.step_at, num_steps, lowest, highest)
    draw(found, plot, params.train.learning_rate)
    print(
        f"lowest smoothed loss {min(found.smoothed):.4f} at {found.lowest:.2e}; proposed peak {found.proposed:.1e}; curve in {plot}"
    )
    return {"train.learning_rate": found.proposed}


def draw(found: RangeTest, path: Path, present: float) -> None:
    """The curve with the proposed rate and the one that params.yaml has now."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(found.rates, found.losses, color="#c9ced6", linewidth=1, label="loss of each step")
    axes.plot(found.rates, found.smoothed, color="#1f6feb", linewidth=2, label="smoothed")
    axes.axvline(
        found.proposed, color="#1a7f37", linestyle="--", label=f"proposed {found.proposed:g}"
    )
    axes.axvline(present, color="#9a6700", linestyle=":", label=f"in params.yaml {present:g}")
    axes.set(
        xscale="log",
        xlabel="learning rate",
        ylabel="training loss",
        title="Learning-rate range test",
    )
    axes.set_ylim(top=2 * found.smoothed[0] - min(found.smoothed))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".partial{path.suffix}")
    with mpl.rc_context({"svg.hashsalt": "slipway"}):
        figure.savefig(partial, metadata={"Date": None} if path.suffix == ".svg" else {})
    files.write_bytes(path, partial.read_bytes())
    partial.unlink()


@quiet_when_unread()
def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m slipway.planning.tuning", description=__doc__)
    parser.add_argument(
        "--apply", action="store_true", help="write the proposed change into params.yaml"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    batch = commands.add_parser("batch", help="the largest and the fastest batch of a device")
    batch.add_argument(
        "--seconds", type=float, default=10.0, help="bound of the timing of each size"
    )
    batch.add_argument(
        "--step",
        action="store_true",
        help="also propose train.batch_size, which changes the result",
    )
    rate = commands.add_parser("learning-rate", help="the range test")
    rate.add_argument("--steps", type=int, default=100)
    rate.add_argument("--from", dest="lowest", type=float, default=1e-6)
    rate.add_argument("--to", dest="highest", type=float, default=1.0)
    rate.add_argument("--plot", type=Path, default=PLOT, help="an .svg or a .png")
    arguments = parser.parse_args()

    def run(params: Params) -> None:
        if arguments.command == "batch":
            changes = tune_batch(
                params, PROJECT_PATHS, arguments.seconds, changes_step=arguments.step
            )
        else:
            changes = tune_learning_rate(
                params,
                PROJECT_PATHS,
                arguments.steps,
                arguments.lowest,
                arguments.highest,
                arguments.plot,
            )
        patch = propose(_PARAMS, changes, apply=arguments.apply)
        print(patch or "params.yaml has these values already.")
        print(
            "applied."
            if patch and arguments.apply
            else "nothing was changed; --apply writes it."
            if patch
            else "",
            flush=True,
        )

    run_stage(run)


if __name__ == "__main__":
    main()
