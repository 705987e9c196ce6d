"""Packing of texts: the bytes of the split rows become one uint8 matrix per split.

The service encodes requests with the same functions. `slipway.data.store.packed` reads the store.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.params import Params
from slipway.data.engine.rows import SPLITS
from slipway.data.store.packed import (
    PackedManifest,
    PackedSplitManifest,
    PackPaths,
    write_labels,
    write_manifest,
    write_split,
)
from slipway.data.store.targets import class_names, packed_rows, target_scale, targets_of
from slipway.data.tables.files import ID_COLUMN
from slipway.data.tables.source import columns_of
from slipway.data.texts.files import read_texts
from slipway.inputs.texts import TRUNCATED, TextContract, encode_texts, text_of
from slipway.system import files
from slipway.system.errors import IntegrityError

_BLOCK_ROWS = 1 << 12


def pack_texts(params: Params, rows: pa.Table, paths: PackPaths) -> str:
    """Encode the rows (`rows.SPLIT_ROWS`) into the packed store; return what to print."""
    data, task = params.data, params.data.task
    rows = rows.sort_by("id")
    texts = _texts_of(rows, read_texts(paths.clean, data.text_columns))
    used = {*data.text_columns, *data.target_columns}
    contract = TextContract(
        kind="texts",
        columns=data.text_columns,
        max_bytes=params.precompute.max_text_bytes,
        max_characters=params.clean.max_characters
        if params.clean.rules.too_long == "refuse"
        else None,
        ignored=[name for name in columns_of(data) if name not in used],
    )
    classes = class_names(rows, task)
    targets = targets_of(rows, classes, task)
    num_cut, manifests = 0, {}
    with files.new_directory(paths.packed) as folder:
        for split in SPLITS:
            chosen = pc.equal(rows["split"], split)
            part = rows.filter(chosen)
            own_targets = targets[chosen.to_numpy()]
            manifests[split], cut = _write(
                folder / split, part, texts.filter(chosen), own_targets, contract
            )
            num_cut += cut
        is_training = pc.equal(rows["split"], "train").to_numpy()
        manifest = PackedManifest(
            format_version=3,
            task=task,
            input=contract,
            classes=classes,
            mean=[],
            std=[],
            target_scale=None if classes else target_scale(targets[is_training]),
            splits=manifests,
        )
        write_manifest(folder, manifest)
    notes = [f"packed {rows.num_rows} texts of at most {contract.max_bytes} bytes"]
    if num_cut:
        notes.append(
            f"{num_cut} texts are longer and were cut: "
            f"precompute.max_text_bytes is {contract.max_bytes}"
        )
    return "\n".join(notes)


def _texts_of(rows: pa.Table, texts: pa.Table) -> pa.Table:
    positions = pc.index_in(rows["id"].combine_chunks(), texts[ID_COLUMN].combine_chunks())
    if positions.null_count:
        raise IntegrityError(
            f"{positions.null_count} of {rows.num_rows} rows have no texts in data/clean. "
            "Run `dvc repro --force clean split`."
        )
    return texts.take(positions)


def _write(
    root: Path, rows: pa.Table, texts: pa.Table, targets: NDArray[Any], contract: TextContract
) -> tuple[PackedSplitManifest, int]:
    """Write the folder of a split; return its manifest and the number of texts that were cut."""
    root.mkdir()
    write_labels(root, targets)
    inputs = np.lib.format.open_memmap(
        root / "inputs.npy", mode="w+", dtype=np.uint8, shape=(rows.num_rows, *contract.shape)
    )
    for begin in range(0, rows.num_rows, _BLOCK_ROWS):
        block = texts.slice(begin, _BLOCK_ROWS)
        cells = zip(*(block[name].to_pylist() for name in contract.columns), strict=True)
        joined = [text_of((cell or "" for cell in row), contract) for row in cells]
        inputs[begin : begin + block.num_rows] = encode_texts(joined, contract)
    inputs.flush()
    num_cut = int((inputs[:, -1] == TRUNCATED).sum())
    return write_split(root, packed_rows(rows, targets), contract.shape), num_cut
