"""The section `search` of `params.yaml`: the space, the method and the budget of `slipway search`.

No stage reads it, so DVC need not see its values: an edit re-runs nothing, a project may leave the
section out, and the parts of a dimension that are not used may be left out, too.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from slipway.config.sections import NotNegativeInt, ParamsSection, Positive, PositiveFloat
from slipway.config.yaml_text import as_yaml

Bounds = Annotated[list[int | float], Field(min_length=2, max_length=2, examples=[[0.001, 0.01]])]
Values = Annotated[list[Any], Field(min_length=1, examples=[[16, 32, 64]])]
_FORMS = ("choice", "range", "log_range")


class DimensionParams(ParamsSection):
    """The values to try for one key of params.yaml."""

    choice: Values | None = None  # one of these values
    range: Bounds | None = None  # any number between these
    log_range: Bounds | None = None  # the same, evenly over the orders of magnitude
    step: int | float | None = None  # step of a range: low, low + step, ...
    # Searched only while other keys have one of these values; else the value in params.yaml stays.
    when: Annotated[dict[str, Values], Field(examples=[{"train.optimizer": ["sgd"]}])] | None = None

    @property
    def bounds(self) -> list[int | float] | None:
        """The bounds of the range, linear or logarithmic; None for a list of choices."""
        return self.range or self.log_range

    def problems(self) -> Iterator[str]:
        given = [form for form in _FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            yield f"found {found}, expected exactly one of {', '.join(_FORMS)}"
        if self.bounds is None:
            if self.step is not None:
                yield f"step is {self.step}, but there is no range: remove step"
            return
        low, high = self.bounds
        if low >= high:
            fix = f"write [{high}, {low}]" if low > high else f"write `choice: [{low}]`"
            yield f"the range [{low}, {high}] is empty, expected a lower and a higher number; {fix}"
        if self.log_range and low <= 0:
            yield f"log_range starts at {low}, expected a number above 0: use range, or raise it"
        if self.step is not None and (self.step <= 0 or self.log_range):
            yield f"step is {self.step}, expected a number above 0, of a `range`: remove step"


class BudgetParams(ParamsSection):
    """Limits of a search, which ends when it reaches the first of them."""

    # One of the three limits must be set; the first that is reached ends the search.
    trials: Positive | None = None
    epochs: Positive | None = None  # trained by all trials together
    minutes: PositiveFloat | None = None  # minutes after which no trial starts

    def problems(self) -> Iterator[str]:
        if self.trials is self.epochs is self.minutes is None:
            yield "trials, epochs and minutes are all null, expected at least one limit"


class HalvingParams(ParamsSection):
    """Early stopping by asynchronous successive halving (ASHA, Li et al. 2018)."""

    reduction: Annotated[int, Field(ge=2)] = 3  # the best of so many trials at a rung goes on
    first_rung: Positive  # epochs; each further rung has `reduction` times as many


class SearchParams(ParamsSection):
    """A search for better values of params.yaml."""

    # grid: every point. random: random points. tpe, gp: Bayesian, by Parzen estimators or Gaussian
    # processes. The samplers are Optuna's.
    method: Literal["grid", "random", "tpe", "gp"] = "tpe"
    metric: Annotated[str, Field(examples=["accuracy"])]  # a metric on validation rows, or loss
    # The better direction of the metric; the other one is refused.
    direction: Literal["maximize", "minimize"]
    budget: BudgetParams
    halving: HalvingParams | None = None  # null: every trial has all epochs
    workers: Positive = 1  # trials at the same time
    # Of the proposals; the trainings have the seed of the project.
    seed: NotNegativeInt = 0
    # Keys of precompute, augment and train, with the values to try.
    space: Annotated[
        dict[str, DimensionParams],
        Field(min_length=1, examples=[{"train.learning_rate": {"log_range": [0.001, 0.01]}}]),
    ]

    def problems(self) -> Iterator[str]:
        if self.method != "grid":
            return
        for key, dimension in self.space.items():
            if dimension.bounds and dimension.step is None:
                low, high = dimension.bounds
                yield (
                    f"method is 'grid', but space.{key} is a range without a step: write "
                    f"`choice: {as_yaml([low, high])}`, add a step, or use another method"
                )
