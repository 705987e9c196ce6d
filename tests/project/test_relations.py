"""Columns that others compute, perfect twins of a target, and columns that predict it alone."""

import csv
import random
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from slipway.config import edit
from slipway.project.column_roles import sampled_columns
from slipway.project.creation import _readme, params_file
from slipway.project.inspection import inspect
from slipway.project.proposal import ProjectProposal, propose
from slipway.project.recipe import Machine
from slipway.project.relations import find_relations
from slipway.project.table_sample import sample_table

LAPTOP = Machine(cores=2, has_gpu=False, has_amx=False)


def written(folder: Path, header: str, rows: Iterable[Iterable[object]]) -> Path:
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows(rows)
    return folder / "t.csv"


def taxis(folder: Path) -> Path:
    draw = random.Random(1)
    rows = []
    for number in range(400):
        distance = round(draw.lognormvariate(0.7, 0.8), 2)
        fare = round(2.5 + 2.5 * distance + 3 * draw.random(), 1)
        tip = round(draw.choice((0, 0, 0.1, 0.2)) * fare, 2)
        tolls = draw.choice((0,) * 9 + (6.12,))
        total = "" if number % 50 == 0 else round(fare + tip + tolls, 2)
        rows.append((draw.randint(1, 6), distance, fare, tip, tolls, total, draw.choice("uvw")))
    return written(folder, "passengers,distance,fare,tip,tolls,total,borough", rows)


def passengers(folder: Path, class_name: str = "class") -> Path:
    """Write passengers with a class as a number and in words, and whether they survived."""
    draw = random.Random(2)
    rows = []
    for _ in range(300):
        number = draw.randint(1, 3)
        survived = int(draw.random() < 0.7 - 0.2 * number)
        word = ("First", "Second", "Third")[number - 1]
        age = draw.randint(1, 80)
        rows.append((survived, number, age, word, ("no", "yes")[survived]))
    return written(folder, f"survived,pclass,age,{class_name},alive", rows)


def relations(path: Path) -> list[str]:
    columns = sampled_columns(sample_table(path).raw.columns.values())
    return [str(relation) for relation in find_relations(columns)]


def proposed(path: Path, target: str | None = None) -> ProjectProposal:
    return propose(inspect(path), None, target, machine=LAPTOP)


def command_lines(proposal: ProjectProposal) -> list[list[str]]:
    """Return the words of each command in the warnings."""
    lines = proposal.text().splitlines()
    return [shlex.split(line) for line in lines if line.startswith("      slipway")]


def command_in(proposal: ProjectProposal) -> list[str]:
    """Return the words of the only command in the warnings."""
    (words,) = command_lines(proposal)
    return words


# Sums and products --------------------------------------------------------------------------------


def test_a_total_is_found_as_the_sum_of_its_parts(tmp_path: Path) -> None:
    assert relations(taxis(tmp_path)) == ["'total' is 'fare' + 'tip' + 'tolls'"]


def test_differences_constants_and_two_independent_sums_are_found(tmp_path: Path) -> None:
    draw = random.Random(3)
    rows = []
    for _ in range(80):
        a, b, c = (draw.randint(0, 99) for _ in range(3))
        rows.append((a, b, a - b, c, a + b + c + 3.5))
    assert sorted(relations(written(tmp_path, "a,b,gap,c,sum", rows))) == [
        "'a' is 'b' + 'gap'",
        "'sum' is 'a' + 'b' + 'c' + 3.5",
    ]


@pytest.mark.parametrize("decimals", [2, 9])
def test_a_product_is_found_even_if_it_is_rounded(tmp_path: Path, decimals: int) -> None:
    draw = random.Random(4)
    rows = []
    for _ in range(80):
        price, number = round(draw.uniform(1, 50), 3), draw.randint(0, 20)
        rows.append((price, number, round(price * number, decimals), draw.random()))
    found = relations(written(tmp_path, "price,number,amount,noise", rows))
    assert found == ["'amount' is 'price' * 'number'"]


def test_related_numbers_without_an_exact_rule_are_no_relation(tmp_path: Path) -> None:
    draw = random.Random(5)
    rows = []
    for _ in range(80):
        a, b = draw.random(), draw.random()
        rows.append((a, b, a + b + draw.gauss(0, 0.01), a * b + draw.gauss(0, 0.01)))
    assert relations(written(tmp_path, "a,b,sum,product", rows)) == []


def test_columns_for_the_values_of_a_category_are_no_sum(tmp_path: Path) -> None:
    rows = [(int(n % 3 == 0), int(n % 3 == 1), int(n % 3 == 2), n * 7 % 31) for n in range(90)]
    assert relations(written(tmp_path, "is_a,is_b,is_c,x", rows)) == []


