"""Changing a value of params.yaml leaves the rest of the file as it is."""

from pathlib import Path

import pytest

from slipway.config.edit import changed_text, propose
from slipway.config.params import load_params
from slipway.system.errors import ParamsError

TEXT = (Path(__file__).parents[2] / "params.yaml").read_text()


def test_changed_text_changes_one_value_and_keeps_every_other_line() -> None:
    before, after = TEXT.splitlines(), changed_text(TEXT, {"train.num_workers": 2}).splitlines()
    assert [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]] == [
        ("  num_workers: 0", "  num_workers: 2")
    ]


def test_comments_behind_changed_values_stay() -> None:
    assert "  compile: true # compare with `make profile` before you use true" in changed_text(
        TEXT, {"train.compile": True}
    )
    assert "  encoding: jpeg # or jpeg, only for training images" in changed_text(
        TEXT, {"precompute.encoding": "jpeg"}
    )


def test_a_section_on_one_line_is_changed_in_place() -> None:
    line = (
        "split: { train: 0.7, val: 0.15, test: 0.15, assignment: stable, on_leak: fail, "
        "time_cuts: null, folds: null, fold: 0 } # mine\n"
    )
    text = TEXT[: TEXT.index("split:\n")] + line + "\n" + TEXT[TEXT.index("precompute:\n") :]
    assert changed_text(text, {"split.on_leak": "report"}) == text.replace(
        "on_leak: fail", "on_leak: report"
    )


def test_a_value_over_several_lines_is_refused() -> None:
    with pytest.raises(ParamsError, match="by hand"):
        changed_text(
            TEXT.replace("  precision: auto #", "  precision: >-\n    auto\n  #"),
            {"train.precision": "32-true"},
        )


def test_no_change_changes_nothing() -> None:
    assert changed_text(TEXT, {}) == TEXT


@pytest.mark.parametrize(
    ("place", "value"), [("train.workers", 2), ("trains.num_workers", 2), ("train.num_workers", -1)]
)
def test_changed_text_refuses_values_that_params_yaml_refuses(place: str, value: int) -> None:
    with pytest.raises(ParamsError):
        changed_text(TEXT, {place: value})


def test_propose_with_apply_changes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(TEXT)
    propose(path, {"train.num_workers": 2, "train.precision": "bf16-mixed"}, apply=True)
    train = load_params(path).train
    assert (train.num_workers, train.precision) == (2, "bf16-mixed")
