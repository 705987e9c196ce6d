from pathlib import Path

import pytest
import torch

from slipway.data.store.packed import TargetScale
from slipway.system.errors import IntegrityError, ParamsError, SchemaError
from slipway.training.networks.networks import build_network, load_network, save_model
from tests.model_manifests import model_manifest
from tests.training.conftest import ARGUMENTS, spec


def _images(num_rows: int = 3) -> torch.Tensor:
    return torch.randint(
        0, 256, (num_rows, 8, 8, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def test_a_network_outputs_one_logit_for_each_class() -> None:
    assert build_network(spec(classes=["a", "b", "c"]))(_images()).shape == (3, 3)


def test_a_network_predicts_a_numeric_target_in_its_unit() -> None:
    scale = TargetScale(mean=100.0, std=5.0)
    torch.manual_seed(1)
    plain = build_network(
        spec(task="image_regression", classes=[], target_scale=TargetScale(mean=0.0, std=1.0))
    ).eval()
    torch.manual_seed(1)
    scaled = build_network(spec(task="image_regression", classes=[], target_scale=scale)).eval()
    assert torch.allclose(scaled(_images()), plain(_images()) * 5 + 100)


def test_a_network_normalises_pixels_with_mean_and_std_of_its_spec() -> None:
    network = build_network(spec(mean=[0.25], std=[0.5]))
    seen: list[torch.Tensor] = []
    network.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    network(_images())
    assert torch.allclose(seen[0], (_images().permute(0, 3, 1, 2) / 255 - 0.25) / 0.5, atol=1e-6)


def test_the_exported_graph_first_casts_the_images_to_float32() -> None:
    program = torch.export.export(build_network(spec()).eval(), (_images(),))
    first = next(
        node
        for node in program.graph.nodes
        if node.op == "call_function" and "assert" not in str(node.target)
    )
    assert first.args[0].name == "images"
    assert "_to_copy" in str(first.target) or "aten.to" in str(first.target)
    assert first.meta["val"].dtype == torch.float32


def test_a_loaded_model_gives_the_same_outputs_as_the_saved_one(tmp_path: Path) -> None:
    network = build_network(spec()).eval()
    save_model(tmp_path / "checkpoint", model_manifest(spec()), network.state_dict())
    assert torch.equal(load_network(tmp_path / "checkpoint")(_images()), network(_images()))


def test_a_model_with_an_altered_weight_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "checkpoint", model_manifest(spec()), build_network(spec()).state_dict())
    path = tmp_path / "checkpoint/weights.safetensors"
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    path.write_bytes(payload)
    with pytest.raises(IntegrityError, match="was altered"):
        load_network(tmp_path / "checkpoint")


def test_a_model_with_the_weights_of_another_network_is_refused(tmp_path: Path) -> None:
    other = build_network(spec(arguments={**ARGUMENTS, "width": 32}))
    save_model(tmp_path / "checkpoint", model_manifest(spec()), other.state_dict())
    with pytest.raises(SchemaError, match="does not fit the network"):
        load_network(tmp_path / "checkpoint")


def test_a_missing_model_is_refused_with_the_stage_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="dvc repro train"):
        load_network(tmp_path)


def test_error_lists_every_wrong_network_argument_and_suggests_the_closest() -> None:
    with pytest.raises(ParamsError, match="did you mean 'width'") as error:
        build_network(
            spec(
                arguments={
                    "widht": 16,
                    "blocks": [1],
                    "dropout": 2.0,
                    "stochastic_depth": 0.0,
                    "normalisation": "batch",
                }
            )
        )
    assert "dropout: found 2.0" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "small_resnt"}, "expected 'small_resnet' or 'timm/NAME'"),
        ({"name": "timm/resnet18x", "arguments": {}}, "did you mean 'timm/resnet18'"),
        ({"name": "timm/resnet18", "arguments": {"pretrained": True}}, "Slipway sets itself"),
        ({"name": "timm/resnet18", "arguments": {"nonsense": 1}}, "nonsense"),
        ({"name": "timm/vit_tiny_patch16_224", "arguments": {}}, "precompute.image_size_px"),
    ],
)
def test_a_network_that_cannot_be_built_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ParamsError, match=text):
        build_network(spec(**changes))


def test_a_timm_network_gets_the_channels_and_classes_of_the_data() -> None:
    assert build_network(spec(name="timm/resnet10t", arguments={})).eval()(_images()).shape == (
        3,
        2,
    )
