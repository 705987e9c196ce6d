"""Chooses the rows of a bundle's drift reference, and writes its file.

slipway/drift/ defines the format of the reference.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import DRIFT, ModelFile, OutputContract
from slipway.artifacts.uncertainty import Answers, Calibration
from slipway.data.engine.randomness import drawn_order
from slipway.data.store.packed import Inputs, PackedSplit
from slipway.drift.reference import (
    describe_answers,
    describe_inputs,
    extract_blocks,
    references_bytes,
)
from slipway.inputs.contract import InputContract
from slipway.runtimes.runtime import open_onnx, run_in_batches
from slipway.system import files

# Most rows of a split: with so many, its sampling error is small beside that of any window.
_MAX_ROWS = 20_000
# Fewest recent validation rows; with fewer, all rows are described. The tests expect 20 rows in a
# bin, so fewer than two bins' rows would show no change of an answer.
_MIN_RECENT = 40
_BLOCK_ROWS = 256


def choose_rows(
    split: PackedSplit, seed: int, num_rows: int = _MAX_ROWS, recent_from: int | None = None
) -> NDArray[np.intp]:
    """Choose at most `num_rows` rows of the split, by seed and ids only, in ascending order.

    With `recent_from`, only rows of the data from this number on are chosen.
    """
    order = drawn_order(seed, 0, split.keys, "drift")
    if recent_from is not None:
        numbers = np.array([int(source.partition(":")[0]) for source in split.sources], np.int64)
        order = order[numbers[order] >= recent_from]
    return np.sort(order[:num_rows])


def has_served_form(inputs: Inputs, contract: InputContract) -> bool:
    """Return True if the rows are stored exactly as the service computes them from raw input.

    Training images may instead be stored larger, for random crops, or as lossy JPEGs.
    """
    return isinstance(inputs, np.ndarray) and tuple(inputs.shape[1:]) == tuple(contract.shape)


@dataclass(frozen=True)
class DriftRows:
    """The rows from which a drift reference is made."""

    validation: PackedSplit
    train: PackedSplit | None  # enlarges the input reference if it is stored in the served form
    seed: int
    batch_size: int  # batch size of the validation rows' answers
    # First row of the data, from 0, that describes the present traffic; None: all rows do.
    recent_from: int | None = None


def write_drift(
    root: Path,
    contract: InputContract,
    output: OutputContract,
    calibration: Calibration,
    models: Mapping[str, ModelFile],
    rows: DriftRows,
) -> str:
    """Write the drift reference: inputs, and every graph's predictions for the validation rows.

    Returns:
        The SHA-256 of the file.
    """
    validation, train, recent_from = rows.validation, rows.train, rows.recent_from
    chosen = choose_rows(validation, rows.seed, recent_from=recent_from)
    if len(chosen) < _MIN_RECENT:
        recent_from, chosen = None, choose_rows(validation, rows.seed)
    more_inputs: Iterator[NDArray[Any]] = iter(())
    if train and has_served_form(train.inputs, contract):
        more_inputs = _blocks(train.inputs, choose_rows(train, rows.seed, recent_from=recent_from))
    values = extract_blocks(contract, _blocks(validation.inputs, chosen))
    inputs = describe_inputs(contract, values, more_inputs)

    answers = {}
    for variant, model in models.items():
        graph = (root / model.file).read_bytes()
        found = _answers(graph, variant, validation.inputs, chosen, rows.batch_size)
        own = model.calibration or calibration
        targets = validation.targets[chosen]
        answers[variant] = describe_answers(output, own, found, targets, inputs, values)
    payload = references_bytes(inputs, answers)
    files.write_bytes(root / DRIFT, payload)
    return files.sha256_bytes(payload)


def _answers(
    graph: bytes, variant: str, inputs: Inputs, chosen: NDArray[np.intp], batch_size: int
) -> Answers:
    runner = open_onnx(graph, variant=variant, precision=variant, provider="cpu", num_threads=0)
    return run_in_batches(lambda indices: runner.run(inputs[indices]), chosen, batch_size)


def _blocks(inputs: Inputs, chosen: NDArray[np.intp]) -> Iterator[NDArray[Any]]:
    for start in range(0, len(chosen), _BLOCK_ROWS):
        yield np.ascontiguousarray(inputs[chosen[start : start + _BLOCK_ROWS]])
