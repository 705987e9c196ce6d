"""Writes a model repository for Triton, and an InferenceService of KServe around it.

FOLDER/model_repository/NAME/config.pbtxt     inputs, outputs and batching
FOLDER/model_repository/NAME/labels.txt       the labels, in the order of the columns
FOLDER/model_repository/NAME/1/model.onnx     the graph
FOLDER/inference_service.yaml                 of `kserve` only

Batching is that of artifacts/capacity.json, if `slipway tune serving` measured this model. Triton's
server is no Python package, so its hop runs only with `--server`, the address of a server that has
loaded the folder: a client of the Open Inference Protocol then sends every test row.
"""

import json
import re
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from slipway.artifacts.bundle import SCORE_NAME
from slipway.artifacts.certificate import Hop
from slipway.artifacts.locations import CAPACITY
from slipway.artifacts.uncertainty import Answers
from slipway.config.yaml_text import yaml_text
from slipway.export.certification.comparison import not_executed
from slipway.export.certification.grpc_hop import why_no_grpc
from slipway.export.targets.exported import (
    ExportRecord,
    ExportSource,
    TargetAnswers,
    compare,
    read_source,
    summary,
    write_export,
)
from slipway.system import files
from slipway.system.errors import UnavailableError

ServerTarget = Literal["triton", "kserve"]
REPOSITORY = "model_repository"
SERVICE = "inference_service.yaml"
_CAPACITY_FORMAT = 1
_DATATYPES = {"uint8": "UINT8", "int32": "INT32", "float32": "FP32"}
# A name of Kubernetes, which is also a name of Triton and of a folder.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_MOST_WAIT = 0.1  # fraction of the latency limit in which a batch may fill
_WARM_UP_CALLS = 3
_PARTS = ("grpc", "tritonclient")


@dataclass(frozen=True)
class Batching:
    """The settings that a load test found: workers, threads and batch sizes."""

    workers: int
    num_threads: int  # threads of each worker
    batch_size: int
    wait_us: int


@dataclass(frozen=True)
class ServerExport:
    """The options of an export for a Triton server."""

    target: ServerTarget
    name: str  # name of the model
    storage_uri: str  # URI of the copied repository, for KServe
    server: str | None  # HOST:PORT of gRPC; None: the hop is not run


def export_server(given: ServerExport, out: Path, variant: str | None) -> str:
    """Write the model repository to the folder `out`. Returns a summary.

    Raises:
        UnavailableError: the name is not usable, or the server does not respond.
        ParityError: the hop differs.
    """
    require_name(given.name)
    record = write_server(out, read_source(variant), given)
    return summary(out, record, [f"batching: {record.facts['batching']}"])


def require_name(name: str) -> None:
    """Raise UnavailableError for a name that is a path, or that Kubernetes rejects."""
    if not _NAME.fullmatch(name):
        raise UnavailableError(
            f"--name is {name!r}, expected at most 63 small letters, digits and hyphens that begin "
            "with a letter and end with no hyphen. Give another one, such as my-model."
        )


def write_server(out: Path, source: ExportSource, given: ServerExport) -> ExportRecord:
    """Write the repository of a certified model, and run its hop if there is a server."""

    def fill(folder: Path) -> tuple[list[Hop], dict[str, Any]]:
        batching, remark = read_batching(CAPACITY, source)
        model = folder / REPOSITORY / given.name
        (model / "1").mkdir(parents=True)
        config = config_text(source, given.name, batching)
        files.write_text(model / "config.pbtxt", config)
        labels = source.bundle.manifest.output.labels
        if labels:
            lines = "".join(f"{' '.join(label.split())}\n" for label in labels)
            files.write_text(model / "labels.txt", lines)
        files.write_bytes(model / "1/model.onnx", source.graph())
        if given.target == "kserve":
            files.write_text(folder / SERVICE, service_text(source, given, batching))
        facts = {"batching": remark, "schema": check_config(config)}
        return [run_server_hop(source, given)], facts

    return write_export(out, source, given.target, fill)


def read_batching(path: Path, source: ExportSource) -> tuple[Batching | None, str]:
    """Read the load test's settings; (None, remark) if it did not measure this model.

    The wait is the time in which the measured rate fills a batch, at most a tenth of the limit.
    """
    try:
        card = json.loads(path.read_bytes())
        is_known = card["format_version"] == _CAPACITY_FORMAT
        is_own = is_known and card["model"]["version"] == source.bundle.version
        rate, p99_ms = card["carried"]["rate"], card["goal"]["p99_ms"]
        settings = {name.removeprefix("SLIPWAY_"): one for name, one in card["settings"].items()}
        workers, threads, size = (
            int(settings[name]) for name in ("WORKERS", "NUM_THREADS", "MAX_BATCH_SIZE")
        )
    except FileNotFoundError:
        return None, f"the server's own: {path} is missing; run `slipway tune serving`"
    except (ValueError, KeyError, TypeError) as error:
        return None, f"the server's own: {path} cannot be read ({error!r})"
    if not is_own or rate is None:
        return None, f"the server's own: {path} is of another model or has no capacity"
    size = min(size, source.bundle.manifest.max_batch_size)
    wait_us = round(1e6 * min(size / rate, _MOST_WAIT * p99_ms / 1000))
    remark = f"batches of {size} within {wait_us} us, {workers} instances of {threads} threads"
    return Batching(workers, threads, size, wait_us), remark


