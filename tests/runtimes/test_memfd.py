"""The path to a model's bytes in memory, and models that must be passed as bytes."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from slipway.runtimes import memfd
from slipway.runtimes.memfd import may_refer_elsewhere, path_or_bytes

LARGE = os.urandom(3 << 20)


def test_path_of_a_large_model_is_readable_only_inside_the_block() -> None:
    with path_or_bytes(LARGE) as given:
        assert isinstance(given, str)
        assert Path(given).read_bytes() == LARGE
    assert not Path(given).exists()


def test_small_model_or_system_without_memfd_is_passed_as_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with path_or_bytes(LARGE[:1000]) as given:
        assert given == LARGE[:1000]
    monkeypatch.delattr(os, "memfd_create")
    with path_or_bytes(LARGE) as given:
        assert given is LARGE


def forbidden(*_: object) -> int:
    raise PermissionError(errno.EACCES, "as with the sysctl vm.memfd_noexec=2")


def full(*_: object, **__: object) -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("make", [forbidden, full])
def test_model_is_passed_as_bytes_if_memfd_fails(
    make: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", make)
    with path_or_bytes(LARGE) as given:
        assert given is LARGE


def graph_with(tensor: onnx.TensorProto) -> onnx.GraphProto:
    taken = helper.make_tensor_value_info("taken", TensorProto.FLOAT, [2])
    return helper.make_graph(
        [helper.make_node("Add", ["taken", tensor.name], ["sum"])],
        "graph",
        [taken],
        [taken],
        initializer=[tensor],
    )


def elsewhere() -> onnx.TensorProto:
    tensor = numpy_helper.from_array(np.ones(2, np.float32), "weight")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="3")
    return tensor


def nested(tensor: onnx.TensorProto) -> onnx.ModelProto:
    """Return a model whose `tensor` is a constant in a branch of a node."""
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["weight"], value=tensor)], "branch", [], []
    )
    node = helper.make_node("If", ["taken"], ["sum"], then_branch=branch, else_branch=branch)
    return helper.make_model(helper.make_graph([node], "graph", [], []))


@pytest.mark.parametrize("make", [lambda tensor: helper.make_model(graph_with(tensor)), nested])
@pytest.mark.parametrize("padding", [0, memfd._PIECE - 200, 2 * memfd._PIECE])
def test_a_reference_to_external_data_is_found_anywhere_in_the_graph(
    make: object, padding: int
) -> None:
    assert callable(make)
    for shift in range(0, 400, 7 if padding else 400):  # over the border between two pieces
        model = make(elsewhere())
        model.doc_string = "x" * (padding + shift)
        assert may_refer_elsewhere(model.SerializeToString())
        with path_or_bytes(model.SerializeToString()) as given:
            assert isinstance(given, bytes)
    inside = numpy_helper.from_array(np.ones(2, np.float32), "weight")
    assert not may_refer_elsewhere(make(inside).SerializeToString())
