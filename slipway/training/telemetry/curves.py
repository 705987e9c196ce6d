"""Reads the curves of a finished training from DVCLive's files.

There is one TSV file for each metric, with the columns `step` and value.
"""

import csv
from pathlib import Path

from slipway.reports.pages.charts import Series
from slipway.system.errors import SchemaError

_MAX_POINTS = 400  # most points of a line; a picture shows no more


def read_curves(live: Path) -> dict[str, list[Series]]:
    """Return the curves of each metric, such as {"loss": [train, val], "accuracy": [val]}.

    Returns an empty dictionary if nothing was logged. Raises SchemaError if a file is not such a
    table.
    """
    root = live / "plots" / "metrics"
    curves: dict[str, list[Series]] = {}
    for path in sorted(root.rglob("*.tsv")):
        if path.stem != "epoch":
            curves.setdefault(path.stem, []).append(
                _read_line(path, path.parent.relative_to(root).as_posix())
            )
    return curves


def _read_line(path: Path, split: str) -> Series:
    try:
        with path.open(newline="") as file:
            points = [
                (float(row["step"]), float(row[path.stem]))
                for row in csv.DictReader(file, delimiter="\t")
            ]
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaError(
            f"{path} is not a curve of DVCLive ({error!r}), expected the columns step and "
            f"{path.stem}."
        ) from error
    shown = points[:: max(1, len(points) // _MAX_POINTS)]
    return Series(
        name=path.stem if split == "." else split, x=[x for x, _ in shown], y=[y for _, y in shown]
    )
