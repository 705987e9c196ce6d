"""Preflight tries the user's network, loss and metrics before DVC removes anything."""

import copy
from pathlib import Path
from typing import Any

import pytest

from slipway.config.params import parse_params
from slipway.preflight.user_code import check_user_code
from slipway.system.errors import MetricError, ParamsError, SlipwayError, TrainingError
from tests.project_params import of_kind, own_content
from tests.training.distributed.test_pipeline import NETS
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

CONTENT: dict[str, Any] = own_content()
SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, num_outputs):
        super().__init__()
        self.head = nn.LazyLinear(num_outputs)
        self.head(torch.zeros(1, *input_shape).flatten(1))

    def forward(self, rows):
        return self.head(rows.flatten(1))

def loss(outputs, targets):
    return (outputs - targets.reshape(len(outputs), -1)).abs().reshape(len(outputs), -1).mean(1)

def score(targets, outputs):
    return float(len(targets))
"""


def check(
    write_functions: WriteFunctions, source: str, task: str = "image_classification", **train: Any
) -> None:
    write_functions("own", {"parts.py": source})
    content = of_kind(copy.deepcopy(CONTENT), task)
    content["train"] |= {
        "network": "own.parts:Net",
        "network_arguments": {},
        "loss": "own.parts:loss",
        "label_smoothing": 0.0,
        **train,
    }
    content["evaluate"] |= {"metrics": ["own.parts:score"], "gates": {}}
    check_user_code(parse_params(content))


@pytest.fixture(autouse=True)
def _in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "code")


@pytest.mark.process
@pytest.mark.parametrize("task", ["image_classification", "table_regression"])
def test_sound_code_passes_and_is_tried_again_only_after_a_change(
    write_functions: WriteFunctions, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(write_functions, SOURCE, task)
    with monkeypatch.context() as patched:
        patched.setattr("slipway.preflight.user_code._spec", None)
        check(write_functions, SOURCE, task)
        with pytest.raises(TypeError):
            check(write_functions, SOURCE + "X = 1\n", task)


@pytest.mark.parametrize(
    ("old", "new", "kind", "text"),
    [
        (
            "return self.head",
            "assert not self.training or len(rows) == 1\n        return self.head",
            ParamsError,
            "fails in training mode: AssertionError (own/parts.py, line 12: `assert not",
        ),
        (".mean(1)", ".mean()", TrainingError, "returned shape () (own/parts.py, line 14)"),
        (
            "(outputs - targets",
            "(outputs.detach() - targets",
            ParamsError,
            "train.loss 'own.parts:loss' of train.network 'own.parts:Net' has no gradient",
        ),
        ("rows.flatten(1)", "rows.flatten(0, 1)", ParamsError, "`return self.head(rows.flatten(0"),
    ],
)
def test_code_that_cannot_train_is_refused_with_the_users_line(
    write_functions: WriteFunctions, old: str, new: str, kind: type[SlipwayError], text: str
) -> None:
    with pytest.raises(kind) as raised:
        check(write_functions, SOURCE.replace(old, new))
    assert text in str(raised.value)
    assert not Path(".work/user_code.json").exists()


@pytest.mark.process
def test_a_network_that_the_processes_of_a_pipeline_cannot_share_is_refused_before_any_stage(
    write_functions: WriteFunctions, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided: dict[str, Any] = {"strategy": "pipeline", "accelerator": "cpu", "devices": 2}
    with pytest.raises(ParamsError, match=r"'own\.parts:Net' has no stages: it has no method bef"):
        check(write_functions, SOURCE, **divided)
    monkeypatch.setenv("TRAIN_LAUNCHER", "srun")  # other machines train, with other processes
    check(write_functions, SOURCE, **divided)


@pytest.mark.process
def test_a_pipeline_of_more_processes_than_a_users_network_has_blocks_is_refused(
    write_functions: WriteFunctions,
) -> None:
    staged = NETS + SOURCE[SOURCE.index("def loss") :]  # four blocks
    divided: dict[str, Any] = {"strategy": "pipeline", "network_arguments": {"width": 8}}
    with pytest.raises(ParamsError, match=r"on 5 processes, but .* has only 4 blocks"):
        check(write_functions, staged, **divided, accelerator="cpu", devices=5)
    check(write_functions, staged, **divided, accelerator="cpu", devices=4)


@pytest.mark.process
def test_a_network_that_onnx_cannot_express_is_refused_with_the_users_line(
    write_functions: WriteFunctions,
) -> None:
    branch = "if rows.sum() > 0:\n            rows = rows + 1\n        return self.head"
    with pytest.raises(ParamsError) as raised:
        check(write_functions, SOURCE.replace("return self.head", branch))
    assert str(raised.value).startswith(
        "train.network 'own.parts:Net' cannot be exported to ONNX "
        "(own/parts.py, line 12: `if rows.sum() > 0:`): torch cannot export this network"
    )


def test_a_metric_without_a_number_is_refused(write_functions: WriteFunctions) -> None:
    with pytest.raises(MetricError, match=r"returned None on 64 rows, expected one finite number"):
        check(
            write_functions,
            SOURCE.replace("float(len(targets))", "None"),
            network="small_resnet",
            network_arguments=CONTENT["train"]["network_arguments"],
            loss="auto",
        )


def test_without_code_of_the_users_nothing_is_tried() -> None:
    check_user_code(parse_params(CONTENT))
    assert not Path(".work").exists()
