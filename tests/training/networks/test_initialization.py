"""Tests of the weights with which a network starts."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

from slipway.config.training import TrainParams
from slipway.system.errors import ParamsError, UnavailableError
from slipway.training.networks.initialization import (
    initial_network,
    load_pretrained,
    pretrained_file,
    pretrained_normalisation,
    start_normalisation,
    without_former_model,
)
from slipway.training.networks.networks import Network, NetworkSpec, build_network, save_model
from tests.model_manifests import model_manifest
from tests.project_params import PROJECT
from tests.training.conftest import CONTRACT, spec
from tests.training.networks import test_tabm, test_text_networks
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

NAME = "resnet10t"


def _network(channels: int, **changes: Any) -> Network:
    torch.manual_seed(1)
    contract = CONTRACT.model_copy(update={"size_px": 32, "channels": channels})
    return build_network(
        spec(
            **{
                "name": f"timm/{NAME}",
                "arguments": {},
                "input": contract,
                "mean": [0.5] * channels,
                "std": [0.2] * channels,
                **changes,
            }
        )
    )


def _weights(num_classes: int = 10) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return dict(timm.create_model(NAME, num_classes=num_classes).state_dict())


def _params(**changes: Any) -> TrainParams:
    return PROJECT.train.model_copy(
        update={"network": f"timm/{NAME}", "network_arguments": {}, **changes}
    )


def _file(folder: Path, weights: dict[str, torch.Tensor], suffix: str = ".safetensors") -> Path:
    path = folder / f"weights{suffix}"
    if suffix == ".safetensors":
        safetensors.torch.save_file(weights, path)
    else:
        torch.save({"state_dict": weights}, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("num_classes", [10, 2, 1000])
def test_pretrained_weights_are_loaded_except_the_head(
    tmp_path: Path, suffix: str, num_classes: int
) -> None:
    weights, network = _weights(num_classes), _network(3)
    head = network.backbone.state_dict()["fc.weight"].clone()
    load_pretrained(network, _file(tmp_path, weights, suffix))
    state = network.backbone.state_dict()
    assert all(
        torch.equal(state[name], value)
        for name, value in weights.items()
        if not name.startswith("fc.")
    )
    assert state["fc.weight"].shape == head.shape
    if num_classes == 2:
        assert not torch.equal(state["fc.weight"], weights["fc.weight"])
    assert state["fc.weight"].std() == pytest.approx(0.01, rel=0.1)
    assert not state["fc.bias"].any()


def _first_loss(network: Network, num_classes: int) -> float:
    generator = torch.Generator().manual_seed(5)
    size = network.spec.input.shape[0]
    pixels = torch.randint(256, (24, size, size, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(num_classes, (24,), generator=generator)
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(network.train()(pixels), labels))


@pytest.mark.process
@pytest.mark.parametrize("num_classes", [2, 10])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tf_efficientnet_lite0", {}),
        ("mobilenetv3_small_050", {}),
        ("resnet10t", {}),
        ("resnetv2_50", {}),  # its head is a convolution
        ("convnext_atto", {}),
        ("vit_tiny_patch16_224", {"img_size": 64}),
        ("levit_128s", {}),  # two heads, behind a norm each
    ],
)
def test_the_first_loss_behind_a_pretrained_body_is_that_of_guessing(
    tmp_path: Path, name: str, arguments: dict[str, Any], num_classes: int
) -> None:
    classes = [f"class {number}" for number in range(num_classes)]
    size = 224 if name == "levit_128s" else 64
    contract = CONTRACT.model_copy(update={"size_px": size, "channels": 3})
    described = _network(
        3, name=f"timm/{name}", arguments=arguments, classes=classes, input=contract
    ).spec
    torch.manual_seed(2)
    donor = timm.create_model(name, num_classes=5, **arguments)
    path = _file(tmp_path, dict(donor.state_dict()))
    params = _params(network=described.name, network_arguments=arguments, pretrained=str(path))
    guessing = math.log(num_classes)
    assert _first_loss(initial_network(7, params, described), num_classes) <= guessing + 0.1


def test_the_head_of_an_untrained_efficientnet_exceeds_the_loss_of_guessing() -> None:
    network = _network(3, name="timm/tf_efficientnet_lite0")
    assert _first_loss(network, 2) > math.log(2) + 0.1


def test_pretrained_weights_without_a_head_can_be_loaded(tmp_path: Path) -> None:
    weights, network = _weights(), _network(3)
    load_pretrained(
        network,
        _file(
            tmp_path, {name: value for name, value in weights.items() if not name.startswith("fc.")}
        ),
    )
    assert torch.equal(network.backbone.state_dict()["conv1.0.weight"], weights["conv1.0.weight"])


def test_the_first_layer_of_grey_images_sums_pretrained_weights_over_colours(
    tmp_path: Path,
) -> None:
    weights, network = _weights(), _network(1)
    load_pretrained(network, _file(tmp_path, weights))
    assert torch.allclose(
        network.backbone.state_dict()["conv1.0.weight"],
        weights["conv1.0.weight"].sum(dim=1, keepdim=True),
    )


def test_error_lists_missing_foreign_and_misshapen_pretrained_weights(tmp_path: Path) -> None:
    weights = _weights()
    del weights["bn1.weight"]
    weights["alien"] = torch.zeros(1)
    weights["layer1.0.conv1.weight"] = torch.zeros(1, 2)
    with pytest.raises(ParamsError) as error:
        load_pretrained(_network(3), _file(tmp_path, weights))
    assert all(
        name in str(error.value) for name in ("bn1.weight", "alien", "layer1.0.conv1.weight")
    )


def test_pickled_weights_that_would_run_code_are_refused_without_running_it(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "touched",))

    path = tmp_path / "weights.pth"
    torch.save({"state_dict": {"conv1.0.weight": Trap()}}, path, pickle_module=pickle)
    with pytest.raises(ParamsError, match="could not be read as plain weights"):
        load_pretrained(_network(3), path)
    assert not (tmp_path / "touched").exists()


def test_pretrained_networks_normalise_pixels_as_in_pretraining() -> None:
    config: Any = timm.get_pretrained_cfg(NAME)
    assert pretrained_normalisation(f"timm/{NAME}", 3) == (list(config.mean), list(config.std))
    mean, std = pretrained_normalisation(f"timm/{NAME}", 1)
    assert mean == pytest.approx([sum(config.mean) / 3])
    assert std == pytest.approx([sum(config.std) / 3])


def test_a_missing_file_of_pretrained_weights_is_refused() -> None:
    with pytest.raises(ParamsError, match="which is not a file"):
        pretrained_file(_params(pretrained="weights/none.safetensors"))
    with pytest.raises(ParamsError, match="expected 'hub' or a file that ends in"):
        pretrained_file(_params(pretrained="weights"))
    assert pretrained_file(_params()) is None


def test_a_stage_takes_weights_of_the_hub_from_its_cache_and_never_downloads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UnavailableError,
        match=r"Fetch it once: hf download timm/resnet10t.c3_in1k model.safetensors. Without a "
        r"network, copy the file here and name it: train.pretrained: weights/",
    ):
        pretrained_file(_params(pretrained="hub"))
    folder = tmp_path / "models--timm--resnet10t.c3_in1k"
    cached = folder / "snapshots" / "0" / "model.safetensors"
    cached.parent.mkdir(parents=True)
    cached.touch()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0")
    assert pretrained_file(_params(pretrained="hub")) == cached


def test_a_network_without_weights_on_the_hub_is_refused() -> None:
    with pytest.raises(UnavailableError, match="has no weights of 'timm/darknet17'"):
        pretrained_file(_params(network="timm/darknet17", pretrained="hub"))
    with pytest.raises(ParamsError, match="no pretrained configuration of 'nothing'"):
        pretrained_file(_params(network="timm/nothing", pretrained="hub"))


OWN = """from torch import nn
class Own(nn.Sequential):
    def __init__(self, input_shape, num_outputs):
        super().__init__(nn.Flatten(), nn.Linear(64, num_outputs))
