"""Messages on mistakes in params.yaml: the found value, the expected values, a correction."""

import copy
import datetime
import math
from typing import Any, get_type_hints

import pytest
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from slipway.config.mistakes import expected_values
from slipway.config.params import Params, mistakes_in
from tests.config.contents import CONTENT, content

WRONG: list[Any] = [None, "", "some", -7, 3.5, True, math.inf, [], {}, [None], {"a": None}, {1: 2}]
WRONG += [datetime.date(2024, 1, 31)]


def _keys(section: Any, place: str = "") -> list[str]:
    keys = []
    for name, kind in ((key, get_type_hints(section)[key]) for key in section.model_fields):
        if name == "model_config":
            continue
        is_section = isinstance(kind, type) and hasattr(kind, "model_fields")
        keys += _keys(kind, f"{place}{name}__") if is_section else [f"{place}{name}"]
    return keys


@pytest.mark.parametrize("key", _keys(Params))
def test_wrong_value_of_any_key_gives_a_message_in_plain_english(key: str) -> None:
    found = [mistakes_in(content(**{key: copy.deepcopy(value)})) for value in WRONG]
    lines = [line for mistakes in found for line in mistakes]
    assert sum(map(bool, found)) >= 4
    # An optional section has a line for each key that it lacks.
    others = [[line for line in mistakes if ": missing;" not in line] for mistakes in found]
    assert all(len(mistakes) <= 2 for mistakes in others)
    for line in lines:
        assert key.split("__")[-1] in line
        assert not any(word in line for word in ("Input", "valid", "None", "True", "datetime"))


@pytest.mark.parametrize("key", [None, 2024, True])
def test_error_names_a_key_that_is_not_text(key: Any) -> None:
    (line,) = mistakes_in(content(data__label_map={key: "x"}))
    assert line.startswith("data.label_map.")
    assert "expected text" in line


@pytest.mark.parametrize("key", _keys(Params))
def test_the_example_of_every_key_is_accepted(key: str) -> None:
    kind: Any = Params
    for part in key.split("__"):
        kind = get_type_hints(kind, include_extras=True)[part]
    text = expected_values(kind).partition(", such as ")[2].partition(", or ")[0]
    if text:
        value = YAML(typ="safe", pure=True).load(text)
        TypeAdapter(kind).validate_python(value, strict=True)


@pytest.mark.parametrize(
    ("key", "found", "meant"),
    [
        ("train__precision", "bf16", "'bf16-mixed'"),
        ("train__precision", "fp16", "'16-mixed'"),
        ("train__precision", 32, "'32-true'"),
        ("train__optimizer", "adam", "'adamw'"),
        ("train__optimizer", "SGD", "'sgd'"),
        ("train__accelerator", "cuda", "'gpu'"),
        ("train__epochs", 3.0, "3"),
        ("train__epochs", "3", "3"),
        ("train__devices", "2", "2"),
        ("train__learning_rate", "1e-3", "0.001"),
        ("train__compile", "yes", "true"),
        ("train__channels_last", "off", "false"),
        ("train__gradient_clip_norm", "none", "null"),
        ("clean__rules__blurred", False, "null"),
        ("clean__rules__blurred", "flags", "'flag'"),
        ("data__task", "image_clasification", "'image_classification'"),
        ("data__group_column", 5, "'5'"),
        ("data__classes", ["cat", 7], "'7'"),
        ("data__classes", "cat", "['cat']"),
        ("split__time_cuts", [datetime.date(2024, 1, 31), "2024-06-30"], "'2024-01-31'"),
        ("verify__max_metric_loss", {"int9": 0.1}, "'int8'"),
        ("train__class_weights", "balance", "'balanced'"),
        ("train__network_arguments__normalisation", "bacth", "'batch'"),
        ("evaluate__gates", {"accuracy": {"min": "0.9", "max": None}}, "0.9"),
    ],
)
def test_message_for_a_wrong_value_contains_its_only_likely_correction(
    key: str, found: Any, meant: str
) -> None:
    assert f"; did you mean {meant}?" in mistakes_in(content(**{key: found}))[0]


@pytest.mark.parametrize(
    ("key", "found"),
    [("train__epochs", 0), ("data__path", None), ("train__accelerator", "x"), ("seed", -1)],
)
def test_message_for_a_wrong_value_without_likely_correction_proposes_none(
    key: str, found: Any
) -> None:
    (line,) = mistakes_in(content(**{key: found}))
    assert ", expected " in line
    assert "did you mean" not in line


def test_error_lists_all_contradictions_between_keys_of_a_section() -> None:
    changed = content(split__train=0.8, split__fold=3)
    assert mistakes_in(changed) == [
        "split: train 0.8 + val 0.15 + test 0.15 is 1.1, expected 1",
        "split: fold is 3, expected less than folds null (0 without folds)",
    ]
    assert mistakes_in(CONTENT) == []
