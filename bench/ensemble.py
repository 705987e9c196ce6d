"""Compares an ensemble with its members, its student and a search's winner on the same test rows.

`python -m bench.ensemble [PROJECT [SEARCHED]]` reads the packed store, the model and the log of a
project that trained an ensemble: this checkout, or PROJECT. It exports each member, the ensemble
and a student that is not served as one ONNX graph each, predicts the test rows, and times the
graph. SEARCHED is a project with the same split whose model is the best trial of a search. The best
member is that with the lowest validation loss. The command prints and writes one table.
"""

import json
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.conditions import conditions
from slipway.artifacts.bundle import OutputContract
from slipway.config.params import load_params
from slipway.data.store.packed import PackedManifest, PackedSplit, open_split, read_manifest
from slipway.export.certification.timings import measure_in_turns
from slipway.export.graphs.graph import export_graph
from slipway.kinds.registry import kind_of
from slipway.metrics.paired_bootstrap import paired_difference
from slipway.metrics.scores import Resampling, measure
from slipway.reports.console import interval, number, size
from slipway.runtimes.runtime import Runner, open_onnx, run_in_batches
from slipway.system import files
from slipway.training.networks.ensemble import EnsembleNetwork
from slipway.training.networks.networks import (
    STUDENT,
    Network,
    load_network,
    read_model_manifest,
)
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork
from slipway.training.uncertainty.calibration import Calibrator

RESULT = Path.cwd() / "bench/results/ensemble.md"
RESAMPLING = Resampling(seed=7, num_samples=1000, confidence=0.95)
BATCH, SECONDS = 64, 60.0
WHOLE = "the ensemble"
COLUMNS = (
    *("Model", "Weight", "Loss on the validation rows", "RMSE on the test rows (95 %)"),
    *("Gain of the ensemble (95 %, paired)", "Training", "Graph", "Latency, p50", "Rows/s"),
)


def graph_of(
    network: Network, project: Path, manifest: PackedManifest, train: PackedSplit, val: PackedSplit
) -> bytes:
    """Export the fp32 graph of one network, with a calibration fitted for it."""
    params = load_params(project / "params.yaml")
    fitted = Calibrator(network, params.evaluate, params.seed, "cpu").fit(train, val)
    head = kind_of(manifest.task).target.load_part("head")
    whole = CalibratedNetwork(network, head, fitted.calibration.temperature, fitted.score).eval()
    output = OutputContract(kind="value", labels=[])
    return export_graph(whole, manifest.input, output, opset=18, max_batch_size=BATCH)


def seconds_by_weights(project: Path) -> dict[str, float]:
    """Return the seconds of each training, summed over its attempts, by digest of its weights."""
    started: dict[str, datetime] = {}
    found: dict[str, float] = {}
    for line in (project / ".work/log/train.jsonl").read_text().splitlines():
        entry = json.loads(line)
        run, time = entry["run"], datetime.fromisoformat(entry["time"])
        if entry["event"] == "started":
            started[run] = time
        elif entry["event"] == "finished":
            found[run] = found.get(run, 0.0) + (time - started[run]).total_seconds()
    models = {run: project / ".work/members" / run / "model" for run in found}
    return {
        read_model_manifest(model).weights_sha256: found[run]
        for run, model in models.items()
        if model.is_dir()
    }


def searched_model(project: Path) -> tuple[str, Network, float, float]:
    """Return a search's best trial: name, network, validation loss, and seconds of all trials."""
    records = [
        json.loads(path.read_text()) for path in (project / ".work/experiments").glob("*.json")
    ]
    trials = [record for record in records if record["search"]]
    loss = read_model_manifest(project / "artifacts/model").metrics["val/loss"]
    name = f"the best of {len(trials)} trials"
    seconds = sum(trial["seconds"] for trial in trials)
    return name, load_network(project / "artifacts/model"), loss, seconds


