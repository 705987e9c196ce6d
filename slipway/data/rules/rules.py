"""The rules for rows: their names, meanings and actions, and the reasons why some are not checked.

The user chooses the actions of the rules in `RuleParams`. The other rules always refuse a row,
because it cannot be used, except for `narrow_range`, which always flags.
"""

from collections.abc import Mapping

from slipway.config.sections import Action, CleanParams, DataParams, RuleParams
from slipway.kinds.registry import KINDS, kind_of

# Rules of the annotation columns of a row.
_ANNOTATION_RULES = {
    "malformed_row": "the row has too many or too few columns",
    "missing_label": "no class; set aside for prediction, and not bad",
    "unknown_label": "a class that data.classes does not name",
    "missing_target": "no number; set aside for prediction, and not bad",
    "not_a_number": "a target that is not a number",
    "non_finite_target": "a target that is infinite or NaN",
    "missing_group": "no group, though data.group_column is set",
    "missing_time": "no time, though data.time_column is set",
    "bad_time": "a time that is neither a date nor a finite number",
    "bad_weight": "a weight that is not a finite number of at least 0",
    "bad_split": "a split that is not train, val or test",
}
IMAGE_RULES = _ANNOTATION_RULES | {
    "missing_file": "the path leads to no file, or data.checksums lists a file that is missing",
    "outside_folder": "the path leads outside the table's folder",
    "unreadable": "the file system fails to read the file",
    "missing_image": "the image column is empty",
    "empty": "an image of 0 bytes",
    "undecodable": "not an image of a known format, whatever its name says",
    "truncated": "an image that is truncated or damaged",
    "pixel_bomb": "more pixels than clean.max_pixels",
    "digest_mismatch": "other bytes than data.checksums lists",
    "not_listed": "a file that data.checksums does not list",
    "too_small": "a side shorter than clean.min_side_px",
    "odd_aspect": "one side more than clean.max_aspect times the other",
    "wrong_extension": "the name's ending is that of another format",
    "constant_image": "one colour: grey levels that spread less than clean.constant_std",
    "too_dark": "a mean grey level below clean.dark_mean",
    "too_bright": "a mean grey level above clean.bright_mean",
    "narrow_range": "an image of 16 bits that uses at most a quarter of their range",
    "blurred": "without edges: a Laplacian that varies less than clean.blur_variance",
    "conflicting_label": "the same picture under different classes",
    "conflicting_target": "the same picture with different numbers",
    "exact_duplicate": "the same pixels again; one of them is kept",
    "near_duplicate": (
        "a picture that looks like another: re-encoded, rescaled, cropped or brightened"
    ),
    "near_conflict": "a picture that looks like one of another class",
    "outlier": (
        "a target more than clean.outlier_mad_threshold robust standard deviations from the median"
    ),
}
TABLE_RULES = _ANNOTATION_RULES | {
    "missing_value": "a cell is missing that data.columns requires",
    "type_violation": "a cell is not of its column's kind",
    "out_of_range": "a number beyond the bounds in data.columns",
    "all_missing": "no input has a value",
    "outlier": (
        "a number more than clean.outlier_mad_threshold robust standard deviations "
        "from its column's median"
    ),
    "constant_column": "a column with one value only",
    "duplicate_column": "a column equal to one before it",
    "exact_duplicate": "the same row again, with the same id; one of them is kept",
    "duplicate_row": "the same row again, in a table without ids; they stay in one split",
    "conflicting_label": "the same inputs under different classes",
    "conflicting_target": "the same inputs with different numbers",
    "near_duplicate": "the same inputs; they stay in one split, or one of them is kept",
}
TEXT_RULES = _ANNOTATION_RULES | {
    "missing_value": "no text, or only white space, control and invisible characters",
    "type_violation": "bytes that are invalid in data.encoding, or a list or bytes instead of text",
    "too_short": "fewer characters than clean.min_characters",
    "too_long": "more characters than clean.max_characters",
    "control_characters": (
        "control characters, each run of which becomes a space, or invisible marks, "
        "such as those that reverse the direction of a text"
    ),
    "garbled": "letters of UTF-8 that were read in another encoding, such as \u00c3\u00a9",
    "mixed_script": "a word with both Latin and Greek or Cyrillic letters, which look the same",
    "rare_script": "in a script that less than 1 % of the texts use",
    "personal_data": "an e-mail address, a phone number or the number of a payment card",
    "boilerplate": "a passage that many texts of one class share and no other text has",
    "outlier": (
        "a target more than clean.outlier_mad_threshold robust standard deviations from the median"
    ),
    "exact_duplicate": "the same row again; one of them is kept",
    "conflicting_label": "the same text under different classes",
    "conflicting_target": "the same text with different numbers",
    "near_duplicate": (
        "nearly the same text, by clean.near_duplicate_similarity; they stay in one split, or one "
        "of them is kept"
    ),
    "near_conflict": "nearly the same text as one of another class",
}
# Rules of rows that are another case, although they repeat the inputs of one.
REPEATS = ("duplicate_row", "conflicting_label", "conflicting_target")
# Ends the detail of a copy that leaks between given splits.
IN_ANOTHER_SPLIT = ", which is in the given split "
NO_TARGET = ("missing_label", "missing_target")  # rows to predict rather than to learn from
# Usable rows that are already present.
DUPLICATES = ("exact_duplicate", "duplicate_row", "near_duplicate")
_OF_CHECKSUMS = ("digest_mismatch", "not_listed")
_NO_CHECKSUMS = (
    "data.checksums is null: a flipped byte that still decodes stays undetected, "
    "and so does a missing file"
)
_CHOSEN_WITH = {"conflicting_target": "conflicting_label", "near_conflict": "near_duplicate"}
_OF_COLUMNS = {
    "missing_group": "group_column",
    "missing_time": "time_column",
    "bad_time": "time_column",
    "bad_weight": "weight_column",
    "bad_split": "split_column",
}


