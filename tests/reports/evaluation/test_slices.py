"""Slices: bounds match names, a planted weak slice is found, equal slices are not called worse."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from slipway.config.sections import Gate
from slipway.data.engine.rows import SPLIT_ROWS
from slipway.data.store.packed import PackedManifest, read_manifest
from slipway.data.tables.raw_columns import RawCells
from slipway.inputs.texts import encode_texts
from slipway.kinds.registry import Task
from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.gates import apply_slice_gates
from slipway.reports.evaluation.slice_scores import (
    RowAnswers,
    SliceScores,
    adjusted_p_values,
    score_slices,
)
from slipway.reports.evaluation.slices import (
    Dimension,
    brightness,
    built_in_dimensions,
    by_category,
    by_date,
    by_number,
    of_column,
    of_sources,
)
from slipway.system.errors import IntegrityError
from tests.data.raw_files import data_params
from tests.packed_rows import packed_split
from tests.reports.conftest import CLASSES, images, split_rows, targets
from tests.tokens import token_contract

RESAMPLING = Resampling(3, 400, 0.95)
NUM_ROWS = 600


@pytest.fixture
def packed_manifest(project: Callable[[Task], None]) -> PackedManifest:
    project("image_classification")
    return read_manifest(Path("data/packed"))


def members(dimension: Dimension) -> dict[str, int]:
    return dict(zip(dimension.values, dimension.counts.tolist(), strict=True))


def answers_with(wrong: NDArray[np.bool_], num_classes: int = 3) -> RowAnswers:
    """Return labels in turn; the answers to those in `wrong` are the next label."""
    labels = np.arange(len(wrong)) % num_classes
    outputs = np.full((len(wrong), num_classes), 0.1, np.float32)
    outputs[np.arange(len(wrong)), (labels + wrong) % num_classes] = 1 - 0.1 * (num_classes - 1)
    return RowAnswers("image_classification", labels.astype(np.float64), outputs)


def three_dimensions(generator: np.random.Generator, num_rows: int = NUM_ROWS) -> list[Dimension]:
    colours = by_category("colour", generator.choice(["red", "green", "blue"], num_rows).tolist())
    return [
        colours,
        by_number("age", generator.normal(40, 12, num_rows)),
        by_number("width", generator.integers(1, 4, num_rows)),
    ]


# how rows are cut


def test_each_category_is_a_slice_and_so_are_missing_values() -> None:
    assert members(by_category("colour", ["red", "", "blue", "red"])) == {
        "blue": 1,
        "missing": 1,
        "red": 2,
    }


def test_each_of_a_few_distinct_numbers_is_a_slice() -> None:
    assert members(by_number("rooms", [3, 1, np.nan, 3, 2.5])) == {
        "1": 1,
        "2.5": 1,
        "3": 2,
        "missing": 1,
    }


def test_numbers_are_cut_at_rounded_quartiles_that_the_slice_names_state() -> None:
    values = np.random.default_rng(0).normal(50_000, 12_345.678, 1001)
    found = by_number("income", values, "USD")
    assert len(found.values) == 4
    assert found.counts.sum() == 1001
    assert found.counts.min() > 200
    low = float(found.values[0].removeprefix("below ").removesuffix(" USD").replace(",", ""))
    high = float(found.values[-1].removeprefix("from ").removesuffix(" USD").replace(",", ""))
    assert found.counts[0] == (values < low).sum()
    assert found.counts[-1] == (values >= high).sum()
    assert found.values[1].startswith(f"{low:,.12g} USD to below ")


@pytest.mark.parametrize(
    "values",
    [
        np.concatenate([np.zeros(900), np.arange(1, 101)]),
        1e9 + np.arange(100) / 1000,
        np.repeat([3.0, 4.0], [50, 3]).tolist() + list(range(5, 20)),
        -np.geomspace(1e-12, 1e12, 50),
    ],
)
def test_no_slice_of_numbers_is_empty_for_any_distribution(values: NDArray[np.float64]) -> None:
    counts = by_number("x", values).counts
    assert len(counts) > 1
    assert counts.min() > 0
    assert counts.sum() == len(values)


def test_dates_are_cut_on_whole_days() -> None:
    days = 20_000 + np.random.default_rng(0).uniform(0, 365, 400)
    found = by_date("bought", np.append(days, np.nan))
    assert found.values[0] == "before 2025-01-17"
    assert found.values[-2].startswith("from 2025-0")
    assert found.values[-1] == "missing"
    assert found.counts.tolist() == pytest.approx([100, 100, 100, 100, 1], abs=5)


def test_dates_of_one_day_are_cut_by_minutes() -> None:
    found = by_date("bought", 20_000 + np.arange(0, 1440, 10) / 1440)
    assert found.values == [
        "before 2024-10-04 06:00",
        "2024-10-04 06:00 to before 2024-10-04 12:00",
        "2024-10-04 12:00 to before 2024-10-04 18:00",
        "from 2024-10-04 18:00",
    ]


def test_the_kind_of_a_column_decides_how_it_is_cut_into_slices() -> None:
    flags = np.array([0.0, 1.0, np.nan, 1.0])
    assert members(of_column(RawCells("garden", "boolean", flags))) == {
        "false": 1,
        "missing": 1,
        "true": 2,
    }
    assert members(of_column(RawCells("day", "date", np.array([0.0, 9.0, 9.0])))) == {
        "before 1970-01-10": 1,
        "from 1970-01-10": 2,
    }
    assert members(of_column(RawCells("place", "category", np.array(["a", "", "a"], object)))) == {
        "a": 2,
        "missing": 1,
    }


def test_images_are_cut_by_class_size_aspect_brightness_group_and_flag(
    packed_manifest: PackedManifest,
) -> None:
    pixels = images(21)
    test = packed_split(
        pixels, targets("image_classification"), [f"{row:032x}" for row in range(21)], ["x"] * 21
    )
    found = built_in_dimensions(test, packed_manifest, split_rows("image_classification"))
    assert [dimension.name for dimension in found] == [
        "class",
        "size",
        "aspect",
        "brightness",
        "group",
        "flag",
    ]
    assert found[0].values == CLASSES
    assert members(found[1]) == {"64 px": 11, "128 px": 10}
    assert found[1].codes.tolist() == [row % 2 for row in range(21)]
    assert members(found[2]) == {"1": 11, "2": 10}
    assert members(found[4]) == {"north": 10, "south": 11}
    assert members(found[5]) == {"blurred": 3}
    assert brightness(pixels) == pytest.approx([image.mean() for image in pixels])


def test_the_aspect_of_images_is_named_by_two_decimals(packed_manifest: PackedManifest) -> None:
    rows = split_rows("image_classification")
    for name, sides in (("width", [160, 400]), ("height", [150, 300])):
        place = rows.schema.get_field_index(name)
        column = pa.array([sides[row % 2] for row in range(21)], rows.schema.field(place).type)
        rows = rows.set_column(place, rows.schema.field(place), column)
    names = [f"{row:032x}" for row in range(21)]
    test = packed_split(images(21), targets("image_classification"), names, ["x"] * 21)
    found = {one.name: one for one in built_in_dimensions(test, packed_manifest, rows)}
    assert found["aspect"].values == ["1.07", "1.33"]


@pytest.mark.parametrize("has_tokens", [False, True], ids=["bytes", "tokens"])
def test_texts_are_cut_by_length_and_script(
    packed_manifest: PackedManifest, *, has_tokens: bool
) -> None:
    contract = token_contract()
    if not has_tokens:
        contract = contract.model_copy(update={"tokenizer": None, "max_tokens": None})
    texts = ["soup"] * 10 + ["a train, " * 9] * 5 + ["\u5f88\u597d\u5403"] * 6
    test = packed_split(
        encode_texts(texts, contract),
        targets("image_classification"),
        [f"{row:032x}" for row in range(21)],
        ["x"] * 21,
    )
    task: Task = "text_classification"
    manifest = packed_manifest.model_copy(update={"task": task, "input": contract})
    found = {
        dimension.name: dimension
        for dimension in built_in_dimensions(test, manifest, split_rows("image_classification"))
    }
    assert members(found["script"]) == {"Han": 6, "Latin": 15}
    lengths = found["length"]
    assert len(set(lengths.codes[:10])) == len(set(lengths.codes[10:15])) == 1
    assert lengths.values[-1] == ("16 tokens" if has_tokens else "64 bytes")


def test_a_dimension_without_variation_has_no_slices(packed_manifest: PackedManifest) -> None:
    rows = split_rows("image_classification")
    for name, value in (("width", 8), ("group", None), ("flags", [])):
        field = SPLIT_ROWS.field(name)
        rows = rows.set_column(
            rows.schema.get_field_index(name), field, pa.array([value] * 21, field.type)
        )
    test = packed_split(
        images(21),
        targets("image_classification"),
        [f"{row:032x}" for row in range(21)],
        ["x"] * 21,
    )
    assert [dimension.name for dimension in built_in_dimensions(test, packed_manifest, rows)] == [
        "class",
        "brightness",
    ]


def test_a_packed_test_row_missing_from_the_split_table_is_refused(
    packed_manifest: PackedManifest,
) -> None:
    test = packed_split(images(2), [0, 1], ["0" * 32, "f" * 32], ["x", "y"])
    with pytest.raises(IntegrityError, match="1 of 2 packed test rows"):
        built_in_dimensions(test, packed_manifest, split_rows("image_classification"))


# which slice is worse


def test_a_planted_weak_slice_comes_first_and_is_the_only_one_called_worse() -> None:
    generator = np.random.default_rng(1)
    dimensions = three_dimensions(generator)
    is_red = dimensions[0].codes == dimensions[0].values.index("red")
    wrong = generator.random(NUM_ROWS) < np.where(is_red, 0.25, 0.03)
    scores = score_slices(dimensions, answers_with(wrong), 20, RESAMPLING)
    assert scores.judged[0].title == "colour red"
    assert [score.title for score in scores.worse] == ["colour red"]
    assert scores.judged[0].metric.rows == is_red.sum()
    assert scores.judged[0].metric.value == pytest.approx(1 - wrong[is_red].mean())
    assert scores.judged[0].metric.high < 1 - wrong.mean()


def test_a_planted_weak_slice_of_a_numeric_column_comes_first() -> None:
    generator = np.random.default_rng(2)
    dimensions = three_dimensions(generator)
    is_old = dimensions[1].codes == 3
    values = generator.normal(0, 1, NUM_ROWS)
    outputs = (values + generator.normal(0, np.where(is_old, 2.0, 0.5)))[:, None].astype(np.float32)
    scores = score_slices(
        dimensions, RowAnswers("image_regression", values, outputs), 20, RESAMPLING
    )
    assert scores.metric == "rmse"
    assert [score.title for score in scores.worse] == [f"age {dimensions[1].values[3]}"]
    assert scores.worse[0] is scores.judged[0]


@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_equally_good_slices_are_called_worse_in_at_most_5_percent_of_evaluations(
    kind: str,
) -> None:
    generator, num_named = np.random.default_rng(5), 0
    for seed in range(200):
        slices, sizes = np.zeros((3, 200), np.int64), (3, 4, 5)
        for place, (size, start) in enumerate(zip(sizes, (0, 3, 7), strict=True)):
            slices[place] = start + generator.integers(size, size=200)
        losses = (
            (generator.random(200) < 0.1).astype(float)
            if kind == "labels"
            else generator.exponential(1, 200) ** 2
        )
        p_values = adjusted_p_values(losses, slices, sum(sizes), Resampling(seed, 100, 0.95))
        num_named += bool((p_values <= 0.05).any())
    assert num_named <= 200 * 0.05 + 6  # 6: two standard deviations of a binomial draw


def test_uncorrected_p_values_would_call_more_equal_slices_worse() -> None:
    """Twin of the test above: with 12 slices, some uncorrected p-value is small far more often."""
    generator, num_named = np.random.default_rng(5), 0
    for seed in range(20):
        slices = generator.integers(12, size=(1, 120))
        losses = generator.exponential(1, 120)
        alone = [
            adjusted_p_values(
                losses, np.where(slices == code, 0, 1), 1, Resampling(seed, 60, 0.95)
            )[0]
            for code in range(12)
        ]
        num_named += min(alone) <= 0.05
    assert num_named > 20 * 0.2


def test_the_p_value_of_a_single_slice_equals_fishers_exact_test() -> None:
    """3 of 10 rows of a slice are wrong, and 4 of the 90 others.

    P(at least 3) = sum over k of C(7, k) C(93, 10 - k) / C(100, 10).
    """
    losses = np.zeros(100)
    losses[[0, 1, 2, 50, 51, 52, 53]] = 1
    slices = np.where(np.arange(100) < 10, 0, 1)[None]
    found = adjusted_p_values(losses, slices, 1, Resampling(0, 20_000, 0.95))[0]
    tail = sum(math.comb(7, k) * math.comb(93, 10 - k) for k in range(3, 8)) / math.comb(100, 10)
    assert found == pytest.approx(tail, abs=0.004)


def test_the_order_of_dimensions_does_not_change_the_p_values() -> None:
    generator = np.random.default_rng(3)
    dimensions = three_dimensions(generator)
    answers = answers_with(generator.random(NUM_ROWS) < 0.1)
    found, turned = (
        score_slices(order, answers, 20, RESAMPLING) for order in (dimensions, dimensions[::-1])
    )
    assert {score.title: score.p_value for score in found.judged} == {
        score.title: score.p_value for score in turned.judged
    }


@pytest.mark.parametrize("wrong", [False, True])
def test_no_slice_is_worse_if_all_rows_have_the_same_loss(wrong: bool) -> None:
    scores = score_slices(
        three_dimensions(np.random.default_rng(0)),
        answers_with(np.full(NUM_ROWS, wrong)),
        20,
        RESAMPLING,
    )
    assert {score.p_value for score in scores.judged} == {1.0}


# too small, constant, and gates


def small_and_large() -> SliceScores:
    colours = by_category("colour", ["red"] * 5 + ["blue"] * 20 + ["green"] * 35)
    wrong = np.zeros(60, bool)
    wrong[:10] = True  # all red ones, and 5 blue ones
    return score_slices(
        [colours, by_category("kind", ["a"] * 60)], answers_with(wrong), 20, RESAMPLING
    )


def test_a_slice_with_too_few_rows_is_listed_but_not_judged() -> None:
    scores = small_and_large()
    assert [(small.by, small.value, small.rows) for small in scores.too_small] == [
        ("colour", "red", 5)
    ]
    assert {score.value: score.metric.rows for score in scores.judged} == {"blue": 20, "green": 35}
    assert scores.constant == ["kind"]


def test_a_language_that_no_test_row_has_is_listed_with_0_rows() -> None:
    languages = np.array(["en"] * 30 + ["zh"] * 30, object)
    dimension = of_column(RawCells("language", "category", languages, ["de"]))
    scores = score_slices([dimension], answers_with(np.zeros(60, bool)), 20, RESAMPLING)
    assert [(small.value, small.rows) for small in scores.too_small] == [("de", 0)]
    assert {score.value: score.metric.rows for score in scores.judged} == {"en": 30, "zh": 30}


def test_many_small_slices_of_one_column_are_reported_as_one() -> None:
    ids = by_category("id", [f"id-{row // 2}" for row in range(60)])
    scores = score_slices([ids], answers_with(np.zeros(60, bool)), 20, RESAMPLING)
    assert [(small.value, small.rows) for small in scores.too_small] == [("(30 values)", 60)]


def test_slice_gates_apply_to_every_judged_slice() -> None:
    scores, wrong = small_and_large(), np.zeros(60, bool)
    wrong[:10] = True
    gates = {"accuracy": Gate(min=0.8, max=None), "log_loss": Gate(min=None, max=9.0)}
    results = apply_slice_gates(gates, scores, answers_with(wrong), RESAMPLING)
    assert {(gate.name, gate.where): gate.outcome for gate in results} == {
        ("accuracy", "colour blue"): "missed",
        ("accuracy", "colour green"): "passed",
        ("log_loss", "colour blue"): "passed",
        ("log_loss", "colour green"): "passed",
    }
    measured = {gate.where: gate.measured for gate in results if gate.name == "accuracy"}
    assert {where: metric.value for where, metric in measured.items() if metric} == {
        "colour blue": 0.75,
        "colour green": 1.0,
    }


def test_a_slice_gate_skips_slices_that_do_not_define_its_metric() -> None:
    by_class = Dimension("class", ["a", "b", "c"], np.arange(60) % 3)
    answers = answers_with(np.arange(60) % 7 == 0)
    halves = by_category("half", ["left"] * 30 + ["right"] * 30)
    scores = score_slices([by_class, halves], answers, 20, RESAMPLING)
    results = apply_slice_gates({"roc_auc": Gate(min=0.5, max=None)}, scores, answers, RESAMPLING)
    assert {gate.where for gate in results} == {"half left", "half right"}


def test_a_slice_gate_is_unjudged_if_no_slice_defines_its_metric() -> None:
    scores = small_and_large()
    small = SliceScores(scores.metric, [], scores.too_small, [], scores.confidence)
    gates = {"accuracy": Gate(min=0.5, max=None)}
    [result] = apply_slice_gates(gates, small, answers_with(np.zeros(60, bool)), RESAMPLING)
    assert (result.outcome, result.key) == ("unjudged", "evaluate.slice_gates.accuracy")
    assert "none of 0 slices" in result.text


def test_rows_of_joined_sources_are_cut_by_source(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).touch()
    data = data_params(tmp_path, sources=["*.csv"])
    [found] = of_sources(data, ["0:a.csv", "9:b.csv", "1:a.csv"])
    assert (found.name, found.values, found.codes.tolist()) == (
        "source",
        ["a.csv", "b.csv"],
        [0, 1, 0],
    )
    assert of_sources(data, ["0:a.csv", "1:a.csv"]) == []
    assert of_sources(data_params(tmp_path), ["0", "1"]) == []
