"""Which validation rows become canary rows, and the file that carries them with fp32's answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import ModelFile
from slipway.artifacts.golden_rows import FILE, Canary, CanaryRows, canary_budget, canary_bytes
from slipway.data.engine.randomness import uniform
from slipway.data.store.packed import PackedSplit
from slipway.export.graphs.variants import run_in_batches
from slipway.runtimes.runtime import Runner, open_onnx
from slipway.system import files


@dataclass(frozen=True)
class ChosenRows:
    """Rows that were chosen, in the order of their split."""

    ids: list[str]
    inputs: NDArray[Any]  # (rows, ...) as the network takes them


def choose_canary(split: PackedSplit, seed: int, num_rows: int) -> ChosenRows | None:
    """`num_rows` rows of the validation split, or all there are; which ones depends on seed and ids only. None for 0."""
    if num_rows == 0:
        return None
    draw = uniform(seed, 0, split.keys, "canary")
    chosen = np.sort(np.lexsort((split.keys, draw))[:num_rows])
    return ChosenRows([split.ids[row] for row in chosen], split.inputs[chosen])


def write_canary(
    root: Path, chosen: ChosenRows | None, models: Mapping[str, ModelFile], batch_size: int
) -> Canary | None:
    """Answer the rows with every graph in `root`, write the file, and what `bundle.json` says of it; None where no rows were chosen."""
    if chosen is None:
        return None
    answers = {
        variant: run_in_batches(_open(root, variant, model), chosen.inputs, batch_size)
        for variant, model in models.items()
    }
    payload = canary_bytes(CanaryRows(chosen.ids, chosen.inputs, answers["fp32"]))
    files.write_bytes(root / FILE, payload)
    budgets = {
        variant: canary_budget(answers[variant], answers["fp32"], model.precision)
        for variant, model in models.items()
    }
    return Canary(
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
