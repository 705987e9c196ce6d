"""The common form of exports: the certified model as their source, and the written folder.

FOLDER/export.json        target, facts, the hop of its own, and the SHA-256 of every other file
FOLDER/certificate.json   the certificate of the bundle, with this hop as the last one
FOLDER/bundle.json        contract, labels and calibration, as in the bundle
FOLDER/MODEL_CARD.md      the model card, if the bundle has one

The folder appears as a whole or not at all. It replaces an earlier export only.
"""

import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import (
    CARD,
    MANIFEST,
    LoadedBundle,
    ModelFile,
    Provider,
    load_bundle,
)
from slipway.artifacts.certificate import (
    Certificate,
    Execution,
    Hop,
    check_certificate,
    first_fault,
    read_certificate,
    write_certificate,
)
from slipway.artifacts.locations import BUNDLE, CERTIFICATE, PACKED
from slipway.artifacts.uncertainty import Answers, Calibration
from slipway.config.params import load_params
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.export.certification.comparison import HopComparison, Tolerance
from slipway.export.certification.http_hop import RowPayload, raw_payloads
from slipway.export.certification.measurement import Measurement, read_test_rows
from slipway.inputs.contract import InputContract
from slipway.inputs.texts import TextContract
from slipway.metrics.scores import Resampling
from slipway.runtimes.runtime import OnnxRunner, open_onnx, run_in_batches
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import ParityError, UnavailableError

RECORD = "export.json"
ExportTarget = Literal["browser", "edge", "openvino", "triton", "kserve", "mlflow", "huggingface"]


class ExportRecord(Contract):
    """The content of `export.json`."""

    format_version: Literal[1]
    target: ExportTarget
    bundle_digest: str  # hex SHA-256 of bundle.json
    variant: str
    certified: bool  # True if its own hop agrees on every test row
    hop: Hop
    more_hops: tuple[Hop, ...] = ()  # other ways of running the same files, such as browser/webgpu
    facts: dict[str, Any]  # facts about the target: runtime, sizes, differences
    files: dict[str, str]  # hex SHA-256 by path in the folder, of all files but this one


@dataclass(frozen=True)
class CertifiedRows:
    """The test rows of an export, their original bytes, and the allowed differences."""

    comparison: HopComparison
    payloads: Callable[[], Iterator[RowPayload]]
    max_difference: float
    max_metric_loss: Mapping[str, float]  # allowed loss by variant
    timing_rounds: int


@dataclass(frozen=True)
class ExportSource:
    """One variant of a certified bundle."""

    bundle: LoadedBundle
    certificate: Certificate
    variant: str
    rows: CertifiedRows

    @property
    def model(self) -> ModelFile:
        """The manifest's entry of the variant."""
        return self.bundle.manifest.models[self.variant]

    @property
    def calibration(self) -> Calibration:
        """The calibration of the variant."""
        return self.bundle.manifest.calibration_of(self.variant)

    def graph(self) -> bytes:
        """Read the ONNX graph; BundleError if it was altered."""
        return self.bundle.model_bytes(self.variant)

    def requested(self, backend: ExportTarget, provider: str) -> Execution:
        """Return the execution that the hop of a target requests."""
        return Execution(
            backend=backend, provider=provider, precision=self.model.precision, variant=self.variant
        )

    def runner(self) -> OnnxRunner:
        """Load the graph in ONNX Runtime on the CPU; BundleError names an operator it lacks."""
        return open_onnx(
            self.graph(),
            variant=self.variant,
            precision=self.model.precision,
            provider="cpu",
            num_threads=0,
        )

    def reference(self, inputs: NDArray[Any]) -> Answers:
        """Predict inputs (rows, ...) one by one, as targets do, with ONNX Runtime on the CPU.

        In a batch, predictions of a dynamic int8 graph depend on the other rows.
        """
        return run_in_batches(self.runner().run, inputs, 1)


@dataclass(frozen=True)
class TargetAnswers:
    """The predictions of a target for every test row, and its speed."""

    answers: Answers
    latency_ms: float  # median for one row
    rows_per_second: float


def exported_contract(contract: InputContract) -> dict[str, Any]:
    """Return the contract as JSON.

    That of texts has the ranges of characters that this Python's Unicode does not know. Another
    version of Unicode may compose them, which would change the text. Rows of the training data are
    left out, because an exported model explains nothing.
    """
    content = contract.model_dump(mode="json", exclude={"background"})
    if isinstance(contract, TextContract):
        content["unassigned"] = _unassigned()
    return content


@cache
def _unassigned() -> list[list[int]]:
    every = range(sys.maxunicode + 1)
    return as_ranges(code for code in every if unicodedata.category(chr(code)) == "Cn")


def as_ranges(codes: Iterable[int]) -> list[list[int]]:
    """Return ascending numbers as ranges [first, last]."""
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return ranges


