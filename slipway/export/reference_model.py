"""Runs the reference model's fp32 graph on the test rows, with its own preprocessing.

If its input contract equals that of the packed store, it runs on the packed rows. Otherwise the raw
rows are decoded or encoded by its own contract. Rows that the contract refuses are marked and get
no prediction.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import MANIFEST, LoadedBundle, load_bundle
from slipway.config.sections import DataParams
from slipway.data.sources.sources import raw_images
from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.data.tables.source import columns_of, read_json_rows
from slipway.data.texts.source import raw_rows
from slipway.export.certification.raw_rows import RawRowPositions
from slipway.export.release import read_known_rows
from slipway.inputs.columns import ColumnContract, encode_rows, read_row
from slipway.inputs.images import ImageContract, array_from_bytes, load_transform
from slipway.inputs.texts import TextContract, encode_texts, read_text
from slipway.kinds.registry import Task
from slipway.reports.evaluation.reference_comparison import ReferenceAnswers
from slipway.runtimes.runtime import open_onnx, why_unavailable
from slipway.system.errors import BundleError, CellError, ImageError

T = TypeVar("T")
_Batch = tuple[NDArray[np.int64], NDArray[Any]]  # (B,) positions of test rows, (B, ...) inputs


def open_reference(root: Path, manifest: PackedManifest) -> LoadedBundle:
    """Open the bundle in `root`, and check the digest of every file.

    Raises:
        BundleError: it is not a bundle, or is of another task or other classes than `manifest`.
    """
    bundle = open_reference_of(root, manifest.task)
    found, expected = set(bundle.manifest.output.labels), set(manifest.classes)
    if found != expected:
        raise BundleError(
            f"the reference model in {root} has other classes: it lacks {sorted(expected - found)} "
            f"and has {sorted(found - expected)} in addition. "
            "Set evaluate.reference_model to null until a model of these classes is released."
        )
    return bundle


def open_reference_of(root: Path, task: Task) -> LoadedBundle:
    """Open the bundle in `root` and check every file.

    Raises BundleError if its task is not `task`.
    """
    if not (root / MANIFEST).is_file():
        raise BundleError(
            f"evaluate.reference_model is {str(root)!r}, where there is no {MANIFEST}. "
            "Run `slipway release` once a bundle is certified, or set it to null."
        )
    bundle = load_bundle(root)
    bundle.verify()
    if bundle.manifest.task != task:
        raise BundleError(
            f"the reference model in {root} is for {bundle.manifest.task}, expected {task} "
            "(data.task). Set evaluate.reference_model to null until a model of this task is "
            "released."
        )
    return bundle


def answer_test_rows(
    bundle: LoadedBundle,
    test: PackedSplit,
    packed: Path,
    manifest: PackedManifest,
    data: Callable[[], DataParams],
) -> ReferenceAnswers:
    """Predict the test rows in the store `packed` with the reference model.

    Args:
        data: locates the raw rows; called only if they are needed.

    Raises:
        IntegrityError: the raw rows are not the rows that were packed.
        BundleError: they lack a column of the model.
    """
    provider = "cpu" if why_unavailable("cuda") else "cuda"
    runner = open_onnx(
        bundle.model_bytes("fp32"),
        variant="fp32",
        precision="fp32",
        provider=provider,
        num_threads=0,
    )
    outputs = np.full((len(test), max(1, len(manifest.classes))), np.nan, np.float32)
    answered = np.zeros(len(test), bool)
    for positions, inputs in _batches(bundle, test, manifest, data):
        outputs[positions] = runner.run(inputs).outputs
        answered[positions] = True
    if not np.isfinite(outputs[answered]).all():
        raise BundleError(
            f"the reference model in {bundle.root} predicts NaN or infinity. Release another one."
        )
    labels = bundle.manifest.output.labels
    if labels:
        outputs = outputs[:, [labels.index(name) for name in manifest.classes]]
    known, remark = read_known_rows(bundle, test.ids, packed)
    return ReferenceAnswers(
        folder=bundle.root.as_posix(),
        version=bundle.version,
        provider=provider,
        outputs=outputs,
        refused=~answered,
        known=known,
        remark=remark,
        thresholds=_in_order(bundle.manifest.calibration_of("fp32").thresholds, labels, manifest),
    )


def _in_order(
    thresholds: Sequence[float] | None, labels: Sequence[str], manifest: PackedManifest
) -> list[float] | None:
    """Return the thresholds of `labels` in the order of the packed classes."""
    if thresholds is None:
        return None
    return [thresholds[labels.index(name)] for name in manifest.classes]


def _batches(
    bundle: LoadedBundle,
    test: PackedSplit,
    manifest: PackedManifest,
    data: Callable[[], DataParams],
) -> Iterator[_Batch]:
    """Yield all rows that the bundle accepts, in batches of at most the bundle's maximum size."""
    contract, size = bundle.manifest.input, bundle.manifest.max_batch_size
    if contract == manifest.input:
        for start in range(0, len(test), size):
            inputs = np.ascontiguousarray(test.inputs[start : start + size])
            yield np.arange(start, start + len(inputs)), inputs
    elif isinstance(contract, ColumnContract):
        raw = data()
        _require_columns({column.name for column in contract.columns}, raw, bundle.root)
        table = read_json_rows(raw, contract.columns, set(test.sources))
        rows = _readable(table, test, lambda row: read_row(row, contract))
        yield from _grouped(rows, size, lambda cells: encode_rows(cells, contract))
    elif isinstance(contract, ImageContract):
        load_transform(contract)
        found = raw_images(data(), contract, set(test.sources))
        images = _readable(found, test, lambda payload: array_from_bytes(payload, contract))
        yield from _grouped(images, size, np.stack)
    elif isinstance(contract, TextContract):
        raw = data()
        _require_columns(set(contract.columns), raw, bundle.root)
        listed = raw_rows(raw, contract, set(test.sources))
        texts = _readable(listed, test, lambda row: read_text(json.loads(row), contract))
        yield from _grouped(texts, size, lambda batch: encode_texts(batch, contract))
    else:
        raise BundleError(
            f"a reference model that takes {contract.kind} can only be compared on the same "
            "packed rows. Set evaluate.reference_model to null."
        )


def _readable(
    rows: Iterable[tuple[str, str | None, Any]], test: PackedSplit, read: Callable[[Any], Any]
) -> Iterator[tuple[int, Any]]:
    """Yield position and input of each raw row (source, digest, content) that `read` accepts."""
    positions = RawRowPositions(test.ids, test.sources)
    for source, digest, content in rows:
        position = positions.take(source, digest)
        with contextlib.suppress(CellError, ImageError):
            yield position, read(content)
    positions.check_all_taken()


def _require_columns(names: set[str], data: DataParams, root: Path) -> None:
    missing = names.difference(columns_of(data))
    if missing:
        raise BundleError(
            f"the reference model in {root} takes the columns {', '.join(sorted(missing))}, "
            f"which {data.path!r} lacks. "
            "Set evaluate.reference_model to null until a model of these columns is released."
        )


def _grouped(
    rows: Iterator[tuple[int, T]], size: int, make: Callable[[list[T]], NDArray[Any]]
) -> Iterator[_Batch]:
    while batch := list(itertools.islice(rows, size)):
        positions, items = zip(*batch, strict=True)
        yield np.array(positions), make(list(items))
