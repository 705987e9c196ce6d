"""The search section that `slipway init` proposes is valid for `slipway search`."""

import copy
from typing import Any

import pyarrow as pa
import pytest
from ruamel.yaml import YAML

from slipway.config.network_arguments import HashedNgramsArguments
from slipway.config.params import parse_params
from slipway.data.sources.raw_tables import stored_column
from slipway.planning.search_space import read_space
from slipway.project.creation import search_text
from slipway.project.recipe import proposed_search, text_values
from tests.config.contents import CONTENT, table_content
from tests.project_params import of_kind
from tests.training.trees.fitted import ARGUMENTS

TABM = table_content()
TABM["train"] |= {"weight_decay": 0.0003}  # as init proposes it
LIGHTGBM = table_content()
LIGHTGBM["train"] |= {
    "network": "lightgbm",
    "network_arguments": ARGUMENTS,
    "label_smoothing": 0.0,
    "loggers": [],
}


def text_content() -> dict[str, Any]:
    content = of_kind(CONTENT, "text_classification")
    column = stored_column("text", pa.chunked_array([["some words", "and others"]]))
    content["data"]["text_columns"] = ["text"]
    for key, (value, _) in text_values([column]).items():
        section, _, name = key.partition(".")
        content[section][name] = value
    content["train"]["network"] = "hashed_ngrams"
    content["train"]["network_arguments"] = HashedNgramsArguments().model_dump()
    return content


@pytest.mark.parametrize("epochs", [4, 30])
@pytest.mark.parametrize("content", [CONTENT, TABM], ids=["images", "table"])
def test_proposed_search_is_valid_and_includes_the_present_values(
    content: dict[str, Any], epochs: int
) -> None:
    content = copy.deepcopy(content)
    content["train"] |= {"epochs": epochs, "warmup_epochs": 0.5}
    written = YAML(typ="safe", pure=True).load(search_text(proposed_search(content)))
    assert written == {"search": proposed_search(content)}
    params = parse_params(content | written).search
    assert params is not None
    assert (params.halving is None) == (epochs == 4)
    assert read_space(content | written, params).present() is not None


def test_proposed_search_of_trees_stops_no_trial_early_and_includes_present_values() -> None:
    found = proposed_search(LIGHTGBM)
    params = parse_params(LIGHTGBM | {"search": found}).search
    assert params is not None
    assert params.halving is None
    assert "train.weight_decay" not in params.space, "trees have none"
    assert read_space(LIGHTGBM | {"search": found}, params).present() is not None


def test_proposed_search_of_an_ngram_network_tries_width_ngrams_and_dropout() -> None:
    space = proposed_search(text_content())["space"]
    assert space["train.network_arguments.width"] == {"choice": [8, 16, 32]}
    assert {"train.network_arguments.word_ngrams", "train.network_arguments.dropout"} < set(space)
