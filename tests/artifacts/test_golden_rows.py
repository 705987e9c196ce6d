import io
from pathlib import Path

import numpy as np
import pytest

from slipway.artifacts.golden_rows import (
    GoldenBudget,
    GoldenRows,
    check_golden_rows,
    golden_budget,
    golden_rows_bytes,
    parse_golden_rows,
)
from slipway.artifacts.uncertainty import Answers
from slipway.system.errors import BundleError, ParityError
from tests.serving.bundles import with_golden_rows, write_bundle

NUM_ROWS = 64


def answers(seed: int = 0, columns: int = 10) -> Answers:
    """Return probabilities of a confident model; for one column, values around 1,000."""
    generator = np.random.default_rng(seed)
    scores = np.abs(generator.normal(30, 5, NUM_ROWS)).astype(np.float32)
    if columns == 1:
        return Answers(generator.normal(1000, 50, (NUM_ROWS, 1)).astype(np.float32), scores)
    logits = generator.normal(size=(NUM_ROWS, columns)) * 3
    return Answers(
        (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).astype(np.float32), scores
    )


def rows_of(answers: Answers) -> GoldenRows:
    num_rows = len(answers.outputs)
    return GoldenRows(
        [f"row{number}" for number in range(num_rows)],
        np.zeros((num_rows, 4), dtype=np.uint8),
        answers,
    )


def with_noise(answers: Answers, size: float) -> Answers:
    noise = np.random.default_rng(1).uniform(-1, 1, answers.outputs.shape) * size
    return Answers((answers.outputs + noise).astype(np.float32), answers.scores)


def test_golden_rows_survive_a_round_trip_and_equal_rows_give_equal_bytes() -> None:
    rows = rows_of(answers())
    payload = golden_rows_bytes(rows)
    found = parse_golden_rows(payload, NUM_ROWS)
    assert found.ids == rows.ids
    assert np.array_equal(found.inputs, rows.inputs)
    assert np.array_equal(found.answers.outputs, rows.answers.outputs)
    assert np.array_equal(found.answers.scores, rows.answers.scores)
    assert golden_rows_bytes(found) == payload


def test_golden_rows_refuse_pickles_and_other_content() -> None:
    stream = io.BytesIO()
    np.savez(
        stream,
        ids=np.array([{"an": "object"}], dtype=object),
        inputs=np.zeros(1),
        outputs=np.zeros(1),
        scores=np.zeros(1),
    )
    for payload in (stream.getvalue(), b"text", golden_rows_bytes(rows_of(answers()))[:-30]):
        with pytest.raises(BundleError, match="holds no golden rows"):
            parse_golden_rows(payload, 1)
    with pytest.raises(BundleError, match=r"holds \[64\] rows, bundle\.json says 63"):
        parse_golden_rows(golden_rows_bytes(rows_of(answers())), NUM_ROWS - 1)


@pytest.mark.parametrize("columns", [1, 3, 10])
@pytest.mark.parametrize(("precision", "bits"), [("fp32", 23), ("fp16", 10), ("int8", 7)])
def test_predictions_rounded_to_a_precision_are_within_its_golden_budget(
    columns: int, precision: str, bits: int
) -> None:
    expected = answers(columns=columns)
    spread = 1.0 if columns > 1 else float(expected.outputs.std())
    budget = golden_budget(expected, expected, precision)
    result = check_golden_rows(
        with_noise(expected, 2.0 ** -(bits + 1) * spread), rows_of(expected), budget
    )
    assert result.mean_difference <= budget.max_mean_difference


@pytest.mark.parametrize("columns", [1, 3, 10])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_predictions_of_another_model_exceed_every_golden_budget(
    columns: int, precision: str
) -> None:
    expected = answers(columns=columns)
    with pytest.raises(
        ParityError,
        match=r"not answered as fp32 answers them: mean difference .* Worst row: row\d+, off by",
    ):
        check_golden_rows(
            answers(1, columns), rows_of(expected), golden_budget(expected, expected, precision)
        )