@pytest.mark.parametrize(("target", "ignored"), [("tip", ["total"]), ("total", ["fare", "tip"])])
def test_init_names_a_sum_that_tells_the_target_with_the_command_that_ignores_it(
    tmp_path: Path, target: str, ignored: list[str]
) -> None:
    proposal = proposed(taxis(tmp_path), target)
    assert "together they tell the target" in "\n".join(proposal.warnings)
    assert command_in(proposal)[2 : 2 + len(ignored)] == [
        f"data.columns.{name}={{kind: ignore}}" for name in ignored
    ]


def test_the_question_for_a_target_names_a_column_that_others_compute(tmp_path: Path) -> None:
    (question,) = proposed(taxis(tmp_path)).questions
    assert question.text.startswith("'total' is 'fare' + 'tip' + 'tolls'. Which column")


# Twins --------------------------------------------------------------------------------------------


def test_init_asks_for_the_target_if_one_with_a_usual_name_has_a_twin(tmp_path: Path) -> None:
    (question,) = proposed(passengers(tmp_path)).questions
    assert question.option == "--target"
    assert question.text.startswith(
        "'class' is named like a target, but it says the same as 'pclass'."
    )
    assert {"survived", "class", "pclass"} <= set(question.candidates)


def test_init_takes_a_target_with_a_usual_name_that_has_no_twin(tmp_path: Path) -> None:
    rows = [(n % 3, n * 7 % 31, "uvw"[n * n % 7 % 3]) for n in range(90)]
    proposal = proposed(written(tmp_path, "pclass,age,class", rows))
    assert proposal.params["data"]["target_column"] == "class"


def test_a_number_has_a_twin_in_another_unit(tmp_path: Path) -> None:
    rows = [(n * 7 % 31, n * 7 % 31 * 1.8 + 32, n % 5) for n in range(90)]
    (question,) = proposed(written(tmp_path, "response,fahrenheit,x", rows)).questions
    assert "it says the same as 'fahrenheit'" in question.text


# Leaks --------------------------------------------------------------------------------------------


def measured(folder: Path, deviation: float, name: str = "copy") -> Path:
    """Write a column that differs from the target by a part of its standard deviation."""
    draw = random.Random(6)
    targets = [draw.gauss(170, 9) for _ in range(800)]
    rows = [
        (draw.random(), target + 9 * deviation * draw.gauss(0, 1), target) for target in targets
    ]
    return written(folder, f"x,{name},y", rows)


@pytest.mark.parametrize(("deviation", "is_suspected"), [(0.09, True), (0.2, False)])
def test_a_leak_is_suspected_from_an_r2_of_098_on(
    tmp_path: Path, deviation: float, is_suspected: bool
) -> None:
    proposal = proposed(measured(tmp_path, deviation))
    found = [text for text in proposal.warnings if text.startswith("suspected leak: 'copy' alone")]
    assert bool(found) is is_suspected
    if is_suspected:
        assert "(R2 0.98" in found[0]
        assert command_in(proposal) == ["slipway", "set", "data.columns.copy={kind: ignore}"]


def test_rows_sorted_by_the_target_make_no_other_column_suspicious(tmp_path: Path) -> None:
    draw = random.Random(7)
    sizes = sorted(draw.randint(1, 5) for _ in range(900))
    rows = [(size, size // 2 + draw.choice((0, 1)), n + 0.5) for n, size in enumerate(sizes)]
    proposal = proposed(written(tmp_path, "size,other,price", rows), "price")
    assert not [text for text in proposal.warnings if text.startswith("suspected leak")]


def test_a_copy_that_clean_ignores_by_itself_is_no_suspected_leak(tmp_path: Path) -> None:
    proposal = proposed(passengers(tmp_path, class_name="deck"), "survived")
    assert not [text for text in proposal.warnings if text.startswith("suspected leak")]


@pytest.mark.parametrize("name", ["copy", "a copy's copy", "copy.1", "copy=1"])
def test_the_command_of_a_leak_changes_the_params_of_the_project(tmp_path: Path, name: str) -> None:
    proposal = proposed(measured(tmp_path, 0.05, name))
    before = params_file(tmp_path, proposal)
    _, _, *changes = command_in(proposal)
    after = edit.changed_text(before, edit.read_assignments(changes))
    assert yaml.safe_load(after)["data"]["columns"] == {name: {"kind": "ignore"}}
    readme = _readme(tmp_path, proposal.params, proposal)
    assert f"\n\n      {shlex.join(command_in(proposal))}\n" in readme
