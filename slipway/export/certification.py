"""The verdict: hops to a certificate, its table, its metrics, and the error where it is refused.

Certified means that no hop differs, and that fp32 in ONNX Runtime and HTTP were really executed. A
refused certificate is written as well, so that it can be read; the stage fails after it.
"""

from pathlib import Path
from typing import Any, Literal

from slipway import files
from slipway.bundle import LoadedBundle
from slipway.certificate import FORMAT_VERSION, Certificate, Hop
from slipway.contract import Task
from slipway.errors import ParityError
from slipway.export.comparison import headline
from slipway.export.lineage import describe_hardware, package_versions
from slipway.reports.console import number, text_table

_REQUIRED = ("torch", "onnxruntime/cpu/fp32", "http")


def make_certificate(
    bundle: LoadedBundle, hops: list[Hop], digests: dict[str, str], *, engine_digest: str | None = None, draft: bool
) -> Certificate:
    """The certificate of these hops: a draft while HTTP is missing, else certified or refused."""
    agreeing = {hop.name for hop in hops if hop.status == "agrees"}
    is_certified = first_fault(hops) is None and agreeing.issuperset(_REQUIRED)
    verdict: Literal["certified", "refused"] = "certified" if is_certified else "refused"
    return Certificate(
        format_version=FORMAT_VERSION,
        status="draft" if draft else verdict,
        metric=headline(bundle.manifest.task),
        bundle_digest=bundle.digest,
        engine_digest=engine_digest,
        digests=digests,
        hops=hops,
        hardware=describe_hardware(),
        versions=package_versions(),
    )


def first_fault(hops: list[Hop]) -> Hop | None:
    """The first hop that forbids a certificate: one that differs, or a required one that was not executed."""
    for hop in hops:
        if hop.status == "differs" or (hop.status == "not_executed" and hop.name in _REQUIRED):
            return hop
    return None


def digest_everything(bundle: LoadedBundle, paths: list[Path]) -> dict[str, str]:
    """Hex SHA-256 by path of every file the hops read."""
    models = {(bundle.root / model.file).as_posix(): model.sha256 for model in bundle.manifest.models.values()}
    return models | {path.as_posix(): files.sha256_file(path) for path in paths}


def raise_if_refused(certificate: Certificate, path: Path) -> None:
    """ParityError that names the first bad hop and its worst row."""
    if certificate.status != "refused":
        return
    hop = first_fault(certificate.hops)
    if hop is None:
        absent = ", ".join(name for name in _REQUIRED if name not in {hop.name for hop in certificate.hops})
        raise ParityError(f"nothing ran as {absent}, without which there is no certificate. Run `dvc repro export`.")
    against = f" from {hop.reference}" if hop.reference else ""
    row = f" Worst row: {hop.worst_row}." if hop.worst_row else ""
    raise ParityError(f"hop {hop.name} {hop.status.replace('_', ' ')}{against}: {hop.reason}.{row} All hops are in {path}.")


def hop_table(hops: list[Hop], task: Task) -> str:
    """One line per hop, for a terminal."""
    columns = ["hop", "status", "rows", "max difference", "flipped", headline(task), "ms, 1 row", "rows/s"]
    lines = [text_table(columns, [_line(hop) for hop in hops])]
    lines += [f"{hop.name}: {hop.reason}" for hop in hops if hop.status != "agrees"]
    return "\n".join(lines)


def summarise(certificate: Certificate) -> dict[str, Any]:
    """Two columns for `dvc metrics show`, and for each executed hop a few numbers in a list, which DVC skips."""
    executed = [hop for hop in certificate.hops if hop.rows]
    return {
        "certified": int(certificate.status == "certified"),
        "hops_executed": len(executed),
        "hops": [_numbers(hop, certificate.metric) for hop in executed],
    }


def _numbers(hop: Hop, metric: str) -> dict[str, str | float]:
    found: dict[str, str | float | None] = {
        "name": hop.name,
        "agrees": int(hop.status == "agrees"),
        "rows": hop.rows,
        "flipped": len(hop.flipped),
        "max_difference": hop.max_difference,
        metric: hop.metric.value if hop.metric else None,
        "latency_ms": hop.latency_ms,
        "rows_per_second": hop.rows_per_second,
    }
    return {name: value for name, value in found.items() if value is not None}


def _line(hop: Hop) -> list[str]:
    if not hop.rows:
        return [hop.name, hop.status.replace("_", " "), *[""] * 6]
    measured = (hop.max_difference, None, hop.metric.value if hop.metric else None, hop.latency_ms, hop.rows_per_second)
    difference, _, metric, latency, speed = ("" if value is None else number(value) for value in measured)
    return [hop.name, hop.status, str(hop.rows), difference, str(len(hop.flipped)) if hop.reference else "", metric, latency, speed]
