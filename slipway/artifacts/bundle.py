"""Reads and writes bundles. A bundle is a folder with everything that a service needs to predict.

artifacts/bundle/bundle.json          manifest, with the SHA-256 of every file
artifacts/bundle/model_VARIANT.onnx   one self-contained graph per variant
artifacts/bundle/golden_rows.npz      validation rows that every runtime must answer as fp32 does
artifacts/bundle/drift.json           drift reference, read and written by slipway/drift/
artifacts/bundle/MODEL_CARD.md        for people: purpose, quality and weaknesses of the model

An unknown format version, a missing file or an altered byte is refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from slipway.artifacts.golden_rows import GoldenFile, GoldenRows, parse_golden_rows
from slipway.artifacts.uncertainty import Calibration
from slipway.inputs.contract import AnyInputContract
from slipway.kinds.registry import Task
from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import BundleError

FORMAT_VERSION = 8
MANIFEST = "bundle.json"
CARD = "MODEL_CARD.md"
DRIFT = "drift.json"
SCORE_NAME = "ood_score"  # the graph's second output
Precision = Literal["fp32", "fp16", "int8"]
VariantTarget = Literal["cpu", "cuda", "tensorrt"]
Provider = Literal["cpu", "cuda"]  # of ONNX Runtime


class OutputContract(Contract):
    """Form of the graph's outputs, all float32. The first output depends on `kind`.

    * probabilities: (rows, labels), which sum to 1
    * label_probabilities: (rows, labels), independent of each other
    * value: (rows, 1), a predicted number

    The second output has OOD scores (rows,), 0 or more, larger for unusual inputs.
    """

    kind: Literal["probabilities", "label_probabilities", "value"]
    labels: list[str]  # in the order of the columns; empty for a value


class Metric(Contract):
    """A measured number with its confidence interval and the number of rows behind it."""

    value: float
    low: float
    high: float
    confidence: float
    rows: int


class ModelFile(Contract):
    """The manifest's entry for one ONNX graph: file, precision and calibration."""

    file: str
    sha256: str
    bytes: int
    precision: Precision
    meant_for: list[VariantTarget]  # providers on which this variant may be faster or smaller
    # Own calibration of a pruned network or an int8 graph; null: that of the bundle.
    calibration: Calibration | None
    coverage: Metric | None = None  # as in Bundle, with this calibration


class Ratio(Contract):
    """Speed of a variant relative to fp32: above 1 it is faster.

    Both were measured in turns, round by round; `low` and `high` bound the median round.
    """

    value: float
    low: float
    high: float


class MeasuredFigures(Contract):
    """Measured quality of a variant on all validation rows, and its speed on the export machine."""

    metric: Metric  # accuracy, or RMSE for a numeric target
    # Loss against fp32 on the same rows: accuracy points, or relative growth of the RMSE. A gain is
    # negative.
    metric_loss: Metric
    max_difference: float  # largest difference from an answer of fp32
    num_flipped: int  # rows whose label differs from fp32's
    ood_fraction: Metric | None = None  # fraction of rows flagged; null without a threshold
    # Spearman correlation of its OOD scores with fp32's; null if either scores are constant.
    score_rank: float | None = None
    # Largest change of an answer with the other rows of the batch; relative for values above 1.
    batch_dependence: float
    p50_ms: float  # median latency of one row
    p99_ms: float | None  # 99th percentile; null with fewer than 100 calls
    rows_per_second: float  # at `batch_size`, the size with the highest throughput
    batch_size: int
    latency: Ratio
    throughput: Ratio
    bytes: int  # of the file
    memory_bytes: int | None  # added to a process by loading and one batch; null if unknown


class VariantFigures(MeasuredFigures):
    """The figures of a variant, and the verdict that they led to."""

    verdict: str  # reason for choosing it or not


class Choice(Contract):
    """The variant that `auto` serves on a provider, the goal of the choice, and its figures."""

    variant: str
    max_metric_loss: float
    prefer: Literal["fastest", "smallest"]
    reason: str
    figures: dict[str, VariantFigures]  # by variant, of all that were measured on this provider
    hardware: dict[str, str]


class DataSource(Contract):
    """The raw data of a bundle, as dvc.lock records it: path, digest and size."""

    path: str  # `data.path`
    hash: str  # DVC's algorithm: "md5"
    digest: str  # of a file, or, ending in ".dir", of a folder's list of files and digests
    bytes: int | None  # null if DVC does not record it
    files: int | None  # in a folder; null for a file


class Lineage(Contract):
    """The origin of a bundle: git revision, params and raw data."""

    git_revision: str | None  # null outside a git work tree
    git_dirty: bool
    params: dict[str, Any]  # the sections of params.yaml that shaped it, up to export
    data: DataSource | None  # input of `clean`; null without a DVC pipeline
    digests: dict[str, str]  # hex SHA-256 by path: dvc.lock, weights, packed manifest


