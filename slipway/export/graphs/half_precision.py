"""Converts a graph from fp32 to fp16 between the first and the last layer with weights.

Nodes before (normalisation of pixels and columns, bin positions, codes) and after (softmax, a value
in the target's unit, which may exceed 65504) stay in fp32, because they cost little and fp16 would
lose precision. So do the nodes that only the OOD score needs, because it is a sum of squares.
"""

import onnx
from onnx import GraphProto, ModelProto, NodeProto

from slipway.artifacts.bundle import SCORE_NAME
from slipway.runtimes.onnx_runtime import import_onnxruntime

LAYERS = ["Conv", "Gemm", "MatMul"]
# Names of the casts that onnxruntime's converter inserts: at the graph's ends, and around a node
# that stays in fp32.
_DOWN, _DOWN_NODE = "graph_input_cast", "_cast_to_fp16_node"
_UP, _UP_NODE = "graph_output_cast", "_cast_to_fp32_node"


def kept_in_fp32(graph: GraphProto) -> set[str]:
    """Return the names of the nodes before the first and after the last layer.

    A node is named by its first output. The set is empty for a graph without layers.
    """
    inner = between_layers(graph)
    kept = {node.output[0] for node in graph.node} - inner if inner else set()
    constants = {tensor.name for tensor in graph.initializer}
    for node in graph.node:  # in topological order
        if all(name in constants for name in node.input):
            constants.add(node.output[0])
    for node in reversed(graph.node):  # a constant goes with those that use it
        if node.output[0] in constants and any(
            node.output[0] in user.input and user.output[0] not in kept for user in graph.node
        ):
            kept.discard(node.output[0])
    return kept


def between_layers(graph: GraphProto) -> set[str]:
    """Return the names of all layers and of the nodes between layers, by their first outputs.

    Nodes that only the OOD score needs are left out.
    """
    alone = score_branch(graph)
    nodes = [node for node in graph.node if node.output[0] not in alone]
    before = _before_a_layer(nodes)
    return {node.output[0] for node in _after_a_layer(nodes) if node.output[0] in before}


def score_branch(graph: GraphProto) -> set[str]:
    """Return the names of the nodes that only the OOD score depends on, by their first outputs."""
    needed = {value.name for value in graph.output if value.name != SCORE_NAME}
    alone = set()
    for node in reversed(graph.node):
        if needed.isdisjoint(node.output):
            alone.add(node.output[0])
        else:
            needed.update(node.input)
    return alone


def to_half(model: ModelProto, kept: set[str]) -> ModelProto:
    """Convert a graph to fp16, except the nodes named in `kept`.

    The inputs and outputs of the graph keep their types.
    """
    import_onnxruntime()
    # Ships with onnxruntime. The converter of the same name in onnxconverter-common breaks graphs
    # with uint8 input.
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    # The exporter's value_info names weights too, which the converter would take for fp16.
    model.graph.ClearField("value_info")
    for node in model.graph.node:
        node.name = node.name or f"node/{node.output[0]}"
    blocked = [node.name for node in model.graph.node if node.output[0] in kept]
    half = OnnxModel(convert_float_to_float16(model, keep_io_types=True, node_block_list=blocked))
    half.topological_sort()
    _undo_round_trips(half.model.graph)
    half.model.graph.ClearField("value_info")  # the converter leaves the old types there
    result: ModelProto = half.model
    return result


def _after_a_layer(nodes: list[NodeProto]) -> list[NodeProto]:
    reached: set[str] = set()
    found = []
    for node in nodes:
        if node.op_type in LAYERS or not reached.isdisjoint(node.input):
            reached.update(node.output)
            found.append(node)
    return found


def _before_a_layer(nodes: list[NodeProto]) -> set[str]:
    needed: set[str] = set()
    found = set()
    for node in reversed(nodes):
        if node.op_type in LAYERS or not needed.isdisjoint(node.output):
            needed.update(node.input)
            found.add(node.output[0])
    return found


def _undo_round_trips(graph: GraphProto) -> None:
    """Remove the converter's casts to fp16 and back between two fp32 nodes."""
    down = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.name.startswith(_DOWN) or node.name.endswith(_DOWN_NODE)
    }
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        is_cast_back = node.name.startswith(_UP) or node.name.endswith(_UP_NODE)
        if not is_cast_back or node.input[0] not in down:
            continue
        source, target = down[node.input[0]], node.output[0]
        if target in outputs:
            identity = onnx.helper.make_node("Identity", [source], [target], name=node.name)
            node.CopyFrom(identity)
        else:
            _replace(graph, target, source)
    _drop_unused(graph)


def _replace(graph: GraphProto, name: str, by: str) -> None:
    for node in graph.node:
        for index, found in enumerate(node.input):
            if found == name:
                node.input[index] = by


def _drop_unused(graph: GraphProto) -> None:
    """Remove casts whose output nothing reads, and the casts that only these read."""
    needed = {value.name for value in graph.output}
    for node in reversed(graph.node):
        if node.op_type == "Cast" and needed.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            needed.update(node.input)
