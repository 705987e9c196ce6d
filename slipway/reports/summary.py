"""`python -m slipway.reports.summary`: one screen about the last run, read from the files that the stages left behind.

It measures nothing. A file that is missing, or a certificate of another bundle, is refused.
The command ends with exit code 1 if a quality gate was missed or could not be judged.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.certificate import Certificate, Execution, Hop, read_certificate
from slipway.artifacts.gates import not_passed
from slipway.config.command import run_stage
from slipway.kinds.registry import Task, is_classification
from slipway.reports.console import baseline_cells, interval, number, size, text_table
from slipway.reports.evaluation.record import read_metrics
from slipway.system.errors import CertificateError, GateMissedError, SchemaError

_SERVE = "serve it on 127.0.0.1:3000\n  make serve\n  bentoml serve serving.service:Slipway"

_BASELINES = {True: "the majority class", False: "the mean target"}


def main(root: Path) -> None:
    """Print the summary; GateMissedError after it if the quality gates forbid a release."""
    bundle, certificate = _read(root)
    print(summary(root))
    failed = not_passed(certificate.gate_results)
    if failed:
        lines = "\n".join(f"  {result.outcome}: {result.text}" for result in failed)
        raise GateMissedError(
            f"model {bundle.version} did not pass {len(failed)} of {len(certificate.gate_results)} quality gates, "
            f"so the service is not ready with it:\n{lines}\n"
            "reports/evaluate.html shows where it goes wrong. Train a better model, or change the gate in params.yaml, "
            "then run `dvc repro`."
        )


def summary(root: Path) -> str:
    """The whole text, at most 100 columns wide but for the reasons; `root` is the project's folder."""
    bundle, certificate = _read(root)
    return "\n\n".join(
        [
            f"model {bundle.version}, {bundle.manifest.task}, {certificate.status}, gates {certificate.gates}",
            _rows(root),
            _metrics(root, bundle),
            _hops(certificate, bundle),
            *_not_executed(certificate.hops),
            *([] if not_passed(certificate.gate_results) else [_SERVE]),
        ]
    )


def _read(root: Path) -> tuple[LoadedBundle, Certificate]:
    bundle = load_bundle(root / "artifacts/bundle")
    certificate = read_certificate(root / "artifacts/certificate.json")
    if certificate.bundle_digest != bundle.digest:
        raise CertificateError(
            f"the certificate is for bundle {certificate.bundle_digest[:12]}, artifacts/bundle is {bundle.version}. Run `dvc repro`."
        )
    return bundle, certificate


def _rows(root: Path) -> str:
    clean, split = root / "reports/clean.json", root / "reports/split.json"
    kept, read, refused, splits = (
        *(_entry(clean, key) for key in ("kept", "read", "refused")),
        _entry(split, "splits"),
    )
    rules = ", ".join(f"{rule} {found['count']}" for rule, found in refused.items())
    shares = ", ".join(f"{name} {splits[name]['rows']}" for name in ("train", "val", "test"))
    return f"rows\n  read {read}, kept {kept}, refused {read - kept}{f' ({rules})' if rules else ''}\n  {shares}"


def _metrics(root: Path, bundle: LoadedBundle) -> str:
    task, baseline = bundle.manifest.task, bundle.manifest.baseline
    metrics = read_metrics(root / "metrics/evaluate.json")
    shown = [
        (name, metrics[name])
        for name in (("accuracy", "f1_macro") if is_classification(task) else ("rmse", "r2"))
    ]
    rows = [
        [
            name,
            number(metric.value),
            f"{metric.confidence * 100:g} % {interval(metric)}",
            *baseline_cells(metric, baseline.get(name)),
        ]
        for name, metric in shown
    ]
    title = f"trained network on {shown[0][1].rows} test rows; baseline: {_BASELINES[is_classification(task)]}"
    return f"{title}\n" + text_table(
        ["metric", "value", "interval", "baseline", "difference"], rows, "  "
    )


def _hops(certificate: Certificate, bundle: LoadedBundle) -> str:
    executed = [hop for hop in certificate.hops if hop.actual is not None]
    columns = [
        "hop",
        "ran on",
        "agreement",
        "max diff",
        certificate.metric,
        "size",
        "ms/row",
        "rows/s",
    ]
    rows = [_hop_row(hop, hop.actual, bundle) for hop in executed if hop.actual is not None]
    return "from the trained network to live HTTP\n" + text_table(columns, rows, "  ")


def _hop_row(hop: Hop, actual: Execution, bundle: LoadedBundle) -> list[str]:
    model = bundle.manifest.models.get(actual.variant)
    return [
        hop.name,
        _ran_on(hop.requested, actual),
        _agreement(hop, bundle.manifest.task) if hop.reference else "reference",
        _optional(hop.max_difference, ".1e"),
        number(hop.metric.value) if hop.metric else "",
        size(model.bytes) if model else "",
        _optional(hop.latency_ms, ".2f"),
        _optional(hop.rows_per_second, ".0f"),
    ]


def _ran_on(requested: Execution, actual: Execution) -> str:
    """Where it ran; both where that is not what was asked for."""
    asked, found = (
        f"{execution.provider} {execution.precision}" for execution in (requested, actual)
    )
    return found if requested == actual else f"{asked} -> {found}"


def _agreement(hop: Hop, task: Task) -> str:
    """Rows with the same label over all rows; in words where that is not the whole verdict."""
    if not is_classification(task):
        return hop.status
    same = f"{hop.rows - len(hop.flipped)}/{hop.rows}"
    return same if hop.status == "agrees" else f"{hop.status}, {same}"


def _not_executed(hops: Sequence[Hop]) -> list[str]:
    absent = [f"  {hop.name}: {hop.reason}" for hop in hops if hop.actual is None]
    return ["not executed\n" + "\n".join(absent)] if absent else []


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _entry(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_text())[key]
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. Run `dvc repro`.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(
            f"{path} has no {key!r} ({error!r}). Run `dvc repro --force {path.stem}`."
        ) from error


if __name__ == "__main__":
    run_stage(lambda _: main(Path()))
