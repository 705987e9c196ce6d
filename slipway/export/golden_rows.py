"""Choice of the golden rows, and the file that stores them with fp32's answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from slipway.export.graphs.variants import run_in_batches
from slipway.runtimes.runtime import Runner, open_onnx
from slipway.system import files


@dataclass(frozen=True)
class ChosenRows:
    """Chosen rows, in the order of their split."""

    ids: list[str]
    inputs: NDArray[Any]  # (rows, ...) as the network takes them


def choose_golden_rows(split: PackedSplit, seed: int, num_rows: int) -> ChosenRows | None:
    """Choose up to `num_rows` validation rows by seed and ids only; None for 0."""
    if num_rows == 0:
        return None
    draw = uniform(seed, 0, split.keys, "canary")
    chosen = np.sort(np.lexsort((split.keys, draw))[:num_rows])
    return ChosenRows([split.ids[row] for row in chosen], split.inputs[chosen])


def write_golden_rows(
    root: Path, chosen: ChosenRows | None, models: Mapping[str, ModelFile], batch_size: int
) -> GoldenFile | None:
    """Answer the rows with each graph in `root`, write the file and return its manifest entry.

    None if no rows were chosen.
    """
    if chosen is None:
        return None
    answers = {
        variant: run_in_batches(_open(root, variant, model), chosen.inputs, batch_size)
        for variant, model in models.items()
    }
    payload = golden_rows_bytes(GoldenRows(chosen.ids, chosen.inputs, answers["fp32"]))
    files.write_bytes(root / FILE, payload)
    budgets = {
        variant: golden_budget(answers[variant], answers["fp32"], model.precision)
        for variant, model in models.items()
    }
    return GoldenFile(
        file=FILE,
        sha256=files.sha256_bytes(payload),
        bytes=len(payload),
        rows=len(chosen.ids),
        budgets=budgets,
    )


def _open(root: Path, variant: str, model: ModelFile) -> Runner:
    graph = (root / model.file).read_bytes()
    return open_onnx(
        graph, variant=variant, precision=model.precision, provider="cpu", num_threads=0
    )
