"""Settings of monitoring: when a drift window ends, and how many predictions are stored for feedback."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from serving.settings import SettingsSection


@dataclass(frozen=True)
class Limits:
    """The length of a window, and the limits of what is stored."""

    window_rows: int
    window_s: float
    feedback_rows: int
    feedback_s: float


class MonitoringSettings(SettingsSection):
    """Drift detection and feedback."""

    watch: bool = True
    window_rows: Annotated[int, Field(ge=100, le=10_000_000)] = 1000  # that end a drift window
    window_minutes: Annotated[float, Field(gt=0, le=44640)] = (
        60.0  # that end a window with fewer rows, if they are enough for a verdict
    )
    feedback_rows: Annotated[int, Field(ge=100, le=100_000_000)] = (
        100_000  # predictions, and labels, that are stored
    )
    feedback_days: Annotated[float, Field(gt=0, le=36500)] = 30.0  # until they are deleted

    @property
    def limits(self) -> Limits:
        """The same in seconds."""
        return Limits(
            self.window_rows,
            self.window_minutes * 60,
            self.feedback_rows,
            self.feedback_days * 86400,
        )
