"""`slipway replay REQUEST_ID`: runs a logged request on every backend and compares them.

Exit codes: 0 if all backends that ran agree with the logged answer, 1 if one diverges, 2 if the
request cannot be replayed.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from slipway.artifacts.bundle import MANIFEST, LoadedBundle, load_bundle
from slipway.artifacts.certificate import Certificate, check_certificate, read_certificate
from slipway.replay.backends import Places, Replay
from slipway.replay.comparison import BackendResult
from slipway.replay.lineage import describe_lineage, describe_model, describe_request
from slipway.reports.console import number, text_table
from slipway.system import files
from slipway.system.command_line import CommandParser, quiet_when_unread
from slipway.system.disk_faults import disk_fault
from slipway.system.errors import BundleError, CertificateError, SlipwayError, UnavailableError
from slipway.traffic.request_log import LoggedRequest, find_requests, segments

ARTIFACTS = Path("artifacts")
CERTIFICATE = "certificate.json"
EQUAL, DIVERGED, CANNOT = 0, 1, 2
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VERSION = re.compile(r"[0-9a-f]{12}|[0-9a-f]{64}")


@quiet_when_unread()
def main(given: Sequence[str] | None = None) -> NoReturn:
    """Run `slipway replay`. An error ends it with one line on stderr."""
    arguments = _parser().parse_args(given)
    try:
        sys.exit(_lineage(arguments) if arguments.lineage else _replay(arguments))
    except SlipwayError as error:
        _end(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        _end(disk_fault(error) or str(error))


def _parser() -> CommandParser:
    parser = CommandParser(prog="slipway replay", description=__doc__.splitlines()[0])
    parser.add_argument(
        "request_id", help="x-request-id of an answer; with --lineage also its model_version"
    )
    parser.add_argument(
        "--lineage", action="store_true", help="print the origin of the model, and run nothing"
    )
    parser.add_argument(
        "--request-log",
        type=Path,
        help="folder of the request log (default: SLIPWAY_REQUEST_LOG_DIRECTORY)",
    )
    parser.add_argument(
        "--time", type=datetime.fromisoformat, help="of the request, if several have the same id"
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
    parser.add_argument("--url", help="of a running service to compare with")
    return parser


def _lineage(arguments: argparse.Namespace) -> int:
    folder = arguments.request_log or request_log_directory()
    request = None
    if folder is not None and find_requests(folder, _sane(arguments.request_id)):
        request = _request(arguments)
    elif not _VERSION.fullmatch(arguments.request_id):
        _request(arguments)  # explains why there is none
    bundle = _bundle(arguments, request.bundle_digest if request else arguments.request_id)
    if request:
        print(describe_request(request))
    print(describe_model(bundle, find_certificate(bundle)[1]))
    print(describe_lineage(bundle))
    return EQUAL


def _replay(arguments: argparse.Namespace) -> int:
    request = _request(arguments)
    if request.erased:
        raise UnavailableError(
            f"rows {', '.join(map(str, request.erased))} of {request.request_id} were erased, "
            "expected all of its rows: they went through the model together. Replay another "
            "request, or see the model with --lineage."
        )
    bundle = _bundle(arguments, request.bundle_digest)
    certificate, description = find_certificate(bundle)
    print(
        describe_request(request),
        describe_model(bundle, description),
        sep="\n",
        end="\n\n",
        flush=True,
    )
    beside = bundle.root.parent
    places = Places(
        arguments.checkpoint or beside / "model",
        arguments.engine or beside / "engine",
        arguments.url,
    )
    replay = Replay(request, bundle, certificate, places)
    results = list(replay.run())
    print(_table(results), end="\n\n")
    diverged = next((one for one in results if one.status == "diverged"), None)
    if diverged:
        reference = f" from {diverged.reference}" if diverged.reference else ""
        print(f"diverged at {diverged.name}{reference}: {diverged.detail}")
        return DIVERGED
    if arguments.url and results[-1].status == "not_executed":
        raise UnavailableError(f"the service could not be queried: {results[-1].detail}.")
    if not replay.num_executed:
        raise UnavailableError(
            "no backend can run here: install onnxruntime (`pip install 'slipway-ml[serve]'`)."
        )
    num_run = sum(one.status != "not_executed" for one in results)
    print(f"equal: {num_run} backends agree")
    return EQUAL


def _bundle(arguments: argparse.Namespace, digest: str) -> LoadedBundle:
    given = arguments.bundle or given_bundle()
    bundle = find_bundle(digest, given)
    if bundle.root != given:
        print(
            f"{given} is another model; found model {bundle.version} in {bundle.root}",
            file=sys.stderr,
        )
    return bundle


def _request(arguments: argparse.Namespace) -> LoggedRequest:
    """Find the logged request of that id: the newest, or the one of `--time`."""
    folder = arguments.request_log or request_log_directory()
    if folder is None:
        raise UnavailableError(
            "there is no request log: set --request-log, or SLIPWAY_REQUEST_LOG_DIRECTORY as for "
            "the service."
        )
    if not folder.is_dir():
        raise UnavailableError(
            f"{folder} is not a folder; set --request-log to the service's "
            "SLIPWAY_REQUEST_LOG_DIRECTORY."
        )
    found = find_requests(folder, _sane(arguments.request_id))
    if not found:
        existing = segments(folder)
        state = f"it goes back to {_begin(existing[0])} UTC" if existing else "it holds no request"
        raise UnavailableError(
            f"request {arguments.request_id} is not in {folder}: {state}. It was not sampled "
            "(SLIPWAY_REQUEST_LOG_SAMPLING_RATE), was deleted to make room "
            "(SLIPWAY_REQUEST_LOG_BYTES), or was not answered."
        )
    if arguments.time is not None:
        moment = arguments.time if arguments.time.tzinfo else arguments.time.replace(tzinfo=UTC)
        chosen = [request for request in found if request.time == moment]
        if not chosen:
            raise UnavailableError(
                f"request {arguments.request_id} was not logged at that time; "
                f"available: {_times(found)}."
            )
        return chosen[-1]
    if len(found) > 1:
        print(
            f"{len(found)} requests have this id, this is the newest; select another with --time: "
            f"{_times(found)}",
            file=sys.stderr,
        )
    return found[-1]


def _begin(segment: Path) -> str:
    return f"{datetime.strptime(segment.name[:15], '%Y%m%dT%H%M%S'):%Y-%m-%d %H:%M:%S}"


def _sane(request_id: str) -> str:
    if not _SANE_ID.fullmatch(request_id):
        raise UnavailableError(
            f"{request_id[:80]!r} is not a request id, expected 1 to 64 of A-Z a-z 0-9 . _ -"
        )
    return request_id


def _times(found: list[LoggedRequest]) -> str:
    shown = [request.time.isoformat(timespec="microseconds") for request in found[-10:]]
    return ", ".join((["..."] if len(found) > len(shown) else []) + shown)


def _table(results: list[BackendResult]) -> str:
    columns = ["backend", "compared with", "max difference", "answered", "verdict"]
    rows = [
        [
            one.name,
            one.reference,
            "" if one.difference is None else number(one.difference),
            one.answered,
            one.status.replace("_", " "),
        ]
        for one in results
    ]
    lines = [text_table(columns, rows)]
    lines += [f"{one.name}: {one.detail}" for one in results if one.status == "not_executed"]
    return "\n".join(lines)


def _end(text: str) -> NoReturn:
    print(f"\nerror: {text}", file=sys.stderr)
    sys.exit(CANNOT)


def find_bundle(digest: str, given: Path, artifacts: Path = ARTIFACTS) -> LoadedBundle:
    """Find a bundle by digest or model version: `given`, or one below `artifacts`.

    UnavailableError if there is none; BundleError if one of its files was altered.
    """
    for root in (given, *(path.parent for path in sorted(artifacts.rglob(MANIFEST)))):
        found = _digest(root)
        if found is not None and found.startswith(digest):
            bundle = load_bundle(root)
            bundle.verify()
            return bundle
    there = _digest(given)
    other = f"{given} is model {there[:12]}" if there else f"{given} is not a bundle"
    raise UnavailableError(
        f"model {digest[:12]} is needed, but {other}, and no bundle below {artifacts}/ is "
        f"{digest[:12]}. Restore that bundle (dvc checkout at its revision, or a copy) and set "
        "--bundle to its folder."
    )


def find_certificate(bundle: LoadedBundle) -> tuple[Certificate | None, str]:
    """Read the certificate beside or inside a bundle if it certifies this bundle; describe it.

    `slipway release` copies the certificate into the bundle's folder.
    """
    inside = bundle.root / CERTIFICATE
    path = inside if inside.is_file() else bundle.root.parent / CERTIFICATE
    try:
        certificate = read_certificate(path)
        check_certificate(certificate, bundle, accept_draft=False, accept_missed_gates=True)
    except CertificateError as error:
        return None, f"none that certifies it: {error}"
    return certificate, f"{certificate.status}, gates {certificate.gates}, {path}"


def request_log_directory() -> Path | None:
    """Return the folder in SLIPWAY_REQUEST_LOG_DIRECTORY; None if it is unset or empty."""
    named = os.environ.get("SLIPWAY_REQUEST_LOG_DIRECTORY")
    return Path(named) if named else None


def given_bundle() -> Path:
    """Return SLIPWAY_BUNDLE, or else the pipeline's bundle."""
    return Path(os.environ.get("SLIPWAY_BUNDLE") or ARTIFACTS / "bundle")


def _digest(root: Path) -> str | None:
    try:
        return files.sha256_file(root / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BundleError(
            f"{root / MANIFEST} cannot be read: {error.strerror}. Make it readable for this user."
        ) from error


if __name__ == "__main__":
    main()
