"""What `train.network_arguments` may hold for Slipway's own networks.

Apart from the networks, which need torch: a mistake is found when `params.yaml` is read, before any stage has worked for it.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Normalisation = Literal["batch", "group"]


class SmallResnetArguments(BaseModel):
    """`train.network_arguments` of `small_resnet`; every one is required."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    width: Annotated[int, Field(ge=16, le=1024, multiple_of=16)]  # channels of the first stage
    blocks: Annotated[
        list[Annotated[int, Field(ge=1, le=64)]], Field(min_length=1, max_length=6)
    ]  # residual blocks per stage
    dropout: Annotated[float, Field(ge=0, lt=1)]  # before the last layer
    stochastic_depth: Annotated[
        float, Field(ge=0, lt=1)
    ]  # probability that the last block is skipped; the first ones' are less, in a line
    normalisation: Normalisation  # batch learns faster; group does not depend on how a batch is cut over devices


class TabmArguments(BaseModel):
    """`train.network_arguments` of `tabm`; every one is required."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    num_submodels: Annotated[int, Field(ge=1, le=256)]  # k in the paper
    num_blocks: Annotated[int, Field(ge=1, le=16)]  # layers of each
    width: Annotated[int, Field(ge=8, le=4096)]  # of a layer
    dropout: Annotated[float, Field(ge=0, lt=1)]  # after each layer
    embedding_size: Annotated[int, Field(ge=1, le=256)]  # what one number becomes
    num_bins: Annotated[
        int, Field(ge=1, le=1024)
    ]  # pieces of its range, at most; precompute.num_quantiles is the other bound


_KINDS: dict[str, type[BaseModel]] = {"small_resnet": SmallResnetArguments, "tabm": TabmArguments}
STARTS = {  # a whole line to begin with
    "small_resnet": "{ width: 32, blocks: [1, 1, 1], dropout: 0.0, stochastic_depth: 0.0, normalisation: batch }",
    "tabm": "{ num_submodels: 16, num_blocks: 2, width: 128, dropout: 0.1, embedding_size: 32, num_bins: 48 }",
}


def argument_mistakes(network: str, arguments: Mapping[str, Any]) -> str:
    """Everything that is wrong with the arguments, a line each, and a set that is right.

    "" if nothing is, or if the network is timm's, which checks them itself. A network of another name is a mistake.
    """
    kind = _KINDS.get(network)
    if kind is None:
        return "" if network.startswith("timm/") else _unknown_network(network)
    try:
        kind.model_validate(dict(arguments))
    except ValidationError as error:
        known = list(kind.model_fields)
        lines = [
            f"network_arguments of {network}:",
            *(f"    {_describe(detail, known)}" for detail in error.errors(include_url=False)),
        ]
        return "\n".join([*lines, f"    To begin with: network_arguments: {STARTS[network]}"])
    return ""


def _unknown_network(network: str) -> str:
    close = difflib.get_close_matches(network, _KINDS, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ", for example 'timm/resnet18'."
    expected = ", ".join(map(repr, _KINDS))
    return f"network is {network!r}, expected {expected} or 'timm/NAME'{hint}"


def _describe(detail: Any, known: list[str]) -> str:
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        return f"{key}: unknown argument{f'; did you mean {close[0]!r}?' if close else '.'}"
    if detail["type"] == "missing":
        return f"{key}: missing."
    return f"{key}: found {detail['input']!r}. {detail['msg']}"
