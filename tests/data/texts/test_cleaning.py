"""Tests of cleaning texts: each rule, and copies of a text in any case and Unicode form."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.config.sections import DataParams
from slipway.data.rules.report import CleanResult, Clusters
from slipway.data.texts.cleaning import check_texts, clean_texts
from slipway.system.errors import DataError
from tests.project_params import PROJECT, clean_params

pytestmark = pytest.mark.unit
PLAIN = [("good", f"a text with number {n}") for n in range(5)]


def of_texts(path: Path, **changes: Any) -> DataParams:
    own = {"path": str(path), "task": "text_classification", "text_columns": ["text"]}
    return PROJECT.data.model_copy(update=own | changes)


def result(
    folder: Path, rows: list[Any], data: dict[str, Any] | None = None, **changes: Any
) -> CleanResult:
    path = folder / "texts.jsonl"
    lines = [json.dumps(dict(zip(("label", "text"), row, strict=True))) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return clean_texts(of_texts(path, **(data or {})), clean_params(**changes))


def refused(found: CleanResult) -> dict[int, tuple[str, str]]:
    rows = found.cleaned.quarantine.to_pylist()
    return {int(row["source"]): (row["rule"], row["detail"]) for row in rows}


def flagged(found: CleanResult) -> dict[int, list[str]]:
    rows = found.cleaned.rows.to_pylist()
    return {int(row["source"]): row["flags"] for row in rows if row["flags"]}


def test_each_text_rule_refuses_its_row_with_a_detail_of_found_and_expected(tmp_path: Path) -> None:
    rows = [
        *PLAIN,
        ("bad", ""),
        ("bad", " \u3000\t"),
        ("bad", None),
        ("bad", "ab"),
        ("bad", "x" * 51),
        (None, "a text without a class"),
        ("bad", "garbled \ufffd bytes"),
        ("bad", "\u200b\ufeff"),
    ]
    found = result(tmp_path, rows, min_characters=3, max_characters=50)
    assert {source: rule for source, (rule, _) in refused(found).items()} == {
        **dict.fromkeys((5, 6, 7, 12), "missing_value"),
        8: "too_short",
        9: "too_long",
        10: "missing_label",
        11: "type_violation",
    }
    assert refused(found)[8][1] == "2 characters, expected at least 3"
    assert refused(found)[5][1] == "text: no text"
    assert found.cleaned.rows.num_rows + len(refused(found)) == found.cleaned.num_read


def test_control_characters_except_tabs_and_line_breaks_are_flagged(tmp_path: Path) -> None:
    rows = [*PLAIN, ("bad", "a\x00b"), ("bad", "a\x1b[31mred"), ("bad", "a\tb\nc")]
    assert flagged(result(tmp_path, rows)) == {
        5: ["control_characters"],
        6: ["control_characters"],
    }


def test_texts_that_differ_only_in_case_and_white_space_share_a_cluster(tmp_path: Path) -> None:
    rows = [*PLAIN, ("bad", "Some Words"), ("bad", "some\n words"), ("bad", "some words")]
    kept = result(tmp_path, rows).cleaned.rows.to_pylist()
    clusters = {row["cluster"] for row in kept if int(row["source"]) >= len(PLAIN)}
    assert len(clusters) == 1
    assert None not in clusters
    assert all(row["cluster"] is None for row in kept if int(row["source"]) < len(PLAIN))


def test_nearly_equal_texts_share_a_cluster_and_their_flags_name_each_other(tmp_path: Path) -> None:
    long = "this is a long message that many people have got and sent to others, number "
    rows = [
        *PLAIN,
        ("bad", f"{long}123"),
        ("bad", f"{long}987"),
        ("good", f"{long}5"),
        ("bad", "x"),
    ]
    found = result(tmp_path, rows)
    kept = {int(row["source"]): row for row in found.cleaned.rows.to_pylist()}
    near = {source for source, row in kept.items() if row["cluster"] == kept[5]["cluster"]}
    assert near == {5, 6, 7}
    assert flagged(found)[7] == ["near_conflict", "near_duplicate"]
    assert kept[8]["cluster"] is None
    report = found.report()
    assert report.clusters is not None
    assert (report.clusters.count, report.clusters.rows) == (1, 3)
    assert report.excerpts["5"] == f"{long}123"


def test_one_of_several_near_duplicate_texts_is_kept_if_the_rule_refuses_them(
    tmp_path: Path,
) -> None:
    long = "this is a long message that many people have got and sent to others, number "
    rows = [
        *PLAIN,
        *(("bad", f"{long}{number}") for number in range(4)),
        ("bad", f"{long}0".upper()),
    ]
    found = result(tmp_path, rows, rules={"near_duplicate": "refuse"})
    kept = [int(row["source"]) for row in found.cleaned.rows.to_pylist()]
    assert len(set(kept) & set(range(5, 10))) == 1
    assert {rule for rule, _ in refused(found).values()} == {"near_duplicate"}
    assert result(tmp_path, rows, near_duplicate_similarity=1.0).report().clusters == Clusters(
        count=1, rows=2, largest=2, examples=[["5", "9"]]
    )


def test_each_suspicious_text_is_flagged_under_its_rule(tmp_path: Path) -> None:
    rows = [
        *(
            ("good" if n % 2 else "bad", f"a fine text with number {n} and {n * 7919 % 1000}")
            for n in range(120)
        ),
        ("bad", "caf\u00c3\u00a9 au lait"),
        ("bad", "log in to p\u0430ypal"),
        ("bad", "\u5f88\u597d\u5403\u7684\u9762"),
        ("bad", "\u202eevil text that runs to the left"),
        ("bad", "write to a.b@example.org or 09061701461"),
        ("bad", "5 \u03bcm, caf\u00e9 and na\u00efve, \u201cquoted\u201d"),
    ]
    found = result(tmp_path, rows, rules={"near_duplicate": None})
    assert flagged(found) == {
        120: ["garbled"],
        121: ["mixed_script"],
        122: ["rare_script"],
        123: ["control_characters"],
        124: ["personal_data"],
    }
    report = found.report()
    (example,) = report.flagged["personal_data"].examples
    assert example.detail == "text: an e-mail address and a phone number"
    assert report.excerpts["124"] == "write to [email] or [phone]"
    assert report.texts is not None
    assert report.texts.scripts == {"Latin": 125, "Han": 1}


def test_a_passage_of_one_class_is_flagged_on_each_row_with_a_hint(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    words = [" ".join(generator.choice(list("abcdefghij"), 30)) for _ in range(60)]
    rows = [("spam" if n % 2 else "ham", text) for n, text in enumerate(words)]
    rows = [
        (label, f"{text} Unsubscribe here: reply STOP") if label == "spam" else (label, text)
        for label, text in rows
    ]
    found = result(tmp_path, rows, rules={"near_duplicate": None})
    assert flagged(found) == {row: ["boilerplate"] for row in range(1, 60, 2)}
    (hint,) = found.report().hints
    assert "unsubscribe here: reply stop', which 100% of the texts of 'spam' have" in hint


def test_an_equal_text_is_a_duplicate_and_a_conflict_if_its_label_differs(tmp_path: Path) -> None:
    rows = [*PLAIN, PLAIN[0], ("bad", PLAIN[1][1].upper())]
    found = {source: rule for source, (rule, _) in refused(result(tmp_path, rows)).items()}
    assert found == {5: "exact_duplicate", 1: "conflicting_label", 6: "conflicting_label"}


def test_cleaned_texts_do_not_depend_on_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = [*PLAIN, ("bad", "one"), ("bad", "ONE"), ("bad", "two")]
    first, second = (
        result(tmp_path, order).cleaned.rows.drop(["source"]).to_pylist()
        for order in (rows, rows[::-1])
    )
    assert first == second


def test_error_for_a_missing_text_column_proposes_the_closest_name(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text("label,text\na,b\n")
    with pytest.raises(DataError, match=r"text_columns\[0\] is 'Text', .*did you mean 'text'"):
        check_texts(of_texts(path, text_columns=["Text"]))


def test_a_text_column_of_lists_is_refused_with_its_type(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'text', whose cells are list.* expected text"):
        result(tmp_path, [("a", ["x"]), ("b", ["y"])])


def test_an_unreadable_number_as_target_names_the_task_of_texts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set data\.task to text_classification"):
        result(tmp_path, [("a", "x"), ("b", "y")], {"task": "text_regression"})


def test_too_long_and_undecodable_texts_are_refused_and_the_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"label": label, "text": text}) for label, text in PLAIN]
    lines += [
        json.dumps({"label": "bad", "text": "long " * 250_000}),
        '{"label": "bad", "text": "half a pair \\ud83d"}',
        json.dumps({"label": "bad", "text": "<script>alert(1)</script> \u202eback"}),
    ]
    path.write_text("\n".join(lines) + "\n")
    found = clean_texts(of_texts(path), clean_params())
    assert refused(found) == {
        5: ("too_long", "1,249,999 characters, expected at most 1000000"),
        6: ("malformed_row", "the line is not a JSON object of UTF-8 text"),
    }
    assert flagged(found) == {7: ["control_characters"]}


def test_the_only_text_of_a_script_is_flagged(tmp_path: Path) -> None:
    rows = [(("good", "bad")[n % 2], f"a text with number {n}, {n * 7919}") for n in range(120)]
    found = result(tmp_path, [*rows, ("bad", "\u5f88\u597d\u5403\u7684\u4e1c\u897f")])
    assert flagged(found)[120] == ["rare_script"]
