"""The rules that rows are checked by: their names, what they mean, what breaking one leads to, and which do not run.

Rules in `RuleParams` are the user's choice; the others always refuse, because nothing could be done with the row.
"""

from collections.abc import Iterable

from slipway.config.sections import Action, CleanParams, DataParams, RuleParams
from slipway.kinds.registry import is_classification

# What a row says besides its image or its inputs.
_ANNOTATION_RULES = {
    "malformed_row": "the row has too many or too few columns",
    "missing_label": "no class",
    "unknown_label": "a class that data.classes does not name",
    "missing_target": "no number",
    "not_a_number": "a target that is not a number",
    "non_finite_target": "a target that is infinite or NaN",
    "missing_group": "no group, though data.group_column is set",
    "missing_time": "no time, though data.time_column is set",
    "bad_time": "a time that is neither a date nor a finite number",
    "bad_weight": "a weight that is not a finite number of at least 0",
    "bad_split": "a split that is not train, val or test",
}
IMAGE_RULES = _ANNOTATION_RULES | {
    "missing_file": "the path leads to no file, or data.checksums lists one that is not there",
    "outside_folder": "the path leads out of the table's folder",
    "unreadable": "the file system does not give the bytes",
    "missing_image": "the image column is empty",
    "empty": "an image of 0 bytes",
    "undecodable": "not an image of a known format, whatever its name says",
    "truncated": "an image that breaks off or is damaged",
    "pixel_bomb": "more pixels than clean.max_pixels",
    "digest_mismatch": "other bytes than data.checksums lists",
    "not_listed": "a file that data.checksums does not list",
    "too_small": "a side shorter than clean.min_side_px",
    "odd_aspect": "one side more than clean.max_aspect times the other",
    "wrong_extension": "the name's ending is that of another format",
    "constant_image": "one colour: grey levels that spread less than clean.constant_std",
    "too_dark": "a mean grey level below clean.dark_mean",
    "too_bright": "a mean grey level above clean.bright_mean",
    "blurred": "without edges: a Laplacian that varies less than clean.blur_variance",
    "conflicting_label": "the same picture under different classes",
    "conflicting_target": "the same picture with different numbers",
    "exact_duplicate": "the same pixels again; one of them is kept",
    "near_duplicate": "a picture that looks like another: re-encoded, rescaled, cropped or brightened",
    "near_conflict": "a picture that looks like one of another class",
    "outlier": "a target more than clean.outlier_mad_threshold robust standard deviations from the median",
}
TABLE_RULES = _ANNOTATION_RULES | {
    "missing_value": "a cell is missing that data.columns requires",
    "type_violation": "a cell is not of its column's kind",
    "out_of_range": "a number beyond the bounds in data.columns",
    "all_missing": "no input has a value",
    "outlier": "a number more than clean.outlier_mad_threshold robust standard deviations from its column's median",
    "constant_column": "a column with one value only",
    "duplicate_column": "a column equal to one before it",
    "exact_duplicate": "the same row again; one of them is kept",
    "conflicting_label": "the same inputs under different classes",
    "conflicting_target": "the same inputs with different numbers",
    "near_duplicate": "the same inputs; they stay in one split, or one of them is kept",
}
IN_ANOTHER_SPLIT = (
    ", which is in the given split "  # ends the detail of a copy that leaks between given splits
)
DUPLICATES = (
    "exact_duplicate",
    "near_duplicate",
)  # nothing is wrong with them but that they are there already
_OF_NUMBERS = ("missing_target", "not_a_number", "non_finite_target", "conflicting_target")
_OF_CLASSES = ("missing_label", "unknown_label", "conflicting_label", "near_conflict")
_CHOSEN_WITH = {"conflicting_target": "conflicting_label", "near_conflict": "near_duplicate"}
_OF_COLUMNS = {
    "missing_group": "group_column",
    "missing_time": "time_column",
    "bad_time": "time_column",
    "bad_weight": "weight_column",
    "bad_split": "split_column",
}


def action(rule: str, rules: RuleParams) -> Action:
    """Return the action for a sample that breaks `rule`."""
    chosen: Action = getattr(rules, _CHOSEN_WITH.get(rule, rule), "refuse")
    return "flag" if rule == "near_conflict" and chosen == "refuse" else chosen


def severity(rule: str) -> str:
    """Return "duplicate" or "error", for the quarantine."""
    return "duplicate" if rule in DUPLICATES else "error"


def images_not_checked(data: DataParams, params: CleanParams) -> dict[str, str]:
    """Return the rules of IMAGE_RULES that these params switch off, with reasons."""
    reasons = _not_checked(IMAGE_RULES, data, params)
    if data.checksums is None:
        unseen = "data.checksums is null: a flipped byte that still decodes goes unseen, and so does a file that is gone"
        reasons |= {"digest_mismatch": unseen, "not_listed": unseen}
    if is_classification(data.task):
        reasons["outlier"] = "targets are classes"
    return reasons


def table_not_checked(data: DataParams, params: CleanParams) -> dict[str, str]:
    """Return the rules of TABLE_RULES that these params switch off, with reasons."""
    reasons = _not_checked(TABLE_RULES, data, params)
    if all(said.min is None and said.max is None for said in data.columns.values()):
        reasons["out_of_range"] = "data.columns has no bounds"
    if not any(said.required for said in data.columns.values()):
        reasons["missing_value"] = "data.columns requires no value"
    return reasons


def _not_checked(rules: Iterable[str], data: DataParams, params: CleanParams) -> dict[str, str]:
    is_class = is_classification(data.task)
    reasons = {
        rule: f"clean.rules.{_CHOSEN_WITH.get(rule, rule)} is null"
        for rule in rules
        if action(rule, params.rules) is None
    }
    reasons |= {
        rule: f"data.{column} is null"
        for rule, column in _OF_COLUMNS.items()
        if getattr(data, column) is None
    }
    if data.classes is None:
        reasons["unknown_label"] = "data.classes is null"
    without = (
        dict.fromkeys(_OF_NUMBERS, "targets are classes")
        if is_class
        else dict.fromkeys(_OF_CLASSES, "targets are numbers")
    )
    return reasons | {rule: reason for rule, reason in without.items() if rule in rules}
