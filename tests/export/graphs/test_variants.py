from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from PIL import Image

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.uncertainty import Answers
from slipway.data.store.packed import PackedManifest, PackedSplit, write_split
from slipway.export.graphs.graph import torch_answers
from slipway.export.graphs.half_precision import LAYERS, score_branch
from slipway.export.graphs.variants import (
    PRECISION,
    fp16_graph,
    largest_activations,
    quantization_samples,
    refuse_broken,
)
from slipway.inputs.images import ImageContract, image_array
from slipway.runtimes.runtime import open_onnx, run_in_batches
from slipway.system.errors import ParityError
from tests.export.conftest import Project
from tests.packed_rows import packed_rows, packed_split

PROBABILITIES = OutputContract(kind="probabilities", labels=["a", "b"])
VALUE = OutputContract(kind="value", labels=[])
PIXEL = ImageContract(
    kind="images",
    transform=None,
    size_px=1,
    channels=1,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=10**6,
)


def answers(outputs: NDArray[np.float32]) -> Answers:
    return Answers(outputs, np.ones(len(outputs), dtype=np.float32))


def split(num_rows: int) -> PackedSplit:
    images = np.arange(num_rows, dtype=np.uint8)[:, None, None, None]
    ids = [f"{(number * 2654435761) % 2**64:016x}" for number in range(num_rows)]
    return packed_split(images, np.zeros(num_rows), ids, ids)


