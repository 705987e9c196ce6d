"""Builds the network for a table: TabM, boosted trees, or the user's own."""

from slipway.inputs.columns import ColumnContract
from slipway.kinds.registry import are_trees, input_kind
from slipway.system.errors import ParamsError
from slipway.system.user_code import is_user_code
from slipway.training.networks.networks import Network, NetworkSpec
from slipway.training.networks.tabm import UserTableNetwork, tabm_network
from slipway.training.networks.trees import TreeNetwork


def table_network(spec: NetworkSpec) -> Network:
    """Build the network of a spec for a table. Raises ParamsError for an unknown name."""
    assert isinstance(spec.input, ColumnContract)
    known = input_kind(spec.input.kind).networks
    if spec.name not in known and not is_user_code(spec.name):
        expected = " or ".join(map(repr, known))
        raise ParamsError(f"train.network is {spec.name!r}, expected {expected} for a table.")
    if not spec.input.columns:
        raise ParamsError(
            "the table has no column left to learn from. See reports/clean.html for the refused "
            "columns."
        )
    if is_user_code(spec.name):
        return UserTableNetwork(spec.input, spec)
    return TreeNetwork(spec) if are_trees(spec.name) else tabm_network(spec)
