"""The drift reference of a bundle: which rows it describes, and the file that carries it. slipway/drift/ says how."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import DRIFT, ModelFile, OutputContract
from slipway.artifacts.input_contract import InputContract
from slipway.artifacts.uncertainty import Answers, Calibration
from slipway.data.engine.randomness import uniform
from slipway.data.store.packed import Inputs, PackedSplit
from slipway.drift.reference import (
    describe_answers,
    describe_inputs,
    extract_blocks,
    references_bytes,
)
from slipway.runtimes.runtime import open_onnx
from slipway.system import files

_MOST_ROWS = 20_000  # of a split: with so many the reference's own sampling error is small beside any window's
_BLOCK_ROWS = 256


def choose_rows(split: PackedSplit, seed: int, num_rows: int = _MOST_ROWS) -> NDArray[np.intp]:
    """(rows,) increasing: `num_rows` rows of the split, or all there are; which ones depends on seed and ids only."""
    draw = uniform(seed, 0, split.keys, "drift")
    return np.sort(np.lexsort((split.keys, draw))[:num_rows])


def has_served_form(inputs: Inputs, contract: InputContract) -> bool:
    """Whether the rows are stored as the service sees them: not larger, for random crops, nor compressed once more."""
    return isinstance(inputs, np.ndarray) and tuple(inputs.shape[1:]) == tuple(contract.shape)


@dataclass(frozen=True)
class DriftRows:
    """What a reference is made of."""

    validation: PackedSplit
    train: (
        PackedSplit | None
    )  # makes the reference of the input larger, where it is stored in the served form
    seed: int
    batch_size: int  # of the validation rows' answers


def write_drift(
    root: Path,
    contract: InputContract,
    output: OutputContract,
    calibration: Calibration,
    models: Mapping[str, ModelFile],
    rows: DriftRows,
) -> str:
    """Answer validation rows with every graph in `root`, on the CPU, write the reference, and give its SHA-256."""
    validation, train = rows.validation, rows.train
    chosen = choose_rows(validation, rows.seed)
    further = (
        _blocks(train.inputs, choose_rows(train, rows.seed))
        if train and has_served_form(train.inputs, contract)
        else ()
    )
    values = extract_blocks(contract, _blocks(validation.inputs, chosen))
    inputs = describe_inputs(contract, values, further)
    answers = {}
    for variant, model in models.items():
        graph = (root / model.file).read_bytes()
        runner = open_onnx(
            graph, variant=variant, precision=model.precision, provider="cpu", num_threads=0
        )
        outputs, scores = zip(
            *(runner.run(block) for block in _blocks(validation.inputs, chosen, rows.batch_size)),
            strict=True,
        )
        found = Answers(np.concatenate(outputs), np.concatenate(scores))
        own = model.calibration or calibration
        answers[variant] = describe_answers(
            output, own, found, validation.targets[chosen], inputs, values
        )
    payload = references_bytes(inputs, answers)
    files.write_bytes(root / DRIFT, payload)
    return files.sha256_bytes(payload)


def _blocks(
    inputs: Inputs, chosen: NDArray[np.intp], block_rows: int = _BLOCK_ROWS
) -> Iterator[NDArray[Any]]:
    for start in range(0, len(chosen), block_rows):
        yield np.ascontiguousarray(inputs[chosen[start : start + block_rows]])
