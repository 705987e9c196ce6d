"""Splitting: train, val and test as a pure function of the content and the seed, never of the order of rows.

Each class (for a numeric target: each tenth of its range, by rank) is split in the same shares. A group stays whole. An empty split, a
class that one of them lacks, and any leak between two splits is refused.
"""

import hashlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipway.data.packed import SPLITS
from slipway.data.randomness import id_keys, uniform
from slipway.data.rows import SPLIT_ROWS
from slipway.errors import DataError
from slipway.params import SplitParams

_MAX_BINS = 10
_UNITS_PER_BIN = 20
_MAX_SHOWN = 5


@dataclass(frozen=True)
class _Unit:
    """What is never divided: a group, or a single row without one."""

    name: str
    rows: list[dict[str, Any]]

    @property
    def stratum(self) -> str:
        """Its most frequent class, of equally frequent ones the first by name."""
        counts = Counter(str(row["label"]) for row in self.rows)
        return min(counts, key=lambda label: (-counts[label], label))

    @property
    def mean_target(self) -> float:
        return float(np.mean([row["target"] for row in self.rows]))


def split_rows(rows: pa.Table, params: SplitParams, seed: int) -> pa.Table:
    """`rows.ROWS` to `rows.SPLIT_ROWS`, sorted by id; DataError if a split, or a class in one, would be empty."""
    records = sorted(rows.to_pylist(), key=lambda row: str(row["id"]))
    shares = (params.train, params.val, params.test)
    owed = [0.0] * len(SPLITS)
    for stratum in _strata(_units(records)):
        units = _shuffled(stratum, seed)
        for unit, split in zip(units, _assign(units, shares, owed), strict=True):
            for row in unit.rows:
                row["split"], row["leaked"] = split, False
    table = pa.Table.from_pylist(records, schema=SPLIT_ROWS)
    check_complete(table, shares)
    return table


def largest_remainder(total: int, shares: Sequence[float], owed: Sequence[float] = (0, 0, 0)) -> list[int]:
    """`total` in whole parts by `shares` (which sum to 1): each rounded down, what is left to the largest remainders.

    Of equal remainders the part that is `owed` most is first, otherwise the first would gain in every stratum.
    """
    exact = [total * share for share in shares]
    counts = [int(value + 1e-9) for value in exact]
    remainders = [round(value - count, 9) for value, count in zip(exact, counts, strict=True)]
    order = sorted(range(len(shares)), key=lambda index: (-remainders[index], -round(owed[index], 9), index))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


def check_complete(table: pa.Table, shares: Sequence[float]) -> None:
    """DataError with the counts if a split of `rows.SPLIT_ROWS`, or a class in it, is empty."""
    splits = _count_by(table, "split")
    if missing := [split for split in SPLITS if not splits[split]]:
        raise DataError(
            f"split {', '.join(missing)} is empty: {table.num_rows} rows became {dict(splits)}. With {_enough(shares)} rows (or groups) "
            "none is, for these shares. Add data, or change the shares in params.yaml's section split."
        )
    counts = _class_counts(table)
    short = {label: count for label, count in counts.items() if any(not count[split] for split in SPLITS)}
    if short:
        lines = [
            f"  {label!r}: " + ", ".join(f"{split} {count[split]}" for split in SPLITS) for label, count in list(short.items())[:_MAX_SHOWN]
        ]
        raise DataError(
            f"{len(short)} of {len(counts)} classes lack rows in a split:\n" + "\n".join(lines) + "\n"
            f"With {_enough(shares)} rows (or groups) a class is in every split, for these shares. "
            "Add images of it, merge it into another class, remove it, or change the shares in params.yaml's section split."
        )


def find_leaks(table: pa.Table) -> dict[str, list[str]]:
    """The ids, digests and groups that are in more than one split: empty lists where all is well."""
    return {column: _shared(table, column) for column in ("id", "sha256", "group")}


