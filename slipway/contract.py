"""The base of everything that is written by one part and read by another: typed, frozen, no unknown fields."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Task = Literal["image_classification", "image_regression"]


class Contract(BaseModel):
    """A record with exactly the declared fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)
