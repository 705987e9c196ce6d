"""The rules that images and their annotations are checked by: their names, what they mean, and what breaking one leads to.

Rules in `RuleParams` are the user's choice; the others always refuse, because nothing could be done with the sample.
"""

from slipway.params import Action, CleanParams, RuleParams

RULES = {
    "missing_file": "the path leads to no file, or data.digests lists one that is not there",
    "outside_folder": "the path leads out of the table's folder",
    "unreadable": "the file system does not give the bytes",
    "missing_image": "the image column is empty",
    "malformed_row": "the row has too many or too few columns",
    "missing_label": "no class",
    "missing_target": "no number",
    "not_a_number": "a target that is not a number",
    "non_finite_target": "a target that is infinite or NaN",
    "missing_group": "no group, though data.group_column is set",
    "missing_time": "no time, though data.time_column is set",
    "bad_time": "a time that is neither a date nor a finite number",
    "bad_weight": "a weight that is not a finite number of at least 0",
    "bad_split": "a split that is not train, val or test",
    "empty": "an image of 0 bytes",
    "undecodable": "not an image of a known format, whatever its name says",
    "truncated": "an image that breaks off or is damaged",
    "pixel_bomb": "more pixels than clean.max_pixels",
    "digest_mismatch": "other bytes than data.digests lists",
    "not_listed": "a file that data.digests does not list",
    "unknown_label": "a class that data.classes does not name",
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
    "outlier": "a target more than clean.outlier_deviations robust standard deviations from the median",
}
DUPLICATES = ("exact_duplicate", "near_duplicate")  # nothing is wrong with them but that they are there already
_OF_NUMBERS = ("missing_target", "not_a_number", "non_finite_target", "conflicting_target", "outlier")
_OF_CLASSES = ("missing_label", "unknown_label", "conflicting_label", "near_conflict")


def action(rule: str, rules: RuleParams) -> Action:
    """What happens to a sample that breaks `rule`."""
    if rule == "conflicting_target":
        return rules.conflicting_label
    if rule == "near_conflict":
        return "off" if rules.near_duplicate == "off" else "flag"
    chosen: Action = getattr(rules, rule, "refuse")
    return chosen


def severity(rule: str) -> str:
    """ "duplicate" or "error", for the quarantine."""
    return "duplicate" if rule in DUPLICATES else "error"


def not_checked(params: CleanParams, is_class: bool, has_classes: bool, has_digests: bool) -> dict[str, str]:
    """The rules that do not run with these params, and why."""
    reasons = {rule: f"clean.rules.{rule} is off" for rule in RULES if action(rule, params.rules) == "off"}
    if not has_digests:
        reasons["digest_mismatch"] = reasons["not_listed"] = (
            "data.digests is null: a flipped byte that still decodes goes unseen, and so does a file that is gone"
        )
    if is_class:
        reasons |= dict.fromkeys(
            ("missing_target", "not_a_number", "non_finite_target", "conflicting_target", "outlier"), "targets are classes"
        )
        if not has_classes:
            reasons["unknown_label"] = "data.classes is null"
    else:
        reasons |= dict.fromkeys(_OF_CLASSES, "targets are numbers")
    return reasons
