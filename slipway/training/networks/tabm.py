"""TabM for tables: an ensemble of small networks that share most of their weights.

After Gorishniy, Kotelnikov and Babenko 2025, "TabM: Advancing Tabular Deep Learning with
Parameter-Efficient Ensembling"; the shared blocks are the authors' package `tabm`. Numbers enter
through the piecewise-linear embeddings of Gorishniy, Rubachev and Babenko 2022, with the column's
quantiles as edges. Numbers are clipped to the range of the training rows, as in a tree, so that an
outlier cannot change the output arbitrarily.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipway.config.network_arguments import TabmArguments
from slipway.inputs.columns import Column, ColumnContract
from slipway.kinds.registry import kind_of
from slipway.training.networks.features import FeatureEncoding
from slipway.training.networks.networks import Network, NetworkSpec, parse_arguments
from slipway.training.networks.user_network import user_backbone

_FEWEST_EDGES = 2


class RowEncoding(FeatureEncoding):
    """Encodes rows (rows, width) float32, in the layout of the column contract, for `Tabm`.

    It has no weights. It is a separate module because codes, and positions of numbers inside narrow
    bins, need float32 in any precision of the network.
    """

    embedded: Tensor
    lowest: Tensor
    highest: Tensor
    edges: Tensor
    inverse_widths: Tensor
    plain: Tensor

    def __init__(self, contract: ColumnContract, num_bins: int) -> None:
        super().__init__()
        edges = [_edges(column, num_bins) for column in contract.numeric]
        wide = [index for index, found in enumerate(edges) if len(found) >= _FEWEST_EDGES]
        left, inverse_widths = _pieces([edges[index] for index in wide])
        num_indicators = len(contract.indicated)
        plain = sorted(set(range(len(edges))) - set(wide)) + list(
            range(len(edges), len(edges) + num_indicators)
        )
        # Not stored with the weights, because the contract in model.json is the only source.
        self._register("embedded", torch.tensor(wide, dtype=torch.int64))
        self._register(
            "lowest", torch.tensor([edges[index][0] for index in wide], dtype=torch.float32)
        )
        self._register(
            "highest", torch.tensor([edges[index][-1] for index in wide], dtype=torch.float32)
        )
        self._register("edges", torch.from_numpy(left))
        self._register("inverse_widths", torch.from_numpy(inverse_widths))
        self._register("plain", torch.tensor(plain, dtype=torch.int64))
        self._first_code = len(edges) + num_indicators
        self._num_categories = len(contract.categorical)
        for place, column in enumerate(contract.categorical):
            # Code 0 (missing or unknown) has its own slot only if training rows had it.
            first = 0 if column.has_missing else 1
            self._register(
                f"codes_{place}",
                torch.arange(first, len(column.categories) + 1, dtype=torch.float32),
            )
        self.num_bins = left.shape[1]
        self.num_embedded = len(wide)
        self.plain_sizes = [1] * len(plain) + [
            len(self._codes(place)) for place in range(self._num_categories)
        ]

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode rows (B, width): values (B, N), positions in bins (B, N, bins), others (B, P).

        Positions are in [0, 1]. All are float32.
        """
        values = torch.index_select(rows, 1, self.embedded)
        values = torch.minimum(torch.maximum(values, self.lowest), self.highest)
        places = ((values[:, :, None] - self.edges) * self.inverse_widths).clamp(0.0, 1.0)
        others = [torch.index_select(rows, 1, self.plain)]
        for place in range(self._num_categories):
            position = self._first_code + place
            others.append((rows[:, position : position + 1] == self._codes(place)).to(rows.dtype))
        return values, places, torch.cat(others, dim=1)

    def features(self, rows: Tensor) -> Tensor:
        """Return features (B, D) float32: the numbers unchanged, and one slot for each category."""
        return torch.cat([torch.index_select(rows, 1, self.embedded), self(rows)[2]], dim=1)

    def _register(self, name: str, values: Tensor) -> None:
        self.register_buffer(name, values, persistent=False)

    def _codes(self, place: int) -> Tensor:
        return self.get_buffer(f"codes_{place}")


