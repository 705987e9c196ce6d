"""What the traffic is compared with: `drift.json` in the bundle, made at export and read by the service.

Features of the input are described by the training and validation rows together: they need no model, and a reference of few rows hides
a shift. Features of the answer are described by validation rows alone: on its training rows a network is surer than on new ones.
The numbers of rows are kept, because the laws account for the reference's own sampling error.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slipway.bundle import LoadedBundle, OutputContract
from slipway.calibration import Calibration
from slipway.contract import Contract
from slipway.drift.feature_reference import FeatureReference, describe
from slipway.drift.features import OUTLIER_SCORE, extract, extract_inputs, features_of
from slipway.drift.joint import JointReference, fit_joint
from slipway.drift.quality_reference import QualityReference, fit_quality
from slipway.errors import BundleError
from slipway.input_contract import InputContract

FORMAT_VERSION = 1

Float32 = NDArray[np.float32]


class Reference(Contract):
    """The content of `drift.json`."""

    format_version: Literal[1]
    features: list[FeatureReference] = Field(min_length=1)
    joint: JointReference | None  # of the numbers of the input together; null where there are fewer than two
    quality: QualityReference | None  # what the quality is estimated with; null where the validation rows were too few
    outlier_threshold: float | None  # scores above are outliers; null: no row is one
    outliers: int  # validation rows that are
    outside: int  # rows of the input's reference that alone are the least or the greatest in a number: of new rows as many lie outside
    input_rows: int  # behind the features of the input
    rows: int  # validation rows: behind the features of the answer, the quality and the outliers

    @property
    def names(self) -> list[str]:
        """Of the features, in order."""
        return [feature.name for feature in self.features]

    @cached_property
    def outlier_column(self) -> int:
        """The position of the outlier score among the features."""
        return self.names.index(OUTLIER_SCORE)

    @cached_property
    def fingerprint(self) -> bytes:
        """(32,) SHA-256 of the content: windows of equal fingerprints can be put together."""
        return hashlib.sha256(reference_bytes(self)).digest()


@dataclass(frozen=True)
class ReferenceRows:
    """Validation rows, what the network answered to them, and the truth."""

    inputs: NDArray[Any]  # (rows, ...) as the network takes them
    outputs: NDArray[np.float32]  # (rows, labels) probabilities, or (rows, 1) values
    scores: NDArray[np.float32]  # (rows,) outlier scores
    targets: NDArray[np.float64]  # (rows,) class index, or the number itself


def build_reference(
    contract: InputContract,
    output: OutputContract,
    calibration: Calibration,
    rows: ReferenceRows,
    further_inputs: Sequence[NDArray[Any]] = (),
) -> Reference:
    """The reference of validation rows. `further_inputs` are blocks of rows of the same kind, whose answers do not count: training rows."""
    specifications = features_of(contract, output)
    features = extract(contract, rows.inputs, rows.outputs, rows.scores)
    num_inputs = sum(feature.origin == "input" for feature in specifications)
    of_inputs = np.concatenate([features[:, :num_inputs], *(extract_inputs(contract, block) for block in further_inputs)])
    described = [
        describe(feature, of_inputs[:, column] if column < num_inputs else features[:, column])
        for column, feature in enumerate(specifications)
    ]
    threshold = calibration.outlier.threshold
    return Reference(
        format_version=FORMAT_VERSION,
        features=described,
        joint=fit_joint(described[:num_inputs], of_inputs),
        quality=fit_quality(output, rows.outputs, rows.scores, rows.targets),
        outlier_threshold=threshold,
        outliers=int(calibration.is_outlier(rows.scores).sum()),
        outside=_num_extreme(described[:num_inputs], of_inputs),
        input_rows=len(of_inputs),
        rows=len(features),
    )


def _num_extreme(features: Sequence[FeatureReference], values: Float32) -> int:
    """Rows that would lie outside the range if they were left out of it."""
    is_extreme = np.zeros(len(values), np.bool_)
    for column, feature in enumerate(features):
        for bound in {feature.low, feature.high} - {None}:
            at_bound = values[:, column] == bound
            is_extreme |= at_bound & (at_bound.sum() == 1)
    return int(is_extreme.sum())


def reference_bytes(reference: Reference) -> bytes:
    """The content of `drift.json`: equal references give equal bytes."""
    return json.dumps(reference.model_dump(mode="json"), allow_nan=False, separators=(",", ":")).encode()


def parse_reference(payload: bytes) -> Reference:
    """The reference in the content of `drift.json`; BundleError if it is of another format version, or none."""
    try:
        return Reference.model_validate_json(payload)
    except ValueError as error:
        raise BundleError(f"drift.json is no reference that this Slipway reads: {error}. Run `dvc repro export`.") from error


def read_reference(bundle: LoadedBundle) -> Reference | None:
    """The reference of a bundle, or None where it has none; BundleError if it is absent, altered, or of another form."""
    payload = bundle.drift_bytes()
    return parse_reference(payload) if payload is not None else None
