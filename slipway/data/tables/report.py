"""`reports/clean.json` of a table: the same record as of a folder of images, with the columns."""

from slipway.config.sections import CleanParams, DataParams
from slipway.data.rules.report import (
    CleanReport,
    ColumnSummary,
    RuleCount,
    class_counts,
    correction_counts,
    rule_counts,
    target_summary,
)
from slipway.data.rules.rules import TABLE_RULES, table_not_checked
from slipway.data.tables.cleaning import CleanedTable
from slipway.kinds.registry import is_classification


def table_report(table: CleanedTable, data: DataParams, clean: CleanParams) -> CleanReport:
    """Return the record of a cleaned table."""
    rows, refused = table.cleaned.rows, table.cleaned.quarantine
    skipped = table_not_checked(data, clean)
    classes = is_classification(data.task)
    return CleanReport(
        read=table.cleaned.num_read,
        kept=rows.num_rows,
        refused=rule_counts(
            refused["rule"], refused["source"], refused["detail"], refused["severity"], TABLE_RULES
        )
        if refused.num_rows
        else {},
        flagged=_flagged(table.ledger.flags()),
        corrections=correction_counts(rows["corrections"]),
        classes=class_counts(rows["label"]) if classes else None,
        target=None if classes else target_summary(rows["target"].to_numpy()),
        checks=sorted(set(TABLE_RULES) - set(skipped)),
        not_checked=dict(sorted(skipped.items())),
        columns=table.columns,
    )


def column_notes(table: CleanedTable, page: str) -> str:
    """Describe the columns that are no inputs or need a check, and name the page."""
    dropped = [_note(column) for column in table.columns if column.kind == "ignore"]
    noted = [_note(column) for column in table.columns if column.kind != "ignore" and column.note]
    lines = [f"\nthe columns' kinds are in {page}{'; no inputs:' if dropped else ''}", *dropped]
    return "\n".join([*lines, *(["inputs to check:", *noted] if noted else [])])


def _note(column: ColumnSummary) -> str:
    return f"  {column.name or repr('')}: {column.note}"


def conflict_hint(table: CleanedTable) -> str:
    """Suggest flagging conflicts if equal inputs have different labels; else ""."""
    rules = set(table.cleaned.quarantine["rule"].to_pylist())
    if not rules & {"conflicting_label", "conflicting_target"}:
        return ""
    return "\nWhere equal inputs have different answers by nature, set clean.rules.conflicting_label to flag."


def _flagged(flags: list[tuple[str, str, str]]) -> dict[str, RuleCount]:
    if not flags:
        return {}
    rules, sources, details = zip(*flags, strict=True)
    return rule_counts(rules, sources, details, ["flag"] * len(flags), TABLE_RULES)
