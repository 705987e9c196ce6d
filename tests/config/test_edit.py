"""Changing a value of params.yaml leaves the rest of the file unchanged."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from slipway.config.edit import changed_text, propose, read_assignments
from slipway.config.params import load_params
from slipway.system.errors import ParamsError

parse = YAML(typ="safe", pure=True).load
TEXT = (Path(__file__).parents[2] / "params.yaml").read_text()


def test_changed_text_changes_one_value_and_keeps_every_other_line() -> None:
    before, after = TEXT.splitlines(), changed_text(TEXT, {"train.batch_size": 64}).splitlines()
    assert [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]] == [
        ("  batch_size: 128 # over all devices", "  batch_size: 64 # over all devices")
    ]


def test_changed_text_keeps_comments_after_changed_values() -> None:
    assert "  max_bad_fraction: 0.1 # more refused rows than this fail the stage" in changed_text(
        TEXT, {"clean.max_bad_fraction": 0.1}
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


def test_a_value_over_several_lines_is_replaced() -> None:
    text = TEXT.replace("  precision: auto #", "  precision: >-\n    auto\n  #")
    assert parse(changed_text(text, {"train.precision": "32-true"}))["train"]["precision"] == (
        "32-true"
    )


@pytest.mark.parametrize(
    ("assignment", "before", "after"),
    [
        ("seed=8", "seed: 7", "seed: 8"),
        ("data.path=my photos/a", "  path: data/demo/digits.parquet #", "  path: my photos/a #"),
        (
            "evaluate.gates.accuracy.min=0.5",
            "    accuracy: { min: 0.95, max: null }",
            "    accuracy: { min: 0.5, max: null }",
        ),
        (
            "export.variants=[fp32, fp16]",
            "  variants: [fp32, fp16, int8, int8_dynamic, int8_tensorrt]",
            "  variants: [fp32, fp16]",
        ),
        (
            "evaluate.gates={balanced_accuracy: {min: 0.3, max: null}}",
            "    accuracy: { min: 0.95, max: null }",
            "    {balanced_accuracy: {min: 0.3, max: null}}",
        ),
        (
            "evaluate.gates.log_loss={min: null, max: 0.5}",
            "    accuracy: { min: 0.95, max: null }",
            "    accuracy: { min: 0.95, max: null }\n    log_loss: {min: null, max: 0.5}",
        ),
        (
            "evaluate.slice_gates.accuracy={min: 0.5, max: null}",
            "artifacts/reference_model, which `slipway release` fills",
            "artifacts/reference_model, which `slipway release` fills\n"
            "  slice_gates:\n    accuracy: {min: 0.5, max: null}",
        ),
    ],
)
def test_assignment_changes_only_its_own_value(assignment: str, before: str, after: str) -> None:
    assert TEXT.count(before) == 1
    assert changed_text(TEXT, read_assignments([assignment])) == TEXT.replace(before, after)


def test_assignment_adds_a_key_that_the_file_leaves_out_to_its_section() -> None:
    text = changed_text(TEXT, {"precompute.interpolation": "bicubic"})
    assert len(text.splitlines()) == len(TEXT.splitlines()) + 1
    assert parse(text)["precompute"]["interpolation"] == "bicubic"


def test_assignment_adds_sections_that_the_file_leaves_out() -> None:
    changes = {"clean.rules.blurred": None, "ensemble.folds": None, "prune.epochs": 3}
    before, after = parse(TEXT), parse(changed_text(TEXT, changes))
    assert after["clean"] == before["clean"] | {"rules": {"blurred": None}}
    assert after["ensemble"] == {"folds": None}
    assert after["prune"] == {"epochs": 3}
    assert {key: after[key] for key in before if key != "clean"} == {
        key: before[key] for key in before if key != "clean"
    }


def test_argument_of_the_default_network_may_be_set() -> None:
    table = "data:\n  path: x.csv\n  task: table_regression\n"
    text = changed_text(table, {"train.network_arguments.num_blocks": 3})
    assert parse(text)["train"] == {"network_arguments": {"num_blocks": 3}}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.epoch=5", r"no key train\.epoch, .*; did you mean train\.epochs\?"),
        ("trian.epochs=5", r"did you mean train\.epochs\?"),
        ("learning_rate=5", r"did you mean train\.learning_rate\?"),
        ("a.b.c.d=5", "`slipway params` lists all"),
        ("train.epochs.a=5", r"no key train\.epochs\.a"),
        ("clean.rules.blured=flag", r"did you mean clean\.rules\.blurred"),
        ("train.epochs=many", r"train\.epochs: found 'many', expected a whole number"),
        ("train.epochs", "is not an assignment. Write KEY=VALUE"),
        ("=5", "is not an assignment. Write KEY=VALUE"),
        ("train.epochs=[", r"not YAML, expected one such as 5.*Put quotes"),
    ],
)
def test_error_for_a_wrong_assignment_suggests_a_correction(assignment: str, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        changed_text(TEXT, read_assignments([assignment]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{TEXT}train:\n  epochs: 5\n", r"a key twice, the second time in line \d+: `train:`"),
        (TEXT.replace("  epochs: 30", "epochs: 30"), r"is not YAML at line \d+"),
        ("- 1\n", "is not a mapping of sections"),
    ],
)
def test_error_names_the_line_of_a_wrongly_pasted_block(text: str, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        changed_text(text, {"train.epochs": 5})


def test_changing_no_value_leaves_params_yaml_unchanged() -> None:
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


def test_propose_outside_a_project_says_how_to_get_into_one(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"is missing in .*make a project: `slipway init"):
        propose(tmp_path / "params.yaml", {"train.num_workers": 2}, apply=True)


def test_error_for_a_key_without_a_section_names_possible_sections() -> None:
    with pytest.raises(
        ParamsError, match=r"^params\.yaml .*\n  warmup_epochs: is not in a section"
    ):
        changed_text(f"{TEXT}warmup_epochs: 2\n", {"seed": 8})
