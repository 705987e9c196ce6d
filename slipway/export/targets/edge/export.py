"""Writes the folders of `slipway export edge` and `openvino`, and runs their script.

The hop installs `requirements.txt` with uv into a new environment, lets `run.py` predict the
original bytes of every test row there, and measures what `edge` in params.yaml limits.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import SCORE_NAME, Provider
from slipway.artifacts.certificate import Hop
from slipway.artifacts.uncertainty import (
    Answers,
    Calibration,
    decided_classes,
    flipped_rows,
    given_labels,
)
from slipway.config.params import load_params
from slipway.config.sections import ScriptParams
from slipway.export.certification.comparison import failed, not_executed
from slipway.export.graphs.narrow_integers import in_32_bits
from slipway.export.targets.edge.environment import emulated_lines, install
from slipway.export.targets.exported import (
    ExportRecord,
    ExportSource,
    TargetAnswers,
    compare,
    exported_contract,
    megabytes,
    read_source,
    summary,
    write_export,
)
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract
from slipway.runtimes.runtime import MIN_LENGTH
from slipway.system import files
from slipway.system.errors import ParityError, UnavailableError


@dataclass(frozen=True)
class ScriptTarget:
    """A runtime that the script can use: its package, and how to install it."""

    name: Literal["edge", "openvino"]
    package: str  # name in the index; its version is that of `pinned`, or the one in use
    pinned: str | None
    provider: Provider | None  # this provider's choice of a variant is the default; None: fp32
    options: tuple[str, ...] = ()  # options of `uv pip install`


EDGE = ScriptTarget("edge", "onnxruntime", None, "cpu")
# Without openvino-telemetry, which sends what is run to the vendor. OpenVINO requires numpy only.
OPENVINO = ScriptTarget("openvino", "openvino", "2026.4.1", None, ("--no-deps",))
# What a runtime requires besides numpy, for an installation without the packages' own requirements.
_NEEDS = {"onnxruntime": ("flatbuffers", "packaging", "protobuf")}
GRAPH = "model.onnx"
_SCRIPT = package_files("slipway.export.targets.edge") / "run.py"
_MASKS = package_files("slipway.inputs") / "personal_data.py"
_EMULATED_ROWS = 20  # the first ones; QEMU needs many times as long
_CONTAINERFILE = """\
# podman build --platform linux/arm64 --tag model .     (linux/amd64 works as well)
# podman run --rm --network none --read-only -v ./pictures:/in:ro model /in
FROM docker.io/library/python:{python}-slim
COPY requirements.txt /model/
RUN pip install --no-cache-dir {options} -r /model/requirements.txt
COPY . /model/
LABEL slipway.runtime="{runtime}"
USER 65534
ENTRYPOINT ["python", "/model/run.py"]
"""
NO_BUDGET = ScriptParams(
    max_folder_mb=None, max_installed_mb=None, max_memory_mb=None, max_latency_ms=None
)


def export_script(
    target: ScriptTarget, out: Path, variant: str | None, aarch64_system: Path | None
) -> str:
    """Write the export of the runtime `target` to the folder `out`. Returns a summary.

    With `aarch64_system`, the folder of an aarch64 system, QEMU runs the script on aarch64, too.

    Raises:
        UnavailableError: a bundle that the script or its runtime cannot carry.
        ParityError: the hop differs, or a budget is exceeded.
    """
    source = read_source(variant, of_choice=target.provider)
    budget = getattr(load_params(), target.name) or NO_BUDGET
    record = write_script(out, source, target, budget, aarch64_system)
    facts = record.facts
    measured = [
        f"{facts['installed_mb']:.0f} MB installed, {facts['memory_mb']:.0f} MB of memory",
        f"aarch64: {facts['aarch64_run']}",
    ] * record.certified
    return summary(out, record, [*measured, f"now: python {out / 'run.py'} FILE_OR_FOLDER"])


def write_script(
    out: Path,
    source: ExportSource,
    target: ScriptTarget = EDGE,
    budget: ScriptParams = NO_BUDGET,
    aarch64_system: Path | None = None,
) -> ExportRecord:
    """Write the script, graph and recipe of a certified model, and verify them within `budget`."""
    require_script(source)

    def fill(folder: Path) -> tuple[list[Hop], dict[str, Any]]:
        write_files(folder, source, target)
        hop, facts = run_script_hop(folder, source, target)
        facts = {"folder_mb": megabytes(folder)} | facts
        if (folder / GRAPH).read_bytes() != source.graph():
            facts["graph"] = "rewritten: hashes of n-grams in integers of 32 bits"
        if hop.status == "agrees":
            facts["aarch64_run"] = run_on_aarch64(folder, source, target, aarch64_system)
        require_within(budget, facts | {"latency_ms": hop.latency_ms}, hop)
        return [hop], facts

    return write_export(out, source, target.name, fill)


def require_script(source: ExportSource) -> None:
    """Raise UnavailableError for a bundle that the script cannot run."""
    contract = source.bundle.manifest.input
    if isinstance(contract, ImageContract) and contract.transform is not None:
        raise UnavailableError(
            f"the script cannot carry the function {contract.transform.function} of "
            "precompute.transform; expected images whose preprocessing is Slipway's own. Serve it "
            "with `slipway serve`."
        )


def require_within(budget: ScriptParams, measured: Mapping[str, Any], hop: Hop) -> None:
    """Raise ParityError if a number exceeds its limit in params.yaml, or was not measured.

    A hop that differs is reported by itself.
    """
    limits = {
        name: getattr(budget, f"max_{name}")
        for name in ("folder_mb", "installed_mb", "memory_mb", "latency_ms")
    }
    found = {name: measured.get(name) for name, most in limits.items() if most is not None}
    beyond = [
        f"{name} is {'not measured' if value is None else f'{value:.4g}'}, expected at most "
        f"{limits[name]:g} ({hop.name}.max_{name})"
        for name, value in found.items()
        if value is None or value > limits[name]
    ]
    if beyond and hop.status != "differs":
        raise ParityError(
            f"the export exceeds its budget: {'; '.join(beyond)}. "
            + f"The hop was not run: {hop.reason.rstrip('.')}. " * (hop.status == "not_executed")
            + "Export a smaller variant with --variant, train a smaller network, or change the "
            "limit in params.yaml."
        )


def write_files(folder: Path, source: ExportSource, target: ScriptTarget = EDGE) -> None:
    """Write script, graph, contract, requirements and recipe."""
    manifest = source.bundle.manifest
    (folder / "run.py").write_bytes(_SCRIPT.read_bytes())
    if isinstance(manifest.input, TextContract) and manifest.input.masked:
        (folder / _MASKS.name).write_bytes(_MASKS.read_bytes())
    graph = source.graph()
    files.write_bytes(folder / GRAPH, in_32_bits(graph) if target is OPENVINO else graph)
    facts = {
        "version": source.bundle.version,
        "variant": source.variant,
        "runtime": target.package,
        "contract": exported_contract(manifest.input),
        "min_length": MIN_LENGTH,
        "input_name": manifest.input_name,
        "output_name": manifest.output_name,
        "score_name": SCORE_NAME,
        "labels": manifest.output.labels,
        "calibration": source.calibration.model_dump(mode="json"),
    }
    files.write_json(folder / "model.json", facts)
    has_pixels = isinstance(manifest.input, ImageContract)
    names = ["numpy", *["pillow"] * has_pixels]
    if _has_tokens(source):
        names += ["tokenizers", *_NEEDS.get(target.package, ())]
    pinned = {name: _installed(name) for name in names}
    pinned[target.package] = target.pinned or _installed(target.package)
    files.write_text(
        folder / "requirements.txt", "".join(f"{name}=={one}\n" for name, one in pinned.items())
    )
    options = " ".join((*_options(source, target), "--only-binary=:all:"))
    files.write_text(
        folder / "Containerfile",
        _CONTAINERFILE.format(
            python=f"3.{sys.version_info[1]}",
            options=options,
            runtime=f"{target.package}=={pinned[target.package]}",
        ),
    )


def _has_tokens(source: ExportSource) -> bool:
    contract = source.bundle.manifest.input
    return isinstance(contract, TextContract) and contract.tokenizer is not None


def _options(source: ExportSource, target: ScriptTarget) -> tuple[str, ...]:
    """Return the options of the installation; for tokenizers, without its client for downloads."""
    return ("--no-deps",) if _has_tokens(source) else target.options


def run_script_hop(
    folder: Path, source: ExportSource, target: ScriptTarget = EDGE
) -> tuple[Hop, dict[str, Any]]:
    """Predict every test row with the script in a new environment. Returns the hop and its facts.

    Raises UnavailableError, with their names, for operators that the runtime lacks.
    """
    requested = source.requested(target.name, "cpu")
    payloads = sorted(source.rows.payloads(), key=lambda payload: payload.position)
    with tempfile.TemporaryDirectory() as scratch:
        environment, rows = Path(scratch) / "environment", Path(scratch) / "rows"
        try:
            facts = install(environment, folder / "requirements.txt", _options(source, target))
        except UnavailableError as error:
            return not_executed(target.name, requested, str(error)), {}
        command = [str(environment / "bin/python"), "-I", str(folder / "run.py")]
        if target is OPENVINO:
            _require_operators([*command, "--check"])
        rows.mkdir()
        for payload in payloads:
            (rows / f"{payload.position:08d}").write_bytes(payload.content)
        begin = time.perf_counter()
        done = subprocess.run(
            [*command, str(rows), "--measure", str(source.rows.timing_rounds)],
            capture_output=True,
            text=True,
            cwd=scratch,
        )
        seconds = time.perf_counter() - begin
    try:
        *lines, last = map(json.loads, done.stdout.splitlines())
        measured = last["measured"]
        answers = _read_answers(lines, source, [payload.row_id for payload in payloads])
    except (ValueError, KeyError, TypeError) as error:
        said = f"{error}; {done.stderr[-300:].strip()}".rstrip("; ")
        return failed(target.name, requested, f"run.py gave no answers: {said}"), facts
    except ParityError as error:
        return failed(target.name, requested, str(error)), facts
    found = TargetAnswers(answers, measured["latency_ms"], len(lines) / seconds)
    hop = compare(source, target.name, requested, found, is_other_runtime=target is OPENVINO)
    return hop, facts | {"memory_mb": measured["memory_mb"]}


def _require_operators(command: list[str]) -> None:
    """Raise UnavailableError if the runtime lacks operators of the graph."""
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        lacking = json.loads(done.stdout)["unsupported"]
    except (ValueError, KeyError):
        lacking = [f"(it ended with {done.returncode}: {done.stderr[-200:].strip()})"]
    if lacking:
        raise UnavailableError(
            f"OpenVINO lacks operators of the graph: {', '.join(lacking)}; expected none. Export "
            "another variant with --variant, or run `slipway export edge` for ONNX Runtime."
        )


def run_on_aarch64(
    folder: Path, source: ExportSource, target: ScriptTarget, system: Path | None
) -> dict[str, Any] | str:
    """Predict the first test rows with the script on aarch64. Returns its differences.

    Without an emulator, or a `system` for it, it returns that this was skipped, and why. In int8
    and fp16 aarch64 rounds in other places: the differences are recorded only.

    Raises ParityError if the script fails there, or predicts otherwise in fp32.
    """
    payloads = sorted(source.rows.payloads(), key=lambda payload: payload.position)[:_EMULATED_ROWS]
    ids = [payload.row_id for payload in payloads]
    with tempfile.TemporaryDirectory() as scratch:
        for payload in payloads:
            (Path(scratch) / f"{payload.position:08d}").write_bytes(payload.content)
        try:
            lines = emulated_lines(folder, Path(scratch), system, _options(source, target))
        except UnavailableError as error:
            return f"skipped: {error}"
    found = _read_answers(lines, source, ids).outputs
    inputs = np.ascontiguousarray(source.rows.comparison.rows.inputs[: len(ids)])
    own = source.reference(inputs).outputs
    thresholds = source.calibration.thresholds
    flipped = [ids[row] for row in flipped_rows(found, own, (thresholds, thresholds))]
    difference = float(np.abs(found - own).max())
    most = source.rows.max_difference * max(1.0, float(np.abs(own).max()))
    if source.model.precision == "fp32" and (flipped or not difference <= most):
        raise ParityError(
            f"run.py predicts otherwise on aarch64: the largest difference is {difference:.1e}, "
            f"expected at most {most:.1e}; labels flipped: {', '.join(flipped) or 'none'}. Export "
            "without --aarch64-system, and report this message."
        )
    return {"rows": len(ids), "max_difference": difference, "flipped": flipped}


def _read_answers(lines: list[dict[str, Any]], source: ExportSource, ids: list[str]) -> Answers:
    """Parse the output of the script.

    Raises ParityError if a row was refused or its label is wrong.
    """
    labels, calibration = source.bundle.manifest.output.labels, source.calibration
    outputs, scores = [], []
    if len(lines) != len(ids):
        raise ParityError(f"run.py answered {len(lines)} of {len(ids)} rows")
    for row_id, line in zip(ids, lines, strict=True):
        if "error" in line:
            raise ParityError(f"row {row_id}: {line['error'].rstrip('.')}")
        shares = [line["probabilities"][name] for name in labels] if labels else [line["value"]]
        outputs.append(np.array(shares, np.float32))
        scores.append(np.float32(line["ood_score"]))
        expected = list(_expected_fields(outputs[-1], scores[-1], labels, calibration))
        wrong = [name for name, value in expected if line[name] != value]
        if wrong:
            raise ParityError(f"row {row_id}: {', '.join(wrong)} do not fit the probabilities")
    return Answers(np.stack(outputs), np.array(scores))


def _expected_fields(
    outputs: NDArray[np.float32], score: np.float32, labels: list[str], calibration: Calibration
) -> Iterator[tuple[str, Any]]:
    """Yield the fields that a prediction must have, by the bundle's calibration."""
    yield "is_ood", bool(calibration.is_ood(score))
    if not labels:
        interval = calibration.interval(float(outputs[0]))
        yield "interval", interval and list(interval)
        return
    inside = calibration.prediction_sets(outputs)
    best_first = np.argsort(-outputs, kind="stable").tolist()
    yield "prediction_set", [labels[place] for place in best_first if inside[place]]
    if calibration.thresholds is not None and calibration.decision is None:
        given = given_labels(outputs, calibration.thresholds)
        yield "labels", [name for name, own in zip(labels, given, strict=True) if own]
    else:
        yield "label", labels[int(decided_classes(outputs, calibration.thresholds))]


def _installed(name: str) -> str:
    """Return the installed version of a package; onnxruntime's may be that of the CUDA package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return version(f"{name}-gpu")
