"""Writes the folders of `slipway export mlflow` and `slipway export huggingface`.

FOLDER/MLmodel, model.onnx, requirements.txt, ...    a model of MLflow, with MLflow's own signature
FOLDER/README.md, config.json, model.onnx            a repository of the Hugging Face hub
FOLDER/PREPROCESSING.md                              the work of the caller, in both

Both hold the graph only: callers make its tensors. The hop loads the folder as its users do, by
`mlflow.pyfunc` or ONNX Runtime, and sends every test row in a call of its own.
"""

import json
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from slipway.artifacts.bundle import SCORE_NAME
from slipway.artifacts.certificate import Hop
from slipway.artifacts.uncertainty import Answers
from slipway.config.yaml_text import yaml_text
from slipway.export.certification.bill_of_materials import as_spdx, license_of
from slipway.export.targets.exported import (
    ExportRecord,
    ExportSource,
    TargetAnswers,
    compare,
    read_source,
    summary,
    write_export,
)
from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import ImageContract
from slipway.runtimes.onnx_runtime import import_onnxruntime
from slipway.system import files
from slipway.system.errors import UnavailableError

LayoutTarget = Literal["mlflow", "huggingface"]
GRAPH = "model.onnx"
NOTE = "PREPROCESSING.md"
README = "README.md"
_REQUIREMENTS, _PYTHON = "requirements.txt", "python_env.yaml"  # files of MLflow
_PROVIDERS = ["CPUExecutionProvider"]
# Licences whose name on the hub is their SPDX identifier in small letters.
_HUB_LICENSES = {
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "bsl-1.0", "isc", "mpl-2.0", "zlib"),
    *("cc0-1.0", "cc-by-2.0", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0"),
    *("cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nd-4.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-4.0"),
    *("artistic-2.0", "ecl-2.0", "epl-1.0", "epl-2.0", "eupl-1.1", "eupl-1.2", "osl-3.0"),
}
_HUB_TASKS = {
    *("image-classification", "text-classification"),
    *("tabular-classification", "tabular-regression"),
}
_SNIPPET = """\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
rows = np.zeros({shape}, np.{dtype})  # your rows, made as PREPROCESSING.md says
answers, ood_scores = session.run([{output!r}, {score!r}], {{{input!r}: rows}})
print(answers[0], ood_scores[0])
"""


def export_layout(target: LayoutTarget, out: Path, variant: str | None) -> str:
    """Write the export of the layout `target` to the folder `out`. Returns a summary.

    Raises:
        UnavailableError: a package that writes the layout is missing.
        ParityError: the hop differs.
    """
    return summary(out, write_layout(out, read_source(variant), target))


def write_layout(out: Path, source: ExportSource, target: LayoutTarget) -> ExportRecord:
    """Write the layout of a certified model, and run its hop."""
    fill, load = _LAYOUTS[target]

    def write(folder: Path) -> tuple[list[Hop], dict[str, Any]]:
        files.write_text(folder / NOTE, preprocessing_note(source))
        facts = fill(folder, source)
        (folder / GRAPH).write_bytes(source.graph())
        return [run_layout_hop(folder, source, target, load)], facts

    return write_export(out, source, target, write)


def preprocessing_note(source: ExportSource) -> str:
    """Return as Markdown the preprocessing in the graph, and that left to its caller."""
    manifest = source.bundle.manifest
    contract, name = manifest.input, manifest.input_name
    shape = ", ".join(map(str, ["rows", *contract.shape]))
    inside = "The graph holds the calibration, the OOD score and the network"
    if isinstance(contract, ImageContract):
        inside += ", and the cast and normalisation of pixels"
        work = (
            "Decode the image, turn it upright (EXIF), put transparency on white, convert it to "
            f"{'grey' if contract.channels == 1 else 'RGB'}, and resize it to {contract.size_px} x "
            f"{contract.size_px} px (resize_mode {contract.resize_mode}, "
            f"{contract.interpolation}). Values are 0 to 255, channels last."
        )
        if contract.transform is not None:
            work += f" Then apply {contract.transform.function} of the project that made the model."
    elif isinstance(contract, ColumnContract):
        work = (
            "Check and encode each row by the column contract, `input` in bundle.json: "
            "standardised numbers with missing ones filled, then indicators of missing values, "
            "then category codes. `slipway export edge` writes a script of numpy that does this."
        )
    else:
        work = (
            f"Encode each row by the contract `input` in bundle.json, of the kind {contract.kind}. "
            "slipway.load in Python, or `slipway serve`, does this."
        )
    labels = ", ".join(f"`{label}`" for label in manifest.output.labels)
    answer = f"one column for each of {labels}" if labels else "one column, in the target's unit"
    return (
        f"# Preprocessing\n\n{inside}. The caller does the rest.\n\n"
        f"* Input `{name}`: {contract.dtype} ({shape}). {work}\n"
        f"* Output `{manifest.output_name}`: float32, {answer}.\n"
        f"* Output `{SCORE_NAME}`: float32 (rows), larger for unusual inputs.\n\n"
        "Sets of labels, intervals and the OOD threshold are in `calibration` of bundle.json. "
        "certificate.json is the proof for rows that Slipway itself preprocessed: other "
        "preprocessing is not certified. Slipway's own service takes images, rows and texts as "
        "they are.\n"
    )


