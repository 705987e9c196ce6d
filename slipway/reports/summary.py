"""`python -m slipway.reports.summary`: summarises the last run on one screen.

Reads the files that the stages wrote. A missing file or a certificate of another bundle is an
error. The exit code is 1 if a quality gate was missed or could not be judged.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.certificate import Certificate, read_certificate
from slipway.artifacts.gates import not_passed
from slipway.artifacts.locations import BUNDLE, CERTIFICATE, METRICS, TRAINED
from slipway.config.stage_run import run_stage
from slipway.kinds.registry import are_trees, kind_of
from slipway.reports.console import baseline_cells, interval, number, text_table
from slipway.reports.evaluation.record import read_metrics
from slipway.system.environment import activation
from slipway.system.errors import CertificateError, GateMissedError, SchemaError

_FEW_STEPS = 200  # the digits reach 0.99 after 270 steps, and only chance after 36
_FEW_TEST_ROWS = 100
_NOW = """what now
  slipway serve                          start the service; its page is http://127.0.0.1:3000
  slipway show                           open every report
  bentoml serve slipway.serving.service:Slipway  the same, with the command of BentoML
  reports/verify.html                    compare the trained network with every variant and HTTP
  reports/evaluate.html                  see where the network is wrong
"""


def main(root: Path) -> None:
    """Print the summary, then raise GateMissedError if the quality gates forbid a release."""
    bundle, certificate = _read(root)
    print(summary(root))
    failed = not_passed(certificate.gate_results)
    if failed:
        lines = "\n".join(f"  {result.outcome}: {result.text}" for result in failed)
        raise GateMissedError(
            f"model {bundle.version} did not pass {len(failed)} of "
            f"{len(certificate.gate_results)} quality gates, so the service is not ready with it:\n"
            f"{lines}\nreports/evaluate.html shows where it goes wrong. Train a better model, "
            "or change the gate in params.yaml, then run `slipway run`."
        )


def summary(root: Path) -> str:
    """Return the summary of the project in `root`; only reasons exceed 100 columns."""
    bundle, certificate = _read(root)
    parts = [
        f"model {bundle.version}, {bundle.manifest.task}, {certificate.status}, "
        f"gates {certificate.gates}",
        _rows(root),
        _metrics(root, bundle, certificate),
        *_hints(root, bundle.manifest.lineage.params.get("train") or {}),
    ]
    if not not_passed(certificate.gate_results):
        command, (title, *lines) = activation(), _NOW.splitlines()
        first = [f"  {command:<37}  first: this shell lacks the commands"] if command else []
        parts.append("\n".join([title, *first, *lines]))
    return "\n\n".join(parts)


def _read(root: Path) -> tuple[LoadedBundle, Certificate]:
    bundle = load_bundle(root / BUNDLE)
    certificate = read_certificate(root / CERTIFICATE)
    if certificate.bundle_digest != bundle.digest:
        raise CertificateError(
            f"the certificate is for bundle {certificate.bundle_digest[:12]}, "
            f"artifacts/bundle is {bundle.version}. Run `slipway run`."
        )
    return bundle, certificate


def _rows(root: Path) -> str:
    clean = _entries(root / "reports/clean.json", "kept", "read", "refused")
    (splits,) = _entries(root / "reports/split.json", "splits")
    kept, read, refused = clean
    rules = ", ".join(f"{rule} {found['count']}" for rule, found in refused.items())
    named = f" ({rules})" if rules else ""
    shares = ", ".join(f"{name} {splits[name]['rows']}" for name in ("train", "val", "test"))
    return f"rows\n  read {read}, kept {kept}, refused {read - kept}{named}\n  {shares}"


def _entries(path: Path, *keys: str) -> list[Any]:
    """Read the entries `keys` of a stage's JSON report."""
    try:
        content = json.loads(path.read_text())
        return [content[key] for key in keys]
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. Run `slipway run`.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(
            f"{path} has no {', '.join(map(repr, keys))} ({error!r}). "
            f"Run `dvc repro --force {path.stem}`."
        ) from error


def _hints(root: Path, train: Mapping[str, Any]) -> list[str]:
    """List reasons for a weak model (too few optimizer steps or rows), and failed loggers.

    `train` is the section train of params.yaml.
    """
    (splits,) = _entries(root / "reports/split.json", "splits")
    rows, hints = {name: split["rows"] for name, split in splits.items()}, []
    epochs, batch = train.get("epochs", 0), train.get("batch_size", 0)
    steps = epochs * (rows["train"] // batch) if batch else 0
    if 0 < steps < _FEW_STEPS and not are_trees(train.get("network", "")):
        hints.append(
            f"  {steps} optimizer steps in {epochs} epochs are few: below about {_FEW_STEPS} a "
            "network\n  rarely ends its learning. Raise train.epochs, or lower train.batch_size."
        )
    trained = root / TRAINED
    if failed := trained.is_file() and json.loads(trained.read_text()).get("failed_loggers"):
        hints.append(
            f"  the logger {failed} failed, so it lacks a part of the training. "
            "Every metric is in\n  .work/log/train.jsonl and in TensorBoard."
        )
    if rows["test"] < _FEW_TEST_ROWS:
        hints.append(
            f"  {rows['test']} test rows are few, so the intervals are wide: below about "
            f"{_FEW_TEST_ROWS} only large\n  differences between models show. Collect more rows."
        )
    return ["\n".join(["hints", *hints])] if hints else []


def _metrics(root: Path, bundle: LoadedBundle, certificate: Certificate) -> str:
    target, baseline = kind_of(bundle.manifest.task).target, bundle.manifest.baseline
    metrics = read_metrics(root / METRICS)
    gated = [gate.name for gate in certificate.gate_results if gate.name in metrics]
    shown = {name: metrics[name] for name in (*target.summary_metrics, *gated)}
    rows = [
        [
            name,
            number(metric.value),
            f"{metric.confidence * 100:g} % {interval(metric)}",
            *baseline_cells(metric, baseline.get(name)),
        ]
        for name, metric in shown.items()
    ]
    num_rows = next(iter(shown.values())).rows
    title = f"trained network on {num_rows} test rows; baseline: {target.baseline}"
    columns = ["metric", "value", "interval", "baseline", "difference"]
    return f"{title}\n{text_table(columns, rows, '  ')}"


if __name__ == "__main__":
    run_stage(lambda _: main(Path()))
