"""What the rules found, in columns: which samples are refused, and which are kept under a flag."""

import itertools
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipway.config.sections import Action, RuleParams
from slipway.data.engine.rows import QUARANTINE
from slipway.data.engine.scratch import slices, store_table, take_rows
from slipway.data.rules import rules

FINDINGS = pa.schema(
    [
        pa.field(name, pa.string(), nullable=False)
        for name in ("source", "rule", "detail", "severity")
    ]
)


class RuleFindings:
    """Collects refused and flagged samples as two tables of FINDINGS."""

    def __init__(self, chosen: RuleParams) -> None:
        self._chosen = chosen
        self._refused: list[pa.Table] = [FINDINGS.empty_table()]
        self._flagged: list[pa.Table] = [FINDINGS.empty_table()]
        self.num_refused = 0

    def action(self, rule: str) -> Action:
        """Return the action that the params choose for a rule."""
        return rules.action(rule, self._chosen)

    def apply(self, rows: pa.Table, broken: pa.Array, rule: str, details: pa.Array) -> pa.Table:
        """Refuse or flag the `broken` rows, one detail each; return the rows that are left."""
        sources = rows["source"].filter(broken)
        if self.action(rule) == "refuse":
            self.refuse(sources, rule, details)
            return rows.filter(pc.invert(broken))
        self.flag(sources, rule, details)
        return rows

    def refuse(self, sources: pa.ChunkedArray, rule: str, details: pa.Array | str) -> None:
        """Refuse samples under one rule, with a detail for each or one for all."""
        self._refused.append(_findings(sources, rule, details, rules.severity(rule)))
        self.num_refused += len(sources)

    def refuse_table(self, facts: pa.Table) -> None:
        """Refuse samples of `inspection.FACTS` under the rule in each row."""
        self._refused.append(_table(facts["source"], facts["rule"], facts["detail"], "error"))
        self.num_refused += facts.num_rows

    def flag(self, sources: pa.ChunkedArray, rule: str, details: pa.Array | str) -> None:
        """Flag samples, unless the rule is switched off."""
        if self.action(rule) == "flag":
            self._flagged.append(_findings(sources, rule, details, "flag"))

    def flag_tables(self, facts: Iterable[pa.RecordBatch]) -> None:
        """Take over the flags of FACTS and drop the flags of refused samples."""
        refused = pa.concat_tables(self._refused)["source"].combine_chunks()
        earlier = pa.concat_tables(self._flagged).to_batches()
        flagged = itertools.chain(
            earlier, itertools.chain.from_iterable(_flags(batch).to_batches() for batch in facts)
        )
        kept = (batch.filter(pc.invert(pc.is_in(batch["source"], refused))) for batch in flagged)
        self._flagged = [store_table(kept, FINDINGS)]

    def flags_of(self, sources: pa.ChunkedArray) -> pa.Array:
        """Return the list of flags of each source."""
        table = pa.concat_tables(self._flagged)
        places = pc.index_in(table["source"], sources.combine_chunks()).combine_chunks()
        table, places = table.filter(pc.is_valid(places)), np.asarray(places.drop_null())
        names = table["rule"].combine_chunks()
        order = (
            np.lexsort([np.asarray(pc.rank(names, tiebreaker="dense")), places])
            if len(names)
            else np.zeros(0, np.int64)
        )
        offsets = np.concatenate(
            [[0], np.cumsum(np.bincount(places, minlength=len(sources)))]
        ).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), names.take(pa.array(order)))

    def quarantine(self) -> pa.Table:
        """Return `rows.QUARANTINE`, by rule and source."""
        return _sorted(self._refused).select(QUARANTINE.names).cast(QUARANTINE)

    def flagged(self) -> pa.Table:
        """Return FINDINGS of the kept rows, by rule and source."""
        return _sorted(self._flagged)


def _sorted(tables: list[pa.Table]) -> pa.Table:
    table = pa.concat_tables(tables)
    order = np.asarray(
        pc.sort_indices(table, [(name, "ascending") for name in ("rule", "source", "detail")])
    ).astype(np.int64)
    return store_table(
        (
            batch
            for part in slices(len(order))
            for batch in take_rows(table, order[part]).to_batches()
        ),
        FINDINGS,
    )


def _flags(facts: pa.RecordBatch) -> pa.Table:
    sources = facts["source"].take(pc.list_parent_indices(facts["flags"]))
    return _table(
        sources, pc.list_flatten(facts["flags"]), pc.list_flatten(facts["flag_details"]), "flag"
    )


def _findings(
    sources: pa.ChunkedArray, rule: str, details: pa.Array | str, severity: str
) -> pa.Table:
    count = len(sources)
    each = pa.array([details] * count, pa.string()) if isinstance(details, str) else details
    return _table(sources, pa.array([rule] * count, pa.string()), each, severity)


def _table(sources: pa.Array, names: pa.Array, details: pa.Array, severity: str) -> pa.Table:
    return pa.table(
        [sources, names, details, pa.array([severity] * len(sources), pa.string())], schema=FINDINGS
    )
