"""The writer of YAML: what it writes is read back equal, by DVC's reader and by one of YAML 1.1."""

import math
from typing import Any

import pytest
import yaml
from dvc.utils.serialize import parse_yaml as dvc_yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from slipway.config.yaml_files import parse_value, parse_yaml
from slipway.config.yaml_text import as_plain_yaml, as_yaml, yaml_comment, yaml_entry, yaml_text

pytestmark = pytest.mark.unit

# What a reader of some YAML takes for a number, a date, a word of its own or a sign.
ODD = [
    *("no", "on", "Yes", "y", "N", "null", "NULL", "~", "None", "true", "NA", "nan", ".nan"),
    *("1e5", "1e3", "1E5", "0o17", "017", "0x1F", "1_000", "1:30", "+1", "-1", "1.", ".5", "1e-5"),
    *(".inf", "2024-01-01", "2024-01-01 10:00:00", "=", "<<", "-", "- a", "? a", ": a", "a: b"),
    *("a #b", "#", "", " ", " a", "a ", "a\nb", "a\rb", "a\tb", "\u200bA", "\x85", "\u2028"),
    *("\ufeff", "---", "...", "%YAML 1.1", "@a", "`a`", "&a", "*a", "!a", "!!int 5", "|", ">"),
    *("it's", 'say "a"', "\\n", "C:\\new", "😀", "😀\n", "\x00\x07\x7f", "größer", "16-mixed"),
    *(
        "s3://bucket/a",
        "a, b",
        "[a",
        "{a",
        "x" * 2000,
        "${a:B}",
        "../a b/c.csv",
        "..",
        "1-a",
    ),
]
TEXTS = st.sampled_from(ODD) | st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8
)

SLOWLY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)


def read_by_all(text: str) -> list[Any]:
    payload = text.encode()
    return [
        parse_yaml(payload, "params.yaml"),
        dvc_yaml(text, "params.yaml"),
        yaml.safe_load(payload),
    ]


@SLOWLY
@given(VALUES)
def test_every_value_is_read_back_equal_from_one_line(value: Any) -> None:
    for text in (as_yaml(value), as_plain_yaml(value)):
        assert "\n" not in text
        assert read_by_all(f"key: {text}\n") == [{"key": value}] * 3


@SLOWLY
@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_every_mapping_is_read_back_equal_from_blocks(content: dict[str, Any]) -> None:
    content = {"first": 1, **content}
    assert read_by_all(yaml_text(content)) == [content] * 3
    nested = {"outer": {"inner": content, "list": [content, [content]]}}
    assert read_by_all(yaml_text(nested)) == [nested] * 3


@SLOWLY
@given(TEXTS, SCALARS, TEXTS)
def test_no_comment_changes_what_stands_before_it(key: str, value: Any, comment: str) -> None:
    assume(key != "last")
    text = f"{yaml_entry(key, value)}{yaml_comment(comment)}\nlast: 1\n"
    assert read_by_all(text) == [{key: value, "last": 1}] * 3


@pytest.mark.parametrize("text", ODD)
def test_a_word_with_another_meaning_is_still_text_as_value_and_as_key(text: str) -> None:
    content = {text: text, "list": [text, {text: [text]}]}
    assert read_by_all(yaml_text(content)) == [content] * 3


@pytest.mark.parametrize(
    ("value", "text", "plain"),
    [
        ({"a": "b", "no": "it's"}, "{a: 'b', 'no': 'it''s'}", "{a: b, 'no': 'it''s'}"),
        ({1: True, "1": 0.5, "": "#"}, "{1: true, '1': 0.5, '': '#'}", None),
        (["a\nb", "größer", "\x07"], '["a\\nb", \'größer\', "\\x07"]', None),
        ((1, 2.5, None), "[1, 2.5, null]", None),
        ("data/my photos/a.csv", "'data/my photos/a.csv'", "data/my photos/a.csv"),
        ([1e-05, 1e22, math.inf], "[1.0e-05, 1.0e+22, .inf]", None),
    ],
)
def test_quotes_stand_where_they_are_needed(value: Any, text: str, plain: str | None) -> None:
    assert as_yaml(value) == text
    if plain is not None:
        assert as_plain_yaml(value) == plain
    again = list(value) if isinstance(value, tuple) else value
    assert YAML(typ="safe").load(text) == yaml.safe_load(text) == again


def test_a_comment_stays_in_its_line_and_shows_what_cannot_be_seen() -> None:
    assert yaml_comment("classes: A, D\nE, \u200bA") == " # classes: A, D E, \\u200bA"
    assert yaml_comment(" \n") == ""


@pytest.mark.parametrize("name", ["0x1F", "0o17", "1e5", "+1", "1.50"])
def test_a_class_that_looks_like_a_number_is_text_as_it_is_written(name: str) -> None:
    content = f"data: {{classes: [{name}, cat, 7], label_map: {{{name}: dog}}, other: [{name}]}}"
    data = parse_yaml(content.encode(), "params.yaml")["data"]
    assert data["classes"] == [name, "cat", 7]  # 7 is a mistake in the list, with a message
    assert data["label_map"] == {name: "dog"}
    assert not isinstance(data["other"][0], str)
    assert parse_value(f"[{name}, cat]", "data.classes") == [name, "cat"]
    assert not isinstance(parse_value(f"[{name}]", "train.seeds")[0], str)
