"""The arithmetic of hashed n-grams, rewritten for 32-bit integers."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from slipway.export.graphs.narrow_integers import in_32_bits
from slipway.system.errors import UnavailableError

pytestmark = pytest.mark.unit
MERSENNE = 2**31 - 1
FACTORS = (1_000_003, 1_000_003**2 % MERSENNE, 2**31 - 2, 31, 1)
VALUES = np.concatenate(
    [
        np.array([0, 1, 2**11, 2**22, MERSENNE - 1, MERSENNE], np.int64),
        np.random.default_rng(4).integers(0, 2**31, 500),
    ]
)


def hashes(factor: int, modulus: int, buckets: int) -> bytes:
    """Return a graph: ((x * factor + x + 1) % modulus * 31 + 7) % buckets for x > 9, else x."""
    constants = {
        "factor": factor, "one": 1, "modulus": modulus, "small": 31, "seven": 7,
        "buckets": buckets, "nine": 9,
    }  # fmt: skip
    nodes = [
        helper.make_node(operator, inputs.split(), [output])
        for operator, inputs, output in (
            ("Mul", "x factor", "product"),
            ("Add", "product x", "sum"),
            ("Add", "sum one", "more"),
            ("Mod", "more modulus", "hash"),
            ("Mul", "small hash", "mixed"),
            ("Add", "mixed seven", "shifted"),
            ("Mod", "shifted buckets", "bucket"),
            ("Greater", "x nine", "is_there"),
            ("Where", "is_there bucket x", "y"),
        )
    ]
    graph = helper.make_graph(
        nodes,
        "hashes",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["N"])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ["N"])],
        [numpy_helper.from_array(np.array(one, np.int64), name) for name, one in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    content: bytes = onnx.shape_inference.infer_shapes(model).SerializeToString()
    return content


def numbers_of(model: ModelProto) -> list[NDArray[Any]]:
    """Return all integer tensors of a graph for VALUES; the output comes last."""
    model = onnx.shape_inference.infer_shapes(model)
    values = {one.name: one for one in model.graph.value_info}
    names = [name for node in model.graph.node for name in node.output if name in values]
    exposed = [values[name] for name in names]
    integers = [one for one in exposed if one.type.tensor_type.elem_type == TensorProto.INT64]
    own = model.graph.output[0]
    del model.graph.output[:]
    model.graph.output.extend([*integers, own])
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found: list[NDArray[Any]] = session.run(None, {"x": VALUES})
    return found


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("buckets", [256, 4097, 2**24 - 3, 2**24])
def test_remainders_are_exact_and_no_number_needs_more_than_32_bits(
    factor: int, buckets: int
) -> None:
    narrow = onnx.load_model_from_string(in_32_bits(hashes(factor, MERSENNE, buckets)))
    onnx.checker.check_model(narrow)
    assert "Mod" not in {node.op_type for node in narrow.graph.node}
    found = numbers_of(narrow)
    assert max(int(np.abs(one).max()) for one in found) <= MERSENNE
    expected = [
        (((int(x) * factor + int(x) + 1) % MERSENNE) * 31 + 7) % buckets if x > 9 else int(x)
        for x in VALUES
    ]
    assert found[-1].tolist() == expected


def test_graph_of_hashed_ngrams_needs_more_than_32_bits_before_narrowing() -> None:
    wide = onnx.load_model_from_string(hashes(FACTORS[0], MERSENNE, 4097))
    assert max(int(np.abs(one).max()) for one in numbers_of(wide)) > 2**50


def test_narrowing_leaves_a_graph_without_remainders_unchanged() -> None:
    graph = helper.make_model(helper.make_graph([], "empty", [], [])).SerializeToString()
    assert in_32_bits(graph) is graph


@pytest.mark.parametrize("modulus", [2**31 - 3, 2**24 + 1, 1])
def test_error_names_a_modulus_that_has_no_exact_remainder(modulus: int) -> None:
    with pytest.raises(UnavailableError, match=rf"modulus {modulus}, expected .*\. Run `slipway"):
        in_32_bits(hashes(31, modulus, 256))
