"""The section `loop`: contradictions are refused with a fix, and the guide's copy is valid."""

import copy
import re
from typing import Any

import pytest
from ruamel.yaml import YAML

from slipway.config.params import parse_params
from slipway.system.errors import ParamsError
from tests.conftest import ROOT
from tests.loop.cases import SECTION
from tests.project_params import own_content

ENCODER_ARGUMENTS = {
    "pooling": "mean",
    "dropout": 0.1,
    "lora_rank": None,
    "layer_decay": 0.9,
    "checkpoint_activations": False,
}


def content(**changes: Any) -> dict[str, Any]:
    """Return the project's params with the section, and other values by "section.key"."""
    found = own_content() | {"loop": copy.deepcopy(SECTION)}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        found[section][name] = value
    return found


def test_params_yaml_may_omit_the_section_loop() -> None:
    without = content()
    del without["loop"]
    assert parse_params(without).loop is None
    assert parse_params(content()).loop is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split__assignment": "exact"}, r"split\.assignment is 'exact'.*set it to 'stable'"),
        ({"data__split_column": "part"}, r"data\.split_column is 'part'.*set it to null"),
        ({"data__time_column": "day"}, r"data\.time_column is 'day'.*set it to null"),
        (
            {
                "loop__start": "served",
                "train__network": "encoder",
                "train__pretrained": "bert",
                "train__network_arguments": ENCODER_ARGUMENTS,
            },
            r"'encoder', which cannot start from the served weights.*'scratch'",
        ),
        (
            {
                "loop__start": "served",
                "ensemble__method": "average",
                "ensemble__members": [{}, {"seed": 8}],
            },
            r"ensemble\.method is 'average'.*'scratch'",
        ),
        (
            {"loop__triggers": {"drift": False, "objective": None, "new_labels": None}},
            "expected at least one trigger",
        ),
        (
            {"loop__canary": {"steps": [0.5, 0.1], "hold_seconds": 0, "hold_requests": 1}},
            "expected rising fractions",
        ),
        ({"loop__trusted_keys": ["a", "a"]}, "twice: remove the second"),
        ({"loop__min_labels": 3}, "min_labels"),
        ({"loop__webhook": "ftp://x"}, "webhook"),
    ],
)
def test_contradiction_in_the_loop_section_is_refused_with_a_fix(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParamsError, match=message):
        parse_params(content(**changes))


def test_loop_section_of_the_guide_is_valid() -> None:
    guide = (ROOT / "docs/how-to/loop.md").read_text()
    block = re.search(r"^ +```yaml\n(.*?)^ +```", guide, re.DOTALL | re.MULTILINE)
    assert block
    section = YAML(typ="safe", pure=True).load(block[1])
    assert parse_params(content() | section).loop is not None
