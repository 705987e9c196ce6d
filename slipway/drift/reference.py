"""Drift reference: the content of `drift.json`, written at export and read by the service.

Input features are described by training and validation rows together: they need no model, and a
reference of few rows hides a shift. Output features are described by validation rows only, because
a network is more certain of its training rows. Each variant is described by its own answers, so
that rounding by int8 does not count as drift. Row counts are stored because the tests account for
the reference's sampling error.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slipway.artifacts.bundle import LoadedBundle, OutputContract
from slipway.artifacts.uncertainty import Answers, Calibration
from slipway.drift.feature_reference import FeatureReference, bin_columns, describe_features
from slipway.drift.features import (
    OOD_SCORE,
    extract_inputs,
    extract_outputs,
    input_features,
    output_features,
)
from slipway.drift.histogram import merge_rare
from slipway.drift.joint_reference import JointReference, fit_joint
from slipway.drift.quality_reference import QualityReference, fit_quality
from slipway.drift.two_sample_tests import psi
from slipway.inputs.contract import InputContract
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import BundleError

Float32 = NDArray[np.float32]

FORMAT_VERSION = 4
# Level over all features of the test that leaves out training rows that differ too much.
_SIMILARITY_LEVEL = 1e-3


class InputReference(Contract):
    """Distribution of the network's inputs in the reference rows."""

    features: list[FeatureReference] = Field(min_length=1)
    joint: JointReference | None  # reference of all numbers together; null with fewer than two
    # Rows that hold a unique minimum or maximum of a feature: the number of rows outside the range
    # to expect in a window of equal size.
    outside: int
    rows: int


class AnswerReference(Contract):
    """Distribution of one variant's answers to the validation rows."""

    features: list[FeatureReference] = Field(min_length=1)
    quality: QualityReference | None  # null with too few rows to estimate quality
    ood_threshold: float | None  # rows with a higher OOD score are out of distribution
    ood_rows: int  # number of these rows
    rows: int


@dataclass(frozen=True)
class Reference:
    """The reference with which the traffic of one variant is compared."""

    inputs: InputReference
    answers: AnswerReference

    @cached_property
    def features(self) -> list[FeatureReference]:
        """Input features, then output features: the columns of `extract`."""
        return [*self.inputs.features, *self.answers.features]

    def column(self, name: str) -> int:
        """Return the index of the feature `name`."""
        return [feature.name for feature in self.features].index(name)

    @cached_property
    def ood_column(self) -> int:
        return self.column(OOD_SCORE)

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 of the content, 32 bytes; windows with equal fingerprints can be merged."""
        content = self.inputs.model_dump_json() + self.answers.model_dump_json()
        return hashlib.sha256(content.encode()).digest()


class References(Contract):
    """The distributions of inputs and answers: `drift.json` of a bundle.

    The service compares its traffic with it. Inputs of training and validation have one reference,
    answers to validation rows one for each variant of the model, such as fp32 and int8.
    """

    format_version: Literal[4]
    inputs: InputReference
    answers: dict[str, AnswerReference]  # references by variant

    def of(self, variant: str) -> Reference:
        """Return the reference of `variant`; BundleError if there is none."""
        if variant not in self.answers:
            found = ", ".join(sorted(self.answers))
            raise BundleError(
                f"the drift reference has no variant {variant!r}, expected one of {found}. Run "
                "`dvc repro export`."
            )
        return Reference(self.inputs, self.answers[variant])


def describe_inputs(
    contract: InputContract, values: Float32, further: Iterable[NDArray[Any]] = ()
) -> InputReference:
    """Return the reference of the inputs.

    Args:
        values: (rows, features) input features of the validation rows.
        further: blocks (rows, ...) of encoded training rows. If their distribution differs from
            that of the validation rows, as in a split by time, all training rows are left out:
            the validation rows then represent the traffic better.
    """
    features = input_features(contract)
    described = describe_features(features, values)
    more = extract_blocks(contract, further)
    if len(more) and _are_similar(described, more):
        values = np.concatenate([values, more])
        described = describe_features(features, values)
    return InputReference(
        features=described,
        joint=fit_joint(described, values),
        outside=_num_extreme(described, values),
        rows=len(values),
    )


def extract_blocks(contract: InputContract, blocks: Iterable[NDArray[Any]]) -> Float32:
    """Return (rows, features) float32 of inputs in blocks, with one block in memory at a time."""
    empty = np.empty((0, len(input_features(contract))), np.float32)
    return np.concatenate([empty, *(extract_inputs(contract, block) for block in blocks)])


def describe_answers(
    output: OutputContract,
    calibration: Calibration,
    answers: Answers,
    targets: NDArray[Any],
    inputs: InputReference,
    input_values: Float32,
) -> AnswerReference:
    """Return the reference of one variant's answers to the validation rows.

    Args:
        targets: (rows,) class indices or numbers.
        input_values: (rows, features) input features of the same rows.
    """
    several = output.kind == "label_probabilities"
    values = extract_outputs(
        answers.outputs, answers.scores, several=several, thresholds=calibration.thresholds
    )
    described = describe_features(output_features(output), values)
    features = [*inputs.features, *described]
    bins = bin_columns(features, np.concatenate([input_values, values], axis=1))
    return AnswerReference(
        features=described,
        quality=fit_quality(
            output,
            answers.outputs,
            answers.scores,
            targets,
            features,
            bins,
            calibration.thresholds,
        ),
        ood_threshold=calibration.ood.threshold,
        ood_rows=int(calibration.is_ood(answers.scores).sum()),
        rows=len(values),
    )


def references_bytes(inputs: InputReference, answers: Mapping[str, AnswerReference]) -> bytes:
    """Serialise `drift.json`; equal references give equal bytes."""
    references = References(format_version=FORMAT_VERSION, inputs=inputs, answers=dict(answers))
    return references.model_dump_json().encode()


def parse_references(payload: bytes) -> References:
    """Parse `drift.json`; BundleError if it has another format."""
    return parse_record(
        References, Path("drift.json"), payload, BundleError, "Run `dvc repro export`."
    )


def read_reference(bundle: LoadedBundle, variant: str) -> Reference | None:
    """Read the drift reference of a bundle's `variant`; None if the bundle has no drift.json.

    Raises BundleError if the file is missing, altered, of another format, or lacks the variant.
    """
    payload = bundle.drift_bytes()
    return parse_references(payload).of(variant) if payload is not None else None


def _are_similar(described: Sequence[FeatureReference], values: Float32) -> bool:
    """Return True if the PSI of no feature of (rows, features) differs from the reference."""
    level = _SIMILARITY_LEVEL / len(described)
    for feature, bins in zip(described, bin_columns(described, values), strict=True):
        counts = np.bincount(bins, minlength=len(feature.counts))
        merged = merge_rare(counts, feature.counts, ordered=feature.kind == "number")
        if float(psi(*merged, level).p_values) < level:
            return False
    return True


def _num_extreme(features: Sequence[FeatureReference], values: Float32) -> int:
    """Count the rows that would be outside the range of all other rows."""
    is_extreme = np.zeros(len(values), np.bool_)
    for column, feature in enumerate(features):
        for bound in {feature.low, feature.high} - {None}:
            at_bound = values[:, column] == bound
            is_extreme |= at_bound & (at_bound.sum() == 1)
    return int(is_extreme.sum())
