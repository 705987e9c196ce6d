"""Settings of monitoring: length of a drift window, number and age of stored predictions."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from slipway.serving.settings import SettingsSection


@dataclass(frozen=True)
class Limits:
    """Limits of windows and of stored predictions and labels."""

    window_rows: int
    window_s: float
    feedback_rows: int
    feedback_s: float
    database_url: str | None = None  # PostgreSQL, if several services share feedback


class MonitoringSettings(SettingsSection):
    """Settings of drift detection and of feedback."""

    monitoring: bool = True
    window_rows: Annotated[int, Field(ge=100, le=10_000_000)] = 1000  # rows of a full window
    # Age at which a window with fewer rows is closed, if they suffice for a verdict.
    window_minutes: Annotated[float, Field(gt=0, le=44640)] = 60.0
    # Most stored predictions, and most stored labels.
    feedback_rows: Annotated[int, Field(ge=100, le=100_000_000)] = 100_000
    feedback_days: Annotated[float, Field(gt=0, le=36500)] = 30.0  # age at which they are deleted

    # URL of a PostgreSQL shared by services that serve the same models; unset or empty: none.
    database_url: Annotated[str | None, BeforeValidator(lambda url: url or None)] = None

    @field_validator("database_url")
    @classmethod
    def _is_usable(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            from psycopg import ProgrammingError
            from psycopg.conninfo import conninfo_to_dict
        except ImportError:
            raise ValueError(
                "psycopg is missing. Install it: pip install 'slipway-ml[postgres]'"
            ) from None
        try:
            conninfo_to_dict(url)
        except ProgrammingError:  # the text of the error may contain the password
            raise ValueError(
                "It is no address of PostgreSQL, expected postgresql://USER@HOST/NAME"
            ) from None
        return url

    @property
    def limits(self) -> Limits:
        """The limits of windows and of feedback, with times in seconds."""
        return Limits(
            self.window_rows,
            self.window_minutes * 60,
            self.feedback_rows,
            self.feedback_days * 86400,
            self.database_url,
        )
