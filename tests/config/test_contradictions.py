"""Settings of params.yaml that contradict each other, or that have no effect."""

from typing import Any

import pytest
import yaml

from slipway.config.network_arguments import (
    HashedNgramsArguments,
    SmallTransformerArguments,
)
from slipway.config.params import parse_params
from tests.config.contents import OWN, content, message
from tests.project_params import of_kind


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("table_classification", {"precompute__transform": "transforms.faces:crop"}),
        ("table_regression", {"data__engine": "ray"}),
        (
            "image_classification",
            {
                "data__columns": {
                    "age": {"kind": "number", "min": None, "max": None, "required": False}
                }
            },
        ),
        ("image_regression", {"data__label_map": {"Cat": "cat"}}),
        ("table_regression", {"data__classes": ["cat"]}),
        ("image_regression", {"audit__folds": 5}),
    ],
)
def test_settings_without_effect_for_the_task_are_refused(
    task: str, changes: dict[str, Any]
) -> None:
    network = "tabm" if task.startswith("table") else "small_resnet"
    metric = "accuracy" if task.endswith("classification") else "rmse"
    fitting = {
        "data__task": task,
        "train__network": network,
        "train__network_arguments": {},
        "evaluate__gates": {metric: {"min": 0.0, "max": None}},
    }
    parse_params(content(**fitting))
    (key,) = changes
    refusal = message(content(**fitting, **changes))
    assert f"{key.replace('__', '.')} is " in refusal
    assert f"but data.task is {task!r}" in refusal


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": "pipeline"}, ["train.strategy is 'pipeline', but", "set strategy to 'fsdp'"]),
        (
            {"strategy": "tensor_parallel", "model_parallel": 2, "network": "timm/resnet18"},
            ["train.strategy is 'tensor_parallel', but train.network is 'timm/resnet18'"],
        ),
        (
            {"strategy": "fsdp", "model_parallel": 2},
            ["train.model_parallel is 2, but train.network is 'small_resnet'", "set it to null"],
        ),
    ],
)
def test_a_strategy_whose_processes_share_blocks_is_refused_for_networks_without_such(
    changes: dict[str, Any], words: list[str]
) -> None:
    own = {"network": "small_resnet", **changes}
    if own["network"] != "small_resnet":
        own["network_arguments"] = {}
    refusal = message(content(**{f"train__{key}": value for key, value in own.items()}))
    assert "expected a network of your own (https://" in refusal
    assert all(text in refusal for text in words)
    own |= {"network": "nets:Net", "network_arguments": {}}  # which preflight builds
    parse_params(content(**{f"train__{key}": value for key, value in own.items()}))


@pytest.mark.parametrize("strategy", ["pipeline", "tensor_parallel"])
def test_processes_share_the_blocks_of_transformers_but_not_of_hashed_ngrams(
    strategy: str,
) -> None:
    changes = of_kind(OWN, "text_classification")
    changes["data"]["text_columns"] = ["text"]
    changes["train"] |= {
        "network": "small_transformer",
        "network_arguments": SmallTransformerArguments().model_dump(),
        "strategy": strategy,
    }
    parse_params(changes)
    changes["train"] |= {
        "network": "hashed_ngrams",
        "network_arguments": HashedNgramsArguments().model_dump(),
    }
    refusal = message(changes)
    assert "expected 'small_transformer', 'encoder', a network of your own" in refusal
    changes["train"]["strategy"] = "fsdp"
    parse_params(changes)


@pytest.mark.parametrize(
    ("offload", "strategy"),
    [
        ("optimizer", "deepspeed_stage_1"),
        ("optimizer", "deepspeed_stage_3"),
        ("optimizer_and_parameters", "deepspeed_stage_3"),
    ],
)
def test_offload_is_accepted_with_a_deepspeed_strategy(offload: str, strategy: str) -> None:
    assert (
        parse_params(content(train__offload=offload, train__strategy=strategy)).train.offload
        == offload
    )


USER_CODE: dict[str, Any] = {
    "train__network": "nets:Net",
    "train__network_arguments": {"width": 8},
    "train__loss": "own.losses:focal",
    "train__label_smoothing": 0.0,
    "evaluate__metrics": ["scores:worst_recall"],
    "evaluate__gates": {"worst_recall": {"min": None, "max": -3.0}},
    "evaluate__slice_gates": {"worst_recall": {"min": 7.0, "max": None}},
}