def config_text(source: ExportSource, name: str, batching: Batching | None) -> str:
    """Return config.pbtxt; its schema is NVIDIA's model_config.proto."""
    manifest = source.bundle.manifest
    contract, labels = manifest.input, manifest.output.labels
    shape = [-1] if contract.varies_in_length else list(contract.shape)
    datatype = _DATATYPES[np.dtype(contract.dtype).name]
    label_file = '\n    label_filename: "labels.txt"' if labels else ""
    lines = [
        f"# model {source.bundle.version}, variant {source.variant}; certificate.json is its proof",
        f"name: {json.dumps(name)}",
        'backend: "onnxruntime"',
        f"max_batch_size: {manifest.max_batch_size}",
        f"input [\n  {{\n    name: {json.dumps(manifest.input_name)}\n"
        f"    data_type: TYPE_{datatype}\n    dims: {shape}\n  }}\n]",
        f"output [\n  {{\n    name: {json.dumps(manifest.output_name)}\n"
        f"    data_type: TYPE_FP32\n    dims: [{max(1, len(labels))}]{label_file}\n  }},\n"
        f"  {{\n    name: {json.dumps(SCORE_NAME)}\n    data_type: TYPE_FP32\n"
        "    dims: [1]\n    reshape { shape: [] }\n  }\n]",
    ]
    if batching is None:
        lines.append("dynamic_batching {}")
    else:
        lines += [
            f"dynamic_batching {{\n  preferred_batch_size: [{batching.batch_size}]\n"
            f"  max_queue_delay_microseconds: {batching.wait_us}\n}}",
            f"instance_group [\n  {{\n    count: {batching.workers}\n    kind: KIND_CPU\n  }}\n]",
            'parameters {\n  key: "intra_op_thread_count"\n'
            f'  value: {{ string_value: "{batching.num_threads}" }}\n}}',
        ]
    return "\n".join(lines) + "\n"


def check_config(text: str) -> str:
    """Parse config.pbtxt by the schema in tritonclient. Returns a remark on the result."""
    reason = why_no_grpc(_PARTS)
    if reason:
        return f"not checked: {reason}"
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    text_format.Parse(text, model_config_pb2.ModelConfig())
    return f"config.pbtxt fits model_config.proto of tritonclient {version('tritonclient')}"


def service_text(source: ExportSource, given: ServerExport, batching: Batching | None) -> str:
    """Return the InferenceService, for KServe's runtime of Triton."""
    model: dict[str, Any] = {
        "modelFormat": {"name": "triton", "version": "2"},
        "protocolVersion": "v2",
        "runtime": "kserve-tritonserver",
        "storageUri": given.storage_uri,
    }
    if batching:
        cores = str(batching.workers * batching.num_threads)
        model["resources"] = {"requests": {"cpu": cores}, "limits": {"cpu": cores}}
    content: dict[str, Any] = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": given.name,
            "annotations": {
                "slipway-model-version": source.bundle.version,
                "slipway-bundle-sha256": source.bundle.digest,
            },
        },
        "spec": {"predictor": {"minReplicas": 1, "model": model}},
    }
    return yaml_text(content)


def run_server_hop(source: ExportSource, given: ServerExport) -> Hop:
    """Send every test row to the server, one per request, and compare its predictions.

    Raises UnavailableError if the server does not respond.
    """
    requested = source.requested(given.target, "auto")
    if given.server is None:
        reason = (
            "no --server was given; load the folder in a Triton server, and give the HOST:PORT of "
            "its gRPC to the same command"
        )
        return not_executed(given.target, requested, reason)
    if missing := why_no_grpc(_PARTS):
        return not_executed(given.target, requested, missing)
    from tritonclient import grpc as triton
    from tritonclient.utils import InferenceServerException

    manifest, rows = source.bundle.manifest, source.rows.comparison.rows
    names = [manifest.output_name, SCORE_NAME]
    client = triton.InferenceServerClient(given.server)

    def ask(row: int) -> list[Any]:
        values = np.ascontiguousarray(rows.inputs[row : row + 1])
        datatype = _DATATYPES[values.dtype.name]
        tensor = triton.InferInput(manifest.input_name, list(values.shape), datatype)
        tensor.set_data_from_numpy(values)
        wanted = [triton.InferRequestedOutput(name) for name in names]
        answer = client.infer(given.name, [tensor], outputs=wanted)
        return [answer.as_numpy(name) for name in names]

    times, found = [], []
    try:
        for _ in range(_WARM_UP_CALLS):
            ask(0)
        for row in range(len(rows.ids)):
            begin = time.perf_counter()
            found.append(ask(row))
            times.append(time.perf_counter() - begin)
    except InferenceServerException as error:
        raise UnavailableError(
            f"the server at {given.server} did not answer row {len(found)} ({error}), expected a "
            f"server of the Open Inference Protocol with the model {given.name!r}. Start it with "
            f"the folder {REPOSITORY} of an export, or leave out --server."
        ) from error
    finally:
        client.close()
    outputs = np.concatenate([one[0] for one in found]).reshape(len(rows.ids), -1)
    scores = np.concatenate([one[1].reshape(-1) for one in found])
    answers = TargetAnswers(
        Answers(outputs, scores), 1000 * float(np.median(times)), len(times) / sum(times)
    )
    return compare(source, given.target, requested, answers, is_other_runtime=True)
