"""params.yaml is strict and has no defaults; one error lists all its mistakes."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.config.network_arguments import TabmArguments
from slipway.config.params import Params, load_params, parse_params
from slipway.kinds.inputs import COLUMNS
from slipway.system.errors import ParamsError
from tests.config.contents import CONTENT, OWN, content, message, table_content
from tests.project_params import of_kind


def all_keys(changed: dict[str, Any]) -> dict[str, Any]:
    """Return the same params with the keys of every kind of input."""
    return parse_params(changed).model_dump(mode="json")


def test_default_params_yaml_lacks_the_keys_of_tables() -> None:
    assert of_kind(OWN, "image_classification") == OWN
    assert "columns" not in OWN["data"]
    assert parse_params(OWN).data.columns == {}


def test_params_yaml_of_a_table_may_omit_the_keys_of_images() -> None:
    table = table_content()
    assert set(table["precompute"]) == {"max_categories", "num_quantiles"}
    assert table["augment"] == {}
    assert parse_params(table).precompute.num_quantiles == 48
    assert table == table_content()  # the content that a stage seals stays as it is in the file


@pytest.mark.parametrize("read", [lambda: OWN, table_content], ids=["images", "table"])
def test_params_yaml_with_the_keys_of_every_kind_gives_equal_params(
    read: Callable[[], dict[str, Any]],
) -> None:
    assert parse_params(all_keys(read())) == parse_params(read())


def test_error_names_a_missing_key_of_the_projects_kind_of_input() -> None:
    table, images = table_content(), copy.deepcopy(OWN)
    del table["precompute"]["num_quantiles"], table["clean"]["rules"]["all_missing"]
    del images["precompute"]["image_size_px"], images["augment"]["forbid"]
    for changed, keys in (
        (table, ("precompute.num_quantiles", "clean.rules.all_missing")),
        (images, ("precompute.image_size_px", "augment.forbid")),
    ):
        text = message(changed)
        assert text.startswith("params.yaml has 2 mistakes:")
        assert all(f"{key}: missing; it has no default" in text for key in keys)


@pytest.mark.parametrize("key", ["data__image_column", "data__engine", "clean__max_pixels"])
def test_image_key_listed_in_dvc_yaml_is_required_for_tables_too(key: str) -> None:
    table, (section, name) = table_content(), key.split("__")
    del table[section][name]
    assert f"{section}.{name}: missing" in message(table)


def test_section_listed_in_dvc_yaml_is_required_for_every_kind_of_input() -> None:
    table = table_content()
    del table["augment"]
    assert "augment: missing" in message(table)


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
            {"verify__max_metric_loss": {}},
            "verify.max_metric_loss has no budget for "
            "['fp16', 'int8', 'int8_dynamic', 'int8_tensorrt']",
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
                "train__network_arguments": yaml.safe_load(TabmArguments.EXAMPLE),
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
        ({"train__freeze_epochs": 2}, "freeze_epochs is 2, but pretrained is null"),
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


def _keys(model: dict[str, Any], place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    free_form = {
        ("train", "network_arguments"),
        ("evaluate", "gates"),
        ("verify", "max_metric_loss"),
    }
    keys = []
    for key, value in model.items():
        keys.append((*place, key))
        if isinstance(value, dict) and (*place, key) not in free_form:
            keys += _keys(value, (*place, key))
    return keys


@pytest.mark.parametrize(
    ("read", "place"),
    [(lambda: copy.deepcopy(OWN), place) for place in _keys(OWN)]
    + [(table_content, tuple(key.split("."))) for key in COLUMNS.settings],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_no_key_of_params_yaml_has_a_default(
    read: Callable[[], dict[str, Any]], place: tuple[str, ...]
) -> None:
    changed = read()
    section = changed
    for part in place[:-1]:
        section = section[part]
    del section[place[-1]]
    assert f"{'.'.join(place)}: missing; it has no default" in message(changed)


def test_one_error_lists_all_mistakes_in_params_yaml() -> None:
    text = message(content(seed="x", train__epochs=0, clean__min_sid=3))
    assert "has 3 mistakes" in text
    assert all(key in text for key in ("seed", "train.epochs", "clean.min_sid"))


def test_params_cannot_be_changed_afterwards() -> None:
    params: Params = parse_params(CONTENT)
    with pytest.raises(ValueError, match="frozen"):
        params.train.epochs = 3  # type: ignore[misc]


def test_params_yaml_is_read_as_yaml_1_2_like_dvc_does(tmp_path: Path) -> None:
    text = Path("params.yaml").read_text().replace("label_map: {}", "label_map: {yes: off}")
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


@pytest.mark.parametrize("wrong", ["%d/%m", "day", "%d/%m/%Q"])
def test_a_date_format_without_day_month_and_year_is_refused(wrong: str) -> None:
    changed = of_kind(content(data__date_format=wrong), "table_regression")
    assert f"data.date_format: found {wrong!r}, expected a day, a month" in message(changed)