def compare(project: Path, searched: Path | None) -> list[list[str]]:
    """Return a row for each member, the ensemble, its student and the best trial."""
    packed = project / "data/packed"
    manifest = read_manifest(packed)
    train, val, test = (open_split(packed, manifest, name) for name in ("train", "val", "test"))
    whole = load_network(project / "artifacts/model")
    if not isinstance(whole, EnsembleNetwork) or manifest.task != "table_regression":
        raise SystemExit(f"{project} has {whole.spec.name}, expected an ensemble for a number")
    report = json.loads((project / "metrics/train.json").read_text())
    members = report["ensemble"]["members"]
    names = [member.label for member in whole.arguments.members]
    networks: dict[str, Network] = dict(zip(names, whole.members, strict=True)) | {WHOLE: whole}
    others: dict[str, dict[str, float]] = {}
    times = seconds_by_weights(project)
    digests = [files.sha256_bytes(member.payload()) for member in whole.members]
    seconds = dict(zip(names, [times[digest] for digest in digests], strict=True))
    seconds[WHOLE] = sum(times.values())  # includes members with weight 0
    if (folder := project / "artifacts/model" / STUDENT).is_dir():
        student, facts = load_network(folder), report["ensemble"][STUDENT]
        name = facts["name"]
        networks[name], others[name] = student, {"val_loss": facts["val_loss"]}
        own = times[files.sha256_bytes(student.payload())]
        seconds[WHOLE] -= own
        seconds[name] = own
    if searched:
        name, network, loss, spent = searched_model(searched)
        networks[name], others[name], seconds[name] = network, {"val_loss": loss}, spent
    graphs = {
        name: graph_of(network, project, manifest, train, val) for name, network in networks.items()
    }
    runners: dict[str, Runner] = {
        name: open_onnx(graph, variant="fp32", precision="fp32", provider="cpu", num_threads=0)
        for name, graph in graphs.items()
    }
    answers: dict[str, NDArray[np.float32]] = {
        name: run_in_batches(runner.run, test.inputs, BATCH).outputs
        for name, runner in runners.items()
    }
    timings = measure_in_turns(runners, test.inputs, BATCH, SECONDS, RESAMPLING.confidence)
    rows = []
    best_first = sorted(names, key=lambda name: float(members[name]["val_loss"]))
    for name in [*best_first, WHOLE, *others]:
        found = measure(manifest.task, test.targets, answers[name], RESAMPLING, names=["rmse"])
        metric = found["rmse"]
        gain = paired_difference(
            manifest.task, "rmse", test.targets, answers[WHOLE], answers[name], RESAMPLING
        )
        facts = others.get(name) or members.get(name) or {"val_loss": report["val_loss"]}
        rows.append(
            [
                name,
                number(facts["weight"]) if "weight" in facts else "",
                number(facts["val_loss"]),
                f"{number(metric.value)} ({interval(metric)})",
                ""
                if name == WHOLE
                else f"{gain.difference:,.0f} ({gain.low:,.0f} to {gain.high:,.0f})",
                f"{seconds[name]:,.0f} s",
                size(len(graphs[name])),
                f"{timings.p50_ms(name):.2f} ms",
                f"{max(timings.rows_per_second(name).values()):,.0f}",
            ]
        )
    return rows


def main() -> None:
    """Write the table of one project."""
    project = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    searched = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    manifest = read_manifest(project / "data/packed")
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in compare(project, searched)]
    text = "\n".join(lines)
    print(text)
    sizes = ", ".join(f"{manifest.splits[name].rows:,} {name}" for name in ("train", "val", "test"))
    method = json.loads((project / "metrics/train.json").read_text())["ensemble"]["method"]
    note = (
        f"One split ({sizes} rows), one run of each, weights by `{method}`; the best member on the "
        f"validation rows comes first. The seconds of the ensemble are those of its members, "
        "without its student, and those of a search are of all its trials. Trainings ran beside "
        f"other work. {conditions('lightgbm', 'torch', 'tabm')}"
    )
    files.write_text(RESULT, f"# An ensemble and its members on one split\n\n{text}\n\n{note}\n")


if __name__ == "__main__":
    main()
