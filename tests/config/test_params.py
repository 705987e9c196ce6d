"""params.yaml is strict, keys have defaults, and one error lists all its mistakes."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from slipway.config.network_arguments import TabmArguments
from slipway.config.params import (
    Params,
    defaults_for,
    filled,
    flat,
    load_params,
    mistakes_in,
    parse_params,
    read_content,
    resolved,
    value_at,
)
from slipway.config.yaml_text import as_yaml
from slipway.system.errors import ParamsError
from tests.config.contents import CONTENT, OWN, content, message, table_content
from tests.project_params import of_kind

WRITTEN = read_content(Path("params.yaml"))  # without the defaults
SHORT: dict[str, Any] = {"data": {"path": "rows.csv", "task": "table_regression"}}


def test_a_key_at_its_default_and_a_key_left_out_give_equal_params() -> None:
    assert len(dict(flat(WRITTEN))) < 40 < 150 < len(dict(flat(OWN)))
    assert parse_params(WRITTEN) == parse_params(OWN) == parse_params(CONTENT)
    assert resolved(WRITTEN) == resolved(OWN)


def test_filling_leaves_the_content_of_the_file_as_it_is() -> None:
    given = copy.deepcopy(SHORT)
    filled(given)
    assert given == SHORT


@pytest.mark.parametrize(
    ("task", "network", "key", "default"),
    [
        ("table_regression", None, "train.network", "tabm"),
        ("text_multilabel", None, "train.network", "hashed_ngrams"),
        ("image_regression", None, "train.network", "small_resnet"),
        ("table_regression", None, "train.learning_rate", 0.006),
        ("table_regression", "lightgbm", "train.learning_rate", 0.05),
        ("table_regression", "lightgbm", "export.variants", ["fp32"]),
        ("image_regression", "timm/resnet18", "train.epochs", 12),
        ("table_regression", None, "verify.max_metric_loss.int8", 0.05),
        ("table_classification", None, "verify.max_metric_loss.int8", 0.01),
        ("table_classification", None, "clean.rules.conflicting_label", "flag"),
        ("image_classification", None, "clean.rules.conflicting_label", "refuse"),
        ("table_regression", None, "train.network_arguments.width", 128),
    ],
)
def test_default_depends_on_the_kind_of_input_or_target_or_on_the_network(
    task: str, network: str | None, key: str, default: object
) -> None:
    train = {"train": {"network": network}} if network else {}
    given = {"data": {"path": "x", "task": task, "text_columns": ["a"]}, **train}
    assert value_at(filled(given), key) == default


def test_warm_up_left_out_is_a_tenth_of_the_epochs_but_at_most_two() -> None:
    for epochs, warmup in ((1, 0.1), (8, 0.8), (20, 2.0), (300, 2.0)):
        assert parse_params(SHORT | {"train": {"epochs": epochs}}).train.warmup_epochs == warmup


def test_part_of_a_mapping_of_budgets_keeps_the_other_defaults() -> None:
    budgets = parse_params(SHORT | {"verify": {"max_metric_loss": {"int8": 0.2}}}).verify
    assert budgets.max_metric_loss["int8"] == 0.2
    assert budgets.max_metric_loss["fp16"] == 0.01


def test_arguments_of_a_network_that_are_left_out_have_its_own_defaults() -> None:
    params = parse_params(SHORT | {"train": {"network_arguments": {"width": 64}}})
    assert params.train.network_arguments == TabmArguments(width=64).model_dump()


def test_only_the_place_and_the_task_of_the_data_are_required() -> None:
    assert parse_params(SHORT).data.encoding == "utf-8"
    text = message({"train": {}, "data": {}})
    assert "data.path: missing; it has no default" in text
    assert "data.task: missing; it has no default" in text


@pytest.mark.parametrize(
    ("task", "key", "value"),
    [
        ("table_classification", "augment.horizontal_flip", 0.5),
        ("table_classification", "precompute.encoding", "jpeg"),
        ("image_classification", "data.missing_values", ["?"]),
        ("image_classification", "precompute.max_text_bytes", 64),
        ("table_regression", "train.label_smoothing", 0.1),
    ],
)
def test_value_other_than_the_default_is_refused_for_a_task_that_does_not_use_it(
    task: str, key: str, value: object
) -> None:
    section, name = key.split(".")
    given: dict[str, Any] = {"data": {"path": "x", "task": task}}
    given.setdefault(section, {})[name] = value
    assert f"{key} is {as_yaml(value)}, but data.task is {task!r}" in message(given)
    given[section][name] = value_at(defaults_for(given), key)
    parse_params(given)


def test_key_of_gradient_steps_is_refused_for_trees_unless_it_has_its_default() -> None:
    trees = SHORT | {"train": {"network": "lightgbm", "batch_size": 64}}
    assert "train.batch_size is 64, but train.network is 'lightgbm'" in message(trees)
    parse_params(SHORT | {"train": {"network": "lightgbm", "batch_size": 128}})


def test_unknown_task_is_reported_without_missing_keys_of_other_kinds() -> None:
    table = table_content()
    table["data"]["task"] = "table_clasification"
    text = message(table)
    assert text.startswith("params.yaml has 1 mistake:")
    assert "data.task: found 'table_clasification'" in text


def test_default_params_yaml_is_valid() -> None:
    assert load_params(Path("params.yaml")) == parse_params(CONTENT)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"train__learning_rte": 0.1},
            "train.learning_rte: unknown key; did you mean 'learning_rate'?",
        ),
        ({"trian": {}}, "trian: unknown key; did you mean 'train'?"),
        ({"evaluate__gates__accuracy__mni": 0.1}, "mni: unknown key; did you mean 'min'?"),
        (
            {"data__columns": {"age": "number"}},
            "data.columns.age: found 'number', expected a mapping of kind, min, max, required",
        ),
        (
            {"data__columns": {"age": {"kidn": 1}}},
            "data.columns.age.kidn: unknown key; did you mean 'kind'?",
        ),
        ({"split": 3}, "split: found 3, expected a mapping of train, val, test"),
        ({"train__epochs": "thirty"}, "train.epochs: found 'thirty'"),
        ({"train__epochs": 3.5}, "train.epochs: found 3.5"),
        (
            {"train__epochs": True},
            "train.epochs: found true, expected a whole number of at least 1",
        ),
        ({"train__epochs": 0}, "train.epochs: found 0"),
        ({"seed": -1}, "seed: found -1"),
        ({"data__task": "images"}, "data.task: found 'images'"),
        (
            {"data__split_column": "a", "data__time_column": "b", "split__time_cuts": ["1", "2"]},
            "split.time_cuts is set, but data.split_column already says where val and test begin",
        ),
        (
            {"data__split_file": "s.csv", "split__folds": 5},
            "split.folds is 5, but data.time_column or data.split_file already says which rows",
        ),
        (
            {"data__split_column": "a", "data__split_file": "s.csv"},
            "split_column and split_file both give the split; set one of them to null",
        ),
        ({"data__path": ""}, "data.path: found '', expected a folder, a table or an archive"),
        ({"data__path": " "}, "data.path: found ' ', expected a folder, a table or an archive"),
        (
            {"data__path": ["a.csv", "b.csv"]},
            "data.path: found a list, expected one folder, table or archive; for several, set it "
            "to their folder and list them in data.sources",
        ),
        ({"precompute__channels": 2}, "precompute.channels: found 2"),
        ({"augment__horizontal_flip": 1.5}, "augment.horizontal_flip: found 1.5"),
        ({"augment__scale": [1.1, 0.9]}, "scale [1.1, 0.9] goes from large to small"),
        ({"split__train": 0.8}, "train 0.8 + val 0.15 + test 0.15 is 1.1, expected 1"),
        (
            {"augment__crop_padding_px": 16},
            "augment.crop_padding_px is 16, expected less than precompute.image_size_px 16",
        ),
        (
            {"compile__optimal_batch_size": 512},
            "compile.optimal_batch_size is 512, above export.max_batch_size 256",
        ),
        ({"export__variants": ["fp16"], "compile__variant": "fp16"}, "lacks 'fp32'"),
        (
            {"export__variants": ["fp32"]},
            "compile.variant is 'fp16', but export.variants is ['fp32']",
        ),
        (
            {"export__goal__max_metric_loss": 5},
            "export.goal.max_metric_loss is 5, but a fraction of the rows is never above 1",
        ),
        (
            {"evaluate__max_regression": 1.5},
            "evaluate.max_regression is 1.5, but a fraction of the rows is never above 1",
        ),
        (
            {
                "verify__max_metric_loss": {
                    "fp16": 0.4,
                    "int8": 1,
                    "int8_dynamic": 1,
                    "int8_tensorrt": 2,
                }
            },
            "verify.max_metric_loss.int8_tensorrt is 2, "
            "but a fraction of the rows is never above 1",
        ),
        ({"train__warmup_epochs": 30.0}, "is 30.0, expected less than epochs 30"),
        (
            {"export__variants": ["fp32", "fp16", "pruned"]},
            "export.variants contains ['pruned'], but prune.kind is null",
        ),
        (
            {"prune__kind": "structured"},
            "prune.kind is 'structured', but export.variants "
            "['fp32', 'fp16', 'int8', 'int8_dynamic', ",
        ),
        ({"prune__sparsity": 1.0}, "prune.sparsity: found 1.0"),
        (
            {"prune__kind": "structured", "train__network_arguments__normalisation": "group"},
            "prune.kind is 'structured', but train.network_arguments.normalisation is 'group'",
        ),
        (
            {
                "prune__kind": "structured",
                "train__network": "tabm",
                "train__network_arguments": TabmArguments().model_dump(),
            },
            "prune.kind is 'structured', but train.network is 'tabm', "
            "whose submodels share their layers: use magnitude",
        ),
        ({"audit__folds": 1}, "audit.folds: found 1, expected a whole number of at least 2"),
        (
            {"audit__folds": 5, "audit__epochs": 2},
            "warmup_epochs: 0.2 # is 2.0, expected less than audit.epochs 2",
        ),
        (
            {"train__offload": "optimizer"},
            "offload is 'optimizer', which needs strategy a deepspeed strategy, "
            "but strategy is 'auto'",
        ),
        (
            {"train__offload": "optimizer_and_parameters", "train__strategy": "deepspeed_stage_2"},
            "offload is 'optimizer_and_parameters', which needs strategy 'deepspeed_stage_3', "
            "but strategy is 'deepspeed_stage_2'",
        ),
        (
            {"train__offload_path": "/mnt", "train__strategy": "deepspeed_stage_3"},
            "offload_path is '/mnt', but offload is null, so no state would be there",
        ),
        (
            {
                "train__offload_path": "/mnt",
                "train__offload": "optimizer",
                "train__strategy": "deepspeed_stage_2",
            },
            "offload_path is '/mnt', which needs strategy 'deepspeed_stage_3', "
            "but strategy is 'deepspeed_stage_2'",
        ),
        ({"train__offload": "all"}, "train.offload: found 'all'"),
        (
            {"train__model_parallel": 2, "train__strategy": "deepspeed_stage_2"},
            "model_parallel is 2, which needs strategy 'tensor_parallel', 'pipeline' or 'fsdp', "
            "but strategy is 'deepspeed_stage_2', and others cannot be combined (decision 43). Use "
            "null, or one of the three",
        ),
        ({"train__loss": "huber"}, "loss is 'huber', which needs huber_delta"),
        (
            {"train__loss": "huber", "train__huber_delta": 1.0},
            "train.loss is 'huber', but data.task is 'image_classification'",
        ),
        ({"train__huber_delta": 1.0}, "huber_delta is 1.0, but loss is 'auto': set it to null"),
        ({"train__momentum": 0.9}, "momentum is 0.9, but optimizer is 'adamw': set it to null"),
        ({"train__optimizer": "sgd"}, "optimizer is 'sgd', which needs momentum"),
        ({"train__nesterov": True}, "nesterov is true, but momentum is null"),
        (
            {"train__schedule": "step"},
            "train: schedule is 'step', which needs step_epochs\n"
            "  train: schedule is 'step', which needs step_factor",
        ),
        ({"train__shuffle": "blocks"}, "shuffle is 'blocks', which needs shuffle_buffer_mib"),
        (
            {"train__shuffle_buffer_mib": 512},
            "shuffle_buffer_mib is 512, but shuffle is 'rows': set it to null",
        ),
        ({"train__step_factor": 0.5}, "step_factor is 0.5, but schedule is 'cosine'"),
        (
            {"train__schedule": "one_cycle", "train__warmup_epochs": 0.0},
            "schedule is 'one_cycle', but warmup_epochs is 0",
        ),
        (
            {"train__early_stopping_patience": 30},
            "early_stopping_patience: 10 # is 30, which epochs 30 cannot exhaust",
        ),
        (
            {"train__strategy": "deepspeed_stage_3", "train__l1": 0.1},
            "l1 is 0.1, but strategy is 'deepspeed_stage_3'",
        ),
        ({"train__pretrained": "hub"}, "pretrained is 'hub', but network is 'small_resnet'"),
        (
            {"train__network": "timm/resnet18", "train__freeze_epochs": 2},
            "freeze_epochs is 2, but pretrained is null: untrained weights would be frozen. Name",
        ),
        (
            {"train__network": "mine:Own", "train__freeze_epochs": 2},
            "freeze_epochs is 2, but network is 'mine:Own': only 'timm/NAME' and 'encoder' have",
        ),
        ({"train__unfreeze_epochs": 2}, "unfreeze_epochs is 2, but freeze_epochs is 0"),
        (
            {"train__class_weights": "some"},
            "train.class_weights: found 'some', expected 'balanced', or a mapping",
        ),
        (
            {"train__class_weights": {"cat": -1.0}},
            "has 1 mistake:\n  train.class_weights.cat: found -1.0, expected a number above 0",
        ),
        (
            {"train__devices": 0},
            "has 1 mistake:\n  train.devices: found 0, "
            "expected 'auto', or a whole number of at least 1",
        ),
        (
            {"train__channels_last": 3},
            "has 1 mistake:\n  train.channels_last: found 3, expected 'auto', or true or false",
        ),
        ({"train__learning_rate": "fast"}, "train.learning_rate: found 'fast'"),
        ({"clean__max_pixels": 200_000_000}, "clean.max_pixels: found 200000000"),
        (
            {"evaluate__slice_gates": {"acuracy": {"min": 0.5, "max": None}}},
            "evaluate.slice_gates names 'acuracy'",
        ),
        ({"evaluate__slices": ["age", "place", "age"]}, "slices names 'age' more than once"),
        ({"train__loggers": ["wandb", "wandb"]}, "loggers names 'wandb' more than once"),
        ({"evaluate__slice_min_rows": 1}, "evaluate.slice_min_rows: found 1"),
        ({"evaluate__gates__accuracy": {"min": None, "max": None}}, "min and max are both null"),
        (
            {"evaluate__gates__accuracy": {"min": 0.9, "max": 0.8}},
            "evaluate.gates.accuracy: min 0.9 is above max 0.8",
        ),
        (
            {"evaluate__gates__accuracy": {"min": None, "max": float("inf")}},
            "evaluate.gates.accuracy.max: found .inf, expected a number",
        ),
        (
            {"evaluate__gates__accuracy": {"min": 95.0, "max": None}},
            "evaluate.gates.accuracy requires min 95, but it is never above 1",
        ),
        (
            {"evaluate__slice_gates": {"log_loss": {"min": None, "max": -1.0}}},
            "slice_gates.log_loss requires max -1, but it is never below",
        ),
        (
            {
                "evaluate__top_k": None,
                "evaluate__gates": {"top_k_accuracy": {"min": 0.9, "max": None}},
            },
            "gates names top_k_accuracy, which needs top_k, but top_k is null",
        ),
        ({"export__variants": ["fp32", "fp16", "fp16"]}, "variants names 'fp16' more than once"),
    ],
)
def test_error_describes_found_and_expected_values_of_each_mistake(
    changes: dict[str, Any], words: str
) -> None:
    assert words in message(content(**changes))


def test_one_error_lists_all_mistakes_in_params_yaml() -> None:
    text = message(content(seed="x", train__epochs=0, clean__min_sid=3))
    assert "has 3 mistakes" in text
    assert all(key in text for key in ("seed", "train.epochs", "clean.min_sid"))


def test_params_cannot_be_changed_afterwards() -> None:
    params: Params = parse_params(CONTENT)
    with pytest.raises(ValueError, match="frozen"):
        params.train.epochs = 3  # type: ignore[misc]


def test_params_yaml_is_read_as_yaml_1_2_like_dvc_does(tmp_path: Path) -> None:
    text = Path("params.yaml").read_text().replace("data:", "data:\n  label_map: {yes: off}")
    (tmp_path / "params.yaml").write_text(
        text.replace("learning_rate: 0.004", "learning_rate: 4e-03")
    )
    params = load_params(tmp_path / "params.yaml")
    assert params.train.learning_rate == 0.004
    assert params.data.label_map == {"yes": "off"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is missing"),
        ("a: 1\na: 2", "a key twice"),
        ("a: [", "is not YAML"),
        ("- 1", "holds list"),
        ("", "holds NoneType"),
        ("a: \ud800", "is not YAML"),
        ("!!python/object:os.system {}", "is not YAML"),
        (
            "a: [2024-02-29, 2024-02-30, 2024-06-31]",
            r"dates that do not exist: 2024-02-30, 2024-06-31\. "
            r"Correct it, and write dates in quotes",
        ),
        ("a: 2024-02-28T25:00:00", "holds a wrong value: hour must be in"),
        ("a: !!int x", "holds a wrong value: invalid literal"),
        ("a: !!bool x", "holds a wrong value: 'x'"),
        ("[" * 1000, "nested too deeply"),
    ],
)
def test_a_file_without_params_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "params.yaml").write_text(text, errors="surrogatepass")
    with pytest.raises(ParamsError, match=words):
        load_params(tmp_path / "params.yaml")


@pytest.mark.parametrize(
    ("name", "meant"), [("latn-1", "latin-1"), ("windows-125", "windows-125[0-9]"), ("", "utf-8")]
)
def test_error_for_an_unknown_encoding_names_the_most_similar_one(name: str, meant: str) -> None:
    found = message(content(data__encoding=name))
    assert re.search(f"not a text encoding; did you mean '{meant}'", found)


@pytest.mark.parametrize(
    ("key", "value", "path", "sources"),
    [
        ("sheet", "Data", "data/t.csv", None),
        ("sheet", "Data", "data", ["a.csv", "b.zip"]),
        ("archive_encoding", "cp932", "data/raw", None),
        ("archive_encoding", "cp932", "data/t.xlsx", None),
    ],
)
def test_a_key_of_workbooks_or_archives_is_refused_for_other_data(
    key: str, value: str, path: str, sources: list[str] | None
) -> None:
    changed = content(**{f"data__{key}": value}, data__path=path, data__sources=sources)
    assert f"{key} is for a" in message(of_kind(changed, "table_regression"))


@pytest.mark.parametrize(
    ("key", "value", "path", "sources"),
    [
        ("sheet", "Data", "data/T.XLSX", None),
        ("sheet", "Data", "data", ["2024/*.xlsx"]),
        ("sheet", "Data", "data", ["2024/*"]),
        ("archive_encoding", "cp932", "data/raw.Zip", None),
        ("archive_encoding", "cp932", "data", ["a.csv", "raw.tar.gz"]),
    ],
)
def test_a_key_of_workbooks_or_archives_is_accepted_where_one_may_be_read(
    key: str, value: str, path: str, sources: list[str] | None
) -> None:
    changed = content(**{f"data__{key}": value}, data__path=path, data__sources=sources)
    assert f"{key} is for" not in str(mistakes_in(of_kind(changed, "table_regression")))


@pytest.mark.parametrize("wrong", ["%d/%m", "day", "%d/%m/%Q"])
def test_a_date_format_without_day_month_and_year_is_refused(wrong: str) -> None:
    changed = of_kind(content(data__date_format=wrong), "table_regression")
    assert f"data.date_format: found {wrong!r}, expected a day, a month" in message(changed)
