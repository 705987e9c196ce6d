"""docs/how-to/faq.md quotes messages that the code has."""

import ast
import re
from functools import cache

import pytest

from tests.conftest import ROOT
from tests.structure.syntax import nodes

PAGE = (ROOT / "docs/how-to/faq.md").read_text()
FEWEST, SHORTEST_PIECE = 15, 12  # messages; characters of the longest piece of a quotation


@cache
def texts_of_the_code() -> str:
    """Return all string literals of our modules, without the values in f-strings."""
    pieces = []
    for path in sorted((ROOT / "slipway").rglob("*.py")):
        for node in nodes(path.read_text()):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.append(node.value)
    return "\0".join(pieces)


def quotations(page: str) -> list[str]:
    return re.findall(r"^### `(.+)`$", page, flags=re.MULTILINE)


def missing_pieces(quotation: str) -> list[str]:
    """List the pieces of a quotation, between its "...", that no text of the code contains."""
    pieces = [piece.strip() for piece in quotation.split("...")]
    assert max(map(len, pieces)) >= SHORTEST_PIECE, f"{quotation!r} could be any message"
    return [piece for piece in pieces if piece not in texts_of_the_code()]


def test_the_faq_answers_at_least_fifteen_messages_each_once() -> None:
    found = quotations(PAGE)
    assert len(found) == len(set(found)) >= FEWEST
    assert len(found) == PAGE.count("\n### ")


@pytest.mark.parametrize("quotation", quotations(PAGE))
def test_every_message_that_the_faq_quotes_is_in_the_code(quotation: str) -> None:
    assert missing_pieces(quotation) == []


def test_a_message_that_was_reworded_is_reported() -> None:
    assert missing_pieces("data.path ... is nowhere (looked in ...)") == ["is nowhere (looked in"]


@pytest.mark.parametrize("quotation", quotations(PAGE))
def test_every_message_of_the_faq_has_a_cause_and_a_fix(quotation: str) -> None:
    section = PAGE.partition(f"### `{quotation}`\n")[2].partition("\n#")[0]
    assert re.fullmatch(r"\n\*\*Cause\.\*\* .+\n\n\*\*Fix\.\*\* .+", section, flags=re.DOTALL)
