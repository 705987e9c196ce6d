"""The verdict: hops to a certificate, its table, its metrics, and the error where it is refused.

Certified means that no hop differs, and that fp32 in ONNX Runtime and HTTP were really executed. A
variant that loses too much where nothing serves it is uncertified: it blocks nothing, and no service
takes it. A refused certificate is written as well, so that it can be read; the stage fails after it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import FORMAT_VERSION, REQUIRED, Certificate, Hop, first_fault
from slipway.artifacts.gates import GateResult, verdict_of
from slipway.export.certification.comparison import headline
from slipway.export.certification.lineage import describe_hardware, package_versions
from slipway.kinds.registry import Task
from slipway.reports.console import interval, number, text_table
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
    """The certificate of these hops: a draft while HTTP is missing, else certified or refused.

    The gates change nothing of that: they say what may become of a certified model.
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
    """Hex SHA-256 by path of every file the hops read."""
    models = {
        (bundle.root / model.file).as_posix(): model.sha256
        for model in bundle.manifest.models.values()
    }
    return models | {path.as_posix(): files.sha256_file(path) for path in paths}


def refuse_changed(digests: Mapping[str, str], bundle: LoadedBundle) -> None:
    """IntegrityError where a file that the bundle was made from has another digest than it had then, as its lineage says."""
    made_from = bundle.manifest.lineage.digests
    changed = [path for path, digest in digests.items() if made_from.get(path, digest) != digest]
    if changed:
        raise IntegrityError(
            f"{', '.join(changed)} changed since bundle {bundle.version} was made from it. Run `dvc repro`."
        )


def raise_if_refused(certificate: Certificate, path: Path) -> None:
    """ParityError that names the first bad hop and its worst row."""
    if certificate.status != "refused":
        return
    hop = first_fault(certificate.hops)
    if hop is None:
        absent = ", ".join(
            name for name in REQUIRED if name not in {hop.name for hop in certificate.hops}
        )
        raise ParityError(
            f"nothing ran as {absent}, without which there is no certificate. Run `dvc repro export`."
        )
    against = f" from {hop.reference}" if hop.reference else ""
    row = f" Worst row: {hop.worst_row}." if hop.worst_row else ""
    raise ParityError(
        f"hop {hop.name} {hop.status.replace('_', ' ')}{against}: {hop.reason}.{row}{_way_out(hop)} All hops are in {path}."
    )


def _way_out(hop: Hop) -> str:
    """For a variant with a budget, which nobody has to export."""
    if hop.allowed is None or hop.allowed.max_metric_loss is None:
        return ""
    variant = hop.requested.variant
    return f" Take {variant!r} out of export.variants, raise verify.max_metric_loss.{variant}, or test with more rows."


def hop_table(hops: list[Hop], task: Task) -> str:
    """One line per hop, for a terminal."""
    metric = headline(task)
    columns = [
        "hop",
        "status",
        "rows",
        "max difference",
        "flipped",
        metric,
        "change",
        "its interval",
        "ms, 1 row",
        "rows/s",
    ]
    lines = [text_table(columns, [_line(hop, metric) for hop in hops])]
    lines += [f"{hop.name}: {hop.reason}" for hop in hops if hop.reason]
    lines += [f"{hop.name}: {cut}" for hop in hops for cut in cut_batches(hop)]
    return "\n".join(lines)


def cut_batches(hop: Hop) -> list[str]:
    """The batch sizes in which `verify.batch_seconds` left no time for every row."""
    return [
        f"in batches of {check.batch_size} it answered {check.rows} of {hop.rows} rows, in verify.batch_seconds"
        for check in hop.batches
        if check.rows < hop.rows
    ]


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
        **_change(hop, metric),
        "latency_ms": hop.latency_ms,
        "rows_per_second": hop.rows_per_second,
    }
    return {name: value for name, value in found.items() if value is not None}


def _change(hop: Hop, metric: str) -> dict[str, float]:
    change = hop.metric_changes.get(metric)
    return (
        {
            f"{metric}_change": change.value,
            f"{metric}_change_low": change.low,
            f"{metric}_change_high": change.high,
        }
        if change
        else {}
    )


def _line(hop: Hop, metric: str) -> list[str]:
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
