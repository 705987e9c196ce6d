"""Windows add up exactly in any order, and refuse windows of other references."""

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.drift.window import Window
from slipway.system.errors import SchemaError
from tests.drift.populations import ORDINARY, Population, features_of_rows, reference_of, window_of

REFERENCE = reference_of(ORDINARY.draw(np.random.default_rng(1), 1000))
FEATURES = features_of_rows(Population(strangeness=0.2).draw(np.random.default_rng(2), 500))


def _window(features: NDArray[np.float32]) -> Window:
    window = Window(REFERENCE)
    window.add(features)
    return window


def test_window_counts_do_not_depend_on_the_order_or_division_of_rows() -> None:
    whole = _window(FEATURES)
    shuffled = np.random.default_rng(3).permutation(FEATURES)
    parts = [_window(part) for part in np.array_split(shuffled, [1, 8, 300])]
    merged = Window(whole.reference)
    for part in reversed(parts):
        merged.merge(part)
    assert merged.to_bytes() == whole.to_bytes()
    one_by_one = Window(REFERENCE)
    for row in FEATURES:
        one_by_one.add(row[None])
    assert one_by_one.to_bytes() == whole.to_bytes()


def test_one_changed_row_changes_the_window() -> None:
    other = FEATURES.copy()
    other[0, 0] = 40.0
    assert _window(other).to_bytes() != _window(FEATURES).to_bytes()


def test_window_survives_a_round_trip_through_bytes() -> None:
    window = _window(FEATURES)
    again = Window.from_bytes(REFERENCE, window.to_bytes())
    assert again.to_bytes() == window.to_bytes()
    again.add(FEATURES[:7])
    assert again.num_rows == 507


def test_from_bytes_refuses_truncated_or_altered_bytes() -> None:
    payload = _window(FEATURES).to_bytes()
    for wrong in (payload[:-8], b"x" + payload[1:], b"", payload + b"0"):
        with pytest.raises(SchemaError, match="does not belong to this drift reference"):
            Window.from_bytes(REFERENCE, wrong)


def test_merge_refuses_a_window_of_another_reference() -> None:
    other = reference_of(ORDINARY.draw(np.random.default_rng(9), 1000))
    window = window_of(other, ORDINARY.draw(np.random.default_rng(4), 200))
    with pytest.raises(ValueError, match="different references"):
        _window(FEATURES).merge(window)
    with pytest.raises(SchemaError, match="does not belong to this drift reference"):
        Window.from_bytes(REFERENCE, window.to_bytes())


def test_add_refuses_features_of_another_shape_and_counts_nothing() -> None:
    window = _window(FEATURES)
    with pytest.raises(ValueError, match="expected \\(rows, 25\\)"):
        window.add(FEATURES[:, 1:])
    assert window.to_bytes() == _window(FEATURES).to_bytes()


def test_adding_no_rows_changes_nothing() -> None:
    window = _window(FEATURES)
    window.add(FEATURES[:0])
    assert window.to_bytes() == _window(FEATURES).to_bytes()


def test_window_counts_outliers_and_rows_outside_the_range() -> None:
    features = features_of_rows(ORDINARY.draw(np.random.default_rng(5), 300))
    scores, far = REFERENCE.ood_column, REFERENCE.column("column x3")
    features[:40, scores], features[100:130, far] = 0.76, 50.0
    inside, window = _window(features[130:]), _window(features)
    assert window.num_ood - inside.num_ood == 40
    assert window.num_outside - inside.num_outside >= 30
