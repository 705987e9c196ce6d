"""Builds the sections of `reports/data.html` on texts: lengths, and examples as packed."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.inputs.personal_data import IN_WORDS, mask
from slipway.inputs.texts import TextContract
from slipway.reports.pages.cells import text_cells
from slipway.reports.pages.charts import spark_bars
from slipway.reports.pages.html_page import Html, paragraph, section, table

_MOST_NUMBERS = 20_000_000  # read, from the front
_MOST_CLASSES = 100
_NUM_BINS = 24  # bars of a small histogram
_EXAMPLES = 3  # for each class
_MOST_EXAMPLES = 24


def text_sections(splits: Mapping[str, PackedSplit], manifest: PackedManifest) -> list[Html | None]:
    """Show the lengths of the training rows of each class, and examples."""
    assert isinstance(manifest.input, TextContract)
    train, contract = splits["train"], manifest.input
    most = max(1, _MOST_NUMBERS // contract.shape[0])
    rows = np.asarray(train.inputs[:most])
    classes = manifest.classes[:_MOST_CLASSES]
    places = {name: train.rows_of(label) for label, name in enumerate(classes)}
    found = {name: own[own < most] for name, own in places.items() if len(own)}
    groups = found or {"all": np.arange(len(rows))}
    return [_lengths(rows, groups, contract), _examples(rows, groups, contract)]


def _lengths(
    rows: NDArray[np.generic], groups: Mapping[str, NDArray[np.int64]], contract: TextContract
) -> Html:
    is_cut = contract.is_truncated(rows)
    lengths = (rows != 0).sum(axis=1)
    unit = "tokens" if contract.tokenizer else "bytes"
    bins = np.linspace(0, contract.shape[0], _NUM_BINS + 1)
    columns = ["of", "rows", "shortest", "median", "longest", "cut"]
    cells, bars = [], []
    for name, own in groups.items():
        if not len(own):
            continue
        low, middle, high = np.quantile(lengths[own], (0, 0.5, 1), method="nearest")
        cells.append(
            [
                name,
                f"{len(own):,}",
                f"{low:,}",
                f"{middle:,}",
                f"{high:,}",
                f"{is_cut[own].mean():.1%}",
            ]
        )
        counts, _ = np.histogram(lengths[own], bins)
        bars.append(spark_bars(counts.tolist(), f"lengths of {name}"))
    note = (
        f"{len(rows):,} training rows as they are packed, in {unit}; at most {contract.shape[0]:,} "
        "are read, and longer texts are cut (precompute.max_text_bytes, precompute.max_tokens)."
    )
    drawn = table(columns, cells, numeric=columns[1:], last=bars)
    return section("Lengths", drawn, paragraph(note, "note"))


def _examples(
    rows: NDArray[np.generic], groups: Mapping[str, NDArray[np.int64]], contract: TextContract
) -> Html:
    chosen = [(name, row) for name, own in groups.items() for row in own[:_EXAMPLES].tolist()]
    chosen = chosen[:_MOST_EXAMPLES]
    names, texts, _ = text_cells(contract, [rows[row] for _, row in chosen])
    cells = [[name, mask(text, IN_WORDS)] for (name, _), (text,) in zip(chosen, texts, strict=True)]
    note = "Their beginnings as the network reads them. Personal data is left out here."
    return section("Examples", table(["of", *names], cells), paragraph(note, "note"))