@pytest.mark.parametrize("task", ["image_classification", "table_regression"])
def test_user_code_is_accepted_for_every_kind_of_task(task: str) -> None:
    params = parse_params(content(data__task=task, **USER_CODE))
    assert params.evaluate.metric_names == ["worst_recall"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train__network": "nets:"}, "network is 'nets:', expected 'package.module:Class'"),
        (
            {"train__network_arguments": {"num_outputs": 3}},
            "network_arguments names num_outputs, which Slipway sets itself from the data: remove",
        ),
        (
            {"train__loss": "focal"},
            "train.loss: found 'focal', expected 'auto', 'cross_entropy', 'bce', 'asymmetric', "
            "'mse' or 'huber', or text, such as 'package.module:function'",
        ),
        (
            {"train__label_smoothing": 0.1},
            "train.label_smoothing is 0.1, but train.loss is 'own.losses:focal', which gets logits "
            "and class indices only: set train.label_smoothing to 0.0",
        ),
        ({"train__class_weights": "balanced"}, "set train.class_weights to null, and do it in"),
        ({"train__pretrained": "hub"}, "'timm/NAME' and 'encoder' have other pretrained weights"),
        (
            {"train__pretrained": "former/weights.safetensors", "train__freeze_epochs": 1},
            "'timm/NAME' and 'encoder' have parts to freeze",
        ),
        ({"evaluate__metrics": ["scores.f1"]}, "evaluate.metrics.0: found 'scores.f1'"),
        ({"evaluate__metrics": ["a:f", "b:f"]}, "metrics names 'f' more than once"),
        (
            {"evaluate__metrics": ["scores:accuracy"]},
            "evaluate.metrics has a function 'accuracy', which is the name of a built-in metric",
        ),
        ({"evaluate__gates": {"worst_recal": {"min": 0, "max": None}}}, "mean 'worst_recall'?"),
    ],
)
def test_error_describes_a_wrong_name_of_user_code(changes: dict[str, Any], words: str) -> None:
    assert words in message(content(**USER_CODE | changes))


@pytest.mark.parametrize("task", ["image_classification", "table_regression"])
def test_structured_pruning_of_a_user_network_is_accepted(task: str) -> None:
    changed = content(data__task=task, prune__kind="structured", **USER_CODE)
    changed["export"]["variants"].append("pruned")
    assert parse_params(changed).prune.kind == "structured"


def test_error_names_each_key_too_large_for_the_epochs_with_a_valid_value() -> None:
    pretrained = {"network": "timm/resnet18", "network_arguments": {}, "pretrained": "hub"}
    wanted = {"warmup_epochs": 5.0, "freeze_epochs": 4, "unfreeze_epochs": 4}
    changed = content()
    changed["train"] |= pretrained | wanted | {"early_stopping_patience": 5, "epochs": 10}
    changed["audit"] |= {"folds": 3, "epochs": 10}
    parse_params(changed)
    changed["train"]["epochs"], changed["audit"]["epochs"] = 3, 2
    text = message(changed)
    assert "has 1 mistake:" in text
    pasted = yaml.safe_load(text.partition("set in `train`:\n")[2])
    assert pasted.keys() == {*wanted, "early_stopping_patience"}
    changed["train"] |= pasted
    parse_params(changed)


@pytest.mark.parametrize(
    ("task", "tokenizer", "augment", "found"),
    [
        ("text_classification", None, {"token_dropout": 0.1}, "the network reads bytes"),
        ("text_classification", "bpe", {"word_deletion": 0.1}, "the network reads tokens"),
        ("image_classification", None, {"word_deletion": 0.1}, "augment.word_deletion is 0.1"),
    ],
)
def test_augmentation_of_texts_that_the_network_does_not_read_is_refused(
    task: str, tokenizer: str | None, augment: dict[str, float], found: str
) -> None:
    changed = of_kind(OWN, task)
    changed["augment"] |= augment
    if task == "text_classification":
        changed["data"]["text_columns"] = ["text"]
        size, most = (300, 24) if tokenizer else (None, None)
        tokens = {"tokenizer": tokenizer, "vocabulary_size": size, "max_tokens": most}
        changed["precompute"] |= tokens
    assert found in message(changed)
