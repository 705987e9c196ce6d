"""Collected rows with several labels have the same columns as the training data."""

from pathlib import Path

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.label_sets import set_text
from slipway.traffic.collect import _targets
from slipway.traffic.selection import LoggedItem, SelectedRows
from tests.serving.bundles import write_bundle


def item(truth: str | None) -> LoggedItem:
    return LoggedItem(
        ("id", 0, 0.0), "model", "digest", truth, set_text([]), 0.1, 0.5, False, False
    )


def test_collect_writes_label_sets_as_a_list_column_or_one_boolean_column_per_label(
    tmp_path: Path,
) -> None:
    output = OutputContract(kind="label_probabilities", labels=["car", "dog"])
    manifest = write_bundle(tmp_path / "bundle").manifest.model_copy(update={"output": output})
    rows = SelectedRows([item(set_text(["dog"])), item(set_text([])), item(None)], {})
    (lists,) = _targets(rows, manifest, ["tags"]).values()
    assert lists.to_pylist() == ['["dog"]', "[]", None]
    flags = _targets(rows, manifest, ["car", "dog"])
    assert {name: cells.to_pylist() for name, cells in flags.items()} == {
        "car": [False, False, None],
        "dog": [True, False, None],
    }
