"""int8 graphs do not saturate on CPUs that add products in 16 bits."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from slipway.export.certification.lineage import describe_hardware
from slipway.export.graphs.quantization import CPU, TENSORRT, Scheme, StaticQuantizer, dynamic_graph
from slipway.runtimes import runtime
from slipway.runtimes.cpu_int8 import int8_instructions, weight_bits
from slipway.runtimes.runtime import open_onnx
from tests.export.graphs.test_quantization import ROWS, WIDTH, graph, mlp

LARGEST_SUM = 2**15 - 1  # of two products in 16 bits


@pytest.mark.parametrize(
    ("machine", "information", "instructions", "bits"),
    [
        ("x86_64", "model name\t: A\nflags\t\t: avx2 avx512f avx512_vnni\n", "avx512_vnni", 8),
        ("x86_64", "flags : avx2 avx_vnni\n", "avx_vnni", 8),
        ("x86_64", "flags : avx2 avx512_vnni amx_int8\n", "amx_int8", 8),
        ("x86_64", "flags : sse4_2 avx avx2\n", "avx2 without VNNI", 7),
        ("x86_64", "", "x86 without VNNI", 7),  # nothing is known: what never saturates
        ("aarch64", "", "aarch64", 8),
    ],
)
def test_int8_weights_have_7_bits_only_if_the_instructions_saturate(
    machine: str, information: str, instructions: str, bits: int
) -> None:
    assert int8_instructions(machine, information) == instructions
    assert weight_bits(instructions) == bits


def test_the_certificate_names_the_int8_instructions_and_the_options_of_a_session() -> None:
    hardware = describe_hardware()
    assert hardware["int8"] == int8_instructions()
    assert hardware["session_options"].startswith("intra_op_num_threads=0, session.")
    assert ("x64quantprecision" in hardware["session_options"]) == (weight_bits() == 7)


def largest_weight(model: bytes) -> int:
    arrays = (
        numpy_helper.to_array(tensor)
        for tensor in onnx.load_model_from_string(model).graph.initializer
    )
    return max(
        int(np.abs(array.astype(int)).max())
        for array in arrays
        if array.dtype == np.int8 and array.ndim == 2
    )


def test_sum_of_two_products_fits_16_bits_with_7_bit_but_not_8_bit_weights(tmp_path: Path) -> None:
    fp32 = mlp()
    narrow, wide = (StaticQuantizer(fp32, ROWS, tmp_path, CPU, bits).graph() for bits in (7, 8))
    assert 2 * 255 * largest_weight(narrow) <= LARGEST_SUM < 2 * 255 * largest_weight(wide)
    narrow, wide = (dynamic_graph(fp32, tmp_path, bits) for bits in (7, 8))
    assert 2 * 255 * largest_weight(narrow) <= LARGEST_SUM < 2 * 255 * largest_weight(wide)
    assert (
        largest_weight(StaticQuantizer(fp32, ROWS, tmp_path, TENSORRT, 7).graph()) == 127
    )  # a GPU's products do not saturate


def large_sums() -> tuple[bytes, NDArray[np.float32]]:
    """Return a layer whose inputs and weights are near their maximum, and rows for it."""
    generator = np.random.default_rng(0)
    nodes = [onnx.helper.make_node("MatMul", ["row", "weight"], ["value"], name="layer")]
    weight = generator.uniform(0.8, 1.0, (WIDTH, WIDTH)).astype(np.float32)
    return graph(nodes, {"weight": weight}, ["N", WIDTH]), generator.uniform(
        0.8, 1.0, (64, WIDTH)
    ).astype(np.float32)


def error(answers: NDArray[np.float32], rows: NDArray[np.float32], fp32: bytes) -> float:
    exact = (
        open_onnx(fp32, variant="fp32", precision="fp32", provider="cpu", num_threads=1)
        .run(rows)
        .outputs
    )
    return float(np.abs(answers - exact).max() / exact.max())


@pytest.mark.parametrize("scheme", [CPU, TENSORRT])
def test_a_graph_with_8_bit_weights_from_another_machine_does_not_saturate(
    scheme: Scheme, tmp_path: Path
) -> None:
    fp32, rows = large_sums()
    wide = StaticQuantizer(fp32, rows, tmp_path, scheme, 8).graph()
    assert (
        error(
            open_onnx(wide, variant="int8", precision="int8", provider="cpu", num_threads=1)
            .run(rows)
            .outputs,
            rows,
            fp32,
        )
        < 0.02
    )


@pytest.mark.parametrize("bits", [7, 8])
def test_saturation_is_switched_off_only_on_a_cpu_that_saturates(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "weight_bits", lambda: bits)
    asked: list[tuple[str, str]] = []
    options = onnxruntime.SessionOptions

    class Options(options):  # type: ignore[misc, valid-type]
        def add_session_config_entry(self, key: str, value: str) -> None:
            asked.append((key, value))
            super().add_session_config_entry(key, value)

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    open_onnx(mlp(), variant="fp32", precision="fp32", provider="cpu", num_threads=1)
    assert (("session.x64quantprecision", "1") in asked) == (bits == 7)


@pytest.mark.skipif(weight_bits() == 8, reason="this machine's int8 products do not saturate")
def test_int8_saturates_without_onnx_runtimes_setting(tmp_path: Path) -> None:
    fp32, rows = large_sums()
    session = onnxruntime.InferenceSession(
        StaticQuantizer(fp32, rows, tmp_path, CPU, 8).graph(), providers=["CPUExecutionProvider"]
    )
    assert error(session.run(["value"], {"row": rows})[0], rows, fp32) > 0.1
