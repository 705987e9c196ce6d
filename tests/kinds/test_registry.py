import dataclasses

import pytest

from slipway.kinds import registry
from slipway.kinds.registry import KINDS, TaskKind, is_classification, is_table, kind_of
from slipway.system.errors import ParamsError

pytestmark = pytest.mark.unit


def test_each_kind_is_found_by_its_own_name() -> None:
    assert {name: kind.name for name, kind in KINDS.items()} == {name: name for name in KINDS}


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ParamsError, match=r"'table_sorting'\. Known tasks: image_classification, "):
        kind_of("table_sorting")


def test_a_target_that_is_neither_class_nor_number_is_never_taken_for_one_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labels = dataclasses.replace(kind_of("image_classification").target, name="set of labels")
    kind = TaskKind("image_multilabel_classification", kind_of("image_regression").input, labels)
    monkeypatch.setitem(registry.KINDS, kind.name, kind)
    with pytest.raises(ParamsError, match="predicts a set of labels; this step knows classes and"):
        is_classification(kind.name)


def test_an_input_that_is_neither_image_nor_columns_is_never_taken_for_one_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = dataclasses.replace(kind_of("table_regression").input, name="text")
    kind = TaskKind("table_of_texts", text, kind_of("table_regression").target)
    monkeypatch.setitem(registry.KINDS, kind.name, kind)
    with pytest.raises(ParamsError, match="takes text; this step knows images and columns only"):
        is_table(kind.name)
