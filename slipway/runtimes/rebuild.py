"""Rebuilds a bundle's engine on another machine and certifies it on the bundle's golden rows.

The service starts `python -m slipway.runtimes.rebuild BUNDLE ENGINE REBUILT`; `python -m
slipway.stages.compile` does the same without params.yaml. The engine manifest or the record of a
skipped build in ENGINE holds the request. REBUILT then holds an engine, its manifest and
`target_certificate.json`, without which it is not served. A bundle without golden rows is refused,
and so is an engine whose predictions for them differ.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.certificate import Execution
from slipway.artifacts.engine_manifest import (
    ENGINE_MANIFEST,
    EngineMachine,
    EngineRequest,
    read_request,
)
from slipway.artifacts.golden_rows import GoldenResult, check_golden_rows
from slipway.artifacts.uncertainty import Answers
from slipway.runtimes.compilation import compile_engine
from slipway.runtimes.engine_runner import EngineRunner, open_engine
from slipway.runtimes.runtime import run_in_batches, why_unavailable
from slipway.system import files
from slipway.system.contract import Contract, validate_record
from slipway.system.errors import (
    EngineError,
    IntegrityError,
    LockedError,
    SlipwayError,
    UnavailableError,
)

FORMAT_VERSION = 2
CERTIFICATE = "target_certificate.json"
_TIMINGS = "timing.cache"
_NICENESS = 10
_LOCK_POLL_S = 0.5


class TargetCertificate(Contract):
    """The content of `target_certificate.json`: proof that a rebuilt engine agrees with fp32.

    It names the engine, the machine, and the differences measured on the golden rows.
    """

    format_version: Literal[2]
    bundle_digest: str  # hex SHA-256 of bundle.json
    engine_digest: str  # hex SHA-256 of the engine's engine_manifest.json
    golden_rows_sha256: str
    machine: EngineMachine
    execution: Execution
    golden_rows: GoldenResult


def rebuild_engine(
    bundle_root: Path, engine_root: Path, rebuilt: Path, module: str = "tensorrt"
) -> TargetCertificate:
    """Build and certify the engine requested in `engine_root`, unless `rebuilt` has one that fits.

    Raises SlipwayError if that is impossible here or the engine differs from fp32; `rebuilt` is
    then unchanged.
    """
    bundle = load_bundle(bundle_root)
    bundle.verify()
    request = read_request(engine_root)
    if bundle.manifest.golden_rows is None:
        raise UnavailableError(
            "the bundle has no golden rows to certify an engine on. "
            "Set export.golden_rows, and run `slipway run`."
        )
    reason = why_unavailable("tensorrt")
    if reason:
        raise UnavailableError(f"no engine can be built here: {reason}.")
    with _exclusive(rebuilt):
        try:
            return open_rebuilt(rebuilt, bundle)[1]  # another worker has just built it
        except SlipwayError:
            return _build(rebuilt, bundle, request, module)


def open_rebuilt(rebuilt: Path, bundle: LoadedBundle) -> tuple[EngineRunner, TargetCertificate]:
    """Open the engine that was built on this machine, with its certificate.

    Raises UnavailableError if there is none, EngineError if it is for another bundle or machine,
    IntegrityError if a file was altered.
    """
    certificate = read_target_certificate(rebuilt)
    if certificate.bundle_digest != bundle.digest:
        raise EngineError(
            f"the engine in {rebuilt} is of bundle {certificate.bundle_digest[:12]}, "
            f"expected {bundle.version}."
        )
    return open_engine(rebuilt, bundle, certificate.engine_digest), certificate


def read_target_certificate(rebuilt: Path) -> TargetCertificate:
    """Read the certificate of a rebuilt engine.

    Raises UnavailableError if there is none, IntegrityError if it was altered, EngineError for
    another format.
    """
    path = rebuilt / CERTIFICATE
    fix = f"Remove {rebuilt}, and the engine is built again."
    try:
        content = json.loads(path.read_bytes())
        digest = content.pop("digest")
    except FileNotFoundError:
        raise UnavailableError(f"{rebuilt} holds no engine that was built here.") from None
    except (ValueError, KeyError, AttributeError) as error:
        raise IntegrityError(f"{path} was altered: {error}. {fix}") from None
    if content.get("format_version") != FORMAT_VERSION:
        raise EngineError(
            f"{path} has format version {content.get('format_version')!r}, "
            f"this Slipway reads version {FORMAT_VERSION}."
        )
    if digest != files.digest_json(content):
        raise IntegrityError(f"{path} was altered: its `digest` does not match. {fix}")
    return validate_record(TargetCertificate, path, content, EngineError, fix)


def answer_golden_rows(
    run: Callable[[NDArray[Any]], Answers], variant: str, bundle: LoadedBundle, batch_size: int
) -> GoldenResult | None:
    """Run the bundle's golden rows through `run`, and compare the predictions with fp32's.

    Returns the measured differences, or None if the bundle has no golden rows. Raises ParityError
    if they exceed the budget of `variant`.
    """
    rows, entry = bundle.golden_rows(), bundle.manifest.golden_rows
    if rows is None or entry is None:
        return None
    found = run_in_batches(run, rows.inputs, batch_size)
    own, expected = (bundle.manifest.calibration_of(name) for name in (variant, "fp32"))
    thresholds = own.thresholds, expected.thresholds
    return check_golden_rows(found, rows, entry.budgets[variant], thresholds)


def _build(
    rebuilt: Path, bundle: LoadedBundle, request: EngineRequest, module: str
) -> TargetCertificate:
    with files.new_directory(rebuilt) as folder:
        timings = rebuilt / _TIMINGS
        if timings.exists():
            files.write_bytes(folder / _TIMINGS, timings.read_bytes())
        engine_manifest = compile_engine(folder, bundle, request, folder / _TIMINGS, module)
        runner = open_engine(folder, bundle)
        result = answer_golden_rows(
            runner.run, runner.actual.variant, bundle, engine_manifest.profile.largest
        )
        assert result is not None
        assert bundle.manifest.golden_rows is not None
        certificate = TargetCertificate(
            format_version=FORMAT_VERSION,
            bundle_digest=bundle.digest,
            engine_digest=files.sha256_file(folder / ENGINE_MANIFEST),
            golden_rows_sha256=bundle.manifest.golden_rows.sha256,
            machine=engine_manifest.machine,
            execution=runner.actual,
            golden_rows=result,
        )
        content = certificate.model_dump(mode="json")
        files.write_json(folder / CERTIFICATE, content | {"digest": files.digest_json(content)})
    return certificate


@contextmanager
def _exclusive(rebuilt: Path) -> Iterator[None]:
    """Hold the lock of `rebuilt` during the block, so that only one worker builds the engine."""
    path = rebuilt.with_name(f"{rebuilt.name}.lock")
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(files.lock(path, "a rebuild"))
                break
            except LockedError:
                time.sleep(_LOCK_POLL_S)
        yield


def main(arguments: list[str], module: str = "tensorrt") -> int:
    """Rebuild the engine that the arguments name. Returns 0, or 1 after one line on stderr."""
    os.nice(_NICENESS)
    try:
        bundle, engine, rebuilt = map(Path, arguments)
        rebuild_engine(bundle, engine, rebuilt, module)
    except (SlipwayError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
