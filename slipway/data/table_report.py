"""`reports/clean.json` of a table: the same record as of a folder of images, with the columns."""

from slipway.contract import is_classification
from slipway.data.clean_report import CleanReport, RuleCount, class_counts, correction_counts, rule_counts, target_summary
from slipway.data.table_cleaning import CleanedTable
from slipway.params import CleanParams, DataParams

RULES = {
    "malformed_row": "the row has too many or too few columns",
    "missing_label": "no class",
    "unknown_label": "a class that data.classes does not name",
    "missing_target": "no number",
    "not_a_number": "a target that is not a number",
    "non_finite_target": "a target that is infinite",
    "missing_group": "no group, though data.group_column is set",
    "missing_time": "no time, though data.time_column is set",
    "bad_time": "a time that is neither a date nor a number",
    "bad_weight": "a weight that is missing, negative or no number",
    "bad_split": "a split that is not train, val or test",
    "missing_value": "a cell is missing that data.columns requires",
    "type_violation": "a cell is not of its column's kind",
    "out_of_range": "a number beyond the bounds in data.columns",
    "all_missing": "no input has a value",
    "outlier": "a number far from the others of its column",
    "constant_column": "a column with one value only",
    "duplicate_column": "a column equal to one before it",
    "exact_duplicate": "the same row again; one of them is kept",
    "conflicting_label": "the same inputs under different classes",
    "conflicting_target": "the same inputs with different numbers",
    "near_duplicate": "the same inputs; they stay in one split, or one of them is kept",
}
_BY_COLUMN = ("missing_time", "bad_time", "bad_weight", "bad_split", "missing_group")
_OF_CLASSES = ("missing_label", "unknown_label", "conflicting_label")
_OF_NUMBERS = ("missing_target", "not_a_number", "non_finite_target", "conflicting_target")


def table_report(table: CleanedTable, data: DataParams, clean: CleanParams) -> CleanReport:
    """What the rules found, and what is left."""
    rows, refused = table.cleaned.rows, table.cleaned.quarantine
    not_checked = _not_checked(data, clean)
    classes = is_classification(data.task)
    return CleanReport(
        read=table.cleaned.num_read,
        kept=rows.num_rows,
        refused=rule_counts(refused["rule"], refused["source"], refused["detail"], refused["severity"], RULES) if refused.num_rows else {},
        flagged=_flagged(table.ledger.flags()),
        corrections=correction_counts(rows["corrections"]),
        classes=class_counts(rows["label"]) if classes else None,
        target=None if classes else target_summary(rows["target"].to_numpy()),
        checks=sorted(set(RULES) - set(not_checked)),
        not_checked=not_checked,
        columns=table.columns,
    )


def column_notes(table: CleanedTable, page: str) -> str:
    """Where the columns' kinds are written down, with a line for each column that is no input."""
    dropped = [f"  {column.name or repr('')}: {column.note}" for column in table.columns if column.kind == "ignore"]
    return "\n".join([f"\nthe columns' kinds are in {page}{'; no inputs:' if dropped else ''}", *dropped])


def conflict_hint(table: CleanedTable) -> str:
    """What to do where equal inputs with different answers are many, "" where there are none."""
    rules = set(table.cleaned.quarantine["rule"].to_pylist())
    if not rules & {"conflicting_label", "conflicting_target"}:
        return ""
    return "\nWhere equal inputs have different answers by nature, set clean.rules.conflicting_label to flag."


def _flagged(flags: list[tuple[str, str, str]]) -> dict[str, RuleCount]:
    if not flags:
        return {}
    rules, sources, details = zip(*flags, strict=True)
    return rule_counts(rules, sources, details, ["flag"] * len(flags), RULES)


def _not_checked(data: DataParams, clean: CleanParams) -> dict[str, str]:
    """The rules that did not run, and why."""
    actions = clean.rules.model_dump() | {"conflicting_target": clean.rules.conflicting_label}
    reasons = {rule: "clean.rules switches it off" for rule in RULES if actions.get(rule) == "off"}
    reasons |= dict.fromkeys(_OF_NUMBERS if is_classification(data.task) else _OF_CLASSES, f"the task is {data.task}")
    columns = {"group": data.group_column, "time": data.time_column, "weight": data.weight_column, "split": data.split_column}
    reasons |= {
        rule: f"data.{part}_column is null" for rule in _BY_COLUMN for part, name in columns.items() if rule.endswith(part) and not name
    }
    if data.classes is None:
        reasons.setdefault("unknown_label", "data.classes is null")
    if all(said.min is None and said.max is None for said in data.columns.values()):
        reasons["out_of_range"] = "data.columns has no bounds"
    if not any(said.required for said in data.columns.values()):
        reasons["missing_value"] = "data.columns requires no value"
    return dict(sorted(reasons.items()))
