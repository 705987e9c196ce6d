"""Each measured figure of the pages equals its results file, to the digits that the page gives.

A figure is followed by a comment that quotes one line of a file in bench/results/, or of
bench/LOG.md, such as `13 times <!-- serving_speed_small: 13.23 ... times BentoML -->`. Bars of
tables are left out, and `...` stands for anything. All numbers of a quote are figures: the last
numbers before the comment are the same, rounded.
"""

import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = sorted((ROOT / "bench/results").glob("*.md"))
COMMENT = re.compile(r"<!-- (\w+): (.+?) -->")
# Not the 8 of int8, nor the 512 of AVX-512.
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?: ?%)?(?!\w)")
CONDITIONS = re.compile(r"20\d\d-\d\d-\d\d, \d+ cores of .+load average at the end [\d.]+", re.S)

MEASURED = re.compile(r"\b(took|takes?|taking|measured|costs?|needed|reached|gained)\b")
WITH_UNIT = re.compile(
    r"(?<![\w.-])\d[\d,.]*[ -]?"
    r"(s|ms|seconds|minutes|MB|GB|kB|GiB|MiB|images/s|rows/s|answers/s|times( as)?|x|%)(?![\w/])"
)
# Limits, settings and computed examples, which nobody measured.
NOT_MEASURED = (
    "**Shutdown** takes",
    "a function that takes 10 ms",
    "they take longer than `--slow-ms`",
    "So a network of 1 billion parameters takes",
    "Refused bodies take turns",
    "Drift detection takes at most",
    "whose batches took at most 1 ms in warm-up",
    "and the service takes `12.5`",
)


class Quote(NamedTuple):
    """A comment, and the text of its page up to it."""

    page: str
    before: str
    results: str
    quoted: str


def quotes(page: str, text: str) -> Iterator[Quote]:
    for comment in COMMENT.finditer(text):
        # Numbers in other comments are no figures of the page.
        before = COMMENT.sub("", text[: comment.start()])
        yield Quote(page, before, *comment.groups())


def is_quoted(quote: Quote, results: str) -> bool:
    parts = (re.escape(part.strip()) for part in quote.quoted.split("..."))
    pattern = re.compile(".*?".join(rf"(?<![\d.,]){part}(?!\d|[.,]\d)" for part in parts))
    lines = (" ".join(line.replace("|", " ").split()) for line in results.splitlines())
    return any(pattern.search(line) for line in lines)


def rounded(measured: str, as_said: str) -> Decimal:
    """A measured figure in the unit and to the digits of another."""
    value = decimal(measured)
    if as_said.endswith("%") and not measured.endswith("%"):
        value *= 100
    return value.quantize(decimal(as_said), ROUND_HALF_UP)


def decimal(figure: str) -> Decimal:
    return Decimal(figure.removesuffix("%").strip().replace(",", ""))


def is_true(quote: Quote) -> bool:
    measured = NUMBER.findall(quote.quoted)
    said = NUMBER.findall(quote.before)[-len(measured) :]
    if not measured or len(said) != len(measured):
        return False
    pairs = zip(measured, said, strict=True)
    return all(rounded(one, other) == decimal(other) for one, other in pairs)


QUOTES = [quote for page in PAGES for quote in quotes(page.name, page.read_text())]


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: f"{quote.page}: {quote.quoted}")
def test_a_figure_of_a_page_is_the_measured_one(quote: Quote) -> None:
    folder = ROOT / "bench" if quote.results == "LOG" else ROOT / "bench/results"
    assert is_quoted(quote, (folder / f"{quote.results}.md").read_text())
    assert is_true(quote), NUMBER.findall(quote.before)[-5:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_begins_with_a_comment_which_would_end_its_paragraph(page: Path) -> None:
    assert not re.search(r"^\s*<!-- \w+: ", page.read_text(), re.M)


def test_the_pages_quote_results() -> None:
    assert {"README.md", "results.md", "drift.md"} <= {quote.page for quote in QUOTES}
    in_readme = {quote.results for quote in QUOTES if quote.page == "README.md"}
    in_results = {quote.results for quote in QUOTES if quote.page == "results.md"}
    assert in_readme <= in_results


def bare_figures(text: str) -> list[str]:
    """Find sentences that tell a measured figure in a paragraph that quotes no results."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*[-*|] |\d+\. )", text)
    return [
        sentence
        for paragraph in paragraphs
        if not COMMENT.search(paragraph)
        for sentence in re.split(r"(?<=[.:;]) ", " ".join(paragraph.split()))
        if MEASURED.search(sentence) and WITH_UNIT.search(sentence)
    ]


PROSE = [page for page in PAGES if "decisions" not in page.parts and not page.match("*.zh.md")]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_a_measured_figure_quotes_its_results(page: Path) -> None:
    bare = bare_figures(page.read_text())
    assert not [one for one in bare if not any(known in one for known in NOT_MEASURED)]


def test_a_figure_without_its_results_is_found() -> None:
    assert bare_figures("One.\n\nA step took 35 ms here.") == ["A step took 35 ms here."]
    assert not bare_figures("A step took 35 ms <!-- x: 35 -->.\n\nWait for 35 ms.")


LINE = "| 260 | 19.9% | 1,234.6 (0.251 to 9) |"


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("20 % <!-- x: 260 ... 19.9% -->", False),  # 260 is a figure, too
        ("Of 260, 20 % <!-- x: 260 19.9% -->", True),
        ("20 % <!-- x: 19.9% -->", True),
        ("19 % <!-- x: 19.9% -->", False),
        ("20 % <!-- x: 9.9% -->", False),  # no whole number of the line
        ("1,235 <!-- x: 1,234.6 -->", True),
        ("25 % (int8) <!-- x: 0.251 -->", True),
        ("25 % and 9 <!-- x: 0.251 to 9 -->", True),
        ("9 <!-- x: 19.9% ... to 9 -->", False),
    ],
)
def test_only_numbers_that_match_their_results_line_are_accepted(text: str, is_right: bool) -> None:
    (quote,) = quotes("page", text)
    assert (is_quoted(quote, LINE) and is_true(quote)) == is_right


@pytest.mark.parametrize("results", RESULTS, ids=lambda results: results.stem)
def test_each_results_file_names_its_processor_and_the_load(results: Path) -> None:
    assert CONDITIONS.search(results.read_text())
