"""Typed predictions, with the fields of the service's JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

# Optional fields: the first two need evaluate.decision.costs, the last one is for texts.
_OPTIONAL = ("expected_cost", "abstain", "truncated")


@dataclass(frozen=True, slots=True)
class _Answer:
    """The part that all predictions share."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        content = asdict(self)
        return {k: v for k, v in content.items() if k not in _OPTIONAL or v is not None}


@dataclass(frozen=True, slots=True)
class ClassPrediction(_Answer):
    """The answer of a classifier to one item."""

    label: str  # the most probable one
    probabilities: dict[str, float]
    prediction_set: list[str]  # contains the true label at the coverage that `info` names
    ood_score: float  # larger for unusual inputs
    is_ood: bool
    expected_cost: float | None = None  # of this answer; None without evaluate.decision.costs
    abstain: bool | None = None  # True: leave it to a person; None if that has no cost
    truncated: bool | None = None  # True: the text was cut; None for other inputs


@dataclass(frozen=True, slots=True)
class LabelsPrediction(_Answer):
    """The answer of a multi-label model to one item."""

    labels: list[str]  # those whose probability reaches their threshold, in the model's order
    probabilities: dict[str, float]
    prediction_set: list[str]  # contains all true labels at the coverage that `info` names
    ood_score: float  # larger for unusual inputs
    is_ood: bool
    truncated: bool | None = None  # True: the text was cut; None for other inputs


@dataclass(frozen=True, slots=True)
class ValuePrediction(_Answer):
    """The answer of a regression model to one item."""

    value: float
    interval: tuple[float, float] | None  # None with too few validation rows for the coverage
    ood_score: float  # larger for unusual inputs
    is_ood: bool
    truncated: bool | None = None  # True: the text was cut; None for other inputs


Prediction = ClassPrediction | LabelsPrediction | ValuePrediction


@dataclass(frozen=True, slots=True)
class Explanation:
    """A prediction, and the effect on it of each image region, table column or word."""

    prediction: Prediction
    kind: Literal["occlusion", "columns", "words"]
    of: str  # the label whose probability is explained, or "value"
    answer: float  # that probability or value
    rows: int  # changed copies that the model ran
    details: dict[str, Any]  # of `kind`; docs/reference/serving.md lists them under /explain


def prediction_of(answer: Mapping[str, Any]) -> Prediction:
    """Return the typed form of one answer; unknown fields are ignored."""
    if "value" in answer:
        interval = answer["interval"]
        return ValuePrediction(
            answer["value"],
            None if interval is None else (interval[0], interval[1]),
            answer["ood_score"],
            answer["is_ood"],
            answer.get("truncated"),
        )
    if "labels" in answer:
        return LabelsPrediction(
            answer["labels"],
            answer["probabilities"],
            answer["prediction_set"],
            answer["ood_score"],
            answer["is_ood"],
            answer.get("truncated"),
        )
    return ClassPrediction(
        answer["label"],
        answer["probabilities"],
        answer["prediction_set"],
        answer["ood_score"],
        answer["is_ood"],
        answer.get("expected_cost"),
        answer.get("abstain"),
        answer.get("truncated"),
    )


def explanation_of(answer: Mapping[str, Any]) -> Explanation:
    """Return the typed form of an answer with its `explanation`."""
    details = dict(answer["explanation"])
    head = {name: details.pop(name) for name in ("kind", "of", "answer", "rows")}
    return Explanation(prediction_of(answer), details=details, **head)
