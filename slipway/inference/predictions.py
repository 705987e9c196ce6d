"""Typed predictions, with the fields of the service's JSON, and tables of several."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from slipway.system.errors import UnavailableError

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

# Optional fields: the first two need evaluate.decision.costs, the last one is for texts.
_OPTIONAL = ("expected_cost", "abstain", "truncated")


@dataclass(frozen=True, slots=True)
class _Answer:
    """The part that all predictions share."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form.

        >>> sorted(model.predict(row).to_dict())
        ['is_ood', 'label', 'ood_score', 'prediction_set', 'probabilities']
        """
        content = asdict(self)
        return {k: v for k, v in content.items() if k not in _OPTIONAL or v is not None}


@dataclass(frozen=True, slots=True)
class ClassPrediction(_Answer):
    """The answer of a classifier to one item.

    >>> found = model.predict(row)
    >>> found.label in found.prediction_set, round(sum(found.probabilities.values()), 6)
    (True, 1.0)
    """

    label: str  # the most probable one, or the one that evaluate.decision chooses
    probabilities: dict[str, float]  # of each label, 0 to 1, calibrated; their sum is 1
    prediction_set: list[str]  # contains the true label at the coverage that `info` names
    ood_score: float  # 0 or more, without a unit; larger for unusual inputs
    is_ood: bool  # the score exceeds the threshold that `info` names
    # In the unit of evaluate.decision.costs, of this answer; None without costs.
    expected_cost: float | None = None
    abstain: bool | None = None  # True: leave it to a person; None if that has no cost
    truncated: bool | None = None  # True: the text was cut; None for other inputs


@dataclass(frozen=True, slots=True)
class LabelsPrediction(_Answer):
    """The answer of a multi-label model to one item.

    >>> found = LabelsPrediction(["cat"], {"cat": 0.9, "dog": 0.2}, ["cat"], 0.1, False)
    >>> found.probabilities["dog"]
    0.2
    """

    labels: list[str]  # those whose probability reaches their threshold, in the model's order
    probabilities: dict[str, float]  # of each label by itself, 0 to 1, calibrated
    prediction_set: list[str]  # contains all true labels at the coverage that `info` names
    ood_score: float  # 0 or more, without a unit; larger for unusual inputs
    is_ood: bool  # the score exceeds the threshold that `info` names
    truncated: bool | None = None  # True: the text was cut; None for other inputs


@dataclass(frozen=True, slots=True)
class ValuePrediction(_Answer):
    """The answer of a regression model to one item.

    >>> found = ValuePrediction(12.5, (11.0, 14.0), 0.1, False)
    >>> found.interval[0] <= found.value <= found.interval[1]
    True
    """

    value: float  # in the unit of the target
    # (low, high) in the unit of the target, which contains the true value at the coverage that
    # `info` names; None with too few validation rows for it.
    interval: tuple[float, float] | None
    ood_score: float  # 0 or more, without a unit; larger for unusual inputs
    is_ood: bool  # the score exceeds the threshold that `info` names
    truncated: bool | None = None  # True: the text was cut; None for other inputs


Prediction = ClassPrediction | LabelsPrediction | ValuePrediction


class Predictions(list[Prediction]):
    """The predictions for several items, in their order: a list, which is also a table.

    The columns are those of `predict_files`: `prediction`, `probability_LABEL` for each label and
    `prediction_set`, or `interval_low` and `interval_high`; then `ood_score` and `is_ood`.

    >>> found = model.predict([row, row])
    >>> found[0].label == found.to_arrow()["prediction"][0].as_py()
    True
    """

    def __init__(self, predictions: Iterable[Prediction] = (), index: Any = None) -> None:
        """Make a list; `index` is that of the DataFrame whose rows were predicted."""
        super().__init__(predictions)
        self._index = index

    def to_arrow(self) -> "pa.Table":
        """Return a `pyarrow.Table` with a row for each item. Without items it has no columns.

        >>> model.predict([row, row]).to_arrow().num_rows
        2
        """
        import pyarrow as pa  # which slipway.Client does without

        return pa.table(self._columns())

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a DataFrame with a row for each item, and the index of the DataFrame given.

        >>> frame = pandas.DataFrame([row, row], index=["a", "b"])
        >>> model.predict(frame).to_pandas().index.tolist()
        ['a', 'b']
        """
        return required_pandas().DataFrame(self._columns(), index=self._index)

    def _columns(self) -> dict[str, list[Any]]:
        answers = [prediction.to_dict() for prediction in self]
        if not answers:
            return {}
        first = answers[0]
        columns = predicted_columns(answers, list(first.get("probabilities", ())))
        names = ("expected_cost", "abstain", "ood_score", "is_ood", "truncated")
        return columns | {
            name: [answer[name] for answer in answers] for name in names if name in first
        }


def index_of(given: object) -> Any:
    """Return the index of a DataFrame; None for anything else."""
    pandas = sys.modules.get("pandas")
    is_frame = pandas is not None and isinstance(given, pandas.DataFrame)
    return given.index if is_frame else None  # type: ignore[attr-defined]


def predicted_columns(
    answers: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> dict[str, list[Any]]:
    """Return the columns of the predicted labels and probabilities, or of the values.

    An empty answer, of a row with a fault, gives None in each column. `labels` are those of the
    model, empty for a numeric target.
    """
    if not labels:
        intervals = [answer.get("interval") or (None, None) for answer in answers]
        return {
            "prediction": [answer.get("value") for answer in answers],
            "interval_low": [low for low, _ in intervals],
            "interval_high": [high for _, high in intervals],
        }
    each = [answer.get("probabilities", {}) for answer in answers]
    return {
        "prediction": [answer.get("label", answer.get("labels")) for answer in answers],
        **{f"probability_{label}": [found.get(label) for found in each] for label in labels},
        "prediction_set": [answer.get("prediction_set") for answer in answers],
    }


def required_pandas() -> Any:
    """Return the package pandas. Raises UnavailableError if it is not installed."""
    try:
        import pandas
    except ImportError:
        raise UnavailableError(
            "pandas is not installed, expected it for a DataFrame. Run `pip install pandas`, or "
            "use to_arrow()."
        ) from None
    return pandas


@dataclass(frozen=True, slots=True)
class Explanation:
    """A prediction, and the effect on it of each image region, table column or word.

    >>> why = model.explain(row)
    >>> why.kind, why.of == why.prediction.label
    ('columns', True)
    """

    prediction: Prediction
    kind: Literal["occlusion", "columns", "words"]
    of: str  # the label whose probability is explained, or "value"
    answer: float  # that probability (0 to 1), or the value in the unit of the target
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
