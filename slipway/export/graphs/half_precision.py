"""fp32 to fp16 where it pays: from the first layer with weights to the last, and nowhere else.

What comes before (pixels and columns to be normalised, a number's place in a narrow bin, codes) and what comes after (softmax,
a value in the target's unit, which may be beyond 65504) stays in fp32: it costs next to nothing there, and fp16 would lose it.
So does all that the outlier score alone needs: it is made of squares.
"""

import onnx
from onnx import GraphProto, ModelProto, NodeProto

from slipway.artifacts.bundle import SCORE_NAME
from slipway.runtimes.onnx_runtime import import_onnxruntime

LAYERS = ["Conv", "Gemm", "MatMul"]
# What onnxruntime's converter calls the casts that it puts in: at the graph's ends, and around a node that stays in fp32.
_DOWN, _DOWN_NODE = "graph_input_cast", "_cast_to_fp16_node"
_UP, _UP_NODE = "graph_output_cast", "_cast_to_fp32_node"


def kept_in_fp32(graph: GraphProto) -> set[str]:
    """First outputs, as names, of the nodes before every layer or after every layer; none in a graph without layers."""
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
    """First outputs, as names, of the layers and of what lies between them, without what only the outlier score needs."""
    alone = score_branch(graph)
    nodes = [node for node in graph.node if node.output[0] not in alone]
    before = _before_a_layer(nodes)
    return {node.output[0] for node in _after_a_layer(nodes) if node.output[0] in before}


def score_branch(graph: GraphProto) -> set[str]:
    """First outputs, as names, of the nodes that no output but the outlier score depends on; none in a graph without a score."""
    needed = {value.name for value in graph.output if value.name != SCORE_NAME}
    alone = set()
    for node in reversed(graph.node):
        if needed.isdisjoint(node.output):
            alone.add(node.output[0])
        else:
            needed.update(node.input)
    return alone


def to_half(model: ModelProto, kept: set[str]) -> ModelProto:
    """The model with every node in fp16 but `kept`; its inputs and outputs stay as they are."""
    import_onnxruntime()
    # Ships with onnxruntime. The converter of the same name in onnxconverter-common breaks graphs with uint8 input.
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    model.graph.ClearField(
        "value_info"
    )  # the exporter's names weights too, which the converter then takes for fp16
    for node in model.graph.node:
        node.name = node.name or f"node/{node.output[0]}"
    blocked = [node.name for node in model.graph.node if node.output[0] in kept]
    half = OnnxModel(convert_float_to_float16(model, keep_io_types=True, node_block_list=blocked))
    half.topological_sort()
    _undo_round_trips(half.model.graph)
    half.model.graph.ClearField("value_info")  # the converter's is of the types before
    result: ModelProto = half.model
    return result


def _after_a_layer(nodes: list[NodeProto]) -> list[NodeProto]:
    """The layers and all that depends on one."""
    reached: set[str] = set()
    found = []
    for node in nodes:
        if node.op_type in LAYERS or not reached.isdisjoint(node.input):
            reached.update(node.output)
            found.append(node)
    return found


def _before_a_layer(nodes: list[NodeProto]) -> set[str]:
    """First outputs of the layers and of all that one depends on."""
    needed: set[str] = set()
    found = set()
    for node in reversed(nodes):
        if node.op_type in LAYERS or not needed.isdisjoint(node.output):
            needed.update(node.input)
            found.add(node.output[0])
    return found


def _undo_round_trips(graph: GraphProto) -> None:
    """Between two nodes that it leaves in fp32, the converter rounds to fp16 and back: take that out."""
    down = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.name.startswith(_DOWN) or node.name.endswith(_DOWN_NODE)
    }
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        if (
            not (node.name.startswith(_UP) or node.name.endswith(_UP_NODE))
            or node.input[0] not in down
        ):
            continue
        if node.output[0] in outputs:
            node.CopyFrom(
                onnx.helper.make_node(
                    "Identity", [down[node.input[0]]], list(node.output), name=node.name
                )
            )
        else:
            _replace(graph, node.output[0], down[node.input[0]])
    _drop_unused(graph)


def _replace(graph: GraphProto, name: str, by: str) -> None:
    for node in graph.node:
        for place, found in enumerate(node.input):
            if found == name:
                node.input[place] = by


def _drop_unused(graph: GraphProto) -> None:
    """Casts that nothing reads any more, and with them those that they read."""
    needed = {value.name for value in graph.output}
    for node in reversed(graph.node):
        if node.op_type == "Cast" and needed.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            needed.update(node.input)
