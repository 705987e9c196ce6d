"""Settings that boosted trees cannot apply are refused, with their names."""

import copy
from typing import Any

import pytest

from slipway.config.network_arguments import LightgbmArguments
from slipway.config.params import parse_params
from slipway.config.tree_settings import require_gradient_steps
from slipway.system.errors import ParamsError
from tests.project_params import PROJECT, of_kind


def content(task: str = "table_classification", **changes: Any) -> dict[str, Any]:
    """Return the params for trees; `train__epochs` is the key `train.epochs`."""
    found = of_kind(copy.deepcopy(PROJECT.model_dump(mode="json")), task)
    found["train"] |= {
        "network": "lightgbm",
        "network_arguments": LightgbmArguments().model_dump(),
        "label_smoothing": 0.0,
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        found[section][name] = value
    return found


def test_tree_networks_are_accepted_if_no_key_requests_gradient_steps() -> None:
    assert parse_params(content()).train.network == "lightgbm"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train__devices": 2}, "train.devices is 2, but .* set it to 'auto'"),
        ({"train__precision": "bf16-mixed"}, "train.precision is 'bf16-mixed', but"),
        ({"train__accelerator": "gpu"}, "train.accelerator is 'gpu', but"),
        ({"train__strategy": "ddp"}, "train.strategy is 'ddp', but"),
        ({"train__num_nodes": 2}, "train.num_nodes is 2, but .* set it to 1"),
        ({"train__compile": True}, "train.compile is true, but .* set it to false"),
        ({"train__ema_decay": 0.9}, "train.ema_decay is 0.9, but .* set it to null"),
        ({"train__loggers": ["mlflow"]}, r"train.loggers is \['mlflow'\], but .* set it to \[\]"),
        ({"train__label_smoothing": 0.1}, "train.label_smoothing is 0.1, but .* set it to 0.0"),
        ({"train__loss": "losses:mine"}, "train.loss is 'losses:mine', but .* set it to auto"),
        ({"prune__kind": "magnitude"}, "prune.kind is 'magnitude', but .* set it to null"),
        ({"compile__require": True}, "compile.require is true, but .* TensorRT cannot run"),
    ],
)
def test_setting_that_trees_cannot_apply_is_refused_with_the_value_to_write(
    changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ParamsError, match=expected):
        parse_params(content(**changes))


def test_tree_networks_are_refused_for_images() -> None:
    with pytest.raises(ParamsError, match=r"train.network is 'lightgbm', but data.task is"):
        parse_params(content("image_classification"))


def test_commands_that_time_gradient_steps_refuse_tree_models() -> None:
    require_gradient_steps("tabm", "slipway profile")
    with pytest.raises(ParamsError, match="slipway profile times gradient steps"):
        require_gradient_steps("lightgbm", "slipway profile")


def test_tree_networks_are_refused_for_multi_label_targets() -> None:
    with pytest.raises(ParamsError, match="which cannot learn"):
        parse_params(content("table_multilabel"))