def test_tf32_rounding_exceeds_the_budget_of_fp32() -> None:
    expected = answers()
    with pytest.raises(ParityError, match="mean difference"):
        check_golden_rows(
            with_noise(expected, 2.0**-11),
            rows_of(expected),
            golden_budget(expected, expected, "fp32"),
        )  # TF32 has 10 bits


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("of", ["outputs", "scores"])
def test_error_names_the_first_golden_row_whose_prediction_is_nan(value: float, of: str) -> None:
    rows = rows_of(answers())
    found = answers()
    (found.outputs[:, 3] if of == "outputs" else found.scores)[17] = value
    with pytest.raises(
        ParityError,
        match="1 of 64 golden rows were answered by NaN or an infinity, the first is row17",
    ):
        check_golden_rows(found, rows, golden_budget(rows.answers, rows.answers, "fp16"))


def test_golden_rows_refuse_predictions_of_another_shape() -> None:
    rows = rows_of(answers())
    with pytest.raises(
        ParityError, match=r"answered by \[\(64, 9\), \(64,\)\], expected \[\(64, 10\), \(64,\)\]"
    ):
        check_golden_rows(
            Answers(answers().outputs[:, :9], answers().scores),
            rows,
            golden_budget(rows.answers, rows.answers, "fp16"),
        )


def test_golden_rows_refuse_more_flips_than_chance_explains() -> None:
    edge = np.tile(np.array([[0.5001, 0.4999]], dtype=np.float32), (NUM_ROWS, 1))  # every row on it
    expected = Answers(edge, answers().scores)
    budget = golden_budget(expected, expected, "fp16")
    assert 1 <= budget.max_flipped <= 6
    found = Answers(edge.copy(), expected.scores)
    found.outputs[: budget.max_flipped] = edge[: budget.max_flipped, ::-1]
    assert len(check_golden_rows(found, rows_of(expected), budget).flipped) == budget.max_flipped
    found.outputs[budget.max_flipped] = edge[budget.max_flipped, ::-1]
    with pytest.raises(
        ParityError,
        match=f"{budget.max_flipped + 1} of 64 labels flipped, "
        f"expected at most {budget.max_flipped}",
    ):
        check_golden_rows(found, rows_of(expected), budget)


def test_golden_rows_refuse_ood_scores_of_another_model() -> None:
    expected = answers()
    strange = Answers(expected.outputs, expected.scores[::-1])
    with pytest.raises(ParityError, match="mean difference of the OOD scores"):
        check_golden_rows(strange, rows_of(expected), golden_budget(expected, expected, "int8"))


def test_flip_budget_grows_with_the_flips_measured_on_the_cpu() -> None:
    expected, found = answers(), answers()
    found.outputs[:8] = np.roll(found.outputs[:8], 1, axis=1)
    assert (
        golden_budget(found, expected, "int8").max_flipped
        > golden_budget(expected, expected, "int8").max_flipped
        >= 1
    )


def test_golden_budget_of_numeric_predictions_has_no_flips() -> None:
    value = answers(columns=1)
    assert golden_budget(value, value, "fp16").max_flipped == 0
    none = GoldenBudget(max_mean_difference=0, max_mean_score_difference=0, max_flipped=0)
    assert check_golden_rows(value, rows_of(value), none).flipped == []


def test_bundle_returns_its_golden_rows_and_refuses_altered_ones(tmp_path: Path) -> None:
    bundle = with_golden_rows(write_bundle(tmp_path))
    rows = bundle.golden_rows()
    assert rows is not None
    assert rows.ids[3] == "row3"
    path = tmp_path / "golden_rows.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for read in (bundle.golden_rows, bundle.verify):
        with pytest.raises(BundleError, match=r"golden_rows\.npz was altered"):
            read()
    path.unlink()
    with pytest.raises(BundleError, match=r"golden_rows\.npz is missing"):
        bundle.verify()


def test_bundle_without_golden_rows_is_valid(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path)
    bundle.verify()
    assert bundle.golden_rows() is None