def read_source(variant: str | None, of_choice: Provider | None = None) -> ExportSource:
    """Read the project's certified bundle in the working directory.

    Without `variant` it is fp32, or the bundle's own choice for the provider `of_choice`.

    Raises:
        CertificateError: the certificate is of another bundle, or does not certify it.
        GateMissedError: the bundle did not pass its quality gates.
        BundleError: a file is missing or was altered.
        UnavailableError: the bundle has no such variant.
    """
    bundle = load_bundle(BUNDLE)
    bundle.verify()
    certificate = read_certificate(CERTIFICATE)
    check_certificate(certificate, bundle, accept_draft=False)
    models = bundle.manifest.models
    choice = bundle.manifest.choice.get(of_choice) if of_choice else None
    chosen = variant or (choice.variant if choice else "fp32")
    if chosen not in models:
        raise UnavailableError(
            f"the bundle has no variant {chosen!r}, expected one of {', '.join(sorted(models))}. "
            "Name one of these with --variant, or add it to export.variants and run "
            "`slipway export`."
        )
    params = load_params()
    data = unpacked(params.data, ArchiveLimits.of(params.clean))
    rows = read_test_rows(PACKED, bundle.manifest.output.labels)
    resampling = Resampling(
        params.seed, params.evaluate.bootstrap_samples, params.evaluate.confidence
    )
    return ExportSource(
        bundle,
        certificate,
        chosen,
        CertifiedRows(
            HopComparison(rows, resampling),
            lambda: raw_payloads(data, bundle.manifest.input, rows),
            params.verify.max_difference,
            {str(name): budget for name, budget in params.verify.max_metric_loss.items()},
            params.verify.timing_rounds,
        ),
    )


def compare(
    source: ExportSource,
    name: str,
    requested: Execution,
    found: TargetAnswers,
    inputs: NDArray[Any] | None = None,
    *,
    is_other_runtime: bool = False,
) -> Hop:
    """Compare a target's predictions with those of ONNX Runtime on the CPU.

    `inputs` are those that the target computed from the original bytes, if they may differ from
    the packed ones. Another runtime rounds elsewhere in fp16 and int8: these may lose as much as
    the variant may lose against fp32.
    """
    rows = source.rows.comparison.rows
    own = Execution(
        backend="onnxruntime",
        provider="cpu",
        precision=source.model.precision,
        variant=source.variant,
    )

    def measured(execution: Execution, answers: Answers) -> Measurement:
        return Measurement(
            execution,
            answers.outputs,
            latency_ms=found.latency_ms,
            rows_per_second=found.rows_per_second,
            scores=answers.scores,
            calibration=source.calibration,
        )

    packed = np.ascontiguousarray(rows.inputs[:])
    reference = measured(own, source.reference(packed if inputs is None else inputs))
    first = source.rows.comparison.first(f"onnxruntime/cpu/{source.variant}", own, reference)
    tolerance = Tolerance(max_difference=source.rows.max_difference)
    if is_other_runtime and source.model.precision != "fp32":
        tolerance = Tolerance(
            max_metric_loss=source.rows.max_metric_loss[source.variant],
            budget_key=f"verify.max_metric_loss.{source.variant}",
        )
    answered = measured(requested, found.answers)
    return source.rows.comparison.against(name, requested, answered, (first, reference), tolerance)


def write_export(
    out: Path,
    source: ExportSource,
    target: ExportTarget,
    fill: Callable[[Path], tuple[Sequence[Hop], dict[str, Any]]],
    finish: Callable[[Path, Certificate, bool], None] | None = None,
) -> ExportRecord:
    """Write the export's folder `out`: `fill` writes the target's files and runs its hops.

    The first hop certifies the export; any that differs refuses it. `finish` may add files that
    show the certificate.

    Raises:
        UnavailableError: `out` exists and is no earlier export.
        BundleError: no target can load the graph, because ONNX Runtime cannot.
        ParityError: the hop differs; nothing is written.
    """
    if out.exists() and not (out / RECORD).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UnavailableError(
            f"{out} exists and is no export, expected a new folder or an earlier export. Choose "
            "another folder with --out."
        )
    source.runner()
    with files.new_directory(out.absolute()) as folder:
        (folder / MANIFEST).write_bytes((source.bundle.root / MANIFEST).read_bytes())
        card = source.bundle.card()
        if card is not None:
            files.write_text(folder / CARD, card)
        hops, facts = fill(folder)
        hop = first_fault(hops) or hops[0]
        if hop.status == "differs":
            row = f" Worst row: {hop.worst_row}." if hop.worst_row else ""
            option = hop.name.partition("/")[2]
            fix = f"Export without --{option}, or report" if option else "Report"
            raise ParityError(
                f"hop {hop.name} differs: {hop.reason.rstrip('.')}; expected the answers of "
                f"{hop.reference or 'the certified graph'} on every test row.{row} "
                f"Nothing was written to {out}. {fix} it with this message."
            )
        is_certified = hop.status == "agrees"
        certificate = source.certificate.model_copy(
            update={"hops": [*source.certificate.hops, *hops]}
        )
        write_certificate(folder / CERTIFICATE.name, certificate)
        if finish:
            finish(folder, certificate, is_certified)
        record = ExportRecord(
            format_version=1,
            target=target,
            bundle_digest=source.bundle.digest,
            variant=source.variant,
            certified=is_certified,
            hop=hop,
            more_hops=tuple(hops[1:]),
            facts=facts,
            files={
                path.relative_to(folder).as_posix(): files.sha256_file(path)
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            },
        )
        files.write_json(folder / RECORD, record.model_dump(mode="json"))
    return record


def megabytes(folder: Path) -> float:
    """Return the size of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def summary(out: Path, record: ExportRecord, extra: Sequence[str] = ()) -> str:
    """Return a summary of the export, for a terminal."""
    lines = [f"{out}: {megabytes(out):.1f} MB, variant {record.variant}"]
    for hop in (record.hop, *record.more_hops):
        if hop.status == "agrees":
            lines.append(
                f"hop {hop.name} agrees: {hop.rows} rows, largest difference "
                f"{hop.max_difference:.1e}, {hop.latency_ms:.2f} ms per row"
            )
        else:
            lines.append(f"NOT certified: hop {hop.name} was not run: {hop.reason}")
    return "\n".join([*lines, *extra])
