"""Tests of the user's own network: its contract, and refusals that quote the user's line."""

from pathlib import Path

import pytest
import torch

from slipway.data.store.packed import TargetScale
from slipway.inputs.columns import ColumnContract
from slipway.kinds.code_digest import user_code
from slipway.system.errors import IntegrityError, ParamsError, UnavailableError
from slipway.training.networks.features import feature_layer
from slipway.training.networks.networks import (
    build_network,
    example_rows,
    load_network,
    save_model,
)
from tests.model_manifests import model_manifest
from tests.packed_tables import fit_column
from tests.training.conftest import spec
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, num_outputs, width=4):
        super().__init__()
        self.shape = tuple(input_shape)
        size = 1
        for side in input_shape:
            size *= side
        self.head = nn.Linear(size, num_outputs)

    def forward(self, rows):
        assert rows.dtype == torch.float32 and tuple(rows.shape[1:]) == self.shape
        return self.head(rows.flatten(1))
"""
OWN = {"name": "own.nets:Net", "arguments": {}}


@pytest.fixture(name="write")
def _write(
    write_functions: WriteFunctions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write a project whose package `own` defines the network."""
    (tmp_path / "code").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "code")
    write_functions("own", {"nets.py": NET})


@pytest.mark.usefixtures("write")
def test_user_network_for_images_receives_normalised_channels_first() -> None:
    network = build_network(spec(**OWN))
    assert network.backbone.shape == (1, 8, 8)
    zeros = example_rows(network.spec, 2)
    expected = network.backbone(torch.full((2, 1, 8, 8), -2.0))  # mean 0.5, deviation 0.25
    assert torch.allclose(network(zeros), expected)


@pytest.mark.usefixtures("write")
def test_user_network_for_tables_receives_numbers_indicators_and_category_slots() -> None:
    columns = [fit_column("x", [1.0, 2.0, None, 9.0]), fit_column("c", ["a", "b", "a", "b"])]
    contract = ColumnContract(kind="columns", columns=columns)
    scale = TargetScale(mean=100.0, std=10.0)
    network = build_network(
        spec(
            **OWN,
            task="table_regression",
            classes=[],
            input=contract,
            mean=[],
            std=[],
            target_scale=scale,
        )
    ).eval()
    assert network.backbone.shape == (4,)
    seen: list[torch.Tensor] = []
    network.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    answer = network(torch.tensor([[50.0, 0.0, 2.0]]))
    highest = (9.0 - columns[0].mean) / columns[0].std
    assert seen[0][0].tolist() == pytest.approx([highest, 0.0, 0.0, 1.0])
    assert answer[0, 0].item() == pytest.approx(100 + 10 * network.backbone(seen[0])[0, 0].item())
    assert feature_layer(network, example_rows(network.spec)) == "encoding"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "def Net(**k):\n    1 / 0\n",
            "cannot be built: ZeroDivisionError: division by zero (own/nets.py, line 2",
        ),
        ("def Net(a):\n    pass\n", "It is called with the keywords input_shape, num_outputs; all"),
        (
            "def Net(**k):\n    return 3\n",
            "made int (own/nets.py, line 1), expected a torch.nn.Module",
        ),
        (
            NET.replace("return self.head(rows.flatten(1))", "return self.head(rows)"),
            "nets.py, line 16: `return self.head(rows)`). It gets float32 of shape (1, 1, 8, 8)",
        ),
        (
            NET.replace("rows.flatten(1)", "rows.flatten(1)).argmax(1"),
            "returned torch.int64 of shape (1,) (own/nets.py, line 5)",
        ),
        (
            NET.replace("return self.head(rows.flatten(1))", "return rows.shape"),
            "returned Size (own/nets.py",
        ),
        (
            NET.replace("size, num_outputs)", "size, 7)"),
            "shape (1, 7) (own/nets.py, line 5). It gets",
        ),
    ],
)
def test_a_user_network_that_breaks_the_contract_is_refused_with_its_line(
    write_functions: WriteFunctions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    text: str,
) -> None:
    write_functions("own", {"nets.py": source})
    monkeypatch.chdir(tmp_path / "code")
    with pytest.raises(ParamsError) as raised:
        build_network(spec(**OWN))
    assert str(raised.value).startswith("train.network 'own.nets:Net' ")
    assert text in str(raised.value)


@pytest.mark.usefixtures("write")
def test_a_user_network_that_is_not_a_class_of_torch_is_refused() -> None:
    Path("own/nets.py").write_text("Net = 3\n")
    with pytest.raises(UnavailableError, match="is int, expected a class of torch"):
        build_network(spec(**OWN))


@pytest.mark.usefixtures("write")
def test_a_model_loads_only_with_the_user_code_it_was_trained_with(tmp_path: Path) -> None:
    network = build_network(spec(**OWN))
    manifest = model_manifest(network.spec).model_copy(
        update={"user_code": user_code(Path(), "train.network", [network.spec.name])}
    )
    save_model(tmp_path / "model", manifest, network.state_dict())
    rows = example_rows(network.spec)
    assert torch.equal(load_network(tmp_path / "model")(rows), network.eval()(rows))
    Path("own/nets.py").write_text(NET.replace("width=4", "width=5"))
    with pytest.raises(IntegrityError, match=r"it was trained with other code\. Restore"):
        load_network(tmp_path / "model")
