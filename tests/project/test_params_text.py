"""The text of a new params.yaml: what was decided, in the order of the sections, with reasons."""

import pytest
from ruamel.yaml import YAML

from slipway.project.creation import params_text

pytestmark = pytest.mark.unit
CONTENT = {
    "train": {"epochs": 30, "class_weights": {"no": 1.5, "a: b": 2.0}},
    "data": {"path": "my rows.csv", "task": "table_classification"},
}
REASONS = {"data.path": "where it lies", "train.epochs": "few rows " * 20}


def test_params_text_has_each_decided_key_once_with_its_value() -> None:
    text = params_text(CONTENT, REASONS)
    assert YAML(typ="safe", pure=True).load(text) == CONTENT


def test_params_text_orders_sections_as_the_pipeline_does_and_has_reasons_beside_values() -> None:
    lines = params_text(CONTENT, REASONS).splitlines()
    data, train = lines.index("data:"), lines.index("train:")
    assert data < train
    assert lines[data + 1] == "  path: my rows.csv # where it lies"
    assert lines[data + 2] == "  task: table_classification"
    assert lines[train + 1].startswith("  # few rows few rows")
    assert lines[train + 3] == "  epochs: 30"
    assert max(map(len, lines)) <= 100


def test_params_text_begins_with_how_to_see_the_other_keys() -> None:
    assert "`slipway params` prints all" in params_text(CONTENT, {}).partition("data:")[0]
