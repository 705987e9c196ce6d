"""`slipway tune serving --p99-ms 50 --connections 32`: measures capacity, finds settings.

Starts the real service with several candidate settings, one after the other, on its own port and
with its own state, puts it under load and writes the capacity card. `--apply` also writes the best
settings into serving.env. See docs/how-to/operations.md.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipway.artifacts.locations import CAPACITY
from slipway.predictor.loader import read_certified
from slipway.serving.extensions import SECTIONS
from slipway.serving.load_test import card
from slipway.serving.load_test.candidates import SettingsCandidate, present_candidate
from slipway.serving.load_test.figures import Bench, HttpBench
from slipway.serving.load_test.samples import Samples, samples_of
from slipway.serving.load_test.trial_service import require_answered, running, served_settings
from slipway.serving.load_test.tuner import Goal, Tuner
from slipway.serving.settings import ROOT, Settings, read_settings
from slipway.system import files
from slipway.system.command_line import (
    CommandParser,
    positive_number,
    quiet_when_unread,
    whole_number,
)
from slipway.system.command_run import run_command
from slipway.system.cores import num_cores

PAGE, APPLIED = Path("reports/capacity.md"), Path("serving.env")
_CONNECTIONS = 32  # default number of callers


class Services:
    """Starts the service with the settings of a candidate. Each start uses a new subfolder."""

    def __init__(self, settings: Settings, samples: Samples, folder: Path) -> None:
        self._settings = settings
        self._samples = samples
        self._folder = folder
        self._num_opened = 0
        self.model: dict[str, Any] = {}  # the last service's answer to `GET /model`

    @contextmanager
    def __call__(self, candidate: SettingsCandidate) -> Iterator[Bench]:
        """Run the service with the settings of a candidate."""
        self._num_opened += 1
        with running(
            self._settings, candidate, os.environ, self._folder / str(self._num_opened)
        ) as service:
            require_answered(service.url, self._samples)
            self.model = service.model
            yield HttpBench(service.url, self._samples)


@quiet_when_unread()
def main(arguments: list[str]) -> None:
    """Run the command. A failure prints one line on stderr and exits with code 1."""
    options = _parser().parse_args(arguments)
    run_command(lambda: tune(options))


def tune(options: argparse.Namespace) -> None:
    """Measure all candidates, print the results, and write the capacity card."""
    root: Path = options.out
    load_before = os.getloadavg()[0]
    settings = served_settings(read_settings(SECTIONS))
    bundle, _ = read_certified(
        settings.bundle, settings.certificate, accept_draft=settings.accept_draft
    )
    samples = samples_of(bundle, options.samples)
    goal = Goal(
        options.p99_ms,
        options.requests_per_second,
        None if options.requests_per_second else options.connections,
    )
    print(f"goal: {goal}; about {options.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="slipway-tune-") as folder:
        services = Services(settings, samples, Path(folder))
        tuner = Tuner(services, goal, options.seconds)
        largest = bundle.manifest.max_batch_size
        outcome = tuner.run(
            present_candidate(settings, largest),
            num_cores(),
            largest,
            lambda tried: print(card.describe_trial(tried), flush=True),
        )
    content = card.card(
        outcome, services.model, samples.description, card.machine(load_before, num_cores())
    )
    files.write_json(root / CAPACITY, content)
    files.write_text(root / PAGE, card.page(content))
    print(f"\n{card.page(content)}\nwritten: {CAPACITY}, {PAGE}")
    if options.apply:
        files.write_text(root / APPLIED, card.with_settings(root / APPLIED, content["settings"]))
    print(
        f"applied: {APPLIED}"
        if options.apply
        else f"settings are unchanged; --apply writes them into {APPLIED}"
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="slipway tune serving",
        description="Measures the load that the service carries and finds its best settings.",
    )
    parser.add_argument(
        "--p99-ms",
        type=positive_number,
        default=50.0,
        metavar="MS",
        help="latency that 99 of 100 requests must meet; default: 50",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--requests-per-second",
        type=positive_number,
        metavar="RATE",
        help="open loop: requests at random times",
    )
    load.add_argument(
        "--connections",
        type=whole_number(10_000),
        default=_CONNECTIONS,
        metavar="N",
        help="closed loop: callers that wait for their answers; default: 32",
    )
    parser.add_argument(
        "--samples",
        type=Path,
        metavar="PATH",
        help="file or folder of request bodies; default: from the bundle",
    )
    parser.add_argument(
        "--seconds", type=positive_number, default=120.0, help="approximate duration; default: 120"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT,
        metavar="FOLDER",
        help="root of the written files; default: the project",
    )
    parser.add_argument("--apply", action="store_true", help=f"write the settings into {APPLIED}")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
