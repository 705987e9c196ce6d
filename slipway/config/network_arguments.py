"""The typed arguments of Slipway's own networks: `train.network_arguments` in params.yaml.

They are separate from the networks, so that params.yaml can be checked without importing torch.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from slipway.config.mistakes import describe_mistakes
from slipway.config.yaml_text import as_yaml
from slipway.kinds.inputs import TIMM, network_family
from slipway.kinds.parts import import_part
from slipway.kinds.registry import input_kinds, kind_of
from slipway.system.errors import ParamsError, nearest
from slipway.system.user_code import is_user_code, is_well_formed

Normalisation = Literal["batch", "group"]


class NetworkArguments(BaseModel):
    """Base class for the arguments of a network, each with its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SmallResnetArguments(NetworkArguments):
    """The keys of `train.network_arguments` for the network `small_resnet`."""

    width: Annotated[int, Field(ge=16, le=1024, multiple_of=16)] = 32  # channels of the first stage
    # Residual blocks per stage.
    blocks: Annotated[
        list[Annotated[int, Field(ge=1, le=64)]], Field(min_length=1, max_length=6)
    ] = [1, 1, 1]
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # before the last layer
    # Probability that the last block is skipped; it falls linearly to the first block.
    stochastic_depth: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # batch learns faster; group does not depend on how a batch is divided over devices.
    normalisation: Normalisation = "batch"


class TabmArguments(NetworkArguments):
    """The keys of `train.network_arguments` for the network `tabm`."""

    num_submodels: Annotated[int, Field(ge=1, le=256)] = 16  # k in the paper
    num_blocks: Annotated[int, Field(ge=1, le=16)] = 2  # layers of each
    width: Annotated[int, Field(ge=8, le=4096)] = 128  # of a layer
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1  # after each layer
    embedding_size: Annotated[int, Field(ge=1, le=256)] = 32  # values that embed one number
    # Pieces of the range of a number, at most; precompute.num_quantiles is the other bound.
    num_bins: Annotated[int, Field(ge=1, le=1024)] = 48


class LightgbmArguments(NetworkArguments):
    """`train.network_arguments` of `lightgbm`, by LightGBM's own names."""

    num_leaves: Annotated[int, Field(ge=2, le=4096)] = 31  # most leaves of a tree
    # Null: as deep as the leaves allow.
    max_depth: Annotated[int, Field(ge=1, le=256)] | None = None
    min_data_in_leaf: Annotated[int, Field(ge=1)] = 20  # fewest rows of a leaf
    # Of the columns, drawn for each tree.
    feature_fraction: Annotated[float, Field(gt=0, le=1)] = 0.8
    bagging_fraction: Annotated[float, Field(gt=0, le=1)] = 0.8  # of the rows, drawn for each tree
    lambda_l2: Annotated[float, Field(ge=0)] = 1.0  # penalty of large values in leaves
    max_bin: Annotated[int, Field(ge=2, le=65535)] = 255  # thresholds of a column, at most


class HashedNgramsArguments(NetworkArguments):
    """The keys of `train.network_arguments` for the network `hashed_ngrams`."""

    # Rows of the table that n-grams share.
    buckets: Annotated[int, Field(ge=256, le=1 << 24)] = 131072
    width: Annotated[int, Field(ge=1, le=1024)] = 16  # numbers of each
    word_ngrams: Annotated[int, Field(ge=0, le=5)] = 2  # sequences of up to so many words
    # Lengths in bytes of the sequences of whole characters. A Chinese character has 3 bytes.
    byte_ngrams: Annotated[list[Annotated[int, Field(ge=1, le=12)]], Field(max_length=12)] = [
        3,
        4,
        5,
        6,
    ]
    lowercase: bool = True  # A to Z count as a to z
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # before the last layer

    @field_validator("byte_ngrams")
    @classmethod
    def _has_ngrams(cls, lengths: list[int], others: ValidationInfo) -> list[int]:
        if not lengths and not others.data.get("word_ngrams"):
            raise ValueError("found [] with word_ngrams 0, expected one length or more")
        if len(set(lengths)) < len(lengths):
            raise ValueError(f"found {lengths}, expected each length once")
        return lengths


