"""The names that messages suggest: misspellings of a known name, and nothing farther away."""

import pytest

from slipway.system.errors import nearest


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("trian", ["train", "evaluate"], ["train"]),  # two letters exchanged
        ("lightgbn", ["tabm", "lightgbm"], ["lightgbm"]),
        ("Cultivar", ["cultivar"], ["cultivar"]),
        ("acuracy", ["macro_f1", "accuracy"], ["accuracy"]),
        ("resnet18", ["small_resnet", "tabm"], []),
        ("blocks", ["num_blocks", "block"], ["block"]),
        ("blocks", ["num_blocks", "width"], ["num_blocks"]),
        ("hello", ["help", "check"], []),
        ("zzz", ["run", "set"], []),
        ("train.foo", ["train.loss", "train.l1"], []),  # the section alone says nothing
        ("train.epoch", ["train.epochs", "audit.epochs"], ["train.epochs"]),
        ("SLIPWAY_PROT", ["SLIPWAY_PORT", "SLIPWAY_HOST"], ["SLIPWAY_PORT"]),
        ("", ["a"], []),
        ("x" * 1000, ["x" * 999], []),  # callers may send long names
    ],
)
def test_only_a_misspelling_is_suggested(name: str, known: list[str], expected: list[str]) -> None:
    assert nearest(name, known) == expected


def test_the_nearest_names_come_first_and_no_more_than_wanted() -> None:
    known = ["resnet50", "resnet18", "resnet19", "vit"]
    assert nearest("resnet1", known, most=2) == ["resnet18", "resnet19"]
