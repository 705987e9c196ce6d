"""`python -m slipway.replay REQUEST_ID`: runs a kept request through every hop and names the one where outputs part.

Exit code 0: every hop that ran agrees with the recorded answer. 1: they part. 2: it could not be done.
"""

import argparse
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from slipway.artifacts.bundle import LoadedBundle
from slipway.replay.backends import Places, Replay
from slipway.replay.bundles import find_bundle, find_certificate, given_bundle, kept_directory
from slipway.replay.comparison import BackendResult
from slipway.replay.lineage import describe_lineage, describe_model, describe_request
from slipway.reports.console import number, text_table
from slipway.system.broken_pipe import quiet_when_unread
from slipway.system.disk_faults import disk_fault
from slipway.system.errors import SlipwayError, UnavailableError
from slipway.traffic.request_log import LoggedRequest, find_requests, segments

EQUAL, PARTED, CANNOT = 0, 1, 2
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VERSION = re.compile(r"[0-9a-f]{12}|[0-9a-f]{64}")


@quiet_when_unread()
def main() -> NoReturn:
    """The command."""
    arguments = _parser().parse_args()
    try:
        sys.exit(_lineage(arguments) if arguments.lineage else _replay(arguments))
    except SlipwayError as error:
        _end(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        _end(disk_fault(error) or str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slipway.replay", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "request_id", help="the x-request-id of an answer; with --lineage also its model_version"
    )
    parser.add_argument(
        "--lineage", action="store_true", help="print where the model comes from, and run nothing"
    )
    parser.add_argument(
        "--kept", type=Path, help="folder of kept requests (default: SLIPWAY_KEEP_DIRECTORY)"
    )
    parser.add_argument(
        "--time", type=datetime.fromisoformat, help="of the request, where several have the same id"
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        help="folder of the bundle (default: SLIPWAY_BUNDLE, or artifacts/bundle)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="folder of the trained network (default: model beside the bundle)",
    )
    parser.add_argument(
        "--engine", type=Path, help="folder of the engine (default: engine beside the bundle)"
    )
    parser.add_argument("--url", help="of a running service that is asked, too")
    return parser


def _lineage(arguments: argparse.Namespace) -> int:
    kept = arguments.kept or kept_directory()
    request = None
    if kept is not None and find_requests(kept, _sane(arguments.request_id)):
        request = _request(arguments)
    elif not _VERSION.fullmatch(arguments.request_id):
        _request(arguments)  # says why there is none
    bundle = _bundle(arguments, request.bundle_digest if request else arguments.request_id)
    if request:
        print(describe_request(request))
    print(describe_model(bundle, find_certificate(bundle)[1]))
    print(describe_lineage(bundle))
    return EQUAL


def _replay(arguments: argparse.Namespace) -> int:
    request = _request(arguments)
    bundle = _bundle(arguments, request.bundle_digest)
    certificate, said = find_certificate(bundle)
    print(describe_request(request), describe_model(bundle, said), sep="\n", end="\n\n", flush=True)
    beside = bundle.root.parent
    places = Places(
        arguments.checkpoint or beside / "model",
        arguments.engine or beside / "engine",
        arguments.url,
    )
    replay = Replay(request, bundle, certificate, places)
    hops = list(replay.run())
    print(_table(hops), end="\n\n")
    parted = next((hop for hop in hops if hop.status == "parted"), None)
    if parted:
        against = f" from {parted.reference}" if parted.reference else ""
        print(f"parted at {parted.name}{against}: {parted.detail}")
        return PARTED
    if arguments.url and hops[-1].status == "not_executed":
        raise UnavailableError(f"the service was to be asked: {hops[-1].detail}.")
    if not replay.num_executed:
        raise UnavailableError(
            "no hop could be run here: install onnxruntime (`pip install '.[serve]'`)."
        )
    ran = sum(hop.status != "not_executed" for hop in hops)
    print(f"equal: no outputs part over {ran} hops")
    return EQUAL


def _bundle(arguments: argparse.Namespace, digest: str) -> LoadedBundle:
    given = arguments.bundle or given_bundle()
    bundle = find_bundle(digest, given)
    if bundle.root != given:
        print(
            f"{given} is another model: model {bundle.version} was found in {bundle.root}",
            file=sys.stderr,
        )
    return bundle


def _request(arguments: argparse.Namespace) -> LoggedRequest:
    """The kept request of that id; the newest, or the one of `--time`."""
    kept = arguments.kept or kept_directory()
    if kept is None:
        raise UnavailableError(
            "no folder of kept requests: give --kept, or set SLIPWAY_KEEP_DIRECTORY as for the service."
        )
    if not kept.is_dir():
        raise UnavailableError(
            f"{kept} is no folder; give with --kept the one that the service has as SLIPWAY_KEEP_DIRECTORY."
        )
    found = find_requests(kept, _sane(arguments.request_id))
    if not found:
        there = segments(kept)
        state = (
            f"what it holds goes back to {_begin(there[0])} UTC"
            if there
            else "it holds no kept request"
        )
        raise UnavailableError(
            f"request {arguments.request_id} is not in {kept}: {state}. "
            "It was not sampled (SLIPWAY_KEEP_SHARE), had to make room (SLIPWAY_KEEP_BYTES), or was not answered."
        )
    if arguments.time is not None:
        moment = arguments.time if arguments.time.tzinfo else arguments.time.replace(tzinfo=UTC)
        chosen = [request for request in found if request.time == moment]
        if not chosen:
            raise UnavailableError(
                f"no request {arguments.request_id} is of that time; there are {_times(found)}."
            )
        return chosen[-1]
    if len(found) > 1:
        print(
            f"{len(found)} requests have this id, this is the newest; --time takes another: {_times(found)}",
            file=sys.stderr,
        )
    return found[-1]


def _begin(segment: Path) -> str:
    """When a segment was begun, from its name."""
    return f"{datetime.strptime(segment.name[:15], '%Y%m%dT%H%M%S'):%Y-%m-%d %H:%M:%S}"


def _sane(request_id: str) -> str:
    if not _SANE_ID.fullmatch(request_id):
        raise UnavailableError(
            f"{request_id[:80]!r} is no request id, expected 1 to 64 of A-Z a-z 0-9 . _ -"
        )
    return request_id


def _times(found: list[LoggedRequest]) -> str:
    shown = [request.time.isoformat(timespec="microseconds") for request in found[-10:]]
    return ", ".join((["..."] if len(found) > len(shown) else []) + shown)


def _table(hops: list[BackendResult]) -> str:
    columns = ["hop", "compared with", "max difference", "answered", "verdict"]
    rows = [
        [hop.name, hop.reference, _difference(hop), hop.answered, hop.status.replace("_", " ")]
        for hop in hops
    ]
    lines = [text_table(columns, rows)]
    lines += [f"{hop.name}: {hop.detail}" for hop in hops if hop.status == "not_executed"]
    return "\n".join(lines)


def _difference(hop: BackendResult) -> str:
    return "" if hop.difference is None else number(hop.difference)


def _end(text: str) -> NoReturn:
    print(f"\nerror: {text}", file=sys.stderr)
    sys.exit(CANNOT)


if __name__ == "__main__":
    main()
