"""The bundle: everything a service needs to answer, in one folder; this is its only reader and writer.

artifacts/bundle/bundle.json        what is inside, and the SHA-256 of every file
artifacts/bundle/model_VARIANT.onnx one self-contained graph per variant
artifacts/bundle/canary.npz         validation rows that every runtime has to answer as fp32 does, unless export.golden_rows is 0
artifacts/bundle/drift.json         what the traffic is compared with; slipway/drift/ is its reader and writer
artifacts/bundle/MODEL_CARD.md      what the model is for, how good it is and where it is weak, for people

A format version that is not known, a missing file or a changed byte is refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError, model_validator

from slipway.artifacts.golden_rows import Canary, CanaryRows, parse_canary
from slipway.artifacts.input_contract import InputContract
from slipway.artifacts.uncertainty import Calibration
from slipway.kinds.registry import Task
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import BundleError

FORMAT_VERSION = 6
MANIFEST = "bundle.json"
CARD = "MODEL_CARD.md"
DRIFT = "drift.json"
SCORE_NAME = "outlier_score"  # the graph's second output
Precision = Literal["fp32", "fp16", "int8"]
Target = Literal["cpu", "cuda", "tensorrt"]
Provider = Literal["cpu", "cuda"]  # of ONNX Runtime


class OutputContract(Contract):
    """What the graph answers: probabilities (rows, len(labels)) float32 that sum to 1, or values (rows, 1) float32.

    Beside them it always answers outlier scores (rows,) float32, 0 or more, the larger the stranger.
    """

    kind: Literal["probabilities", "value"]
    labels: list[str]  # in the order of the columns; empty for a value


class Metric(Contract):
    """A measured number, its interval and the number of rows behind it."""

    value: float
    low: float
    high: float
    confidence: float
    rows: int


class ModelFile(Contract):
    """One exported graph."""

    file: str
    sha256: str
    bytes: int
    precision: Precision
    meant_for: list[Target]  # where this variant is worth running
    calibration: (
        Calibration | None
    )  # of a pruned network, or with the thresholds of an int8 graph's own answers; null: the bundle's
    coverage: Metric | None = None  # as in Bundle, with the calibration here


class Ratio(Contract):
    """How many times as fast as fp32, measured in turns with it; above 1 is faster. The bounds are of the median over rounds."""

    value: float
    low: float
    high: float


class VariantFigures(Contract):
    """What a variant was measured to be on one provider: answers on every validation row, speed on the machine that exported."""

    metric: Metric  # accuracy, or RMSE for a numeric target
    metric_loss: Metric  # against fp32 on the same rows: accuracy points, or relative growth of the RMSE; below 0 is a gain
    max_difference: float  # from an answer of fp32
    num_flipped: int  # rows whose label is not fp32's
    outliers: Metric | None = (
        None  # share of the rows that it calls outliers; null where too few rows were there for a threshold
    )
    score_rank: float | None = (
        None  # Spearman's correlation of its outlier scores with fp32's; null where either are all equal
    )
    batch_dependence: float  # largest change of an answer with the rows beside it; of a value relative to the largest, above 1
    p50_ms: float  # one row
    p99_ms: float | None  # null where there were fewer than 100 calls
    rows_per_second: float  # at `batch_size`, the best one
    batch_size: int
    latency: Ratio
    throughput: Ratio
    bytes: int  # of the file
    memory_bytes: (
        int | None
    )  # that loading it and one batch add to a process at most; null where that cannot be told
    verdict: str  # why it was chosen, or why not


class Choice(Contract):
    """Which variant `auto` serves on a provider, by which goal, and the figures behind it."""

    variant: str
    max_metric_loss: float
    prefer: Literal["fastest", "smallest"]
    reason: str
    figures: dict[str, VariantFigures]  # by variant, of all that were measured on this provider
    hardware: dict[str, str]


class DataSource(Contract):
    """The raw data, as dvc.lock knows it."""

    path: str  # `data.path`
    hash: str  # how DVC digests: "md5"
    digest: (
        str  # of a file, or, ending in ".dir", of the list of a folder's files with their digests
    )
    bytes: int | None  # null where DVC does not say
    files: int | None  # in a folder; null for a file


class Lineage(Contract):
    """Where a bundle comes from."""

    git_revision: str | None  # null outside a git work tree
    git_dirty: bool
    params: dict[str, Any]  # the sections of params.yaml that shaped it, up to export
    data: DataSource | None  # that `clean` read; null where no pipeline of DVC's ran
    digests: dict[
        str, str
    ]  # hex SHA-256 by path, of dvc.lock, weights and packed manifest as they were


class Bundle(Contract):
    """The content of `bundle.json`."""

    format_version: Literal[6]
    task: Task
    input: InputContract
    input_name: str  # "image" or "row"
    output: OutputContract
    output_name: str
    max_batch_size: int
    models: dict[
        str, ModelFile
    ]  # by variant: "fp32", "fp16", "int8", "int8_dynamic", "int8_tensorrt", "pruned", "pruned_int8"
    left_out: dict[str, str]  # variants that were asked for and not made, each with the reason
    choice: dict[Provider, Choice]  # what `auto` serves, for each provider that was there at export
    canary: Canary | None  # null where export.golden_rows is 0
    calibration: Calibration  # how an answer becomes a prediction set or an interval, and which score is an outlier's
    # Share of the test rows whose set or interval held the truth. Null: there is no interval; absent from older bundles.
    coverage: Metric | None = None
    metrics: dict[str, Metric]  # on the test split, of the trained network
    baseline: dict[str, float]  # by metric, of the trivial predictor on the same rows
    card_sha256: str | None  # hex, of MODEL_CARD.md; null where there is none
    drift_sha256: str | None  # hex, of drift.json; null where there is none
    lineage: Lineage
    versions: dict[str, str]  # of the packages that made it

    def calibration_of(self, variant: str) -> Calibration:
        """What the answers of `variant` are worth, an engine's of it included; the bundle's where it answers as the trained network."""
        model = self.models.get(variant)
        return (model and model.calibration) or self.calibration

    def coverage_of(self, variant: str) -> Metric | None:
        """The coverage that was measured with `calibration_of(variant)`; None where it was not."""
        model = self.models.get(variant)
        return model.coverage if model and model.calibration else self.coverage

    @model_validator(mode="after")
    def _choices_are_there(self) -> Self:
        for provider, choice in self.choice.items():
            unknown = sorted({choice.variant, *choice.figures} - set(self.models))
            if unknown:
                raise ValueError(
                    f"choice.{provider} names {', '.join(unknown)}, models has {', '.join(sorted(self.models))}"
                )
        return self


@dataclass(frozen=True)
class LoadedBundle:
    """A bundle on disk whose manifest was read; its models are verified when they are read."""

    root: Path
    manifest: Bundle
    digest: str  # hex SHA-256 of bundle.json, which holds the digest of everything else

    @property
    def version(self) -> str:
        """The model version shown to callers: the first 12 hex digits of the digest."""
        return self.digest[:12]

    @property
    def file_names(self) -> list[str]:
        """All files that belong to it, in its folder, the manifest first."""
        card = [CARD] if self.manifest.card_sha256 else []
        canary = [self.manifest.canary.file] if self.manifest.canary else []
        drift = [DRIFT] if self.manifest.drift_sha256 else []
        return [
            MANIFEST,
            *(model.file for model in self.manifest.models.values()),
            *card,
            *canary,
            *drift,
        ]

    def model_bytes(self, variant: str) -> bytes:
        """The graph of `variant`, the very bytes that were digested; BundleError if it is absent or altered."""
        if variant not in self.manifest.models:
            raise BundleError(
                f"{self.root} has no variant {variant!r}, it has {', '.join(sorted(self.manifest.models))}."
            )
        model = self.manifest.models[variant]
        return self._verified(model.file, model.sha256)

    def card(self) -> str | None:
        """The model card, Markdown, or None where the bundle has none; BundleError if it is absent or altered."""
        return (
            self._verified(CARD, self.manifest.card_sha256).decode()
            if self.manifest.card_sha256
            else None
        )

    def golden_rows(self) -> CanaryRows | None:
        """The canary rows, or None where the bundle has none; BundleError if their file is absent or altered."""
        canary = self.manifest.canary
        return (
            parse_canary(self._verified(canary.file, canary.sha256), canary.rows)
            if canary
            else None
        )

    def drift_bytes(self) -> bytes | None:
        """The content of the drift reference, which slipway/drift/reference.py reads; None where the bundle has none.

        BundleError if it is absent or altered.
        """
        return (
            self._verified(DRIFT, self.manifest.drift_sha256)
            if self.manifest.drift_sha256
            else None
        )

    def verify(self) -> None:
        """Check every file."""
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
                f"{path} was altered: its SHA-256 is not the one in {MANIFEST}. Run `dvc repro export`, or copy it again."
            )
        return payload


def write_manifest(root: Path, manifest: Bundle) -> None:
    """Write `bundle.json`, last, when every model is in `root`."""
    files.write_json(root / MANIFEST, manifest.model_dump(mode="json"))


def describe_model(
    path: Path,
    precision: Precision,
    meant_for: list[Target],
    calibration: Calibration | None = None,
    coverage: Metric | None = None,
) -> ModelFile:
    """The manifest's entry for an exported graph."""
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
    """Read a bundle's manifest. BundleError if it is missing, not understood, or of another format version."""
    path = root / MANIFEST
    try:
        payload = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(
            f"{path} is missing: {root} is not a bundle. Run `dvc repro`, or point SLIPWAY_BUNDLE at one."
        ) from None
    try:
        content = json.loads(payload)
    except ValueError as error:
        raise BundleError(
            f"{path} is not JSON: {error}. Run `dvc repro export`, or copy the bundle again."
        ) from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{path} has format version {version!r}, this Slipway reads version {FORMAT_VERSION}. Upgrade Slipway, or export again."
        )
    try:
        manifest = Bundle.model_validate(content)
    except ValidationError as error:
        raise BundleError(
            f"{path} is not a valid manifest: {error}. Run `dvc repro export`, or copy the bundle again."
        ) from error
    return LoadedBundle(root=root, manifest=manifest, digest=files.sha256_bytes(payload))
