"""The result of cleaning, and the check that a model can be trained on the kept rows."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipway.config.sections import CleanParams
from slipway.data.engine.label_sets import label_counts
from slipway.data.engine.rows import QUARANTINE
from slipway.data.engine.scratch import take_rows
from slipway.data.rules import rules
from slipway.kinds.registry import Task, kind_of
from slipway.system.errors import DataError

_MAX_SHOWN = 3


@dataclass(frozen=True)
class Cleaned:
    """The rows that the cleaning of images, a table or texts kept and refused."""

    rows: pa.Table  # the kept samples: `rows.ROWS`, by id
    quarantine: pa.Table  # the refused samples: `rows.QUARANTINE`, by rule and source
    num_read: int
    flagged: pa.Table = field(default_factory=QUARANTINE.empty_table)

    @property
    def num_bad(self) -> int:
        """The number of refused samples, without duplicates and without unlabelled ones."""
        return self._num_of("error")

    @property
    def num_unlabelled(self) -> int:
        """The number of samples without a target, which are set aside for prediction."""
        return self._num_of("unlabelled")

    def _num_of(self, severity: str) -> int:
        return int(pc.sum(pc.equal(self.quarantine["severity"], severity)).as_py() or 0)

    def summary(self, *reports: Path) -> str:
        """Return the counts in one line; a second line reports copies in several given splits."""
        num_kept, num_bad, num_unlabelled = self.rows.num_rows, self.num_bad, self.num_unlabelled
        num_duplicates = self.num_read - num_kept - num_bad - num_unlabelled
        counts = f"read {self.num_read}, kept {num_kept}, bad {num_bad}"
        if num_unlabelled:
            counts += f", without a target {num_unlabelled}"
        summary = f"{counts}, duplicates {num_duplicates}, see {' and '.join(map(str, reports))}"
        if kept := self._kept_repeats():
            summary += f"\nkept and flagged: {kept}"
        if named := self._named_refused():
            summary += f"\nrefused: {named}"
        is_leak = pc.match_substring(self.quarantine["detail"], rules.IN_ANOTHER_SPLIT)
        num_leaks = pc.sum(is_leak).as_py()
        if not num_leaks:
            return summary
        return (
            f"{summary}\ncopies of rows in another given split: {num_leaks}; "
            "the copy in test, else in val, is kept"
        )

    def _kept_repeats(self) -> str:
        """List the numbers of kept rows that equal another one, or contradict it."""
        found = pc.value_counts(self.flagged["rule"])
        counts = {count["values"].as_py(): count["counts"].as_py() for count in found}
        return ", ".join(f"{counts[rule]} {rule}" for rule in rules.REPEATS if rule in counts)

    def _named_refused(self) -> str:
        """List the first refused samples with their rules; duplicates come last."""
        refused = self.quarantine.filter(pc.not_equal(self.quarantine["severity"], "unlabelled"))
        if not refused.num_rows:  # pyarrow before 26 fails on an empty table
            return ""
        order = [("severity", "descending"), ("source", "ascending")]
        first = pc.select_k_unstable(refused, _MAX_SHOWN, order).to_numpy()
        rows = take_rows(refused, first.astype(np.int64)).to_pylist()
        named = ", ".join(f"{row['source']} ({row['rule']})" for row in rows)
        num_others = refused.num_rows - len(rows)
        return f"{named} and {num_others} more" if num_others else named


def check_usable(cleaned: Cleaned, params: CleanParams, task: Task) -> None:
    """Raise DataError if too much was refused, or if the rest cannot train a model."""
    if not cleaned.num_read:
        raise DataError(
            "data.path holds no samples, expected images. Add some, or correct data.path."
        )
    num_labelled = cleaned.num_read - cleaned.num_unlabelled
    fraction = cleaned.num_bad / max(1, num_labelled)
    if fraction > params.max_bad_fraction:
        of_these = " that have a target" if cleaned.num_unlabelled else ""
        is_near = round(fraction, 4) <= params.max_bad_fraction
        raise DataError(
            f"{cleaned.num_bad} of {num_labelled} samples{of_these} are bad, a fraction of "
            f"{fraction:.{9 if is_near else 4}f}, above clean.max_bad_fraction "
            f"{params.max_bad_fraction}:\n"
            f"{_list_refused(cleaned.quarantine)}\n"
            "Fix or remove them, or raise clean.max_bad_fraction."
        )
    if not num_labelled:
        raise DataError(
            f"none of {cleaned.num_read} samples has a target, expected one in the rows to learn "
            "from. Fill it in for some rows, or correct data.target_column."
        )
    if not cleaned.rows.num_rows:
        raise DataError(
            f"none of {cleaned.num_read} samples is left:\n{_list_refused(cleaned.quarantine)}\n"
            "Fix these samples, or point data.path at others."
        )
    column, several = kind_of(task).target.column, kind_of(task).target.several
    distinct = pc.unique(cleaned.rows[column])
    if several and len(label_counts(cleaned.rows[column])) < 2:
        raise DataError(
            f"all {cleaned.rows.num_rows} kept samples have {distinct[0].as_py()} or no label, "
            "expected at least two different labels. Check data.target_column and "
            "data.label_separator; for a single label use a classification task."
        )
    if len(distinct) < 2:
        raise DataError(
            f"all {cleaned.rows.num_rows} kept samples have the {column} {distinct[0].as_py()!r}, "
            "expected at least two. Check data.path and data.target_column."
        )


def _list_refused(quarantine: pa.Table) -> str:
    lines = []
    for rule in sorted(pc.unique(quarantine["rule"]).to_pylist()):
        rows = quarantine.filter(pc.equal(quarantine["rule"], rule))
        note = "" if rules.severity(rule) == "error" else " (these do not count as bad)"
        lines.append(f"  {rule}: {rows.num_rows}{note}")
        shown = rows.slice(0, _MAX_SHOWN).to_pylist()
        lines += [f"    {row['source']}: {row['detail']}" for row in shown]
    return "\n".join(lines)
