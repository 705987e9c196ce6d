"""int8 versions of small graphs: quantized layers, excluded layers, independence of rows."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from slipway.export.graphs.int8_search import search
from slipway.export.graphs.quantization import (
    CPU,
    TENSORRT,
    StaticQuantizer,
    dynamic_graph,
    why_not_dynamic,
)
from slipway.runtimes import runtime
from slipway.runtimes.runtime import open_onnx

WIDTH = 16
GENERATOR = np.random.default_rng(0)
ROWS = GENERATOR.normal(size=(80, WIDTH)).astype(np.float32)


def mlp(largest_dead_weight: float = 1.0) -> bytes:
    """Return a graph of Gemm and MatMul, whose largest weight is for a column of zeros."""
    generator = np.random.default_rng(
        1
    )  # of its own: the weights must not depend on the tests before
    inner, outer = (
        (generator.normal(size=(WIDTH, WIDTH)) / 4).astype(np.float32) for _ in range(2)
    )
    inner[:, 0] = 0
    outer[0] = largest_dead_weight
    nodes = [
        helper.make_node("Gemm", ["row", "inner", "bias"], ["hidden"], name="first"),
        helper.make_node("Relu", ["hidden"], ["positive"], name="relu"),
        helper.make_node("MatMul", ["positive", "outer"], ["value"], name="second"),
    ]
    weights: dict[str, NDArray[np.float32]] = {
        "inner": inner,
        "outer": outer,
        "bias": np.zeros(WIDTH, np.float32),
    }
    return graph(nodes, weights, ["N", WIDTH])


def convolution() -> bytes:
    nodes = [
        helper.make_node("Conv", ["row", "kernel"], ["maps"], name="convolution"),
        helper.make_node("Flatten", ["maps"], ["flat"]),
        helper.make_node("MatMul", ["flat", "head"], ["value"], name="head"),
    ]
    weights = {"kernel": np.ones((64, 4, 3, 3), np.float32), "head": np.ones((64, 2), np.float32)}
    return graph(nodes, weights, ["N", 4, 3, 3])


def residual_block() -> bytes:
    """Return a graph of a convolution, a sum with its input, a ReLU, and a second convolution."""
    nodes = [
        helper.make_node("Conv", ["row", "kernel"], ["maps"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["maps", "row"], ["sum"], name="sum"),
        helper.make_node("Relu", ["sum"], ["positive"], name="relu"),
        helper.make_node(
            "Conv", ["positive", "kernel"], ["last"], name="second", pads=[1, 1, 1, 1]
        ),
        helper.make_node("Relu", ["last"], ["after"], name="after the layers"),
        helper.make_node("Flatten", ["after"], ["value"]),
    ]
    kernel = (np.random.default_rng(1).normal(size=(4, 4, 3, 3)) / 6).astype(np.float32)
    return graph(nodes, {"kernel": kernel}, ["N", 4, 6, 6])


def graph(
    nodes: list[onnx.NodeProto], weights: dict[str, NDArray[np.float32]], shape: list[Any]
) -> bytes:
    taken = helper.make_tensor_value_info("row", TensorProto.FLOAT, shape)
    given = [
        helper.make_tensor_value_info(*value)
        for value in (("value", 1, ["N", None]), ("ood_score", 1, ["N"]))
    ]
    score = [
        helper.make_node("ReduceMax", ["row", "axes"], ["ood_score"], name="score", keepdims=0)
    ]
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    constants.append(numpy_helper.from_array(np.arange(1, len(shape)), "axes"))
    whole = helper.make_graph(nodes + score, "small", [taken], given, constants)
    model = helper.make_model(whole, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    return bytes(model.SerializeToString())


def answers(model: bytes, rows: NDArray[np.float32] = ROWS) -> NDArray[np.float32]:
    return (
        open_onnx(model, variant="int8", precision="int8", provider="cpu", num_threads=1)
        .run(rows)
        .outputs
    )


def operations(model: bytes) -> list[str]:
    return [node.op_type for node in onnx.load_model_from_string(model).graph.node]


def off(model: bytes, reference: bytes) -> float:
    expected = answers(reference)
    return float(np.sqrt(np.square(answers(model) - expected).mean()) / expected.std())


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (7, 0.04)])  # half the steps
def test_predictions_of_a_dynamic_graph_do_not_depend_on_other_rows_of_the_batch(
    tmp_path: Path, bits: int, most: float
) -> None:
    fp32 = mlp()
    model = dynamic_graph(fp32, tmp_path, bits)
    onnx.checker.check_model(model, full_check=True)
    assert operations(model).count("MatMulInteger") == 2
    assert off(model, fp32) < most
    pair = np.concatenate([ROWS[:1], 1000 * ROWS[1:2]])
    assert (answers(model, pair)[0] == answers(model, ROWS[:1])[0]).all()
    assert np.isfinite(answers(model, np.zeros((1, WIDTH), np.float32))).all()


def test_each_position_of_a_sequence_has_its_own_range_in_a_dynamic_graph(tmp_path: Path) -> None:
    """ONNX Runtime would fuse the usual form of both scales, and take the first row's for all."""
    generator = np.random.default_rng(1)
    weight = generator.normal(size=(WIDTH, WIDTH)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["row", "weight"], ["product"], name="layer"),
        helper.make_node("Relu", ["product"], ["positive"]),
        helper.make_node("ReduceMean", ["positive", "places"], ["value"], keepdims=0),
    ]
    weights: dict[str, NDArray[Any]] = {"weight": weight, "places": np.array([1])}
    fp32 = graph(nodes, weights, ["N", "length", WIDTH])
    rows = generator.normal(size=(8, 3, WIDTH)).astype(np.float32)
    rows *= np.array([0.01, 1.0, 100.0], np.float32)[:, None]
    exact = answers(fp32, rows)
    assert np.abs(answers(dynamic_graph(fp32, tmp_path), rows) - exact).max() < 0.05 * exact.max()