def run_layout_hop(
    folder: Path, source: ExportSource, target: LayoutTarget, load: "Load | None" = None
) -> Hop:
    """Load the folder as its users do, and compare its predictions for every test row."""
    ask = (load or _LAYOUTS[target][1])(folder, source)
    inputs = source.rows.comparison.rows.inputs
    ask(np.ascontiguousarray(inputs[:1]))  # a warm-up
    times, found = [], []
    for row in range(len(inputs)):
        values = np.ascontiguousarray(inputs[row : row + 1])
        begin = time.perf_counter()
        found.append(ask(values))
        times.append(time.perf_counter() - begin)
    manifest = source.bundle.manifest
    outputs = np.concatenate([one[manifest.output_name] for one in found])
    scores = np.concatenate([one[SCORE_NAME].reshape(-1) for one in found])
    answers = TargetAnswers(
        Answers(outputs.reshape(len(found), -1), scores),
        1000 * float(np.median(times)),
        len(times) / sum(times),
    )
    return compare(source, target, source.requested(target, "cpu"), answers)


def _fill_mlflow(folder: Path, source: ExportSource) -> dict[str, Any]:
    """Write the folder with MLflow: flavours, signature and requirements."""
    mlflow = _import_mlflow()
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    manifest = source.bundle.manifest
    contract, width = manifest.input, max(1, len(manifest.output.labels))
    shape = (-1,) * len(contract.shape) if contract.varies_in_length else contract.shape
    scores = np.dtype("float32")
    signature = ModelSignature(
        inputs=Schema([TensorSpec(np.dtype(contract.dtype), (-1, *shape), manifest.input_name)]),
        outputs=Schema(
            [
                TensorSpec(scores, (-1, width), manifest.output_name),
                TensorSpec(scores, (-1,), SCORE_NAME),
            ]
        ),
    )
    runtime = import_onnxruntime()
    packages = {"mlflow-skinny": mlflow, "onnx": onnx, "onnxruntime": runtime, "numpy": np}
    required = [f"{name}=={package.__version__}" for name, package in packages.items()]
    files.write_text(folder / _REQUIREMENTS, "\n".join([*required, "pandas"]) + "\n")
    environment = {
        "python": platform.python_version(),
        "build_dependencies": [],
        "dependencies": [f"-r {_REQUIREMENTS}"],
    }
    files.write_text(folder / _PYTHON, yaml_text(environment))
    # mlflow.onnx.save_model would search every installed package for half a minute.
    model = mlflow.models.Model(
        signature=signature,
        metadata={
            "slipway_model_version": source.bundle.version,
            "slipway_bundle_sha256": source.bundle.digest,
            "slipway_variant": source.variant,
            "license": license_of(source.bundle, "weights") or "not declared",
        },
    )
    mlflow.pyfunc.add_to_model(
        model, loader_module="mlflow.onnx", data=GRAPH, python_env=_PYTHON, code=None
    )
    model.add_flavor(
        "onnx", onnx_version=onnx.__version__, data=GRAPH, providers=_PROVIDERS, code=None
    )
    model.save(folder / "MLmodel")
    return {"mlflow": mlflow.__version__}


def _load_mlflow(folder: Path, source: ExportSource) -> "Ask":
    model = _import_mlflow().pyfunc.load_model(str(folder), suppress_warnings=True)
    return lambda rows: model.predict({source.bundle.manifest.input_name: rows})


