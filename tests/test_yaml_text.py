"""YAML is read as DVC reads it, so that what DVC compares is what the stages see."""

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from ruamel.yaml import YAML

from slipway import yaml_text
from slipway.params import load_params
from tests.project_params import PROJECT

ROOT = Path(__file__).parents[1]
WORDS = ["off", "on", "Yes", "no", "y", "N", "true", "False", "null", "~", "v1e5", "2.5.1", "cat", "2024-01-01"]
NUMBERS = ["1e-3", "5E+3", "1.0e-5", "-.5", "1.", "0.25", "12", "-3", "0", ".inf", "-.inf"]


def as_dvc(text: str) -> Any:
    return YAML(typ="safe").load(io.StringIO(text))


@pytest.mark.parametrize("value", WORDS + NUMBERS)
def test_a_value_is_what_dvc_takes_it_for(value: str) -> None:
    found = yaml_text.load(f"key: {value}")["key"]
    expected = as_dvc(f"key: {value}")["key"]
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("value", ["off", "no", "1e-3"])
def test_pyyaml_takes_it_for_something_else(value: str) -> None:
    """The twin: why this is not `yaml.safe_load`, which stays as it is for others."""
    assert yaml.safe_load(value) != as_dvc(value)


def test_a_rule_can_be_switched_off_without_quotes(tmp_path: Path) -> None:
    text = (ROOT / "params.yaml").read_text()
    assert "    blurred: flag\n" in text
    text = text.replace("    blurred: flag\n", "    blurred: off\n").replace("  label_map: {}", "  label_map: {no: off}")
    (tmp_path / "params.yaml").write_text(text)
    params = load_params(tmp_path / "params.yaml")
    assert (params.clean.rules.blurred, params.data.label_map) == ("off", {"no": "off"})


def test_the_projects_params_read_the_same() -> None:
    assert load_params(ROOT / "params.yaml") == PROJECT
    assert yaml_text.load((ROOT / "params.yaml").read_text()) == as_dvc((ROOT / "params.yaml").read_text())


def test_no_object_is_made() -> None:
    with pytest.raises(yaml.YAMLError):
        yaml_text.load("key: !!python/object/apply:os.getcwd []")