def action(rule: str, rules: RuleParams) -> Action:
    """Return the action that params.yaml sets for a sample that breaks `rule`."""
    default: Action = "flag" if rule == "narrow_range" else "refuse"
    chosen: Action = getattr(rules, _CHOSEN_WITH.get(rule, rule), default)
    return "flag" if rule == "near_conflict" and chosen == "refuse" else chosen


def severity(rule: str) -> str:
    """Return the severity of a rule in the quarantine: "unlabelled", "duplicate" or "error"."""
    if rule in NO_TARGET:
        return "unlabelled"
    return "duplicate" if rule in DUPLICATES else "error"


def not_checked(rules: Mapping[str, str], data: DataParams, params: CleanParams) -> dict[str, str]:
    """Return those of `rules` that are not checked, with reasons.

    `rules` are IMAGE_RULES or TABLE_RULES.
    """
    reasons = {
        rule: f"clean.rules.{_CHOSEN_WITH.get(rule, rule)} is null"
        for rule in rules
        if action(rule, params.rules) is None
    }
    for rule, column in _OF_COLUMNS.items():
        if getattr(data, column) is None:
            reasons[rule] = f"data.{column} is null"
    if data.classes is None:
        reasons["unknown_label"] = "data.classes is null"
    if data.checksums is None:
        reasons |= dict.fromkeys(_OF_CHECKSUMS, _NO_CHECKSUMS)
    if all(column.min is None and column.max is None for column in data.columns.values()):
        reasons["out_of_range"] = "data.columns has no bounds"
    if not any(column.required for column in data.columns.values()):
        reasons["missing_value"] = "data.columns requires no value"
    target = kind_of(data.task).target
    other_rules = {rule for kind in KINDS.values() for rule in kind.target.rules}
    if (
        target.has_classes and rules is not TABLE_RULES
    ):  # tables also have outliers among their inputs
        other_rules.add("outlier")
    reasons |= dict.fromkeys(other_rules.difference(target.rules), f"targets are {target.plural}")
    return {rule: reason for rule, reason in reasons.items() if rule in rules}