def check_leaks(leaks: dict[str, list[str]]) -> None:
    """DataError if there is any leak."""
    found = {column: values for column, values in leaks.items() if values}
    if found:
        lines = [f"  {column}: {len(values)} ({', '.join(values[:_MAX_SHOWN])})" for column, values in found.items()]
        raise DataError("the same content is in more than one split:\n" + "\n".join(lines) + "\nRun `dvc repro --force clean split`.")


def report(table: pa.Table, seed: int, leaks: dict[str, list[str]]) -> dict[str, Any]:
    """What `reports/split.json` holds: rows of each split, by class or with the target's mean, and the leaks."""
    classes, rows = _class_counts(table), _count_by(table, "split")
    splits: dict[str, dict[str, Any]] = {split: {"rows": rows[split]} for split in SPLITS}
    for split in SPLITS:
        if classes:
            splits[split]["classes"] = {label: counts[split] for label, counts in classes.items()}
        else:
            targets = table.filter(pc.equal(table["split"], split))["target"].to_numpy()
            splits[split]["target"] = {"mean": float(targets.mean()), "std": float(targets.std())}
    return {"seed": seed, "splits": splits, "leaks": leaks}


def _units(records: list[dict[str, Any]]) -> list[_Unit]:
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in records:
        by_name[row["id"] if row["group"] is None else f"group/{row['group']}"].append(row)
    return [_Unit(name, rows) for name, rows in by_name.items()]


def _strata(units: list[_Unit]) -> list[list[_Unit]]:
    if units and units[0].rows[0]["label"] is None:
        return _target_bins(units)
    by_class: dict[str, list[_Unit]] = defaultdict(list)
    for unit in units:
        by_class[unit.stratum].append(unit)
    return [by_class[label] for label in sorted(by_class)]


def _target_bins(units: list[_Unit]) -> list[list[_Unit]]:
    ranked = sorted(units, key=lambda unit: (unit.mean_target, unit.name))
    num_bins = max(1, min(_MAX_BINS, len(units) // _UNITS_PER_BIN))
    edges = [len(ranked) * index // num_bins for index in range(num_bins + 1)]
    return [ranked[begin:end] for begin, end in itertools.pairwise(edges)]


def _shuffled(units: list[_Unit], seed: int) -> list[_Unit]:
    keys = id_keys([hashlib.sha256(unit.name.encode()).hexdigest() for unit in units])
    return [units[index] for index in np.lexsort((keys, uniform(seed, 0, keys, "split")))]


def _assign(units: list[_Unit], shares: Sequence[float], owed: list[float]) -> list[str]:
    """The split of each unit: by where its middle row falls among the rows of the stratum. Updates `owed`."""
    sizes = np.array([len(unit.rows) for unit in units])
    total = int(sizes.sum())
    counts = largest_remainder(total, shares, owed)
    for index, (share, count) in enumerate(zip(shares, counts, strict=True)):
        owed[index] += total * share - count
    middles = np.cumsum(sizes) - sizes / 2
    return [SPLITS[index] for index in np.searchsorted(np.cumsum(counts), middles, side="right")]


def _enough(shares: Sequence[float]) -> int:
    """So many rows that even the smallest share is one of them."""
    return math.ceil(1 / min(shares) - 1e-9)


def _count_by(table: pa.Table, column: str) -> Counter[str]:
    return Counter(table[column].to_pylist())


def _class_counts(table: pa.Table) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for label, split in zip(table["label"].to_pylist(), table["split"].to_pylist(), strict=True):
        if label is not None:
            counts.setdefault(label, Counter())[split] += 1
    return dict(sorted(counts.items()))


def _shared(table: pa.Table, column: str) -> list[str]:
    places: dict[str, set[str]] = defaultdict(set)
    for value, split in zip(table[column].to_pylist(), table["split"].to_pylist(), strict=True):
        if value is not None:
            places[value].add(split)
    return sorted(value for value, splits in places.items() if len(splits) > 1)
