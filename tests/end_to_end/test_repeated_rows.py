"""A table of people, many of whom have equal data and different outcomes, keeps all of its rows."""

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.end_to_end.project import copy_checkout
from tests.end_to_end.scikit_learn import assert_metrics_as_scikit_learn

pytestmark = pytest.mark.nightly(seconds=60)
NUM_ROWS = 480


def test_every_row_of_a_table_with_equal_rows_is_kept_and_counted(tmp_path: Path) -> None:
    draw = random.Random(7)
    people = [
        (
            draw.choice(("first", "third")),
            draw.choice(("female", "male")),
            draw.randrange(20, 60, 10),
        )
        for _ in range(NUM_ROWS)
    ]
    survived = [
        int(draw.random() < 0.2 + 0.5 * (sex == "female") + 0.1 * (cabin == "first"))
        for cabin, sex, _ in people
    ]
    lines = [
        f"{cabin},{sex},{age},{one}"
        for (cabin, sex, age), one in zip(people, survived, strict=True)
    ]
    checkout = copy_checkout(tmp_path / "checkout")
    (tmp_path / "people.csv").write_text("\n".join(["cabin,sex,age,survived", *lines, ""]))
    checkout.shell("git init -q ..")  # the checkout itself is ignored by the repository around it
    checkout.shell("slipway init ../people --data ../people.csv --target survived --yes")
    checkout.shell("cd ../people && slipway run evaluate train.epochs=3")
    project = tmp_path / "people"
    rows = pq.read_table(project / "data/split/rows.parquet").to_pydict()
    assert len(set(rows["id"])) == len(rows["id"]) == NUM_ROWS
    targets = pq.read_table(project / "data/clean/rows.parquet")["label"].to_pylist()
    assert sum(map(int, targets)) == sum(survived)
    assert assert_metrics_as_scikit_learn(project) > NUM_ROWS / 10
