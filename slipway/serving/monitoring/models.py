"""The monitored model, with its drift features, its reference and the verdicts on windows."""

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


class MonitoredModel:
    """One variant of a bundle. `reference` is None until it is read, or if the bundle has none.

    Windows belong to `key`, which includes the variant: predictions of int8 are compared with those
    of int8 for validation rows.
    """

    def __init__(self, bundle: LoadedBundle, variant: str) -> None:
        self.version = bundle.version
        self.key = model_key(bundle, variant)
        self.manifest = bundle.manifest
        self.reference: Reference | None = None
        self._bundle, self._variant = bundle, variant
        self._thresholds = bundle.manifest.calibration_of(variant).thresholds
        contract = bundle.manifest.input
        self.has_classes = bundle.manifest.output.kind == "probabilities"
        self._several = bundle.manifest.output.kind == "label_probabilities"
        self._indicators: list[int] = []  # encoded columns that are 1 if a number is missing
        self._codes: list[int] = []  # columns whose code 0 is a missing category
        if isinstance(contract, ColumnContract):
            self._indicators, self._codes = _missing_columns(contract)
        self.has_missing_indicators = bool(self._indicators or self._codes)

    def read_reference(self) -> None:
        """Read the drift reference and warm up with one row; BundleError if it was altered."""
        reference = read_reference(self._bundle, self._variant)
        if reference is not None:
            contract, num_outputs = self.manifest.input, max(1, len(self.manifest.output.labels))
            inputs = np.zeros((1, *contract.shape), contract.dtype)
            outputs = np.full((1, num_outputs), 1 / num_outputs, np.float32)
            scores = np.zeros(1, np.float32)
            Window(reference).add(self.features(inputs, outputs, scores))
        self.reference = reference

    @property
    def lacks_reference(self) -> bool:
        """True if the bundle has a reference that has not been read yet."""
        return self.reference is None and self.manifest.drift_sha256 is not None

    def window(self) -> Window:
        """Return an empty window."""
        assert self.reference is not None
        return Window(self.reference)

    def load(self, content: bytes) -> Window:
        """Restore a stored window; SchemaError if it belongs to another model."""
        assert self.reference is not None
        return Window.from_bytes(self.reference, content)

    def features(
        self, inputs: NDArray[Any], outputs: NDArray[np.float32], scores: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return the drift features (rows, features).

        `inputs` are (rows, ...), `outputs` (rows, outputs) and OOD `scores` (rows,).
        """
        return extract(
            self.manifest.input,
            inputs,
            outputs,
            scores,
            several=self._several,
            thresholds=self._thresholds,
        )

    def num_missing_values(self, inputs: NDArray[Any]) -> int:
        """Return the number of missing values that encoded rows (rows, width) show."""
        num_missing_numbers = int(inputs[:, self._indicators].sum())
        return num_missing_numbers + int((inputs[:, self._codes] == 0).sum())

    def judge(self, window: Window, seconds: float) -> dict[str, Any] | None:
        """Return the verdict on a window; None if it is too small.

        Its budget of false alarms is that of `seconds`. Windows share one false alarm per 30 days
        in proportion to their duration, so the budget holds for any number of windows a day: ten
        minutes have a 4,320th of it.
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


def model_key(bundle: LoadedBundle, variant: str) -> str:
    """Return the name of a model's windows in the database."""
    return f"{bundle.version}/{variant}"


def _missing_columns(contract: ColumnContract) -> tuple[list[int], list[int]]:
    first = len(contract.layout.names)
    first_code = first + len(contract.indicated)
    codes = [
        first_code + place
        for place, column in enumerate(contract.categorical)
        if column.has_missing
    ]
    return list(range(first, first_code)), codes
