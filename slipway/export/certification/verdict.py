"""Turns the compared hops into the certificate, its refusal, and its texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import FORMAT_VERSION, REQUIRED, Certificate, Hop, first_fault
from slipway.artifacts.gates import GateResult, verdict_of
from slipway.export.certification.lineage import describe_hardware, package_versions
from slipway.kinds.registry import Task
from slipway.reports.console import interval, number, text_table
from slipway.reports.evaluation.slice_scores import headline
from slipway.system import files
from slipway.system.errors import IntegrityError, ParityError


def make_certificate(
    bundle: LoadedBundle,
    hops: list[Hop],
    digests: dict[str, str],
    gates: list[GateResult],
    *,
    engine_digest: str | None = None,
    draft: bool,
) -> Certificate:
    """Certify or refuse the hops; make a draft while HTTP is missing.

    The gates do not change this: they decide if a certified model may be released.
    """
    agreeing = {hop.name for hop in hops if hop.status == "agrees"}
    is_certified = first_fault(hops) is None and agreeing.issuperset(REQUIRED)
    verdict: Literal["certified", "refused"] = "certified" if is_certified else "refused"
    return Certificate(
        format_version=FORMAT_VERSION,
        status="draft" if draft else verdict,
        gates=verdict_of(gates),
        gate_results=gates,
        metric=headline(bundle.manifest.task),
        bundle_digest=bundle.digest,
        engine_digest=engine_digest,
        digests=digests,
        hops=hops,
        hardware=describe_hardware(),
        versions=package_versions(),
    )


def digest_everything(bundle: LoadedBundle, paths: list[Path]) -> dict[str, str]:
    """Return the hex SHA-256 of every file that the hops read, by path."""
    models = {
        (bundle.root / model.file).as_posix(): model.sha256
        for model in bundle.manifest.models.values()
    }
    return models | {path.as_posix(): files.sha256_file(path) for path in paths}


def refuse_changed(digests: Mapping[str, str], bundle: LoadedBundle) -> None:
    """Raise IntegrityError if a file changed since the bundle was made from it."""
    made_from = bundle.manifest.lineage.digests
    changed = [path for path, digest in digests.items() if made_from.get(path, digest) != digest]
    if changed:
        raise IntegrityError(
            f"{', '.join(changed)} changed since bundle {bundle.version} was made from it. "
            "Run `dvc repro`."
        )


def raise_if_refused(certificate: Certificate, path: Path) -> None:
    """Raise ParityError for a refused certificate; names the first bad hop and its worst row."""
    if certificate.status != "refused":
        return
    hop = first_fault(certificate.hops)
    if hop is None:
        names = {hop.name for hop in certificate.hops}
        absent = ", ".join(name for name in REQUIRED if name not in names)
        raise ParityError(
            f"nothing ran as {absent}, without which there is no certificate. "
            "Run `dvc repro export`."
        )
    against = f" from {hop.reference}" if hop.reference else ""
    row = f" Worst row: {hop.worst_row}." if hop.worst_row else ""
    fix = ""
    if hop.allowed and hop.allowed.max_metric_loss is not None:
        variant = hop.requested.variant
        fix = (
            f" Take {variant!r} out of export.variants, raise verify.max_metric_loss.{variant}, "
            "or test with more rows."
        )
    raise ParityError(
        f"hop {hop.name} {hop.status.replace('_', ' ')}{against}: {hop.reason}.{row}{fix} "
        f"All hops are in {path}."
    )


def hop_table(hops: list[Hop], task: Task) -> str:
    """Format one line per hop for a terminal."""
    metric = headline(task)
    columns = [
        *("hop", "status", "rows", "max difference", "flipped"),
        *(metric, "change", "its interval", "ms, 1 row", "rows/s"),
    ]
    lines = [text_table(columns, [_table_row(hop, metric) for hop in hops])]
    lines += [f"{hop.name}: {hop.reason}" for hop in hops if hop.reason]
    lines += [f"{hop.name}: {cut}" for hop in hops for cut in cut_batches(hop)]
    return "\n".join(lines)


def cut_batches(hop: Hop) -> list[str]:
    """Name the batch sizes in which `verify.batch_seconds` was too short for every row."""
    return [
        f"in batches of {check.batch_size} it answered {check.rows} of {hop.rows} rows "
        "within verify.batch_seconds"
        for check in hop.batches
        if check.rows < hop.rows
    ]


def summarise(certificate: Certificate) -> dict[str, Any]:
    """Return two columns for `dvc metrics show`, and numbers of each hop in a list DVC skips."""
    executed = [hop for hop in certificate.hops if hop.rows]
    return {
        "certified": int(certificate.status == "certified"),
        "hops_executed": len(executed),
        "hops": [_numbers(hop, certificate.metric) for hop in executed],
    }


def _numbers(hop: Hop, metric: str) -> dict[str, str | float]:
    change = hop.metric_changes.get(metric)
    found: dict[str, str | float | None] = {
        "name": hop.name,
        "agrees": int(hop.status == "agrees"),
        "rows": hop.rows,
        "flipped": len(hop.flipped),
        "max_difference": hop.max_difference,
        metric: hop.metric.value if hop.metric else None,
        f"{metric}_change": change.value if change else None,
        f"{metric}_change_low": change.low if change else None,
        f"{metric}_change_high": change.high if change else None,
        "latency_ms": hop.latency_ms,
        "rows_per_second": hop.rows_per_second,
    }
    return {name: value for name, value in found.items() if value is not None}


def _table_row(hop: Hop, metric: str) -> list[str]:
    if not hop.rows:
        return [hop.name, hop.status.replace("_", " "), *[""] * 8]
    change = hop.metric_changes.get(metric)
    return [
        hop.name,
        hop.status,
        str(hop.rows),
        _optional(hop.max_difference),
        str(len(hop.flipped)) if hop.reference else "",
        _optional(hop.metric.value if hop.metric else None),
        _optional(change.value if change else None),
        interval(change) if change else "",
        _optional(hop.latency_ms),
        _optional(hop.rows_per_second),
    ]


def _optional(value: float | None) -> str:
    return "" if value is None else number(value)
