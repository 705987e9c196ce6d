"""What the traffic is compared with: `drift.json` in the bundle, made at export and read by the service.

Features of the input are described by the training and validation rows together: they need no model, and a reference of few rows hides
a shift. Features of the answer are described by validation rows alone, since a network is surer of its training rows than of new
ones, and for each variant by its own answers: what int8 rounds is no drift. The numbers of rows are kept, because the laws account for the
reference's own sampling error.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slipway.artifacts.bundle import LoadedBundle, OutputContract
from slipway.artifacts.input_contract import InputContract
from slipway.artifacts.uncertainty import Answers, Calibration
from slipway.drift.feature_reference import FeatureReference, describe
from slipway.drift.features import (
    OUTLIER_SCORE,
    extract_inputs,
    extract_outputs,
    input_features,
    output_features,
)
from slipway.drift.histogram import merge_rare
from slipway.drift.joint import JointReference, fit_joint
from slipway.drift.quality_reference import QualityReference, fit_quality
from slipway.drift.statistics import psi
from slipway.system.contract import Contract
from slipway.system.errors import BundleError

Float32 = NDArray[np.float32]

FORMAT_VERSION = 2
DEFAULT_VARIANT = "fp32"
_ALIKE = (
    1e-3  # level at which training rows are found unlike the validation rows, over all features
)
_LEAST_EXPECTED = 20.0  # rows in a bin, as slipway/drift/judging.py


class InputReference(Contract):
    """What goes into the network."""

    features: list[FeatureReference] = Field(min_length=1)
    joint: JointReference | None  # of the numbers together; null where there are fewer than two
    outside: int  # rows that alone are the least or the greatest in a number: of as many new rows, so many are expected outside
    rows: int


class AnswerReference(Contract):
    """What a variant answers to the validation rows."""

    features: list[FeatureReference] = Field(min_length=1)
    quality: (
        QualityReference | None
    )  # what the quality is estimated with; null where the rows were too few
    outlier_threshold: float | None  # scores above are outliers; null: no row is one
    outliers: int  # rows that are
    rows: int


@dataclass(frozen=True)
class Reference:
    """What a window of one variant's traffic is compared with."""

    inputs: InputReference
    answers: AnswerReference

    @cached_property
    def features(self) -> list[FeatureReference]:
        """Of the input, then of the answer: the columns of `slipway.drift.features.extract`."""
        return [*self.inputs.features, *self.answers.features]

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
        content = self.inputs.model_dump_json() + self.answers.model_dump_json()
        return hashlib.sha256(content.encode()).digest()


class References(Contract):
    """The content of `drift.json`."""

    format_version: Literal[2]
    inputs: InputReference
    answers: dict[str, AnswerReference]  # by variant

    def of(self, variant: str) -> Reference:
        """For the traffic that `variant` answers; BundleError if there is none for it."""
        if variant not in self.answers:
            raise BundleError(
                f"the drift reference has no variant {variant!r}, it has {', '.join(sorted(self.answers))}."
            )
        return Reference(self.inputs, self.answers[variant])


@dataclass(frozen=True)
class ReferenceRows:
    """Validation rows, what the network answered to them, and the truth."""

    inputs: NDArray[Any]  # (rows, ...) as the network takes them
    outputs: Float32  # (rows, labels) probabilities, or (rows, 1) values
    scores: Float32  # (rows,) outlier scores
    targets: NDArray[np.float64]  # (rows,) class index, or the number itself


def build_reference(
    contract: InputContract,
    output: OutputContract,
    calibration: Calibration,
    rows: ReferenceRows,
    further_inputs: Iterable[NDArray[Any]] = (),
) -> Reference:
    """The reference of validation rows and of one variant's answers; `further_inputs` as `describe_inputs` takes them."""
    values = extract_inputs(contract, rows.inputs)
    inputs = describe_inputs(contract, values, further_inputs)
    return Reference(
        inputs,
        describe_answers(
            output, calibration, Answers(rows.outputs, rows.scores), rows.targets, inputs, values
        ),
    )


