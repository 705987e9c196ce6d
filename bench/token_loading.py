"""Compares the loader of packed tokens with a DataLoader that tokenises on the fly.

`python -m bench.token_loading FILE.csv` learns a BPE of 8,000 tokens from the texts of the last
column, and loads whole epochs of batches of 128 rows. The first loader is that of the stage train,
with rows of tokens as `precompute` stores them. The second is torch's DataLoader with two
persistent workers, as in tutorials: a worker tokenises a batch with the same tokenizer in one call,
and pads it to its longest text. The loaders take turns, after a first epoch that does not count.
"""

import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from bench.conditions import conditions
from slipway.data.store.packed import PackedSplit
from slipway.data.texts.packing import learned_tokenizer
from slipway.inputs.texts import TextContract, encode_texts, text_of
from slipway.system import files
from slipway.training.batches.batches import TrainingBatches, cut_step, training_loader

RESULT = Path.cwd() / "bench/results/token_loading.md"
BATCH_SIZE, MAX_TOKENS, VOCABULARY_SIZE, ROUNDS, NUM_WORKERS = 128, 128, 8000, 5, 2


def packed(texts: list[str], contract: TextContract, folder: Path) -> PackedSplit:
    """Store the rows as `precompute` does, and map them into memory."""
    np.save(folder / "inputs.npy", encode_texts(texts, contract), allow_pickle=False)
    num_rows = len(texts)
    return PackedSplit(
        inputs=np.load(folder / "inputs.npy", mmap_mode="r", allow_pickle=False),
        targets=np.zeros(num_rows),
        ids=[f"{number:064x}" for number in range(num_rows)],
        sources=[str(number) for number in range(num_rows)],
        weights=np.ones(num_rows),
        leaked=np.zeros(num_rows, bool),
    )


class Tokenising:
    """Turns a list of texts into padded ids and a mask, in a worker."""

    def __init__(self, contract: TextContract) -> None:
        self._contract = contract

    def __call__(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and mask, both (B, L) int64."""
        found = [one.ids for one in self._contract.loaded_tokenizer.encode_batch_fast(texts)]
        ids = torch.zeros((len(found), max(map(len, found))), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, own in enumerate(found):
            ids[row, : len(own)] = torch.tensor(own)
            mask[row, : len(own)] = 1
        return ids, mask


def seconds(loader: Iterable[Any]) -> float:
    """Return the seconds of one epoch."""
    begin = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - begin


def main() -> None:
    """Write the table of both loaders."""
    with Path(sys.argv[1]).open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    contract = TextContract(
        kind="texts", columns=["text"], max_bytes=2048, max_characters=None, max_tokens=MAX_TOKENS
    )
    texts = [text_of([row[-1]], contract) for row in rows]
    contract = contract.model_copy(update={"tokenizer": learned_tokenizer(texts, VOCABULARY_SIZE)})
    num_rows = len(texts) // BATCH_SIZE * BATCH_SIZE
    with tempfile.TemporaryDirectory() as folder:
        split = packed(texts, contract, Path(folder))
        shape = cut_step(BATCH_SIZE, 1, BATCH_SIZE)
        batches = TrainingBatches([split], shape, 0, 7, None, "int64")
        ours = training_loader(batches, 0)
        usual: DataLoader[Any] = DataLoader(
            texts,  # type: ignore[arg-type]
            batch_size=BATCH_SIZE,
            shuffle=True,
            drop_last=True,
            num_workers=NUM_WORKERS,
            collate_fn=Tokenising(contract),
            persistent_workers=True,
        )
        sides = {"packed tokens": ours, f"tokenised by {NUM_WORKERS} workers": usual}
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(ROUNDS + 1):
            for name, loader in sides.items():
                speed = num_rows / seconds(loader)
                if turn:
                    speeds[name].append(speed)
    lines = ["| Loader | Rows per second, median | Range |", "|---|---|---|"]
    lines += [
        f"| {name} | {statistics.median(found):,.0f} | {min(found):,.0f} to {max(found):,.0f} |"
        for name, found in speeds.items()
    ]
    medians = [statistics.median(found) for found in speeds.values()]
    note = (
        f"{medians[0] / medians[1]:.1f} times as fast, n = {ROUNDS} epochs of {num_rows:,} rows of "
        f"{Path(sys.argv[1]).name}, at most {MAX_TOKENS} tokens, batches of {BATCH_SIZE}. "
        f"{conditions('torch', 'tokenizers')}"
    )
    text = "\n".join(lines)
    print(text, note, sep="\n")
    files.write_text(RESULT, f"# Loading of tokens\n\n{text}\n\n{note}\n")


if __name__ == "__main__":
    main()
