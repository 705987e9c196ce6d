import pytest

from slipway.kinds.registry import KINDS, kind_of, task_for
from slipway.system.errors import ParamsError

pytestmark = pytest.mark.unit


def test_each_kind_is_found_by_its_own_name() -> None:
    assert {name: kind.name for name, kind in KINDS.items()} == {name: name for name in KINDS}


def test_error_for_an_unknown_task_lists_the_known_tasks() -> None:
    with pytest.raises(
        ParamsError, match=r"'table_sorting', expected one of image_classification, "
    ):
        kind_of("table_sorting")


def test_a_task_is_found_by_its_input_and_target() -> None:
    for kind in KINDS.values():
        assert task_for(kind.input, kind.target) == kind.name