class SmallTransformerArguments(NetworkArguments):
    """The keys of `train.network_arguments` for the network `small_transformer`."""

    width: Annotated[int, Field(ge=8, le=4096)] = 96  # numbers of each position
    num_layers: Annotated[int, Field(ge=1, le=48)] = 2
    num_heads: Annotated[int, Field(ge=1, le=64)] = 4  # width is a multiple of it
    patch: Annotated[int, Field(ge=1, le=16)] = 4  # bytes of one position; 1 for tokens
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1

    @field_validator("num_heads")
    @classmethod
    def _heads_divide_the_width(cls, num_heads: int, others: ValidationInfo) -> int:
        width = others.data.get("width", num_heads)
        if width % num_heads:
            raise ValueError(f"found {num_heads}, expected a divisor of width {width}")
        return num_heads


class EncoderArguments(NetworkArguments):
    """The keys of `train.network_arguments` for the network `encoder`."""

    pooling: Literal["mean", "first"] = "mean"  # of the answers to all tokens, or to the first one
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1  # before the last layer
    # Rank of the trained change of each layer (LoRA), merged at the end; null: train the layers.
    lora_rank: Annotated[int, Field(ge=1, le=256)] | None = None
    # Factor of the learning rate from each layer to the one before it; 1: the same for all.
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 0.9
    # Compute activations again in the backward pass: less memory for a third more time.
    checkpoint_activations: bool = False


def arguments_class(network: str) -> type[NetworkArguments] | None:
    """Return the class of a network's arguments.

    None if the network is unknown or checks its arguments itself.
    """
    path = _known_networks().get(network_family(network))
    return import_part(path) if path else None


def require_network(network: str, task: str, key: str) -> None:
    """Raise ParamsError unless a network is for the rows and targets of a task."""
    kind = kind_of(task)
    can_be_trees = "trees" in kind.target.parts
    fitting = [one for one in kind.input.networks if can_be_trees or one not in kind.input.trees]
    if network_family(network) in fitting or (is_user_code(network) and is_well_formed(network)):
        return
    close = nearest(network, [one for one in fitting if one != TIMM])
    end = f"did you mean {close[0]!r}?" if close else f"name one of these, such as {fitting[0]!r}."
    raise ParamsError(
        f"{key} is {network!r}, but the task is {task!r}, which takes "
        f"{', '.join(map(repr, fitting))} or your own 'package.module:Class'; {end}"
    )


def argument_mistakes(network: str, arguments: Mapping[str, Any]) -> str:
    """Return a line for every mistake in the arguments, and a correct example; "" if there is none.

    Networks of timm and the user's own check their arguments themselves. An unknown network is a
    mistake.
    """
    if is_user_code(network):
        return _mistakes_of_user_network(network, arguments)
    if network_family(network) not in _known_networks():
        return _unknown_network(network)
    kind = arguments_class(network)
    if kind is None:
        return ""
    try:
        kind.model_validate(dict(arguments))
    except ValidationError as error:
        lines = [
            f"network_arguments of {network}:",
            *describe_mistakes(error, kind, arguments),
            f"Its defaults are: {as_yaml(kind().model_dump())}",
        ]
        return "\n    ".join(lines)
    return ""


def _mistakes_of_user_network(network: str, arguments: Mapping[str, Any]) -> str:
    if not is_well_formed(network):
        return f"network is {network!r}, expected 'package.module:Class', such as 'nets:Net'"
    if given := sorted({"input_shape", "num_outputs"} & set(arguments)):
        return (
            f"network_arguments names {', '.join(given)}, which Slipway sets itself from the data: "
            "remove it"
        )
    return ""


def _known_networks() -> dict[str, str | None]:
    return {name: path for kind in input_kinds().values() for name, path in kind.networks.items()}


def _unknown_network(network: str) -> str:
    known = [name for name in _known_networks() if name != TIMM]
    close = nearest(network, known)
    hint = f"; did you mean {close[0]!r}?" if close else ", for example 'timm/resnet18'."
    expected = ", ".join(map(repr, known))
    return (
        f"network is {network!r}, expected {expected}, 'timm/NAME' or your own "
        f"'package.module:Class'{hint}"
    )
