"""Gradient-boosted trees of LightGBM for tables, behind the interface of a network.

The trees read the rows of the column contract. A missing number is NaN, for which each split has a
direction. A category is its code, where 0 (missing or unknown) is a category like the others. The
stored model is LightGBM's text, not a pickle. It lacks LightGBM's settings, which are in
model.json. LightGBM predicts in float64; the exported graph contains the trees as a node instead
(`TREES_NODE`).
"""

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from slipway.config.network_arguments import LightgbmArguments
from slipway.inputs.columns import ColumnContract
from slipway.kinds.registry import kind_of
from slipway.system import files
from slipway.system.errors import ParamsError, UnavailableError
from slipway.training.networks.networks import Network, NetworkSpec, parse_arguments
from slipway.training.networks.tabm import RowEncoding

if TYPE_CHECKING:
    from lightgbm import Booster

# The node that stands for the trees in a traced graph; `export` replaces it. Its attribute `sha256`
# is the digest of their text.
TREES_NODE = "slipway::Trees"
_SETTINGS = "\nparameters:"  # begins the last part of LightGBM's text
_LEAVES = re.compile(r"^num_leaves=(\d+)$", re.MULTILINE)


class TreeInputs(nn.Module):
    """Maps rows (rows, width) float32, in the layout of the contract, to the columns of the trees.

    The columns are the numbers that are never missing, the other numbers with NaN if missing, and
    the codes of the categories.
    """

    complete: Tensor
    gappy: Tensor
    indicators: Tensor
    codes: Tensor

    def __init__(self, contract: ColumnContract) -> None:
        super().__init__()
        numeric, indicated = contract.numeric, contract.indicated
        gappy = [numeric.index(column) for column in indicated]
        complete = [place for place in range(len(numeric)) if place not in gappy]
        end = len(numeric) + len(indicated)
        places = {
            "complete": complete,
            "gappy": gappy,
            "indicators": list(range(len(numeric), end)),
            "codes": list(range(end, end + len(contract.categorical))),
        }
        for name, found in places.items():
            self.register_buffer(name, torch.tensor(found, dtype=torch.int64), persistent=False)
        self.names = [numeric[place].name for place in [*complete, *gappy]]
        self.categories = [column.name for column in contract.categorical]

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (B, width) to columns (B, columns) float32."""
        parts = [torch.index_select(rows, 1, self.complete)]
        if len(self.gappy):
            is_missing = torch.index_select(rows, 1, self.indicators) > 0.5
            parts.append(
                torch.where(is_missing, torch.nan, torch.index_select(rows, 1, self.gappy))
            )
        parts.append(torch.index_select(rows, 1, self.codes))
        return torch.cat([part for part in parts if part.shape[1]], dim=1)


class TreeNetwork(Network):
    """Maps rows (rows, width) float32 to logits (rows, classes), or (rows, 1) in the target's unit.

    Before it is trained it has no trees, and all their sums are 0.
    """

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(nn.Identity(), spec)
        assert isinstance(spec.input, ColumnContract)
        self.arguments = parse_arguments(spec, LightgbmArguments)
        self.inputs = TreeInputs(spec.input)
        self.encoding = RowEncoding(spec.input, num_bins=1)  # features of the OOD score
        target = kind_of(spec.task).target
        if "trees" not in target.parts:
            raise ParamsError(
                f"train.network is {spec.name!r}, which cannot learn {target.plural} "
                f"(data.task {spec.task!r}). Use 'tabm'."
            )
        self.head = target.load_part("trees")
        self.num_sums = self.head.num_sums(len(spec.classes))
        self.text = ""

    def payload(self) -> bytes:
        """Return the trees in LightGBM's text format."""
        return self.text.encode()

    def load_payload(self, payload: bytes) -> None:
        """Load LightGBM's text. Raises ValueError if it does not fit the columns and outputs."""
        self.text = payload.decode()
        self.__dict__.pop("booster", None)
        num_columns = len(self.inputs.names) + len(self.inputs.categories)
        found = (self.booster.num_feature(), self.booster.num_model_per_iteration())
        if found != (num_columns, self.num_sums):
            raise ValueError(
                f"the trees have {found[0]} columns and {found[1]} outputs, expected {num_columns} "
                f"and {self.num_sums}."
            )

    @cached_property
    def booster(self) -> "Booster":
        """The trees of the model text. Raises ValueError if it is not LightGBM's."""
        lightgbm = import_lightgbm()
        try:
            booster: Booster = lightgbm.Booster(model_str=self.text)
        except lightgbm.basic.LightGBMError as error:
            raise ValueError(f"LightGBM cannot read these trees: {error}.") from error
        return booster

    @property
    def num_parameters(self) -> int:
        """The number of splits and leaves."""
        return sum(2 * int(leaves) - 1 for leaves in _LEAVES.findall(self.text))

    def column_gains(self) -> dict[str, float]:
        """Return the fraction of the split gain of each column, by name."""
        gains = self.booster.feature_importance("gain").astype(np.float64)
        names = [*self.inputs.names, *self.inputs.categories]
        return dict(zip(names, (gains / max(gains.sum(), 1e-300)).tolist(), strict=True))

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (B, width) float32 to outputs (B, K) float32."""
        answers: Tensor = self.head.answers(self._sums(self.inputs(rows)))
        return self.to_target_unit(answers)

    def _sums(self, columns: Tensor) -> Tensor:
        """Return the raw scores of rows (B, columns): sums of leaf values, (B, sums) float32."""
        if torch.onnx.is_in_onnx_export():
            return torch.onnx.ops.symbolic(
                TREES_NODE,
                [columns],
                {"sha256": files.sha256_bytes(self.text.encode())},
                dtype=torch.float32,
                shape=(columns.shape[0], self.num_sums),
                version=1,
            )
        if not self.text:
            return torch.zeros(len(columns), self.num_sums, device=columns.device)
        found = np.asarray(self.booster.predict(columns.cpu().numpy(), raw_score=True))
        sums = found.reshape(len(columns), self.num_sums).astype(np.float32)
        return torch.from_numpy(sums).to(columns.device)


def import_lightgbm() -> Any:
    """Import LightGBM, which takes seconds. Raises UnavailableError if it is not installed."""
    try:
        import lightgbm
    except ImportError as error:
        raise UnavailableError(
            "train.network is 'lightgbm', but LightGBM is not installed, expected the extra train: "
            "pip install 'slipway-ml[train]'."
        ) from error
    return lightgbm


def stored_text(text: str) -> str:
    """Return LightGBM's text without its settings, which include the number of threads."""
    return text.partition(_SETTINGS)[0] + "\n"
