"""Rewrites the 64-bit integer arithmetic of hashed n-grams for runtimes that compute in 32 bits.

OpenVINO computes int64 as int32, and divides, compares and chooses in float32. The hashes are
remainders of sums of products, up to 2**61. Each `Mod` by a constant is replaced by nodes whose
numbers all stay below 2**31, and whose divisions are exact or corrected, so the remainder is exact.
"""

from collections.abc import Iterable
from itertools import count
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from slipway.system.errors import UnavailableError

_BITS = 31  # bits of the numbers in a graph: 0 to 2**31 - 1
_MERSENNE = 2**_BITS - 1  # the modulus of the hashes: 2**31 is 1 modulo it
_LIMB = 11  # bits of a part of a number, times _PIECE bits of a factor: below 2**31
_PIECE = 20
_MOST_MODULUS = 2**24  # other moduli, those of hash tables
_MOST_QUOTIENT_BITS = 16  # float32 divides to such a quotient with an error of at most 1


def in_32_bits(graph: bytes) -> bytes:
    """Return the ONNX graph with each `Mod` by a constant in numbers below 2**31.

    Operands are sums of values below 2**31 times constants. A graph without `Mod` stays as it is.
    Raises UnavailableError for another operand or modulus.
    """
    model = onnx.load_model_from_string(graph)
    if all(node.op_type != "Mod" for node in model.graph.node):
        return graph
    writer = _Writer(model)
    integers = {
        value.name
        for value in onnx.shape_inference.infer_shapes(model).graph.value_info
        if value.type.tensor_type.elem_type == TensorProto.INT64
    }
    for node in model.graph.node:
        if node.op_type == "Mod":
            writer.replace_remainder(node)
        elif node.op_type == "Where" and node.output[0] in integers:
            writer.replace_choice(node)
        else:
            writer.nodes.append(node)
    _replace_content(model, writer.nodes, [*model.graph.initializer, *writer.added.values()])
    narrow: bytes = model.SerializeToString()
    return narrow


def _replace_content(
    model: ModelProto, nodes: list[NodeProto], constants: list[TensorProto]
) -> None:
    """Replace a graph's nodes and constants, without those that no output needs."""
    graph = model.graph
    names, kept = {one.name for one in graph.output}, []
    for node in reversed(nodes):
        if names.intersection(node.output):
            names.update(node.input)
            kept.append(node)
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(one for one in constants if one.name in names)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


