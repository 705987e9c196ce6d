"""Packs texts: the bytes or tokens of the split rows become one matrix per split.

A BPE tokenizer is learned from the training rows only; it is the same, byte for byte, in each run.
The service encodes requests with the same functions. `slipway.data.store.packed` reads the store.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.params import Params
from slipway.config.sections import PrecomputeParams
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
from slipway.inputs.texts import (
    TextContract,
    encode_texts,
    import_tokenizers,
    joins_pairs,
    load_tokenizer,
    read_tokenizer,
    text_of,
)
from slipway.system import files
from slipway.system.errors import IntegrityError

_BLOCK_ROWS = 1 << 12


def pack_texts(params: Params, rows: pa.Table, paths: PackPaths) -> str:
    """Encode `rows` (schema SPLIT_ROWS) into the packed store; return a summary to print."""
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
        masked=params.precompute.mask_personal_data,
        ignored=[name for name in columns_of(data) if name not in used],
    )
    is_training = pc.equal(rows["split"], "train")
    contract = _with_tokenizer(contract, params.precompute, texts.filter(is_training))
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
        manifest = PackedManifest(
            format_version=3,
            task=task,
            input=contract,
            classes=classes,
            mean=[],
            std=[],
            target_scale=None if classes else target_scale(targets[is_training.to_numpy()]),
            splits=manifests,
        )
        write_manifest(folder, manifest)
    return _summary(contract, rows.num_rows, num_cut)


def _summary(contract: TextContract, num_rows: int, num_cut: int) -> str:
    """Describe the packed texts for the terminal, and how many of them were cut."""
    notes = [f"packed {num_rows} texts of at most {contract.max_bytes} bytes"]
    limits = f"precompute.max_text_bytes is {contract.max_bytes}"
    if contract.tokenizer:
        notes[0] += f", as at most {contract.max_tokens} of {contract.vocabulary_size:,} tokens"
        limits += f", max_tokens {contract.max_tokens}"
    if num_cut:
        notes.append(f"{num_cut} texts are longer and were cut: {limits}")
    return "\n".join(notes)


def _texts_of(rows: pa.Table, texts: pa.Table) -> pa.Table:
    positions = pc.index_in(rows["id"].combine_chunks(), texts[ID_COLUMN].combine_chunks())
    if positions.null_count:
        raise IntegrityError(
            f"{positions.null_count} of {rows.num_rows} rows have no texts in data/clean. "
            "Run `dvc repro --force clean split`."
        )
    return texts.take(positions)


def _with_tokenizer(
    contract: TextContract, params: PrecomputeParams, training: pa.Table
) -> TextContract:
    """Return the contract with the tokenizer that `params` name, if they name one.

    Raises ParamsError if that tokenizer is not usable, UnavailableError if the package tokenizers
    is not installed.
    """
    if params.tokenizer is None:
        return contract
    if params.tokenizer == "bpe":
        content = learned_tokenizer(_texts(training, contract), params.vocabulary_size or 0)
    else:
        content = read_tokenizer(Path(params.tokenizer))
    is_pair = len(contract.columns) == 2 and joins_pairs(load_tokenizer(content))
    fields = {"tokenizer": content, "max_tokens": params.max_tokens, "is_pair": is_pair}
    return contract.model_copy(update=fields)


def learned_tokenizer(texts: Iterable[str], vocabulary_size: int) -> str:
    """Learn a byte-level BPE tokenizer; return the content of its `tokenizer.json`.

    Every byte is a token, so no text contains unknown tokens. Equal texts in any order give equal
    content. Raises UnavailableError if the package tokenizers is not installed.
    """
    tokenizers = import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    content: str = tokenizer.to_str()
    return content


def _texts(rows: pa.Table, contract: TextContract) -> Iterator[str]:
    """Yield the text of each row, composed of the cells of its text columns."""
    for batch in rows.to_batches(_BLOCK_ROWS):
        cells = zip(*(batch[name].to_pylist() for name in contract.columns), strict=True)
        yield from (text_of((cell or "" for cell in row), contract) for row in cells)


def _write(
    root: Path, rows: pa.Table, texts: pa.Table, targets: NDArray[Any], contract: TextContract
) -> tuple[PackedSplitManifest, int]:
    """Write the folder of a split; return its manifest and the number of truncated texts."""
    root.mkdir()
    write_labels(root, targets)
    inputs = np.lib.format.open_memmap(
        root / "inputs.npy",
        mode="w+",
        dtype=contract.dtype,
        shape=(rows.num_rows, *contract.shape),
    )
    for begin in range(0, rows.num_rows, _BLOCK_ROWS):
        block = list(_texts(texts.slice(begin, _BLOCK_ROWS), contract))
        inputs[begin : begin + len(block)] = encode_texts(block, contract)
    inputs.flush()
    num_cut = int(contract.is_truncated(inputs).sum())
    return write_split(root, packed_rows(rows, targets), contract.shape), num_cut
