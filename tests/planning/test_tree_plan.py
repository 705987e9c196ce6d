"""The plan of boosted trees: time from real rounds, and memory."""

import re
from dataclasses import replace
from pathlib import Path

from slipway.planning.plan import plan_trees
from slipway.training.job import PROJECT_PATHS
from tests.project_params import PROJECT
from tests.training.trees.fitted import packed, tree_params


def test_the_plan_predicts_the_time_of_all_rounds_from_a_few(tmp_path: Path) -> None:
    packed(tmp_path)
    paths = replace(PROJECT_PATHS, packed=tmp_path / "packed", augmented=tmp_path / "augmented")
    train = tree_params(epochs=2000, early_stopping_patience=50)
    text = plan_trees(PROJECT.model_copy(update={"train": train}), paths)
    found = re.search(r"time +([\d.]+) ms a round, ([\d,]+) s in total or less, if it stops", text)
    assert found is not None
    assert float(found[2].replace(",", "")) >= 0.9 * float(found[1])  # 2,000 rounds, in seconds
    assert "up to 2000 rounds of trees with up to 15 leaves" in text
