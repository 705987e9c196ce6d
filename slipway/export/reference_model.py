"""The last released model asked once more: its fp32 graph on the rows of the test split, through its own preprocessing.

Where it takes what the packed store holds, it gets the packed rows. Otherwise the raw rows are decoded or encoded by its own input
contract; rows which that refuses are marked, not guessed. Also here: which test rows it has learned from, as far as that can be known.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import MANIFEST, LoadedBundle, load_bundle
from slipway.config.sections import DataParams
from slipway.data.sources.raw_tables import column_names
from slipway.data.sources.sources import read_samples
from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.data.tables.source import ID_DIGITS, find_table, read_json_rows
from slipway.export.release import read_known_rows
from slipway.inputs.columns import Cell, ColumnContract, encode_rows, read_row
from slipway.inputs.images import ImageContract, array_from_bytes, load_transform
from slipway.kinds.registry import Task
from slipway.reports.evaluation.reference_comparison import ReleasedAnswers
from slipway.runtimes.runtime import Runner, open_onnx, why_unavailable
from slipway.system import files
from slipway.system.errors import BundleError, CellError, ImageError, IntegrityError

T = TypeVar("T")


class _Batch(NamedTuple):
    places: NDArray[np.int64]  # (B,) among the test rows
    inputs: NDArray[Any]  # (B, ...)


def open_released(root: Path, manifest: PackedManifest) -> LoadedBundle:
    """The bundle in `root`, every file checked; BundleError if it is none, or answers another question than `manifest` asks."""
    bundle = open_released_of(root, manifest.task)
    found, expected = set(bundle.manifest.output.labels), set(manifest.classes)
    if found != expected:
        raise BundleError(
            f"the released model in {root} answers other classes: it lacks {sorted(expected - found)} and has {sorted(found - expected)} "
            "besides. Set evaluate.reference_model to null until a model of these classes is released."
        )
    return bundle


def open_released_of(root: Path, task: Task) -> LoadedBundle:
    """The bundle in `root`, every file checked; BundleError if it is none, or of another task."""
    if not (root / MANIFEST).is_file():
        raise BundleError(
            f"evaluate.reference_model is {str(root)!r}, where there is no {MANIFEST}. Run `make release` once a bundle is certified, "
            "or set it to null."
        )
    bundle = load_bundle(root)
    bundle.verify()
    if bundle.manifest.task != task:
        raise BundleError(
            f"the released model in {root} is for {bundle.manifest.task}, data.task is {task}. "
            "Set evaluate.reference_model to null until a model of this task is released."
        )
    return bundle


def ask_released(
    bundle: LoadedBundle,
    test: PackedSplit,
    packed: Path,
    manifest: PackedManifest,
    data: Callable[[], DataParams],
) -> ReleasedAnswers:
    """What the bundle answers to the test rows of the store `packed`. `data()` says where the raw rows are, where they are needed.

    IntegrityError if they are not the rows that were packed, BundleError if they lack a column that the model takes.
    """
    runner, provider = _open(bundle)
    outputs = np.full((len(test), max(1, len(manifest.classes))), np.nan, np.float32)
    answered = np.zeros(len(test), bool)
    for places, inputs in _batches(bundle, test, manifest, data):
        outputs[places] = runner.run(inputs).outputs
        answered[places] = True
    if not np.isfinite(outputs[answered]).all():
        raise BundleError(
            f"the released model in {bundle.root} answers NaN or infinity. Release another one."
        )
    labels = bundle.manifest.output.labels
    known, knowledge = read_known_rows(bundle, test.ids, packed)
    return ReleasedAnswers(
        folder=bundle.root.as_posix(),
        version=bundle.version,
        provider=provider,
        outputs=outputs[:, [labels.index(name) for name in manifest.classes]]
        if labels
        else outputs,
        refused=~answered,
        known=known,
        knowledge=knowledge,
    )


def _open(bundle: LoadedBundle) -> tuple[Runner, str]:
    provider = "cpu" if why_unavailable("cuda") else "cuda"
    return open_onnx(
        bundle.model_bytes("fp32"),
        variant="fp32",
        precision="fp32",
        provider=provider,
        num_threads=0,
    ), provider


def _batches(
    bundle: LoadedBundle,
    test: PackedSplit,
    manifest: PackedManifest,
    data: Callable[[], DataParams],
) -> Iterator[_Batch]:
    """Every row that the bundle takes, once, in batches of at most its largest."""
    contract, size = bundle.manifest.input, bundle.manifest.max_batch_size
    if contract == manifest.input:
        parts = [
            np.arange(start, min(start + size, len(test))) for start in range(0, len(test), size)
        ]
        return (
            _Batch(places, np.ascontiguousarray(test.inputs[places[0] : places[-1] + 1]))
            for places in parts
        )
    if isinstance(contract, ColumnContract):
        return _grouped(
            _read(contract, test, data(), bundle.root),
            size,
            lambda cells: encode_rows(cells, contract),
        )
    return _grouped(_decoded(contract, test, data()), size, np.stack)


def _decoded(
    contract: ImageContract, test: PackedSplit, data: DataParams
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """The place and pixels of each image that the contract takes."""
    load_transform(contract)
    places = _Places(test)
    for sample in read_samples(data, wanted=set(test.sources)):
        place = places.take(
            sample.source, None if sample.fault else files.sha256_bytes(sample.payload)[:ID_DIGITS]
        )
        with contextlib.suppress(ImageError):
            yield place, array_from_bytes(sample.payload, contract)
    places.check_all_taken()


def _read(
    contract: ColumnContract, test: PackedSplit, data: DataParams, root: Path
) -> Iterator[tuple[int, dict[str, Cell]]]:
    """The place and cells of each row that the contract takes."""
    lacking = {column.name for column in contract.columns}.difference(
        column_names(find_table(data))
    )
    if lacking:
        raise BundleError(
            f"the released model in {root} takes the columns {', '.join(sorted(lacking))}, which {data.path!r} lacks. "
            "Set evaluate.reference_model to null until a model of these columns is released."
        )
    places = _Places(test)
    for source, row_id, row in read_json_rows(data, contract.columns, set(test.sources)):
        place = places.take(source, row_id)
        with contextlib.suppress(CellError):
            yield place, read_row(row, contract)
    places.check_all_taken()


class _Places:
    """Where each raw row is among the test rows; each is taken once."""

    def __init__(self, test: PackedSplit) -> None:
        self._ids = test.ids
        self._waiting = {source: place for place, source in enumerate(test.sources)}

    def take(self, source: str, row_id: str | None) -> int:
        """The place of a raw row; IntegrityError if it is not the row that was packed."""
        place = self._waiting.pop(source, None)
        if place is None or self._ids[place] != row_id:
            raise IntegrityError(
                f"{source} changed since it was packed. Run `dvc repro`, which starts at the changed data."
            )
        return place

    def check_all_taken(self) -> None:
        """IntegrityError if a test row did not come."""
        if self._waiting:
            raise IntegrityError(
                f"{len(self._waiting)} test rows are gone from the raw data, the first is {min(self._waiting)}. Run `dvc repro`."
            )


def _grouped(
    rows: Iterator[tuple[int, T]], size: int, make: Callable[[list[T]], NDArray[Any]]
) -> Iterator[_Batch]:
    while batch := list(itertools.islice(rows, size)):
        places, items = zip(*batch, strict=True)
        yield _Batch(np.array(places), make(list(items)))
