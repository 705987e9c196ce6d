"""A model whose traffic is watched: its features, its reference from the bundle, and the judgement of a window of its rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle
from slipway.drift.features import extract
from slipway.drift.quality_estimate import estimate_quality
from slipway.drift.reference import Reference, read_reference
from slipway.drift.verdict import Budget, judge
from slipway.drift.window import Window
from slipway.inputs.columns import ColumnContract

_DAY_S = 86400.0


class WatchedModel:
    """One variant of a bundle. `reference` is None until it was read, and where the bundle has none.

    Windows belong to its `key`: what int8 answers is compared with what int8 answered to the validation rows.
    """

    def __init__(self, bundle: LoadedBundle, variant: str) -> None:
        self.version = bundle.version
        self.key = watched_key(bundle, variant)
        self.manifest = bundle.manifest
        self.reference: Reference | None = None
        self._bundle, self._variant = bundle, variant
        contract = bundle.manifest.input
        self.has_classes = bundle.manifest.output.kind == "probabilities"
        self._missing = _missing_signs(contract) if isinstance(contract, ColumnContract) else None

    def read_reference(self) -> None:
        """From the bundle's folder, with a first row, which takes longer than the others; BundleError where it is altered."""
        reference = read_reference(self._bundle, self._variant)
        if reference is not None:
            contract, num_outputs = self.manifest.input, max(1, len(self.manifest.output.labels))
            example = np.zeros((1, *contract.shape), contract.dtype)
            outputs, score = (
                np.full((1, num_outputs), 1 / num_outputs, np.float32),
                np.zeros(1, np.float32),
            )
            Window(reference).add(self.features(example, outputs, score))
        self.reference = reference

    @property
    def has_missing_signs(self) -> bool:
        """Whether its rows can say of a cell that it has no value."""
        return self._missing is not None and any(self._missing)

    @property
    def lacks_reference(self) -> bool:
        """Whether the bundle has a reference that could not be read so far."""
        return self.reference is None and self.manifest.drift_sha256 is not None

    def window(self) -> Window:
        """One without rows. Only where there is a reference."""
        assert self.reference is not None
        return Window(self.reference)

    def load(self, content: bytes) -> Window:
        """The window of these bytes; ValueError if they are not one of this model's."""
        assert self.reference is not None
        return Window.from_bytes(self.reference, content)

    def features(
        self, inputs: NDArray[Any], outputs: NDArray[np.float32], scores: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """(rows, features) of (rows, ...) inputs, (rows, outputs) and (rows,) outlier scores."""
        return extract(self.manifest.input, inputs, outputs, scores)

    def num_missing_cells(self, inputs: NDArray[Any]) -> int:
        """How many cells of (rows, width) encoded rows had no value, as far as the network is told; 0 for images."""
        if self._missing is None:
            return 0
        indicated, coded = self._missing
        return int(inputs[:, indicated].sum()) + int((inputs[:, coded] == 0).sum())

    def judge(self, window: Window, seconds: float) -> dict[str, Any] | None:
        """Figures of a window with so many seconds' share of the budget, as JSON holds them; None if it is too small to be judged.

        Windows share the budget of false alarms by the time that they stand for, so that it holds however many windows a day has: ten
        minutes of 30 days are a 4,320th of one false alarm.
        """
        assert self.reference is not None
        budget = Budget(false_alarms_per_30_days=1, windows_per_day=_DAY_S / seconds)
        verdict = judge(self.reference, window, budget.level)
        if verdict.verdict == "too_small":
            return None
        estimate = estimate_quality(self.reference, window)
        return {
            "drifted": verdict.drifted,
            "rows": window.num_rows,
            "seconds": seconds,
            "features": [feature.model_dump(mode="json") for feature in verdict.features],
            "estimate": estimate.model_dump(mode="json"),
        }


def watched_key(bundle: LoadedBundle, variant: str) -> str:
    """What its windows are called in the database."""
    return f"{bundle.version}/{variant}"


def _missing_signs(contract: ColumnContract) -> tuple[list[int], list[int]]:
    """Positions in an encoded row of the indicators of missing numbers, and of the categories whose code 0 is a missing one."""
    begin = len(contract.layout.names)
    indicated = range(begin, begin + len(contract.indicated))
    coded = [
        indicated.stop + place
        for place, column in enumerate(contract.categorical)
        if column.has_missing
    ]
    return list(indicated), coded
