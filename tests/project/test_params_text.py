"""The text of a new params.yaml: order of keys, reasons and comments."""

import pytest
from ruamel.yaml import YAML

from slipway.project.params_text import params_text, template_content

pytestmark = pytest.mark.unit
REASONS = {"data.path": "where it lies", "train.epochs": "few rows " * 20}


def test_params_text_has_each_key_once_with_its_value() -> None:
    content = template_content()
    assert YAML(typ="safe", pure=True).load(params_text(content, REASONS)) == content


def test_params_text_begins_with_the_keys_that_have_a_reason() -> None:
    lines = params_text(template_content(), REASONS).splitlines()
    first = lines.index("data:")
    assert "Change these first" in lines[first - 2]
    assert lines[first + 1].endswith("# where it lies")
    train = lines.index("train:")
    assert lines[train + 1].startswith("  # few rows few rows")
    assert lines[train + 3].startswith("  epochs:")
    assert max(map(len, lines)) <= 100


def test_params_text_keeps_the_default_comments_of_other_keys() -> None:
    text = params_text(template_content(), REASONS)
    assert "  min_side_px: 4\n" in text
    assert "  group_column: null # rows of one group stay in one split\n" in text
    assert "    near_duplicate: flag # a cluster of near duplicates stays in one split\n" in text
