"""The base class of input contracts, which define the network's input; one class per kind."""

from collections.abc import Mapping
from typing import Annotated, Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, SerializeAsAny

from slipway.kinds.registry import input_kind
from slipway.system.contract import Contract
from slipway.system.errors import ParamsError


class InputContract(Contract):
    """Base of input contracts: shape and dtype of the network's input, and how to create it."""

    kind: str  # the name of the input kind

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row, without the batch dimension."""
        raise NotImplementedError

    @property
    def dtype(self) -> type[np.uint8] | type[np.float32] | type[np.int32]:
        """The dtype of the network's input."""
        raise NotImplementedError

    @property
    def varies_in_length(self) -> bool:
        """True if rows (length,) end in zeros for padding, which the network does not need."""
        return False

    def require_usable(self) -> None:
        """Raise BundleError if this process cannot convert raw input to network input."""

    def describe(self) -> dict[str, Any]:
        """Return the contract as JSON for callers, without details that only the network needs."""
        return self.model_dump(mode="json")

    @property
    def remark_names(self) -> tuple[str, ...]:
        """Names of extra boolean fields in every prediction, such as `truncated` for texts."""
        return ()

    def remarks(self, rows: NDArray[Any]) -> list[dict[str, bool]]:
        """Return for each of the inputs (rows, ...) the values of its extra fields, by name.

        Returns an empty list if the contract has no `remark_names`.
        """
        return []

    def redacted(self, payload: bytes) -> bytes:
        """Return a request's body for logs, with personal data masked if the contract requires it.

        The network predicts the same for the original and the returned body.
        """
        return payload

    def example_rows(self, num_rows: int) -> NDArray[Any]:
        """Return made-up inputs (num_rows, ...) with many different valid values, for tests."""
        raise NotImplementedError


def input_name(contract: InputContract) -> str:
    """Return the name of a graph's input: "image", "row" or "text"."""
    return input_kind(contract.kind).graph_input


def listed_rows(content: Mapping[str, Any]) -> list[Any] | None:
    """Return the list in an object whose only key is `rows`.

    Returns None for an object that is a row itself.
    """
    rows = content.get("rows")
    return rows if list(content) == ["rows"] and isinstance(rows, list) else None


def _typed(content: Any) -> Any:
    """Parse a mapping as the contract of its kind; return anything else unchanged."""
    if not isinstance(content, dict) or "kind" not in content:
        return content
    try:
        kind = input_kind(content["kind"])
    except ParamsError as error:
        raise ValueError(str(error)) from error
    return cast(type[InputContract], kind.load_part("contract")).model_validate(content)


# An input contract as a field of a record that is read from a file.
AnyInputContract = Annotated[SerializeAsAny[InputContract], BeforeValidator(_typed)]
