"""`slipway tune batch|learning-rate`: proposes a batch size or a learning rate.

Runs real steps in one process, with the data, network, loss, optimizer, augmentation and precision
of the training. Prints a patch of params.yaml, and writes it only with `--apply`.
"""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from slipway.config.edit import propose
from slipway.config.params import Params
from slipway.config.stage_run import run_stage
from slipway.config.tree_settings import require_gradient_steps
from slipway.planning.memory_plan import trace_all
from slipway.planning.rehearsal import Rehearsal
from slipway.planning.resource_plan import available_bytes, process_bytes
from slipway.reports.console import size, text_table
from slipway.system import files
from slipway.system.command_line import CommandParser, quiet_when_unread
from slipway.system.errors import TrainingError, UnavailableError
from slipway.system.memory import own_bytes
from slipway.training.batches.batches import StepShape, cut_step
from slipway.training.distributed.placement import Placement, place, this_host
from slipway.training.job import PROJECT_PATHS, Paths, TrainingData, network_spec, open_data
from slipway.training.networks.networks import build_network
from slipway.training.recipe.optimizers import update_of

PLOT = Path("reports/learning_rate.svg")
_PARAMS = Path("params.yaml")
_TIMED_STEPS = 8
_NEAR_BEST = 0.95  # rates above this fraction of the best one differ only by noise
_MAX_USED = 0.9  # fraction of the free memory
# Decay of the moving average, with the bias correction of Adam (arXiv 1412.6980, section 3).
_SMOOTHING = 0.9
_DIVERGED = 3.0  # a smoothed loss of so many times the lowest one ends the test
_MIN_POINTS = 10
_BELOW_LOWEST = 10.0  # the rate of the lowest loss divided by the proposed one, as in fastai


@dataclass(frozen=True)
class BatchSizeTrial:
    """A batch size, its predicted memory in bytes and its measured speed."""

    rows: int
    predicted_bytes: int | None  # None on a GPU
    rows_per_second: float | None  # None if it does not fit


def tune_batch(
    params: Params, paths: Paths, seconds: float, *, changes_step: bool
) -> dict[str, int | float]:
    """Print the speed of each batch size on one device, and return the proposed changes.

    Proposes the largest size that fits as `max_batch_per_device`, which changes results only by
    rounding. With `changes_step`, also proposes the fastest size, times the number of devices, as
    `batch_size`. This changes the results.
    """
    placement, data = place(params.train, this_host()), open_data(paths.packed, paths.augmented)
    trials = _batch_trials(params, data, placement, seconds)
    print(text_table(["rows", "predicted", "rows/s"], [_cells(trial) for trial in trials]))
    best_size, best_rate = largest(trials), fastest(trials)
    if best_size is None or best_rate is None:
        raise UnavailableError(
            "not even one row fits into the memory here. Take a smaller network or smaller images."
        )
    print(f"largest that fits or that there are rows for: {best_size}; fastest: {best_rate}")
    changes: dict[str, int | float] = {"train.max_batch_per_device": best_size}
    if changes_step:
        changes["train.batch_size"] = best_rate * placement.num_readers
    return changes


