"""Chooses the golden rows of a bundle and writes them with fp32's answers."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from slipway.artifacts.bundle import ModelFile
from slipway.artifacts.golden_rows import (
    FILE,
    GoldenFile,
    GoldenRows,
    golden_budget,
    golden_rows_bytes,
)
from slipway.data.engine.randomness import uniform
from slipway.data.store.packed import PackedSplit
from slipway.export.graphs.graph import onnx_answers
from slipway.system import files


def write_golden_rows(
    root: Path,
    split: PackedSplit,
    seed: int,
    num_rows: int,
    models: Mapping[str, ModelFile],
    batch_size: int,
) -> GoldenFile | None:
    """Draw rows of the split, answer them with every graph in `root` and write the file.

    The choice of `num_rows` rows, or all there are, depends only on the seed and the ids.

    Returns:
        The record for `bundle.json`; None for 0 rows.
    """
    if num_rows == 0:
        return None
    draw = uniform(seed, 0, split.keys, "canary")
    rows = np.sort(np.lexsort((split.keys, draw))[:num_rows])
    ids, inputs = [split.ids[row] for row in rows], split.inputs[rows]
    answers = {
        variant: onnx_answers((root / model.file).read_bytes(), inputs, batch_size, variant)
        for variant, model in models.items()
    }
    payload = golden_rows_bytes(GoldenRows(ids, inputs, answers["fp32"]))
    files.write_bytes(root / FILE, payload)
    budgets = {
        variant: golden_budget(answers[variant], answers["fp32"], model.precision)
        for variant, model in models.items()
    }
    return GoldenFile(
        file=FILE,
        sha256=files.sha256_bytes(payload),
        bytes=len(payload),
        rows=len(rows),
        budgets=budgets,
    )
