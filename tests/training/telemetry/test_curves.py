"""Tests of reading the curves that DVCLive wrote."""

from pathlib import Path

import pytest

from slipway.system.errors import SchemaError
from slipway.training.telemetry.curves import read_curves


def write_curve(root: Path, name: str, text: str) -> None:
    path = root / "plots" / "metrics" / f"{name}.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_curves_of_train_and_val_of_one_metric_share_a_chart(tmp_path: Path) -> None:
    write_curve(tmp_path, "train/loss", "step\tloss\n1\t0.5\n2\t0.25\n")
    write_curve(tmp_path, "val/loss", "step\tloss\n1\t0.6\n")
    write_curve(tmp_path, "learning_rate", "step\tlearning_rate\n1\t0.1\n")
    curves = read_curves(tmp_path)
    assert [line.name for line in curves["loss"]] == ["train", "val"]
    assert (curves["loss"][0].x, curves["loss"][0].y) == ([1.0, 2.0], [0.5, 0.25])
    assert [line.name for line in curves["learning_rate"]] == ["learning_rate"]


def test_read_curves_returns_nothing_if_no_metric_was_logged(tmp_path: Path) -> None:
    assert read_curves(tmp_path / "live") == {}


@pytest.mark.parametrize(
    "text", ["step\taccuracy\n1\t0.5\n", "step\tloss\n1\tmuch\n", "step\tloss\n1\n"]
)
def test_read_curves_refuses_a_file_that_dvclive_did_not_write(tmp_path: Path, text: str) -> None:
    write_curve(tmp_path, "train/loss", text)
    with pytest.raises(SchemaError, match=r"loss\.tsv"):
        read_curves(tmp_path)
