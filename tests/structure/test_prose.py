"""The texts: docstrings open with what a thing is, no private words, short lines and sentences."""

from pathlib import Path

import pytest

from tests.structure.prose import findings, text_findings


def test_all_texts_keep_the_rules(root: Path) -> None:
    assert [f"{found.check}: {found}" for found in findings(root)] == []


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        ("docstring", "slipway/a/b.py", '"""What a row is."""'),
        ("docstring", "slipway/a/b.py", 'def f():\n    """Whether it fits."""'),
        ("banned", "slipway/a/b.py", "told = {}"),
        ("banned", "slipway/a/b.py", "# the Keeper writes"),
        ("banned", "docs/a.md", "what was asked for"),
        ("banned", "docs/reference/limits.md", "the last hop"),
        ("line", "docs/a.md", "word " * 21),
        ("line", "dvc.yaml", "# " + "word " * 21),
        ("line", "slipway/a/b.py", "x = 1  # type: ignore[arg-type]  # " + "word " * 14),
        ("sentence", "docs/a.md", "A sentence " + "with a word\n" * 20),
        ("sentence", "docs/a.md", "| a | " + "word " * 36 + "|"),
        ("sentence", "docs/a.md", "一个 word，\n" * 40),
    ],
)
def test_each_fault_is_reported(check: str, path: str, text: str) -> None:
    assert [found.check for found in text_findings(path, text)] == [check]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("slipway/a/b.py", '"""Rows whose label is unknown."""\nx = "What"'),
        ("slipway/a/b.py", "keep = stolde"),
        ("slipway/export/certification/b.py", "# the last hop"),
        ("docs/a.md", "| " + "Word. " * 40 + "|"),
        ("docs/a.md", "一个 word。\n" * 40),
        ("docs/a.md", "* " + "word " * 18 + "\n* " + "word " * 18 + "\n\n" + "word " * 18),
        ("docs/a.md", "```\n" + "word " * 19 + "\n" + "word " * 19 + "\n```\n"),
        ("docs/a.md", "x" * 200),
    ],
)
def test_texts_without_a_fault_pass(path: str, text: str) -> None:
    assert list(text_findings(path, text)) == []