"""


@pytest.mark.parametrize("kind", ["table", "text", "small_resnet", "timm", "own"])
def test_a_network_starts_from_a_former_model_of_equal_shapes_including_its_head(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_functions: WriteFunctions,
    kind: str,
) -> None:
    (tmp_path / "code").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "code")
    write_functions("own_network", {"__init__.py": OWN})
    makers: dict[str, Callable[[], NetworkSpec]] = {
        "table": test_tabm.spec,
        "text": lambda: test_text_networks.network().spec,
        "small_resnet": spec,
        "timm": lambda: _network(3).spec,
        "own": lambda: spec(name="own_network:Own", arguments={}),
    }
    described = makers[kind]()
    torch.manual_seed(3)
    former = build_network(described)
    save_model(Path("former"), model_manifest(described), former.state_dict())
    params = _params(
        network=described.name,
        network_arguments=described.arguments,
        pretrained="former/weights.safetensors",
    )
    started = initial_network(7, params, described).state_dict()
    assert started.keys() == former.state_dict().keys()
    assert all(torch.equal(started[name], value) for name, value in former.state_dict().items())
    assert start_normalisation(params, [0.1] * 3, [0.2] * 3) == (described.mean, described.std)
    assert without_former_model(params).pretrained is None
    frozen = params.model_copy(update={"freeze_epochs": 4, "unfreeze_epochs": 2})
    assert without_former_model(frozen).freeze_epochs == 0  # drawn weights would be frozen
    assert without_former_model(frozen).unfreeze_epochs == 0


def test_a_former_model_of_other_shapes_is_refused_with_the_names_of_its_weights(
    tmp_path: Path,
) -> None:
    former = build_network(spec(classes=["a", "b", "c"]))
    path = _file(tmp_path, {**former.state_dict(), "backbone.alien": torch.zeros(1)})
    with pytest.raises(ParamsError) as error:
        load_pretrained(build_network(spec()), path)
    assert "backbone.alien is not in this network" in str(error.value)
    assert "has the shape (3," in str(error.value)
    foreign = _file(tmp_path, {"conv.weight": torch.zeros(1)})
    with pytest.raises(ParamsError, match="is not the file of a model that Slipway trained"):
        load_pretrained(build_network(spec()), foreign)
