"""`slipway tune replicas`: computes the replicas for a rate and a latency from measured capacity.

It reads the capacity card of `slipway tune serving`, and starts nothing. Each replica is assumed to
be a machine like the measured one, behind a balancer that spreads requests evenly.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.locations import BUNDLE, CAPACITY
from slipway.serving.load_test.card import FORMAT_VERSION, USABLE
from slipway.serving.settings import ROOT
from slipway.system.command_line import CommandParser, positive_number, quiet_when_unread
from slipway.system.command_run import run_command
from slipway.system.errors import UnavailableError

_MARGIN = round(1 - USABLE, 2)
_MOST_MARGIN = 0.9


@dataclass(frozen=True)
class Sizing:
    """A load and the capacity for it: computes the number of replicas and their utilisation."""

    rate: float  # requests per second of all replicas together
    carried: float  # requests per second that one replica sustains within the limit
    margin: float  # fraction of `carried` that stays free

    @property
    def replicas(self) -> int:
        """The smallest number of replicas that leaves the requested margin of capacity free."""
        needed = self.rate / ((1 - self.margin) * self.carried)
        return max(1, math.ceil(round(needed, 9)))  # 1 - 0.9 is a little less than 0.1

    def load(self, replicas: int) -> float:
        """Return the utilisation of this many replicas, as a fraction of their capacity."""
        return self.rate / (replicas * self.carried)


def read_card(path: Path, p99_ms: float) -> dict[str, Any]:
    """Read a capacity card whose capacity was measured within a latency of `p99_ms`.

    Raises:
        UnavailableError: it is missing, of another format, has no capacity, or a higher latency.
    """
    again = f"Run `slipway tune serving --p99-ms {p99_ms:g}`"
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UnavailableError(
            f"{path} is missing: no capacity was measured. {again} on a machine like those that "
            "will serve."
        ) from None
    except ValueError as error:
        raise UnavailableError(f"{path} is not JSON ({error}). {again}.") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise UnavailableError(
            f"{path} has format version {version!r}, expected {FORMAT_VERSION}. {again}."
        )
    measured = content["goal"]["p99_ms"]
    if measured > p99_ms:
        raise UnavailableError(
            f"the capacity in {path} is within {measured:g} ms, expected one within {p99_ms:g} ms "
            f"or less. {again}."
        )
    if content["carried"]["rate"] is None:
        raise UnavailableError(
            f"no rate was sustained within {measured:g} ms, so no number of replicas is enough. "
            "Allow a higher latency, take a smaller model or a faster machine, and measure again "
            "with `slipway tune serving`."
        )
    return content


def require_model(content: dict[str, Any], version: str) -> None:
    """Raise UnavailableError if the card is of another model."""
    found = content["model"]["version"]
    if found != version:
        raise UnavailableError(
            f"the measured answers per second are those of model {found}, expected {version}, "
            f"which is in {BUNDLE}. "
            f"Run `slipway tune serving --p99-ms {content['goal']['p99_ms']:g}` again."
        )


def describe(content: dict[str, Any], sizing: Sizing, p99_ms: float) -> str:
    """Return the number of replicas and their utilisation, as text for a terminal."""
    replicas, hardware, model = sizing.replicas, content["hardware"], content["model"]
    each = sizing.rate / replicas
    settings = " ".join(f"{name}={value}" for name, value in content["settings"].items())
    lines = [
        f"{sizing.rate:g} requests/s with 99 % within {p99_ms:g} ms",
        "",
        f"replicas  {replicas}, each with {each:,.1f} requests/s: {sizing.load(replicas):.0%} of "
        f"the {sizing.carried:,.1f} that one sustains",
        f"          {replicas + 1} if one may fail or restart",
        f"each      {settings}",
        f"          {hardware['cores']} cores of {hardware['cpu']}",
        f"measured  {content['date']}, model {model['version']}, {model['variant']} on "
        f"{model['provider']}, within {content['goal']['p99_ms']:g} ms",
    ]
    remarks = [one for one in content["remarks"] if not one.startswith("Plan with")]
    return "\n".join([*lines, *(f"note      {remark}" for remark in remarks)])


@quiet_when_unread()
def main(arguments: list[str] | None = None) -> None:
    """Run the command. A failure prints one line on stderr and exits with code 1."""
    options = _parser().parse_args(arguments)
    run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    content = read_card(ROOT / CAPACITY, options.p99_ms)
    if (ROOT / BUNDLE).exists():
        require_model(content, load_bundle(ROOT / BUNDLE).version)
    sizing = Sizing(options.requests_per_second, content["carried"]["rate"], options.margin)
    print(describe(content, sizing, options.p99_ms))


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="slipway tune replicas",
        description="Computes replicas of the service from the measured capacity.",
    )
    parser.add_argument(
        "--requests-per-second",
        type=positive_number,
        required=True,
        metavar="RATE",
        help="load of all replicas together, at its peak",
    )
    parser.add_argument(
        "--p99-ms",
        type=positive_number,
        default=50.0,
        metavar="MS",
        help="latency that 99 of 100 requests must meet; default: 50",
    )
    parser.add_argument(
        "--margin",
        type=_margin,
        default=_MARGIN,
        metavar="FRACTION",
        help=f"of the capacity that stays free for bursts; default: {_MARGIN:g}",
    )
    return parser


def _margin(text: str) -> float:
    margin = 0.0 if text == "0" else positive_number(text)
    if margin > _MOST_MARGIN:
        raise argparse.ArgumentTypeError(f"found {text}, expected 0 to {_MOST_MARGIN:g}")
    return margin