class Bundle(Contract):
    """The content of `bundle.json`: the contracts, graphs, metrics and lineage of a model."""

    format_version: Literal[8]
    task: Task
    input: AnyInputContract
    input_name: str  # "image" or "row"
    output: OutputContract
    output_name: str
    max_batch_size: int
    # By variant: fp32, fp16, int8, int8_dynamic, int8_tensorrt, pruned, pruned_int8.
    models: dict[str, ModelFile]
    left_out: dict[str, str]  # requested variants that were not made, with the reason
    choice: dict[Provider, Choice]  # for each provider that was available at export
    golden_rows: GoldenFile | None  # null if export.golden_rows is 0
    calibration: Calibration
    # Fraction of test rows whose set or interval contains the label; null without an interval.
    coverage: Metric | None = None
    metrics: dict[str, Metric]  # of the trained network, on the test split
    baseline: dict[str, float]  # by metric, of the trivial predictor on the same rows
    card_sha256: str | None  # hex, of MODEL_CARD.md
    drift_sha256: str | None  # hex, of drift.json
    lineage: Lineage
    versions: dict[str, str]  # of the packages that made it

    def calibration_of(self, variant: str) -> Calibration:
        """Return the calibration for predictions of `variant`, also of engines built from it."""
        model = self.models.get(variant)
        return (model and model.calibration) or self.calibration

    def coverage_of(self, variant: str) -> Metric | None:
        """Return the coverage measured with `calibration_of(variant)`.

        Returns None if it was not measured.
        """
        model = self.models.get(variant)
        return model.coverage if model and model.calibration else self.coverage

    @model_validator(mode="after")
    def _choices_are_there(self) -> Self:
        for provider, choice in self.choice.items():
            unknown = sorted({choice.variant, *choice.figures} - set(self.models))
            if unknown:
                known = ", ".join(sorted(self.models))
                raise ValueError(
                    f"choice.{provider} names {', '.join(unknown)}, models has {known}"
                )
        return self


@dataclass(frozen=True)
class LoadedBundle:
    """A bundle on disk whose manifest was read; other files are verified when they are read."""

    root: Path
    manifest: Bundle
    digest: str  # hex SHA-256 of bundle.json, which holds the digest of everything else

    @property
    def version(self) -> str:
        """Model version shown to callers: the first 12 hex digits of the digest."""
        return self.digest[:12]

    @property
    def file_names(self) -> list[str]:
        """All files of the bundle, the manifest first."""
        manifest = self.manifest
        names = [MANIFEST, *(model.file for model in manifest.models.values())]
        if manifest.card_sha256:
            names.append(CARD)
        if manifest.golden_rows:
            names.append(manifest.golden_rows.file)
        if manifest.drift_sha256:
            names.append(DRIFT)
        return names

    def model_bytes(self, variant: str) -> bytes:
        """Read the graph of `variant`. Raises BundleError if it is missing or altered."""
        if variant not in self.manifest.models:
            found = ", ".join(sorted(self.manifest.models))
            raise BundleError(f"{self.root} has no variant {variant!r}, expected one of {found}.")
        model = self.manifest.models[variant]
        return self._verified(model.file, model.sha256)

    def card(self) -> str | None:
        """Read the model card in Markdown, if any. Raises BundleError if missing or altered."""
        sha256 = self.manifest.card_sha256
        return self._verified(CARD, sha256).decode() if sha256 else None

    def golden_rows(self) -> GoldenRows | None:
        """Read the golden rows, if there are any. Raises BundleError if missing or altered."""
        entry = self.manifest.golden_rows
        if entry is None:
            return None
        return parse_golden_rows(self._verified(entry.file, entry.sha256), entry.rows)

    def drift_bytes(self) -> bytes | None:
        """Read the drift reference, if there is one. Raises BundleError if missing or altered."""
        sha256 = self.manifest.drift_sha256
        return self._verified(DRIFT, sha256) if sha256 else None

    def verify(self) -> None:
        """Check the digest of every file. Raises BundleError if one is missing or altered."""
        for variant in self.manifest.models:
            self.model_bytes(variant)
        self.card()
        self.golden_rows()
        self.drift_bytes()

    def _verified(self, file: str, sha256: str) -> bytes:
        path = self.root / file
        try:
            payload = path.read_bytes()
        except FileNotFoundError:
            raise BundleError(
                f"{path} is missing. Run `dvc repro export`, or copy the whole bundle again."
            ) from None
        if files.sha256_bytes(payload) != sha256:
            raise BundleError(
                f"{path} was altered: its SHA-256 is not the one in {MANIFEST}. "
                "Run `dvc repro export`, or copy it again."
            )
        return payload


def write_manifest(root: Path, manifest: Bundle) -> None:
    """Write `bundle.json` to `root`. Call it last, when all other files are there."""
    files.write_json(root / MANIFEST, manifest.model_dump(mode="json"))


def describe_model(
    path: Path,
    precision: Precision,
    meant_for: list[VariantTarget],
    calibration: Calibration | None = None,
    coverage: Metric | None = None,
) -> ModelFile:
    """Build the manifest's entry for an exported graph."""
    return ModelFile(
        file=path.name,
        sha256=files.sha256_file(path),
        bytes=path.stat().st_size,
        precision=precision,
        meant_for=meant_for,
        calibration=calibration,
        coverage=coverage,
    )


def load_bundle(root: Path) -> LoadedBundle:
    """Read a bundle's manifest. Raises BundleError if missing, malformed, or of another version."""
    path = root / MANIFEST
    try:
        payload = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(
            f"{path} is missing: {root} is not a bundle. "
            "Run `slipway run`, or point SLIPWAY_BUNDLE at one."
        ) from None
    manifest = parse_record(
        Bundle, path, payload, BundleError, "Run `dvc repro export`, or copy the bundle again."
    )
    return LoadedBundle(root=root, manifest=manifest, digest=files.sha256_bytes(payload))
