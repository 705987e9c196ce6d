"""How far a pass is, told without flooding a log."""

import pytest

from slipway.data.engine.progress import progress


def test_the_items_pass_through_in_order() -> None:
    assert list(progress(iter("abc"), "clean", 3)) == ["a", "b", "c"]


def test_a_quick_pass_leaves_few_lines_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(progress(range(50_000), "clean", 50_000)) == 1_249_975_000
    told = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line]
    assert "50000/50000" in told[-1]
    assert len(told) <= 3