def describe_inputs(
    contract: InputContract, values: Float32, further: Iterable[NDArray[Any]] = ()
) -> InputReference:
    """Of the features (rows, features) of validation rows, and of blocks of `further` rows (rows, ...), which count unless they are unlike.

    Training rows are unlike where a split of the user's own, or one by time, put others into validation, which stand for the traffic.
    """
    features = input_features(contract)
    described = [describe(feature, values[:, column]) for column, feature in enumerate(features)]
    more = extract_blocks(contract, further)
    if len(more) and _are_alike(described, more):
        values = np.concatenate([values, more])
        described = [
            describe(feature, values[:, column]) for column, feature in enumerate(features)
        ]
    joint = fit_joint(described, values)
    return InputReference(
        features=described, joint=joint, outside=_num_extreme(described, values), rows=len(values)
    )


def extract_blocks(contract: InputContract, blocks: Iterable[NDArray[Any]]) -> Float32:
    """(rows, features) float32 of the input, from blocks of rows that are not all held at a time."""
    none = np.empty((0, len(input_features(contract))), np.float32)
    return np.concatenate([none, *(extract_inputs(contract, block) for block in blocks)])


def describe_answers(
    output: OutputContract,
    calibration: Calibration,
    answers: Answers,
    targets: NDArray[np.float64],
    inputs: InputReference,
    input_values: Float32,
) -> AnswerReference:
    """Of what a variant answered to the validation rows, the truth, and the rows' features of the input (rows, features).

    `targets` (rows,) are class indices, or numbers.
    """
    values = extract_outputs(answers.outputs, answers.scores)
    own = [
        describe(feature, values[:, column])
        for column, feature in enumerate(output_features(output))
    ]
    features, both = [*inputs.features, *own], np.concatenate([input_values, values], axis=1)
    bins = [feature.bins(both[:, column]) for column, feature in enumerate(features)]
    return AnswerReference(
        features=own,
        quality=fit_quality(output, answers.outputs, answers.scores, targets, features, bins),
        outlier_threshold=calibration.outlier.threshold,
        outliers=int(calibration.is_outlier(answers.scores).sum()),
        rows=len(values),
    )


def references_bytes(inputs: InputReference, answers: Mapping[str, AnswerReference]) -> bytes:
    """The content of `drift.json`: equal references give equal bytes."""
    return (
        References(format_version=FORMAT_VERSION, inputs=inputs, answers=dict(answers))
        .model_dump_json()
        .encode()
    )


def reference_bytes(reference: Reference, variant: str = DEFAULT_VARIANT) -> bytes:
    """The same, with one variant alone."""
    return references_bytes(reference.inputs, {variant: reference.answers})


def parse_references(payload: bytes) -> References:
    """What is in the content of `drift.json`; BundleError if it is of another format version, or none."""
    try:
        return References.model_validate_json(payload)
    except ValueError as error:
        raise BundleError(
            f"drift.json is no reference that this Slipway reads: {error}. Run `dvc repro export`."
        ) from error


def read_reference(bundle: LoadedBundle, variant: str = DEFAULT_VARIANT) -> Reference | None:
    """For the traffic that a bundle's `variant` answers, or None where it has no reference.

    BundleError if the file is absent, altered, of another form, or has no such variant.
    """
    payload = bundle.drift_bytes()
    return parse_references(payload).of(variant) if payload is not None else None


def _are_alike(described: Sequence[FeatureReference], values: Float32) -> bool:
    """Whether the rows may be of the same source as those described, by the stability index of each feature."""
    level = _ALIKE / len(described)
    for column, feature in enumerate(described):
        counts = np.bincount(feature.bins(values[:, column]), minlength=len(feature.counts))
        merged = merge_rare(
            counts, feature.counts, _LEAST_EXPECTED, ordered=feature.kind == "number"
        )
        if float(psi(*merged, level).p_values) < level:
            return False
    return True


def _num_extreme(features: Sequence[FeatureReference], values: Float32) -> int:
    """Rows that would lie outside the range if they were left out of it."""
    is_extreme = np.zeros(len(values), np.bool_)
    for column, feature in enumerate(features):
        for bound in {feature.low, feature.high} - {None}:
            at_bound = values[:, column] == bound
            is_extreme |= at_bound & (at_bound.sum() == 1)
    return int(is_extreme.sum())
