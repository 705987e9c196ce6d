"""Packs texts: the bytes or tokens of the split rows become one matrix per split.

A BPE tokenizer is learned from the training rows only; it is the same, byte for byte, in each run.
The service encodes requests with the same functions. `slipway.data.store.packed` reads the store.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipway.config.params import Params
from slipway.config.sections import PrecomputeParams
from slipway.data.store.packed import PackPaths
from slipway.data.store.targets import write_store
from slipway.data.tables.clean_files import in_order_of
from slipway.data.tables.source import columns_of
from slipway.data.texts.clean_files import read_texts
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

_BLOCK_ROWS = 1 << 12


def pack_texts(params: Params, rows: pa.Table, paths: PackPaths) -> str:
    """Encode `rows` (schema SPLIT_ROWS) into the packed store; return a summary to print."""
    data = params.data
    rows = rows.sort_by("id")
    texts = in_order_of(rows, read_texts(paths.clean, data.text_columns), "texts")
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
    training = texts.filter(pc.equal(rows["split"], "train"))
    contract = _with_tokenizer(contract, params.precompute, training)
    num_cut = 0

    def write_inputs(path: Path, chosen: pa.ChunkedArray) -> None:
        nonlocal num_cut
        num_cut += _write_texts(path, texts.filter(chosen), contract)

    with files.new_directory(paths.packed) as folder:
        write_store(folder, rows, params.data.task, contract, write_inputs)
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


def _write_texts(path: Path, texts: pa.Table, contract: TextContract) -> int:
    """Write the encoded texts of a split; return the number of truncated texts."""
    shape = (texts.num_rows, *contract.shape)
    inputs = np.lib.format.open_memmap(path, mode="w+", dtype=contract.dtype, shape=shape)
    for begin in range(0, texts.num_rows, _BLOCK_ROWS):
        block = list(_texts(texts.slice(begin, _BLOCK_ROWS), contract))
        inputs[begin : begin + len(block)] = encode_texts(block, contract)
    inputs.flush()
    return int(contract.is_truncated(inputs).sum())