def test_predictions_of_onnx_runtimes_own_dynamic_graph_depend_on_other_rows(
    tmp_path: Path,
) -> None:
    from onnxruntime.quantization import quantize_dynamic

    (tmp_path / "fp32.onnx").write_bytes(mlp())
    quantize_dynamic(
        tmp_path / "fp32.onnx", tmp_path / "plain.onnx", op_types_to_quantize=["MatMul", "Gemm"]
    )
    plain = (tmp_path / "plain.onnx").read_bytes()
    pair = np.concatenate([ROWS[:1], 1000 * ROWS[1:2]])
    assert not np.allclose(answers(plain, pair)[0], answers(plain, ROWS[:1])[0], atol=0.01)


def test_a_graph_that_names_the_shapes_of_its_weights_is_quantized(tmp_path: Path) -> None:
    """A graph as torch exports it; the quantizer transposes a Gemm's weight under its name."""
    weight = GENERATOR.normal(size=(2, WIDTH)).astype(np.float32)
    gemm = helper.make_node("Gemm", ["row", "weight"], ["value"], name="head", transB=1)
    model = onnx.load_model_from_string(graph([gemm], {"weight": weight}, ["N", WIDTH]))
    model.graph.value_info.append(
        helper.make_tensor_value_info("weight", TensorProto.FLOAT, [2, WIDTH])
    )
    fp32 = model.SerializeToString()
    exact = (
        open_onnx(fp32, variant="fp32", precision="fp32", provider="cpu", num_threads=1)
        .run(ROWS)
        .outputs
    )
    assert np.abs(answers(dynamic_graph(fp32, tmp_path)) - exact).max() < 0.05 * np.abs(exact).max()


def test_dynamic_int8_is_left_out_for_a_convolutional_network(tmp_path: Path) -> None:
    reason = why_not_dynamic(convolution(), tmp_path)
    assert reason is not None
    assert (
        "hold 5.3% of the 2,432 weights in this network's layers, expected at least 10%" in reason
    )
    assert why_not_dynamic(mlp(), tmp_path) is None


@pytest.mark.parametrize("scheme", [CPU, TENSORRT])
def test_graph_of_each_range_method_predicts_as_fp32_does(tmp_path: Path, scheme: Any) -> None:
    fp32 = mlp()
    quantizer = StaticQuantizer(fp32, ROWS, tmp_path, scheme)
    graphs = {
        range_method: quantizer.graph(range_method)
        for range_method in ("minmax", "percentile", "entropy")
    }
    assert all(off(model, fp32) < 0.1 for model in graphs.values())
    assert len(set(graphs.values())) > 1
    assert quantizer.graph("minmax") == graphs["minmax"], (
        "ranges that were measured before are the same"
    )


def test_an_excluded_layer_stays_in_fp32(tmp_path: Path) -> None:
    quantizer = StaticQuantizer(mlp(), ROWS, tmp_path, CPU)
    assert quantizer.layers == ["first", "second"]
    whole, partly = (
        operations(quantizer.graph(in_fp32=layers)).count("DequantizeLinear")
        for layers in ([], ["first"])
    )
    assert operations(quantizer.graph(only="second")).count("DequantizeLinear") == partly < whole


