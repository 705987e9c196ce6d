import pytest
import yaml

from slipway.config.network_arguments import (
    LightgbmArguments,
    NetworkArguments,
    SmallResnetArguments,
    TabmArguments,
    argument_mistakes,
)
from slipway.config.params import parse_params
from tests.config.contents import content, message


def test_invalid_network_arguments_are_refused_with_a_valid_example() -> None:
    table = {
        "data__task": "table_classification",
        "data__target_column": "y",
        "train__network": "tabm",
    }
    text = message(content(**table))
    assert "blocks: unknown key; did you mean 'num_blocks'?" in text
    assert "num_bins: missing" in text
    start = text.partition("network_arguments: {")[2]
    assert parse_params(content(**table, train__network_arguments=yaml.safe_load("{" + start)))


@pytest.mark.parametrize(
    ("network", "kind", "key"),
    [
        ("small_resnet", SmallResnetArguments, "dropout"),
        ("tabm", TabmArguments, "dropout"),
        ("lightgbm", LightgbmArguments, "num_leaves"),
    ],
)
def test_the_example_of_a_networks_arguments_is_correct(
    network: str, kind: type[NetworkArguments], key: str
) -> None:
    assert argument_mistakes(network, yaml.safe_load(kind.EXAMPLE)) == ""
    assert f"{key}: missing" in argument_mistakes(network, {})
