"""The section `loop` of `params.yaml`: triggers, comparison and decision of `slipway loop`.

No stage reads it, so DVC need not see its values: an edit re-runs nothing. A project may leave the
section out, and `slipway loop` is off then.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from slipway.config.sections import Gate, NotNegative, ParamsSection, Positive, PositiveFloat

_GATE = {"accuracy": {"min": 0.9, "max": None}}


class TriggerParams(ParamsSection):
    """The triggers that start a new training. Any one of them suffices."""

    drift: bool = True  # two windows in a row that drifted in the same feature
    # Bounds by metric of the feedback; the whole interval has to lie outside. null: no trigger.
    objective: Annotated[dict[str, Gate], Field(min_length=1, examples=[_GATE])] | None = None
    # Labels since the last cycle collected rows; null: no trigger.
    new_labels: Positive | None = None

    def problems(self) -> Iterator[str]:
        if not self.drift and self.objective is None and self.new_labels is None:
            yield (
                "drift is false, objective and new_labels are null, expected at least one trigger: "
                "set one, or remove the section loop"
            )


class CanaryParams(ParamsSection):
    """The steps of a canary rollout, as for `slipway rollout canary`."""

    # Rising fractions of the requests that the candidate answers.
    steps: Annotated[
        list[Annotated[float, Field(gt=0, le=1)]],
        Field(min_length=1, max_length=20, examples=[[0.01, 0.25, 1.0]]),
    ] = [0.01, 0.05, 0.25, 0.5, 1.0]
    hold_seconds: NotNegative = 60.0  # minimum duration of a step
    hold_requests: Positive = 300  # minimum requests of the candidate in a step

    def problems(self) -> Iterator[str]:
        if self.steps != sorted(set(self.steps)):
            yield f"steps are {self.steps}, expected rising fractions, such as [0.01, 0.25, 1.0]"


class LoopParams(ParamsSection):
    """The closed loop from the service's traffic to the next model."""

    triggers: TriggerParams = TriggerParams()
    # Labelled answers since the trigger, to begin with.
    min_labels: Annotated[int, Field(ge=20)] = 500
    pause_days: NotNegative = 7.0  # pause after the end of a cycle
    start: Literal["scratch", "served"] = "scratch"  # served: from the served model's weights
    # On old test rows: accuracy points, or relative growth of the RMSE.
    max_forgetting: NotNegative = 0.01
    # true: a candidate without a proven gain on recent rows ends without a request.
    require_gain: bool = True
    min_keys: Positive = 1  # API keys that the recent labels must come from
    trusted_keys: list[str] = []  # whose labels count, however they differ from those of other keys
    shadow_requests: Positive | None = 500  # answered before the request; null: no shadow
    decision_days: PositiveFloat = 7.0  # time until the request expires
    # Public keys (PEM), one of which must have signed the decision; []: a name is enough.
    approvers: list[str] = []
    # Receives each request for a decision as JSON.
    webhook: (
        Annotated[str, Field(pattern=r"^https?://", examples=["https://example.com"])] | None
    ) = None
    canary: CanaryParams = CanaryParams()

    def problems(self) -> Iterator[str]:
        for name in ("trusted_keys", "approvers"):
            given = getattr(self, name)
            if len(set(given)) < len(given):
                yield f"{name} names one of {given} twice: remove the second"
