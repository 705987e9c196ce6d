"""`python -m serving.load_test --p99-ms 50 --connections 32`: what the service carries here, and with which settings.

See docs/operations.md.

It starts the real service with some candidates, one after the other, on a port of its own and with a state of its own, puts it under
load and writes the capacity card. Nothing else changes, unless `--apply` writes the settings that won into serving.env.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving.extensions import SECTIONS
from serving.load_test import card
from serving.load_test.candidates import SettingsCandidate, present_candidate
from serving.load_test.figures import Bench, HttpBench
from serving.load_test.running import require_answered, running, served_settings
from serving.load_test.samples import Samples, samples_of
from serving.load_test.tuner import Goal, Tuner
from serving.models.loading import read_certified
from serving.settings import ROOT, Settings, read_settings
from slipway.config.command import run_command
from slipway.system import files
from slipway.system.broken_pipe import quiet_when_unread
from slipway.system.cores import num_cores

CARD, PAGE, APPLIED = (
    Path("artifacts/capacity.json"),
    Path("reports/capacity.md"),
    Path("serving.env"),
)
_CONNECTIONS = 32  # where no load is named


class Services:
    """Opens the service with a candidate's settings, each time in a folder of its own below `folder`."""

    def __init__(self, settings: Settings, samples: Samples, folder: Path) -> None:
        self._settings = settings
        self._samples = samples
        self._folder = folder
        self._num_opened = 0
        self.model: dict[str, Any] = {}  # /model's answer, of the last one

    @contextmanager
    def __call__(self, candidate: SettingsCandidate) -> Iterator[Bench]:
        """A running one."""
        self._num_opened += 1
        with running(
            self._settings, candidate, os.environ, self._folder / str(self._num_opened)
        ) as service:
            require_answered(service.url, self._samples)
            self.model = service.model
            yield HttpBench(service.url, self._samples)


@quiet_when_unread()
def main(arguments: list[str]) -> None:
    """Run the command. What cannot be measured is one line on stderr and exit code 1."""
    options = _parser().parse_args(arguments)
    run_command(lambda: tune(options))


def tune(options: argparse.Namespace) -> None:
    """Measure, print, and write the card."""
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
            lambda tried: print(card.told(tried), flush=True),
        )
    content = card.card(
        outcome, services.model, samples.what, card.machine(load_before, num_cores())
    )
    files.write_json(root / CARD, content)
    files.write_text(root / PAGE, card.page(content))
    print(f"\n{card.page(content)}\nwritten: {CARD}, {PAGE}")
    if options.apply:
        files.write_text(root / APPLIED, card.with_settings(root / APPLIED, content["settings"]))
    print(
        f"applied: {APPLIED}"
        if options.apply
        else f"nothing was changed; --apply writes the settings into {APPLIED}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.load_test",
        description="What the service carries here, and with which settings.",
    )
    parser.add_argument(
        "--p99-ms",
        type=_positive,
        required=True,
        metavar="MS",
        help="within which 99 of 100 requests have to be answered",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--requests-per-second",
        type=_positive,
        metavar="RATE",
        help="at random times, whatever the answers do",
    )
    load.add_argument(
        "--connections",
        type=_count,
        default=_CONNECTIONS,
        metavar="N",
        help="callers who wait for their answers, default: 32",
    )
    parser.add_argument(
        "--samples",
        type=Path,
        metavar="PATH",
        help="file or folder of request bodies; default: of the bundle",
    )
    parser.add_argument(
        "--seconds", type=_positive, default=120.0, help="that it may take, about; default: 120"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT,
        metavar="FOLDER",
        help="that the card is written below; default: the project",
    )
    parser.add_argument("--apply", action="store_true", help=f"write the settings into {APPLIED}")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 10_000:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    main(sys.argv[1:])
