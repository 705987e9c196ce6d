"""Makes the certificate from the compared hops, and the texts that report it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import (
    FORMAT_VERSION,
    REQUIRED,
    Certificate,
    Execution,
    Hop,
    first_fault,
)
from slipway.artifacts.gates import GateResult, verdict_of
from slipway.export.certification.lineage import describe_hardware, package_versions
from slipway.inputs.images import ImageContract
from slipway.kinds.registry import Task, kind_of
from slipway.reports.console import number, size, text_table
from slipway.reports.evaluation.record import read_user_code
from slipway.system import files
from slipway.system.errors import IntegrityError, ParityError
from slipway.system.user_code import UserCode


def make_certificate(
    bundle: LoadedBundle,
    hops: list[Hop],
    digests: dict[str, str],
    gates: list[GateResult],
    *,
    user_code: Sequence[UserCode] = (),
    training: list[str] | None = None,
    engine_digest: str | None = None,
    draft: bool,
) -> Certificate:
    """Return a certificate that certifies or refuses a bundle; a draft before the HTTP hop.

    Quality gates have no influence here: they decide if a certified model may be released.
    """
    agreeing = {hop.name for hop in hops if hop.status == "agrees"}
    is_certified = first_fault(hops) is None and agreeing.issuperset(REQUIRED)
    verdict: Literal["certified", "refused"] = "certified" if is_certified else "refused"
    return Certificate(
        format_version=FORMAT_VERSION,
        status="draft" if draft else verdict,
        gates=verdict_of(gates),
        gate_results=gates,
        metric=kind_of(bundle.manifest.task).target.headline,
        bundle_digest=bundle.digest,
        engine_digest=engine_digest,
        digests=digests,
        user_code=list(user_code),
        training=training,
        hops=hops,
        hardware=describe_hardware(),
        versions=package_versions(),
    )


def user_code_of(
    bundle: LoadedBundle, trained: Sequence[UserCode], evaluation: Path
) -> list[UserCode]:
    """Return the user's own code in a model: transform, network, loss and metrics."""
    contract, transforms = bundle.manifest.input, []
    if isinstance(contract, ImageContract) and contract.transform:
        name, sha256 = contract.transform.function, contract.transform.sha256
        transforms = [UserCode(key="precompute.transform", name=name, sha256=sha256)]
    return [*transforms, *trained, *read_user_code(evaluation)]


def digest_everything(bundle: LoadedBundle, paths: list[Path]) -> dict[str, str]:
    """Return the hex SHA-256 of every file that the hops read, by path."""
    models = {
        (bundle.root / model.file).as_posix(): model.sha256
        for model in bundle.manifest.models.values()
    }
    return models | {path.as_posix(): files.sha256_file(path) for path in paths}


def refuse_changed(digests: Mapping[str, str], bundle: LoadedBundle) -> None:
    """Raise IntegrityError if a file in `digests` changed since the bundle was made from it."""
    made_from = bundle.manifest.lineage.digests
    changed = [path for path, digest in digests.items() if made_from.get(path, digest) != digest]
    if changed:
        raise IntegrityError(
            f"{', '.join(changed)} changed since bundle {bundle.version} was made from it. "
            "Run `slipway run`."
        )


def raise_if_refused(certificate: Certificate, path: Path) -> None:
    """Raise ParityError for a refused certificate, with the first bad hop and its worst row."""
    if certificate.status != "refused":
        return
    hop = first_fault(certificate.hops)
    if hop is None:
        names = {hop.name for hop in certificate.hops}
        absent = ", ".join(name for name in REQUIRED if name not in names)
        raise ParityError(
            f"{absent} was not compared with the trained model, and a certificate requires it. Run "
            "`dvc repro export`."
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


def hop_table(hops: Sequence[Hop], bundle: LoadedBundle) -> str:
    """Format the hops as a table. One line lists those without answers, by reason."""
    metric = kind_of(bundle.manifest.task).target.headline
    columns = ["hop", "ran on", "agreement", "max diff", metric, "size", "ms/row", "rows/s"]
    measured = [(hop, hop.actual) for hop in hops if hop.rows and hop.actual]
    lines = [text_table(columns, [_table_row(hop, actual, bundle) for hop, actual in measured])]
    lines += [f"{hop.name}: {hop.reason}" for hop, _ in measured if hop.reason]
    lines += [f"{hop.name}: {cut}" for hop in hops for cut in cut_batches(hop)]
    others: dict[str, dict[str, list[str]]] = {}
    for hop in hops:
        if not (hop.rows and hop.actual):
            by_reason = others.setdefault(hop.status.replace("_", " "), {})
            by_reason.setdefault(hop.reason, []).append(hop.name)
    for status, by_reason in others.items():
        found = (f"{reason}: {', '.join(names)}" for reason, names in by_reason.items())
        lines.append(f"{status}, {'; '.join(found)}")
    return "\n".join(lines)


def cut_batches(hop: Hop) -> list[str]:
    """Describe the batch sizes for which `verify.batch_seconds` was too short to run all rows."""
    return [
        f"in batches of {check.batch_size} it answered {check.rows} of {hop.rows} rows "
        "within verify.batch_seconds"
        for check in hop.batches
        if check.rows < hop.rows
    ]


def summarise(certificate: Certificate) -> dict[str, Any]:
    """Return the content of the metrics file of `verify`.

    Two keys become columns of `dvc metrics show`; the numbers of all hops are in a list, which DVC
    skips.
    """
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


def _table_row(hop: Hop, actual: Execution, bundle: LoadedBundle) -> list[str]:
    model = bundle.manifest.models.get(actual.variant)
    requested, found = (
        f"{execution.provider} {execution.precision}" for execution in (hop.requested, actual)
    )
    return [
        hop.name,
        found if hop.requested == actual else f"{requested} -> {found}",
        _agreement(hop, bundle.manifest.task) if hop.reference else "reference",
        _optional(hop.max_difference, ".1e"),
        number(hop.metric.value) if hop.metric else "",
        size(model.bytes) if model else "",
        _optional(hop.latency_ms, ".2f"),
        _optional(hop.rows_per_second, ".0f"),
    ]


def _agreement(hop: Hop, task: Task) -> str:
    """Return as text the count of rows with equal labels, and the status of a bad hop."""
    if not kind_of(task).target.has_classes:
        return hop.status
    same = f"{hop.rows - len(hop.flipped)}/{hop.rows}"
    return same if hop.status == "agrees" else f"{hop.status}, {same}"


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
