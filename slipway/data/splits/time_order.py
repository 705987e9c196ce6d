"""Splits rows by time: train is earliest, test is latest, and rows of equal time stay together.

A unit (see `slipway.data.splits.units`) with rows on both sides of a cut would leak. Only its rows
in the latest split stay; its earlier rows are purged and recorded.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.config.sections import SplitParams
from slipway.data.splits.units import Int, Units
from slipway.inputs.columns import read_date
from slipway.system.errors import DataError

_MAX_SHOWN = 5


def assign_by_time(rows: pa.Table, params: SplitParams) -> Int:
    """Return the split of each row by time, (N,): 0 for train, 1 for val, 2 for test.

    Cuts at `split.time_cuts`, or at the distinct times that meet the fractions best. Raises
    DataError if a row has no time, there are fewer than three distinct times, or the cuts do not
    ascend.
    """
    times = _times(rows)
    given = params.time_cuts
    cuts = _cuts_by_fraction(times, params) if given is None else read_cuts(given)
    return np.searchsorted(cuts, times, side="right").astype(np.int64)


def cut_val_by_time(rows: pa.Table, params: SplitParams) -> Int:
    """Cut val from the latest rows, in the proportion that val has of train and val.

    Returns (N,): 1 for val, 0 for train.
    """
    times = _times(rows)
    distinct, num_earlier = np.unique(np.sort(times), return_index=True)
    if len(distinct) < 2:
        raise DataError(
            f"the time column has one distinct time in the {len(times)} rows of train, expected at "
            "least 2 to cut val from them. Use a finer time, or set data.time_column to null."
        )
    fraction = params.train / (params.train + params.val)
    begin = distinct[1 + int(np.abs(num_earlier[1:] - len(times) * fraction).argmin())]
    return np.where(times >= begin, 1, 0).astype(np.int64)


def _cuts_by_fraction(times: NDArray[np.float64], params: SplitParams) -> NDArray[np.float64]:
    """Return the times at which val and test begin, (2,), from the requested fractions."""
    # `num_earlier`: the number of rows earlier than each distinct time
    distinct, num_earlier = np.unique(np.sort(times), return_index=True)
    if len(distinct) < 3:
        raise DataError(
            f"the time column has {len(distinct)} distinct times in {len(times)} rows, expected at "
            "least 3, one for each split. Use a finer time, or set data.time_column to null."
        )
    num_train = len(times) * params.train
    num_before_test = len(times) * (params.train + params.val)
    val = 1 + int(np.abs(num_earlier[1:-1] - num_train).argmin())
    test = val + 1 + int(np.abs(num_earlier[val + 1 :] - num_before_test).argmin())
    return distinct[[val, test]]


def read_cuts(texts: list[str]) -> NDArray[np.float64]:
    """Return two times, (2,): numbers, or dates as days since 1970 UTC.

    Raises DataError unless they ascend.
    """
    cuts, problems = [], []
    for text in texts:
        try:
            cuts.append(_read_time(text))
        except ValueError:
            problems.append(repr(text))
    if problems:
        raise DataError(
            f"split.time_cuts holds {', '.join(problems)}, "
            "expected ISO 8601 dates such as 2026-11-20, or numbers."
        )
    if not cuts[0] < cuts[1]:
        raise DataError(
            f"split.time_cuts is {texts}, "
            "expected the time at which val begins, then a later time at which test begins."
        )
    return np.array(cuts)


def latest_parts(units: Units, parts: Int) -> Int:
    """Return the latest split among the rows of each row's unit, (N,).

    Rows in earlier splits than that will be purged.
    """
    latest = np.zeros(len(units.keys), np.int64)
    np.maximum.at(latest, units.of_row, parts)
    return latest[units.of_row]


def _read_time(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return read_date(text)
    if not np.isfinite(number):
        raise ValueError(text)
    return number


def _times(rows: pa.Table) -> NDArray[np.float64]:
    times: NDArray[np.float64] = rows["time"].to_numpy()  # null becomes NaN
    missing = ~np.isfinite(times)
    if missing.any():
        sources = rows.filter(pa.array(missing))["source"].slice(0, _MAX_SHOWN).to_pylist()
        raise DataError(
            f"{missing.sum()} of {len(times)} rows have no time, the first are "
            f"{', '.join(sources)}; expected one in every row. "
            "Fill data.time_column in, or set it to null."
        )
    return times
