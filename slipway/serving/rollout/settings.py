"""Settings of rollouts, from the environment."""

from typing import Annotated

from pydantic import Field

from slipway.serving.settings import SettingsSection


class RolloutSettings(SettingsSection):
    """The fraction of requests that are copied to a shadowing candidate."""

    shadow_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1  # requests copied to a candidate