def _import_mlflow() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow warns of its own type hints
            import mlflow.models
            import mlflow.pyfunc
    except ImportError as error:
        raise UnavailableError(
            f"the layout of MLflow is written by MLflow itself, which is missing ({error}). "
            "Install it: pip install 'slipway-ml[loggers]' pandas"
        ) from error
    return mlflow


def _fill_hub(folder: Path, source: ExportSource) -> dict[str, Any]:
    """Write the README with its metadata, and the labels in the hub's form."""
    labels = source.bundle.manifest.output.labels
    manifest = source.bundle.manifest
    config = {
        "architectures": ["onnx"],
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        "slipway": {
            "model_version": source.bundle.version,
            "bundle_sha256": source.bundle.digest,
            "variant": source.variant,
            "task": manifest.task,
            "input": manifest.input_name,
            "output": manifest.output_name,
        },
    }
    files.write_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False))
    files.write_text(folder / README, hub_card(source))
    return {"pipeline_tag": hub_task(manifest.task)}


def hub_card(source: ExportSource) -> str:
    """Return README.md: the hub's metadata with results and licence, and the model card."""
    try:
        from huggingface_hub import EvalResult, ModelCardData
    except ImportError as error:
        raise UnavailableError(
            f"the card of the hub is written by huggingface_hub, which is missing ({error}). "
            "Install it: pip install huggingface_hub"
        ) from error
    manifest = source.bundle.manifest
    task = hub_task(manifest.task)
    results = [
        EvalResult(
            task_type=task or "other",
            dataset_type="private",
            dataset_name="test split",
            dataset_split="test",
            metric_type=name,
            metric_name=f"{name}, {metric.rows} rows",
            metric_value=metric.value,
            metric_args={"confidence": metric.confidence, "low": metric.low, "high": metric.high},
        )
        for name, metric in manifest.metrics.items()
    ]
    name = f"{manifest.task.replace('_', ' ')} {source.bundle.version}"
    head = ModelCardData(
        model_name=name,
        eval_results=results,
        metrics=list(manifest.metrics),
        library_name="onnx",
        pipeline_tag=task,
        tags=["onnx", "onnxruntime", "slipway", *([] if task else [manifest.task])],
        **hub_license(license_of(source.bundle, "weights")),
    )
    shape = (1, *manifest.input.example_rows(1).shape[1:])
    snippet = _SNIPPET.format(
        shape=shape,
        dtype=np.dtype(manifest.input.dtype).name,
        output=manifest.output_name,
        score=SCORE_NAME,
        input=manifest.input_name,
    )
    card = source.bundle.card() or f"# {name}\n"
    use = f"## Use\n\n```python\n{snippet}```\n\nPREPROCESSING.md says how rows are made.\n"
    return f"---\n{head.to_yaml()}\n---\n\n{card.rstrip()}\n\n{use}"


def hub_task(task: str) -> str | None:
    """Return the hub's name of a task; None if the hub has none."""
    name = task.replace("table_", "tabular_").replace("_", "-")
    return name if name in _HUB_TASKS else None


def hub_license(license_: str | None) -> dict[str, Any]:
    """Return the metadata of a licence: the hub's own name, or `other` with the text."""
    if license_ is None:
        return {}
    name = as_spdx(license_) or license_
    if name.lower() in _HUB_LICENSES:
        return {"license": name.lower()}
    return {"license": "other", "license_name": name}


def _load_hub(folder: Path, source: ExportSource) -> "Ask":
    session = import_onnxruntime().InferenceSession(str(folder / GRAPH), providers=_PROVIDERS)
    manifest = source.bundle.manifest
    names = [manifest.output_name, SCORE_NAME]
    return lambda rows: dict(
        zip(names, session.run(names, {manifest.input_name: rows}), strict=True)
    )


Ask = Callable[[NDArray[Any]], Mapping[str, NDArray[Any]]]  # rows to outputs by name
Load = Callable[[Path, ExportSource], Ask]
_LAYOUTS: Mapping[LayoutTarget, tuple[Callable[[Path, ExportSource], dict[str, Any]], Load]] = {
    "mlflow": (_fill_mlflow, _load_mlflow),
    "huggingface": (_fill_hub, _load_hub),
}