def scaled_graph(weight: float) -> bytes:
    """Return a graph that multiplies pixels by `weight` and divides them again.

    Only the tensor between these operations is large.
    """
    nodes = [
        onnx.helper.make_node("Cast", ["image"], ["pixels"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Mul", ["pixels", "weight"], ["large"], name="the_large_layer"),
        onnx.helper.make_node("Div", ["large", "weight"], ["small"]),
        onnx.helper.make_node("ReduceMean", ["small", "axes"], ["value"], keepdims=0),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "scaled",
        [onnx.helper.make_tensor_value_info("image", onnx.TensorProto.UINT8, ["rows", 4, 4, 1])],
        [onnx.helper.make_tensor_value_info("value", onnx.TensorProto.FLOAT, ["rows", 1])],
        [
            onnx.numpy_helper.from_array(np.array([weight], dtype=np.float32), "weight"),
            onnx.numpy_helper.from_array(np.array([1, 2], dtype=np.int64), "axes"),
        ],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10
    )
    return bytes(model.SerializeToString())


def pixels(value: int) -> NDArray[np.uint8]:
    return np.full((3, 4, 4, 1), value, dtype=np.uint8)


def store(
    folder: Path, splits: dict[str, PackedSplit], contract: ImageContract = PIXEL
) -> tuple[Path, PackedManifest]:
    """Write a packed store to disk."""
    written = {}
    for name, split_ in splits.items():
        (folder / name).mkdir(parents=True)
        np.save(folder / name / "inputs.npy", split_.inputs[:])
        written[name] = write_split(
            folder / name,
            packed_rows(split_.ids, split_.sources, split_.targets),
            split_.inputs.shape[1:],
        )
    manifest = PackedManifest(
        format_version=3,
        task="image_classification",
        input=contract,
        classes=["a", "b"],
        mean=[0.5],
        std=[0.2],
        target_scale=None,
        splits=written,
    )
    return folder, manifest


def chosen(store_: tuple[Path, PackedManifest], seed: int = 7, num_rows: int = 20) -> set[int]:
    return set(quantization_samples(*store_, seed, num_rows).ravel().tolist())


def test_quantization_samples_depend_on_ids_and_seed_and_not_on_their_order(tmp_path: Path) -> None:
    whole = split(100)
    order = np.random.default_rng(0).permutation(100)
    shuffled = packed_split(
        whole.inputs[order], whole.targets[order], [whole.ids[row] for row in order], whole.sources
    )
    in_order, out_of_order = (
        store(tmp_path / "whole", {"train": whole}),
        store(tmp_path / "shuffled", {"train": shuffled}),
    )
    assert len(chosen(in_order)) == 20
    assert chosen(out_of_order) == chosen(in_order)
    assert chosen(in_order, seed=8) != chosen(in_order)


def test_quantization_samples_are_always_training_rows(
    tmp_path: Path,
) -> None:
    first, second, third = np.split(np.arange(90), 3)
    parts = {
        name: packed_split(
            split(90).inputs[rows], np.zeros(30), [split(90).ids[row] for row in rows], [""] * 30
        )
        for name, rows in (("val", first), ("train", second), ("test", third))
    }
    assert chosen(store(tmp_path, parts), num_rows=1000) == set(second.tolist())


def test_larger_stored_training_images_are_resized_for_quantization(
    tmp_path: Path,
) -> None:
    large = np.zeros((2, 4, 4, 3), dtype=np.uint8)
    large[:, :, 2:] = 200
    contract = PIXEL.model_copy(update={"size_px": 2, "channels": 3})
    stored = packed_split(large, [0.0, 1.0], ["0" * 16, "1" * 16], ["a", "b"])
    rows = quantization_samples(*store(tmp_path, {"train": stored}, contract), 7, 9)
    expected = image_array(Image.fromarray(large[0]), contract)
    assert rows.shape == (2, 2, 2, 3)
    assert (rows == expected).all()
    assert rows[0, 0, 0, 0] < rows[0, 0, 1, 0]


def test_quantization_samples_are_all_rows_if_more_are_requested(tmp_path: Path) -> None:
    assert len(chosen(store(tmp_path, {"train": split(10)}), num_rows=512)) == 10


def test_the_largest_activation_of_every_tensor_is_measured() -> None:
    found = largest_activations(scaled_graph(3.0), np.concatenate([pixels(200), pixels(10)]))
    assert (found["pixels"], found["large"], found["small"]) == (200.0, 600.0, 200.0)


def test_error_names_the_layer_that_overflows_fp16() -> None:
    fp16_graph(scaled_graph(256.0), pixels(255))  # 65280 still fits
    with pytest.raises(
        ParityError, match=r"fp16 holds numbers up to 65504, but large reaches 6\.55e\+04"
    ):
        fp16_graph(scaled_graph(257.0), pixels(255))


def test_error_names_the_weight_that_overflows_fp16() -> None:
    with pytest.raises(ParityError, match=r"weight reaches 7e\+04"):
        fp16_graph(scaled_graph(70_000.0), pixels(0))


def test_non_finite_activations_are_refused() -> None:
    with pytest.raises(ParityError, match="large reaches inf"):
        fp16_graph(scaled_graph(3e38), pixels(255))


RIGHT = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], dtype=np.float32)


def test_a_valid_variant_passes_and_its_difference_is_returned() -> None:
    found = RIGHT + np.array([0.01, -0.01], dtype=np.float32)
    assert refuse_broken("int8", answers(found), answers(RIGHT), PROBABILITIES) == pytest.approx(
        0.01, rel=1e-3
    )


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (np.where(np.float32(0.9) == RIGHT, np.nan, RIGHT), "1 numbers that are not finite"),
        (RIGHT[:, ::-1], r"keeps 0\.0% of fp32's labels"),
        (RIGHT * 2, r"keeps 100\.0%"),
    ],
)
def test_a_broken_classifier_is_refused(found: NDArray[np.float32], message: str) -> None:
    with pytest.raises(ParityError, match=message):
        refuse_broken("int8", answers(found), answers(RIGHT), PROBABILITIES)


def test_a_broken_regressor_is_refused() -> None:
    reference = np.array([[100.0], [110.0], [120.0]], dtype=np.float32)
    assert refuse_broken("int8", answers(reference + 1), answers(reference), VALUE) == 1.0
    with pytest.raises(ParityError, match="more than fp32's answers vary"):
        refuse_broken("int8", answers(reference + 50), answers(reference), VALUE)