class Tabm(nn.Module):
    """The trained part: maps the output of `RowEncoding` to (rows, num_submodels, num_outputs)."""

    def __init__(self, arguments: TabmArguments, encoding: RowEncoding, num_outputs: int) -> None:
        super().__init__()
        # They import scikit-learn and pandas, which takes a second and only tables need.
        from rtdl_num_embeddings import LinearEmbeddings
        from tabm import EnsembleView, LinearEnsemble, make_tabm_backbone

        k, size = arguments.num_submodels, arguments.embedding_size
        num_embedded = encoding.num_embedded
        sizes = [size] * num_embedded + encoding.plain_sizes
        # Version B of the authors' embeddings: linear in the number at first, pieces start at zero.
        self.linear = LinearEmbeddings(num_embedded, size) if num_embedded else None
        self.pieces = (
            nn.Parameter(torch.zeros(num_embedded, encoding.num_bins, size))
            if num_embedded
            else None
        )
        self.view = EnsembleView(k=k)
        self.blocks = make_tabm_backbone(
            d_in=sum(sizes),
            n_blocks=arguments.num_blocks,
            d_block=arguments.width,
            dropout=arguments.dropout,
            k=k,
            start_scaling_init="normal" if num_embedded else "random-signs",
            start_scaling_init_chunks=sizes,  # one scale per column and submodel
        )
        self.head = LinearEnsemble(arguments.width, num_outputs, k=k)

    def forward(self, values: Tensor, places: Tensor, others: Tensor) -> Tensor:
        """Return the outputs (B, num_submodels, num_outputs) for the output of `RowEncoding`.

        Args:
            values: (B, N) the N numbers of each row.
            places: (B, N, bins) the position of each number in its bins, 0 to 1.
            others: (B, P) marks of missing numbers, and one slot for each category.
        """
        features = others
        if self.linear is not None and self.pieces is not None:
            pieces = (places.transpose(0, 1) @ self.pieces).transpose(0, 1)  # (B, N, size)
            features = torch.cat([(self.linear(values) + pieces).flatten(1), others], dim=1)
        answers: Tensor = self.head(self.blocks(self.view(features)))
        return answers


class TableNetwork(Network):
    """Maps rows (rows, width) float32, in the layout of the contract, to logits (rows, classes).

    For a numeric target the output is (rows, 1) in its unit. In training mode it is (rows,
    submodels, outputs), because each submodel has its own loss; otherwise the mean of their
    probabilities, as logits, or of their values.
    """

    def __init__(self, encoding: RowEncoding, backbone: nn.Module, spec: NetworkSpec) -> None:
        super().__init__(backbone, spec)
        self.encoding = encoding
        self._head = kind_of(spec.task).target.load_part("head")

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (B, width) float32 to outputs (B, K); in training mode (B, submodels, K)."""
        answers = self.to_target_unit(self.backbone(*self.encoding(rows)))
        if self.training:
            return answers
        mean: Tensor = self._head.mean_of_submodels(answers)
        return mean

    def misfit(self, error: Exception) -> str:
        """Return a sentence on why the network cannot read such rows, and the remedy."""
        width = self.spec.input.shape[0]
        return f"cannot take rows of {width} numbers: {error}. Change train.network_arguments."


class UserTableNetwork(Network):
    """Maps encoded rows to the outputs of the user's module, which reads (rows, features) float32.

    The features are the numbers in standard deviations, clipped to the range of the training rows,
    then the indicators of missing numbers and a slot for each category.
    """

    def __init__(self, contract: ColumnContract, spec: NetworkSpec) -> None:
        encoding = RowEncoding(contract, num_bins=1)
        num_features = encoding.num_embedded + sum(encoding.plain_sizes)
        super().__init__(user_backbone(spec, (num_features,)), spec)
        self.encoding = encoding

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (B, width) float32 to outputs (B, K)."""
        return self.to_target_unit(self.backbone(self.backbone_inputs(rows)))

    def backbone_inputs(self, rows: Tensor) -> Tensor:
        """Map rows (B, width) float32 to features (B, features) float32."""
        values, _, others = self.encoding(rows)
        return torch.cat([values, others], dim=1)


def tabm_network(spec: NetworkSpec) -> TableNetwork:
    """Build TabM for a spec. Raises ParamsError for wrong arguments."""
    assert isinstance(spec.input, ColumnContract)
    arguments = parse_arguments(spec, TabmArguments)
    encoding = RowEncoding(spec.input, arguments.num_bins)
    return TableNetwork(encoding, Tabm(arguments, encoding, spec.num_outputs), spec)


def _edges(column: Column, num_bins: int) -> NDArray[np.float32]:
    """Return at most `num_bins` + 1 increasing bin edges, in standard deviations.

    A boolean column has fewer than 2 edges, so it has no bins.
    """
    quantiles = np.array(column.quantiles, dtype=np.float64)
    if len(quantiles) > num_bins + 1:
        quantiles = quantiles[
            np.rint(np.linspace(0, len(quantiles) - 1, num_bins + 1)).astype(np.int64)
        ]
    return np.unique(((quantiles - column.mean) / column.std).astype(np.float32))


def _pieces(edges: list[NDArray[np.float32]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the left edges and inverse widths of the bins of all columns, both (N, bins).

    A column with fewer bins is padded with bins that no number reaches.
    """
    num_bins = max((len(found) - 1 for found in edges), default=0)
    left = np.empty((len(edges), num_bins), np.float32)
    inverse_widths = np.ones((len(edges), num_bins), np.float32)
    for index, found in enumerate(edges):
        left[index] = found[-1]
        left[index, : len(found) - 1] = found[:-1]
        inverse_widths[index, : len(found) - 1] = 1 / np.diff(found.astype(np.float64))
    return left, inverse_widths
