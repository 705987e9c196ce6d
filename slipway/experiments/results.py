"""The results of a run, read from what its stages wrote."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from slipway.artifacts.certificate import read_certificate
from slipway.artifacts.gates import read_gates
from slipway.artifacts.locations import CERTIFICATE, GATES, METRICS, TRAINED, VERIFIED
from slipway.config.params import value_at
from slipway.experiments.records import Results
from slipway.kinds.registry import KINDS, kind_of
from slipway.reports.evaluation.record import read_baseline, read_metrics


def read_results(root: Path, stages: Collection[str], content: dict[str, Any]) -> Results | None:
    """Read the results of `stages`, the ones that are up to date; None before `evaluate`.

    `root` is the project's folder, and `content` that of params.yaml. Raises SlipwayError if a file
    is damaged.
    """
    path, task = root / METRICS, value_at(content, "data.task")
    if "evaluate" not in stages or not path.is_file() or task not in KINDS:
        return None
    metrics, headline = read_metrics(path), kind_of(task).target.headline
    loss = metrics.get("log_loss")
    return Results(
        headline=headline,
        metric=metrics.get(headline),
        baseline=read_baseline(path).get(headline),
        log_loss=loss and loss.value,
        gates=read_gates(root / GATES).gates if (root / GATES).is_file() else "",
        certificate=_certificate(root) if "verify" in stages else "",
        **_devices(root),
    )


def _devices(root: Path) -> dict[str, int | None]:
    """Return the numbers of processes and GPUs of the training; None for those not recorded."""
    found = json.loads((root / TRAINED).read_text()) if (root / TRAINED).is_file() else {}
    numbers = {name: found.get(name) for name in ("processes", "gpus")}
    return {name: value if isinstance(value, int) else None for name, value in numbers.items()}


def _certificate(root: Path) -> str:
    """Return "certified", "refused" or another status of the certificate; "" if nothing is known.

    DVC keeps the certificate, so the files of a commit may lack it. Then the status is that in
    the small file of metrics which `verify` writes, and which git keeps.
    """
    if (root / CERTIFICATE).is_file():
        return read_certificate(root / CERTIFICATE).status
    if not (root / VERIFIED).is_file():
        return ""
    return "certified" if json.loads((root / VERIFIED).read_text()).get("certified") else "refused"