@pytest.mark.process
def test_every_exported_variant_loads_and_keeps_labels_and_signature(classifier: Project) -> None:
    bundle, images = classifier.bundle(), classifier.split("test").inputs
    assert {*bundle.manifest.models, *bundle.manifest.left_out} == {
        name for name in PRECISION if not name.startswith("pruned")
    }
    assert list(bundle.manifest.left_out) == ["int8_dynamic"], "a convolutional network"
    assert set(bundle.manifest.choice["cpu"].figures) == set(bundle.manifest.models)
    targets = classifier.split("test").targets
    for variant in bundle.manifest.models:
        graph = bundle.model_bytes(variant)
        model = onnx.load_model_from_string(graph)
        facts = {entry.key: entry.value for entry in model.metadata_props}
        assert facts["variant"] == variant
        assert model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8
        assert model.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        runner = open_onnx(
            graph, variant=variant, precision=PRECISION[variant], provider="cpu", num_threads=1
        )
        assert (
            run_in_batches(runner.run, images, 16).outputs.argmax(axis=1) == targets
        ).mean() > 0.95


@pytest.mark.process
def test_the_precision_of_a_variant_is_part_of_its_graph(classifier: Project) -> None:
    bundle = classifier.bundle()
    graphs = {
        variant: onnx.load_model_from_string(bundle.model_bytes(variant)).graph
        for variant in bundle.manifest.models
    }
    kinds = {
        variant: {tensor.data_type for tensor in graph.initializer}
        for variant, graph in graphs.items()
    }
    tensor = onnx.TensorProto
    alone = score_branch(graphs["fp16"])
    layers = {
        name
        for node in graphs["fp16"].node
        if node.op_type in LAYERS and node.output[0] not in alone
        for name in node.input
    }
    assert {weight.data_type for weight in graphs["fp16"].initializer if weight.name in layers} == {
        tensor.FLOAT16
    }
    assert {tensor.INT8, tensor.UINT8, tensor.INT32} <= kinds["int8"]
    assert tensor.INT8 in kinds["int8_tensorrt"]
    assert not {tensor.UINT8, tensor.INT32} & kinds["int8_tensorrt"]  # TensorRT takes neither


@pytest.mark.process
def test_every_variant_computes_the_ood_score_in_fp32(classifier: Project) -> None:
    bundle, images = classifier.bundle(), classifier.split("test").inputs
    expected = torch_answers(classifier.calibrated(), images[:]).scores
    for variant in bundle.manifest.models:
        graph = onnx.load_model_from_string(bundle.model_bytes(variant)).graph
        alone, kinds = (
            score_branch(graph),
            {weight.name: weight.data_type for weight in graph.initializer},
        )
        branch = [node for node in graph.node if node.output[0] in alone]
        assert {node.op_type for node in branch if node.op_type in LAYERS}
        floats = {kinds[name] for node in branch for name in node.input if name in kinds} - {
            onnx.TensorProto.INT64
        }
        assert floats == {onnx.TensorProto.FLOAT}, variant
        runner = open_onnx(
            bundle.model_bytes(variant),
            variant=variant,
            precision=PRECISION[variant],
            provider="cpu",
            num_threads=1,
        )
        found = run_in_batches(runner.run, images, 16).scores
        assert (
            np.abs(found - expected).mean()
            < {"fp32": 1e-5, "fp16": 0.01}.get(variant, 0.25) * expected.mean()
        ), variant
        assert np.corrcoef(found, expected)[0, 1] > 0.8, variant


@pytest.mark.process
def test_export_leaves_only_the_bundle_in_its_folder(
    classifier: Project, regressor: Project
) -> None:
    for project in (classifier, regressor):
        found = project.bundle()
        assert {
            "bundle.json",
            "golden_rows.npz",
            *(f"model_{variant}.onnx" for variant in found.manifest.models),
        } <= set(found.file_names)
        assert {path.name for path in Path(project.bundle_root).iterdir()} == set(found.file_names)
