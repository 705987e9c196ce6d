"""The network for tables."""

import torch
from torch import Tensor, nn

from slipway.config.network_arguments import TabmArguments
from slipway.inputs.columns import ColumnContract
from slipway.kinds.registry import is_classification
from slipway.system.errors import ParamsError
from slipway.training.networks.networks import Network, NetworkSpec, parse_arguments
from slipway.training.networks.tabm import RowEncoding, Tabm


class TableNetwork(Network):
    """Maps (rows, width) float32, as a column contract lays them out, to (rows, classes) logits.

    For a numeric target the output is (rows, 1) in its unit. In training mode it is (rows,
    submodels, outputs), because each submodel has its own loss; otherwise the mean of their
    probabilities, as logits, or of their values.
    """

    def __init__(self, encoding: RowEncoding, backbone: nn.Module, spec: NetworkSpec) -> None:
        super().__init__(backbone, spec)
        self.encoding = encoding

    def forward(self, rows: Tensor) -> Tensor:
        """(B, width) float32 -> (B, K) float; (B, submodels, K) in training mode"""
        answers = self.to_target_unit(self.backbone(*self.encoding(rows)))
        if self.training:
            return answers
        if not is_classification(self.spec.task):
            return answers.mean(dim=1)
        # Without dividing by the number of submodels, a constant that softmax removes.
        return torch.logsumexp(torch.log_softmax(answers.to(torch.float32), dim=2), dim=1)

    def misfit(self, error: Exception) -> str:
        """Describe why this network cannot take such rows, and the remedy."""
        width = self.spec.input.shape[0]
        return f"cannot take rows of {width} numbers: {error}. Change train.network_arguments."


def table_network(spec: NetworkSpec) -> TableNetwork:
    """Build the network of a spec for a table; ParamsError if there is none of this name."""
    assert isinstance(spec.input, ColumnContract)
    contract = spec.input
    if spec.name != "tabm":
        raise ParamsError(f"train.network is {spec.name!r}, expected 'tabm' for a table.")
    if not contract.columns:
        raise ParamsError(
            "the table has no column left to learn from. See reports/clean.html for the refused "
            "columns."
        )
    arguments = parse_arguments(spec, TabmArguments)
    encoding = RowEncoding(contract, arguments.num_bins)
    return TableNetwork(encoding, Tabm(arguments, encoding, spec.num_outputs), spec)
