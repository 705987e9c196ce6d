"""Input contract of a network: images or table rows, and the name of the graph's input."""

from typing import Annotated

from pydantic import Field

from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import ImageContract

InputContract = Annotated[ImageContract | ColumnContract, Field(discriminator="kind")]


def input_name(contract: ImageContract | ColumnContract) -> str:
    """The name of a graph's input: "image" or "row"."""
    return "image" if isinstance(contract, ImageContract) else "row"
