"""Validates 21 rows in real processes: `python -m tests.training.counted_rows FOLDER`.

For 1, 2 and 4 processes it writes SIZE.json: the metrics of the validation, and the fraction of
rows in each cell of the confusion matrix, summed and reduced by the same code.
SIZE_with_fillers.json has the results of a control that counts padding rows, too.
"""

import json
import multiprocessing
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn.functional import one_hot

from slipway.config.params import load_params
from slipway.data.store.packed import PackedSplit
from slipway.training.batches.batches import ValidationBatches, batch_loader
from slipway.training.module import EpochSums, TrainingModule
from slipway.training.networks.networks import build_network
from tests.training.conftest import ROOT, spec, split_of

NUM_ROWS, CLASSES, SIZES = 21, ["above", "below", "beside"], (1, 2, 4)
_TIMEOUT_S = 120.0


def rows() -> PackedSplit:
    """Return the rows; none has the third class, but the network predicts it for some."""
    return split_of(NUM_ROWS)


def answers(inputs: torch.Tensor) -> torch.Tensor:
    """Return logits (B, 3); those of a row do not depend on the other rows, bit for bit."""
    return inputs.flatten(1)[:, [0, 40, 20]]


def validate(rank: int, size: int, folder: Path, count_fillers: bool) -> None:
    """Run the process `rank` of `size`; rank 0 writes the result of all processes."""
    name = f"{size}_with_fillers" if count_fillers else f"{size}"
    torch.set_num_threads(1)
    if size > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder / name}", rank=rank, world_size=size
        )
    module, cells = _module(), EpochSums()
    for batch in batch_loader(
        ValidationBatches(rows(), 8, size, rank, target_dtype="int64"), num_workers=0
    ):
        counted = torch.ones_like(batch.counted) if count_fillers else batch.counted
        with torch.inference_mode():
            module.validation_step(batch._replace(counted=counted))
            predicted = module.network(batch.inputs).argmax(dim=1)
        cell = one_hot(batch.targets * len(CLASSES) + predicted, len(CLASSES) ** 2)
        cells.add(
            counted=counted, **{str(index): cell[:, index] for index in range(len(CLASSES) ** 2)}
        )
    found = {"validation": module._val_sums.means(), "cells": cells.means()}
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(found))
    if size > 1:
        distributed.destroy_process_group()


def _module() -> TrainingModule:
    torch.manual_seed(0)
    params = load_params(ROOT / "params.yaml").train
    module = TrainingModule(
        build_network(spec(classes=CLASSES)), params, seed=3, steps_per_epoch=1, ids=rows().ids
    ).eval()
    module.network.backbone.register_forward_hook(lambda _, inputs, __: answers(inputs[0]))
    return module


def main(folder: Path) -> None:
    """Run the validation with each number of processes in turn."""
    context = multiprocessing.get_context("fork")
    for size, count_fillers in [*((size, False) for size in SIZES), (4, True)]:
        processes = [
            context.Process(target=validate, args=(rank, size, folder, count_fillers))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_TIMEOUT_S)
        if any(process.exitcode != 0 for process in processes):
            for process in processes:
                process.kill()
            raise SystemExit(
                f"{size} processes ended with {[process.exitcode for process in processes]}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
