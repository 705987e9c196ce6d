"""Collects the samples that the rules refuse or flag, as tables; flagged samples are kept."""

import itertools
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipway.config.sections import Action, RuleParams
from slipway.data.engine.rows import QUARANTINE, row_numbers
from slipway.data.engine.scratch import slices, store_table, take_rows
from slipway.data.rules import rules


class RuleFindings:
    """Collects refused and flagged samples as two tables with the schema QUARANTINE."""

    def __init__(self, chosen: RuleParams) -> None:
        self._chosen = chosen
        self._refused: list[pa.Table] = [QUARANTINE.empty_table()]
        self._flagged: list[pa.Table] = [QUARANTINE.empty_table()]
        self.num_refused = 0

    def action(self, rule: str) -> Action:
        """Return the action of a rule in params.yaml: "refuse", "flag", or None if it is off."""
        return rules.action(rule, self._chosen)

    def apply(self, rows: pa.Table, broken: pa.Array, rule: str, details: pa.Array) -> pa.Table:
        """Refuse or flag the samples `broken` with one detail each; return the rows not refused."""
        sources = rows["source"].filter(broken)
        if self.action(rule) == "refuse":
            self.refuse(sources, rule, details)
            return rows.filter(pc.invert(broken))
        self.flag(sources, rule, details)
        return rows

    def refuse(self, sources: pa.ChunkedArray, rule: str, details: pa.Array | str) -> None:
        """Refuse samples under a rule, with one detail for each sample or one for all."""
        self._refused.append(_table(sources, rule, details, rules.severity(rule)))
        self.num_refused += len(sources)

    def refuse_table(self, facts: pa.Table) -> None:
        """Refuse the samples of `facts` (schema FACTS), each under the rule in its row."""
        severities = pa.array([rules.severity(rule) for rule in facts["rule"].to_pylist()])
        self._refused.append(_table(facts["source"], facts["rule"], facts["detail"], severities))
        self.num_refused += facts.num_rows

    def flag(self, sources: pa.ChunkedArray, rule: str, details: pa.Array | str) -> None:
        """Flag samples under a rule, unless the rule is off."""
        if self.action(rule) == "flag":
            self._flagged.append(_table(sources, rule, details, "flag"))

    def flag_tables(self, facts: Iterable[pa.RecordBatch]) -> None:
        """Add the flags in `facts` (schema FACTS), but none of refused samples."""
        refused = pa.concat_tables(self._refused)["source"].combine_chunks()
        earlier = pa.concat_tables(self._flagged).to_batches()
        found = (batch for part in facts for batch in _flags(part).to_batches())
        kept = (
            batch.filter(pc.invert(pc.is_in(batch["source"], refused)))
            for batch in itertools.chain(earlier, found)
        )
        self._flagged = [store_table(kept, QUARANTINE)]

    def flags_of(self, sources: pa.ChunkedArray) -> pa.Array:
        """Return the list of the rules that flag each source."""
        table = pa.concat_tables(self._flagged)
        positions = pc.index_in(table["source"], sources.combine_chunks())
        names = table["rule"].filter(pc.is_valid(positions)).combine_chunks()
        rows = positions.drop_null().to_numpy()
        order = np.lexsort([pc.rank(names, tiebreaker="dense"), rows])
        counts = np.bincount(rows, minlength=len(sources))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), names.take(pa.array(order)))

    def quarantine(self) -> pa.Table:
        """Return the refused samples, ordered by rule and source."""
        return _sorted(self._refused)

    def flagged(self) -> pa.Table:
        """Return the flags of kept samples, ordered by rule and source."""
        return _sorted(self._flagged)


def _sorted(tables: list[pa.Table]) -> pa.Table:
    table = pa.concat_tables(tables)
    numbered = table.append_column("number", row_numbers(table["source"]))
    keys = [(name, "ascending") for name in ("rule", "number", "source", "detail")]
    order = np.asarray(pc.sort_indices(numbered, keys)).astype(np.int64)
    parts = (take_rows(table, order[part]) for part in slices(len(order)))
    return store_table((batch for part in parts for batch in part.to_batches()), QUARANTINE)


def _flags(facts: pa.RecordBatch) -> pa.Table:
    sources = facts["source"].take(pc.list_parent_indices(facts["flags"]))
    return _table(
        sources, pc.list_flatten(facts["flags"]), pc.list_flatten(facts["flag_details"]), "flag"
    )


def _table(
    sources: pa.Array, rule: pa.Array | str, details: pa.Array | str, severity: pa.Array | str
) -> pa.Table:
    """Return a table with schema QUARANTINE; a single text is repeated for every source."""
    columns = [
        pa.repeat(column, len(sources)) if isinstance(column, str) else column
        for column in (rule, details, severity)
    ]
    return pa.table([sources, *columns], schema=QUARANTINE)