class _Writer:
    """Collects the new nodes of a graph, in order. A value below is named by its tensor."""

    def __init__(self, model: ModelProto) -> None:
        self.nodes: list[NodeProto] = []
        self.added: dict[int, TensorProto] = {}
        self._values = {one.name: one for one in model.graph.initializer}
        self._makers = {name: node for node in model.graph.node for name in node.output}
        self._numbers = count()

    def replace_choice(self, node: NodeProto) -> None:
        """Add nodes that compute the output of a `Where` bitwise, because it selects in float32."""
        condition, one, other = node.input
        truth = self._node("Cast", condition, to=TensorProto.INT64)
        changed = self._node("BitwiseXor", one, other)
        changed = self._node("BitwiseAnd", changed, self._node("Neg", truth))
        self._end(self._node("BitwiseXor", other, changed), node)

    def replace_remainder(self, node: NodeProto) -> None:
        """Add nodes that compute the output of a `Mod` with 32-bit integers."""
        modulus = self._constant(node.input[1])
        terms, rest = self._terms(node.input[0])
        if modulus is None or not (modulus == _MERSENNE or 1 < modulus <= _MOST_MODULUS):
            raise UnavailableError(
                f"OpenVINO cannot carry the remainder {node.output[0]} of the graph: found the "
                f"modulus {modulus}, expected 2**31 - 1 or at most 2**24, for numbers of 32 bits. "
                "Run `slipway export edge` for ONNX Runtime."
            )
        if modulus == _MERSENNE:
            parts = [part for value, factor in terms for part in self._product(value, factor)]
            found = self._folded(parts, rest % modulus)
        else:
            found = self._small(terms, rest % modulus, modulus)
        self._end(found, node)

    def _terms(self, name: str) -> tuple[list[tuple[str, int]], int]:
        """Return the tensor `name` as a sum of other tensors times constants, plus a constant."""
        known, node = self._constant(name), self._makers.get(name)
        if known is not None:
            return [], known
        if node is not None and node.op_type == "Add":
            (left, one), (right, other) = map(self._terms, node.input)
            return left + right, one + other
        if node is not None and node.op_type == "Mul":
            for own, other_input in (node.input, reversed(node.input)):
                factor = self._constant(other_input)
                if factor is not None:
                    terms, rest = self._terms(own)
                    return [(value, factor * one) for value, one in terms], factor * rest
        return [(name, 1)], 0

    def _product(self, value: str, factor: int) -> list[str]:
        """Return tensors below 2**31 whose sum is value * factor, modulo 2**31 - 1."""
        factor %= _MERSENNE
        if factor == 1:
            return [value]
        found = []
        for begin, limb in self._limbs(value, _LIMB):
            for shift in range(0, _BITS, _PIECE):
                piece = factor >> shift & (1 << _PIECE) - 1
                if piece:
                    product = self._node("Mul", limb, piece)
                    found.append(self._rotated(product, (begin + shift) % _BITS))
        return found

    def _rotated(self, value: str, by: int) -> str:
        """Multiply a number of 31 bits by 2**by, modulo 2**31 - 1."""
        if not by:
            return value
        low, high = self._divided(value, _BITS - by)
        return self._node("Add", self._node("Mul", low, 1 << by), high)

    def _folded(self, parts: list[str], rest: int) -> str:
        """Add tensors of 31 bits and the constant `rest`, modulo 2**31 - 1."""
        below: str | int = rest - _MERSENNE  # the sum minus the modulus, at most 0
        for part in parts:
            total = self._node("Add", below, part)
            is_above = self._node("Cast", self._node("Greater", total, 0), to=TensorProto.INT64)
            below = self._node("Sub", total, self._node("Mul", is_above, _MERSENNE))
        return self._lifted(self._name(below), _MERSENNE)

    def _small(self, terms: list[tuple[str, int]], rest: int, modulus: int) -> str:
        """Add nodes that compute (sum of value * factor + `rest`) modulo `modulus`.

        `terms` are pairs (name of the tensor with the values, factor); `modulus` has at most 24
        bits. Returns the name of the result's tensor.
        """
        width = min(_BITS - (modulus - 1).bit_length(), _MOST_QUOTIENT_BITS)
        total = self._name(rest)
        for value, factor in terms:
            limbs = self._limbs(value, width)
            if _is_power_of_two(modulus) and factor % modulus * modulus < 1 << _BITS:
                limbs = [(0, self._node("BitwiseAnd", value, modulus - 1))]
            for begin, limb in limbs:
                small = (factor << begin) % modulus
                if small:
                    part = self._remainder(self._node("Mul", limb, small), modulus)
                    total = self._node("Add", total, part)
        return self._remainder(total, modulus)

    def _remainder(self, value: str, modulus: int) -> str:
        """Return the remainder of a 31-bit tensor. The computed quotient may be off by 1."""
        if _is_power_of_two(modulus):
            return self._node("BitwiseAnd", value, modulus - 1)
        quotient = self._node("Div", value, modulus)
        left = self._node("Sub", value, self._node("Mul", quotient, modulus))
        return self._lifted(self._node("Sub", self._lifted(left, modulus), modulus), modulus)

    def _lifted(self, value: str, modulus: int) -> str:
        """Add the modulus to negative values."""
        truth = self._node("Cast", self._node("Less", value, 0), to=TensorProto.INT64)
        return self._node("Add", value, self._node("Mul", truth, modulus))

    def _limbs(self, value: str, width: int) -> Iterable[tuple[int, str]]:
        """Yield the parts of a 31-bit value, `width` bits each, with their first bit's position."""
        for begin in range(0, _BITS, width):
            if begin + width >= _BITS:
                yield begin, value
                return
            low, value = self._divided(value, width)
            yield begin, low

    def _divided(self, value: str, bits: int) -> tuple[str, str]:
        """Return the lowest `bits` bits of a value, and the remaining higher bits."""
        low = self._node("BitwiseAnd", value, (1 << bits) - 1)
        # Without them it has at most 24 digits before zeros, which float32 divides exactly.
        return low, self._node("Div", self._node("Sub", value, low), 1 << bits)

    def _end(self, found: str, node: NodeProto) -> None:
        self.nodes.append(helper.make_node("Identity", [found], [node.output[0]]))

    def _node(self, operator: str, *inputs: str | int, **attributes: Any) -> str:
        output, names = f"exact_{next(self._numbers)}", list(map(self._name, inputs))
        self.nodes.append(helper.make_node(operator, names, [output], **attributes))
        return output

    def _name(self, value: str | int) -> str:
        if isinstance(value, str):
            return value
        name = f"exact_constant_{value}"
        self.added[value] = numpy_helper.from_array(np.array(value, np.int64), name)
        return name

    def _constant(self, name: str) -> int | None:
        """Return the value of an integer constant of one element; None for anything else."""
        tensor, node = self._values.get(name), self._makers.get(name)
        if node is not None and node.op_type == "Constant":
            tensor = next((one.t for one in node.attribute if one.name == "value"), None)
        if tensor is None or tensor.data_type != TensorProto.INT64 or np.prod(tensor.dims) != 1:
            return None
        return int(numpy_helper.to_array(tensor).item())
