import pytest

from slipway.config.network_arguments import (
    LightgbmArguments,
    NetworkArguments,
    SmallResnetArguments,
    TabmArguments,
    argument_mistakes,
)
from slipway.config.yaml_text import as_yaml
from tests.config.contents import content, message


def test_invalid_network_arguments_are_refused_with_the_defaults() -> None:
    table = {
        "data__task": "table_classification",
        "data__target_column": "y",
        "train__network": "tabm",
        "train__network_arguments": {"blocks": [1, 1, 1]},
    }
    text = message(content(**table))
    assert "blocks: unknown key; did you mean 'num_blocks'?" in text
    assert f"Its defaults are: {as_yaml(TabmArguments().model_dump())}" in text


@pytest.mark.parametrize(
    ("network", "kind", "key"),
    [
        ("small_resnet", SmallResnetArguments, "dropout"),
        ("tabm", TabmArguments, "dropout"),
        ("lightgbm", LightgbmArguments, "num_leaves"),
    ],
)
def test_defaults_of_a_networks_arguments_are_valid(
    network: str, kind: type[NetworkArguments], key: str
) -> None:
    assert argument_mistakes(network, kind().model_dump()) == argument_mistakes(network, {}) == ""
    assert f"{key}: found 'x'" in argument_mistakes(network, {key: "x"})