def _batch_trials(
    params: Params, data: TrainingData, placement: Placement, seconds: float
) -> list[BatchSizeTrial]:
    on_gpu = placement.accelerator == "gpu"
    base_bytes = own_bytes()
    network = build_network(network_spec(params.train, data.manifest))
    sharing = placement.model_parallel or placement.world_size

    def predict(rows: int) -> int:
        traces = trace_all(
            network,
            params.train,
            rows,
            accumulates=True,
            update=update_of(placement),
            model_parallel=sharing,
        )
        return (process_bytes(traces, placement, base_bytes) - base_bytes) * placement.devices

    def step_seconds(rows: int, max_steps: int) -> float:
        gc.collect()  # frees the network and the batches of the previous size
        shape = StepShape(rows, rows, 1, 1)
        rehearsal = Rehearsal(params.seed, params.train, data, placement, shape)
        return rehearsal.step_seconds(max_steps, seconds)

    sizes = candidate_sizes(data.num_train // placement.num_readers)
    # Linux kills a process that takes too much memory, so on the CPU its size is predicted first.
    return search(sizes, None if on_gpu else predict, available_bytes(on_gpu=on_gpu), step_seconds)


def candidate_sizes(max_rows: int) -> list[int]:
    """List the powers of two up to `max_rows`."""
    return [1 << power for power in range(max_rows.bit_length())]


def search(
    sizes: Sequence[int],
    predict: Callable[[int], int] | None,
    available: int | None,
    step_seconds: Callable[[int, int], float],
) -> list[BatchSizeTrial]:
    """Try `sizes` from small to large until one does not fit.

    Args:
        predict: predicts the bytes of all processes for a number of rows; None on a GPU.
        available: free bytes, of which 90 % may be used; None if unknown.
        step_seconds: called as (rows, max_steps); returns the median seconds of a step.
    """
    trials: list[BatchSizeTrial] = []
    for rows in sizes:
        predicted, rate = predict(rows) if predict else None, None
        if predicted is None or available is None or predicted <= _MAX_USED * available:
            rate = _rate(rows, step_seconds)
        trials.append(BatchSizeTrial(rows, predicted, rate))
        if rate is None:
            break
    return trials


def _rate(rows: int, step_seconds: Callable[[int, int], float]) -> float | None:
    try:
        return rows / step_seconds(rows, _TIMED_STEPS)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def largest(trials: Sequence[BatchSizeTrial]) -> int | None:
    """Return the largest batch size that fits; None if no size does."""
    return max((trial.rows for trial in trials if trial.rows_per_second is not None), default=None)


def fastest(trials: Sequence[BatchSizeTrial]) -> int | None:
    """Return the smallest batch size whose speed is within 5 % of the best; None if none fits."""
    rates = {
        trial.rows: trial.rows_per_second for trial in trials if trial.rows_per_second is not None
    }
    best = max(rates.values(), default=0.0)
    return min((rows for rows, rate in rates.items() if rate >= _NEAR_BEST * best), default=None)


def _cells(trial: BatchSizeTrial) -> list[str]:
    predicted = "" if trial.predicted_bytes is None else size(trial.predicted_bytes)
    rate = "does not fit" if trial.rows_per_second is None else f"{trial.rows_per_second:,.0f}"
    return [str(trial.rows), predicted, rate]


@dataclass(frozen=True)
class RangeTest:
    """Learning rate, loss and smoothed loss of each step of a range test.

    The learning rate rises exponentially from far too small to far too large (Smith, arXiv
    1506.01186). The loss is flat at first, then falls, then rises. A good peak of the schedule is
    well below the rate at which the loss rises.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]

    @property
    def lowest(self) -> float:
        """The learning rate with the lowest smoothed loss."""
        return self.rates[self.smoothed.index(min(self.smoothed))]

    @property
    def proposed(self) -> float:
        """The proposed peak of a schedule with warm-up and cosine decay, to two digits."""
        return float(f"{self.lowest / _BELOW_LOWEST:.1e}")


def tune_learning_rate(
    params: Params, paths: Paths, num_steps: int, lowest: float, highest: float, plot: Path
) -> dict[str, int | float]:
    """Run the range test, plot it to `plot` (SVG or PNG), and return the proposed change."""
    placement, data = place(params.train, this_host()), open_data(paths.packed, paths.augmented)
    shape = cut_step(params.train.batch_size, 1, params.train.max_batch_per_device)
    rehearsal = Rehearsal(params.seed, params.train, data, placement, shape)
    found = run_range_test(rehearsal.step_at, num_steps, lowest, highest)
    _draw(found, plot, params.train.learning_rate)
    print(
        f"lowest smoothed loss {min(found.smoothed):.4f} at {found.lowest:.2e}; "
        f"proposed peak {found.proposed:.1e}; curve in {plot}"
    )
    return {"train.learning_rate": found.proposed}


def run_range_test(
    step: Callable[[int, float], float], num_steps: int, lowest: float, highest: float
) -> RangeTest:
    """Raise the learning rate from `lowest` to `highest` until the loss diverges.

    `step(index, rate)` trains one step and returns its loss; it may raise TrainingError if the loss
    is not finite, which ends the test.

    Raises:
        TrainingError: the loss stopped being finite in the first few steps, or it never fell.
    """
    found = RangeTest([], [], [])
    for index in range(num_steps):
        rate = rate_at(index, num_steps, lowest, highest)
        try:
            loss = step(index, rate)
        except TrainingError:
            break
        if not math.isfinite(loss):
            break
        found.rates.append(rate)
        found.losses.append(loss)
        found.smoothed.append(_smooth(found.losses))
        if index >= _MIN_POINTS and found.smoothed[-1] > _DIVERGED * min(found.smoothed):
            break
    if len(found.rates) < _MIN_POINTS:
        raise TrainingError(
            f"the loss was not finite after {len(found.rates)} of {num_steps} steps of the range "
            f"test, expected at least {_MIN_POINTS}. Begin lower (--from), or look at the data."
        )
    if found.lowest <= found.rates[_MIN_POINTS - 1]:
        raise TrainingError(
            f"the loss did not fall at any learning rate between {found.rates[0]:g} and "
            f"{found.rates[-1]:g}. Begin lower (--from), take more steps (--steps), or look at the "
            "data."
        )
    return found


def rate_at(index: int, num_steps: int, lowest: float, highest: float) -> float:
    """Return the rate of step `index`: from `lowest` to `highest` in equal ratios."""
    return float(lowest * (highest / lowest) ** (index / max(1, num_steps - 1)))


def _smooth(losses: Sequence[float]) -> float:
    """Return the exponentially weighted mean of all losses, the last one with the most weight."""
    weights = [_SMOOTHING ** (len(losses) - 1 - index) for index in range(len(losses))]
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)


def _draw(found: RangeTest, path: Path, current: float) -> None:
    """Plot the loss over the rate, and mark the proposed rate and that of params.yaml."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(found.rates, found.losses, color="#c9ced6", linewidth=1, label="loss of each step")
    axes.plot(found.rates, found.smoothed, color="#1f6feb", linewidth=2, label="smoothed")
    axes.axvline(
        found.proposed, color="#1a7f37", linestyle="--", label=f"proposed {found.proposed:g}"
    )
    axes.axvline(current, color="#9a6700", linestyle=":", label=f"in params.yaml {current:g}")
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


def _parser() -> CommandParser:
    parser = CommandParser(prog="slipway tune", description=__doc__)
    applies = CommandParser(add_help=False)
    applies.add_argument(
        "--apply", action="store_true", help="write the proposed change into params.yaml"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    batch = commands.add_parser(
        "batch", parents=[applies], help="the largest and the fastest batch of a device"
    )
    batch.add_argument(
        "--seconds", type=float, default=10.0, help="maximum time of the timed steps of each size"
    )
    batch.add_argument(
        "--step",
        action="store_true",
        help="also propose train.batch_size, which changes the result",
    )
    rate = commands.add_parser("learning-rate", parents=[applies], help="the range test")
    rate.add_argument("--steps", type=int, default=100, help="of the test; default: 100")
    rate.add_argument("--from", dest="lowest", type=float, default=1e-6, help="first rate")
    rate.add_argument("--to", dest="highest", type=float, default=1.0, help="last rate")
    rate.add_argument("--plot", type=Path, default=PLOT, help="an .svg or a .png")
    return parser


@quiet_when_unread()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run `slipway tune`."""
    given = _parser().parse_args(arguments)

    def run(params: Params) -> None:
        require_gradient_steps(params.train.network, "slipway tune")
        if given.command == "batch":
            changes = tune_batch(params, PROJECT_PATHS, given.seconds, changes_step=given.step)
        else:
            changes = tune_learning_rate(
                params, PROJECT_PATHS, given.steps, given.lowest, given.highest, given.plot
            )
        patch = propose(_PARAMS, changes, apply=given.apply)
        if not patch:
            print("params.yaml has these values already.", flush=True)
            return
        print(patch)
        print("applied." if given.apply else "nothing was changed; --apply writes it.", flush=True)

    run_stage(run)


if __name__ == "__main__":
    main()