def test_cpu_graph_is_int8_between_convolutions_unless_a_layer_stays_in_fp32(
    tmp_path: Path,
) -> None:
    rows = np.random.default_rng(2).normal(size=(80, 4, 6, 6)).astype(np.float32)
    fp32 = residual_block()

    def rectifiers(
        model: bytes,
    ) -> list[str]:  # that are left: in int8 the range of the codes does their work
        return [
            node.name
            for node in onnx.load_model_from_string(model).graph.node
            if node.op_type == "Relu"
        ]

    both = ["relu", "after the layers"]
    for scheme, in_fp32, expected in (
        (CPU, [], both[1:]),
        (CPU, ["second"], both),
        (TENSORRT, [], both),
    ):
        (tmp_path / f"{scheme.is_symmetric}{in_fp32}").mkdir()
        quantizer = StaticQuantizer(
            fp32, rows, tmp_path / f"{scheme.is_symmetric}{in_fp32}", scheme
        )
        assert rectifiers(quantizer.graph(in_fp32=in_fp32)) == expected
    runner = open_onnx(fp32, variant="fp32", precision="fp32", provider="cpu", num_threads=1)
    exact = runner.run(rows).outputs
    assert (
        np.abs(answers(StaticQuantizer(fp32, rows, tmp_path, CPU).graph(), rows) - exact).max()
        < 0.05 * exact.max()
    )


def test_sums_of_tokens_stay_in_fp32_even_after_a_convolution(tmp_path: Path) -> None:
    """As in a transformer of images; the convolution and the products are int8."""
    nodes = [
        helper.make_node("Conv", ["row", "kernel"], ["patches"], name="patches", strides=[3, 3]),
        helper.make_node("Reshape", ["patches", "shape"], ["flat"]),
        helper.make_node("Transpose", ["flat"], ["tokens"], perm=[0, 2, 1]),
        helper.make_node("Add", ["tokens", "places"], ["placed"], name="places"),
        helper.make_node("MatMul", ["placed", "inner"], ["made"], name="product"),
        helper.make_node("Add", ["made", "placed"], ["residual"], name="residual"),
        helper.make_node("MatMul", ["residual", "outer"], ["last"], name="last"),
        helper.make_node("Flatten", ["last"], ["value"]),
    ]
    shapes = {"kernel": (8, 4, 3, 3), "places": (4, 8), "inner": (8, 8), "outer": (8, 2)}
    weights: dict[str, NDArray[Any]] = {
        name: GENERATOR.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
    }
    weights["shape"] = np.array([0, 8, 4])
    rows = GENERATOR.normal(size=(80, 4, 6, 6)).astype(np.float32)
    quantizer = StaticQuantizer(graph(nodes, weights, ["N", 4, 6, 6]), rows, tmp_path, CPU)
    assert {"patches", "product", "last"} <= set(quantizer.layers)
    assert quantizer._joints == []


def test_layers_with_a_shared_weight_load_on_a_runtime_with_uint8_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(2).normal(size=(80, 4, 6, 6)).astype(np.float32)
    monkeypatch.setattr(runtime, "weight_bits", lambda: 7)  # as on x86 without VNNI
    exact = (
        open_onnx(residual_block(), variant="fp32", precision="fp32", provider="cpu", num_threads=1)
        .run(rows)
        .outputs
    )
    for scheme in (CPU, TENSORRT):
        (tmp_path / str(scheme.is_symmetric)).mkdir()
        found = answers(
            StaticQuantizer(
                residual_block(), rows, tmp_path / str(scheme.is_symmetric), scheme
            ).graph(),
            rows,
        )
        assert np.abs(found - exact).max() < 0.05 * exact.max()


def test_int8_search_stops_at_the_first_attempt_within_the_budget(tmp_path: Path) -> None:
    fp32 = mlp()
    model, attempts = search(
        StaticQuantizer(fp32, ROWS, tmp_path, CPU), fp32, ROWS, lambda model: off(model, fp32), 0.1
    )
    assert [attempt.range_method for attempt in attempts] == ["minmax"]
    assert off(model, fp32) == attempts[0].metric_loss


@pytest.mark.parametrize("bits", [7, 8])
def test_int8_search_tries_other_ranges_then_leaves_sensitive_layers_in_fp32(
    tmp_path: Path, bits: int
) -> None:
    budget = 0.1  # over networks the first three lose 0.5 to 0.9, the fourth 0.02 to 0.04
    fp32 = mlp(
        largest_dead_weight=60.0
    )  # takes the whole range of each column: the others become zero
    quantizer = StaticQuantizer(fp32, ROWS, tmp_path, CPU, bits)
    model, attempts = search(quantizer, fp32, ROWS, lambda model: off(model, fp32), budget)
    assert [attempt.range_method for attempt in attempts[:3]] == ["minmax", "percentile", "entropy"]
    assert attempts[3].in_fp32 == ["second"]
    assert (
        off(model, fp32)
        == attempts[3].loss
        <= budget
        < min(attempt.loss for attempt in attempts[:3])
    )


def test_int8_search_without_time_returns_its_first_attempt(tmp_path: Path) -> None:
    fp32 = mlp()
    _, attempts = search(
        StaticQuantizer(fp32, ROWS, tmp_path, CPU), fp32, ROWS, lambda model: 1.0, 0.0, limit_s=0.0
    )
    assert [
        (attempt.range_method, attempt.in_fp32, attempt.metric_loss) for attempt in attempts
    ] == [("minmax", [], 1.0)]
