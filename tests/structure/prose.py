"""Checks of the texts: first words of docstrings, banned words, long lines and long sentences."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.structure.tracked import tracked_files

LONGEST_LINE = 100  # characters; ruff does not count comments such as `# type: ignore`
LONGEST_SENTENCE = 35  # words
TEXTS = (".md", ".yaml", ".yml", ".toml", ".sh", ".html", ".js", ".css", ".py")
# History, old names, and results as they were measured.
_UNCHECKED = (*("CHANGELOG.md", "bench/LOG.md", "bench/results/", "data/", "tests/structure/"),)
_QUESTION = re.compile(r"(What|Whether|Where|Which|How|When|Who)\b")
_QUOTED_QUESTION = re.compile(rf'"""\s*{_QUESTION.pattern}')
_CODE_BLOCK = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
_SENTENCE_END = re.compile(
    r"(?<=[.!?:])[)\"'`*]*\s+(?=[^a-z])|(?<=[。！？])"
    r"|\n\s*\n|\n\s*(?:[*-]|\d+\.)\s|\s*\|\s*"
)
_LIST_OR_TITLE = re.compile(r"^\s*(?:[*-]|\d+\.|#+|>)\s+")


@dataclass(frozen=True)
class BannedWord:
    """A line of banned.txt: words, what to write in their place, and the paths where they may be.

    `words` is a regular expression, `pattern` finds it as whole words.
    """

    words: str
    pattern: re.Pattern[str]
    instead: str
    allowed: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """A fault of a text: which check found it, where, and what it is."""

    check: str
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def findings(root: Path) -> Iterator[Finding]:
    """All faults in the tracked files of `root`."""
    for path in tracked_files(root, TEXTS):
        if not path.startswith(_UNCHECKED):
            yield from text_findings(path, (root / path).read_text())


def text_findings(path: str, text: str) -> Iterator[Finding]:
    """The faults of one file. `path` is relative to the root of the repository."""
    for line, word in banned_words(path, text):
        yield Finding("banned", path, line, f"{word.words} -> {word.instead}")
    if path.endswith(".py"):
        for line, opening in question_docstrings(text):
            yield Finding("docstring", path, line, f"docstring opens with {opening!r}")
    for line, length in long_lines(path, text):
        yield Finding("line", path, line, f"{length} characters")
    if path.endswith(".md"):
        for line, sentence in long_sentences(text):
            yield Finding("sentence", path, line, f"{len(sentence.split())} words: {sentence}")


def banned_words(path: str, text: str) -> Iterator[tuple[int, BannedWord]]:
    """The line of each banned word in a text, and the word."""
    words = [word for word in read_banned_words() if not path.startswith(word.allowed)]
    any_word = _whole_word("|".join(word.words for word in words))
    for number, line in enumerate(text.splitlines(), start=1):
        if any_word.search(line):
            yield from ((number, word) for word in words if word.pattern.search(line))


@cache
def read_banned_words() -> tuple[BannedWord, ...]:
    lines = Path(__file__).with_name("banned.txt").read_text().splitlines()
    return tuple(_banned_word(line) for line in lines if line and not line.startswith("#"))


def _banned_word(line: str) -> BannedWord:
    pattern, rest = line.split(" -> ")
    instead, _, allowed = rest.rstrip("]").partition(" [in: ")
    return BannedWord(pattern, _whole_word(pattern), instead, tuple(allowed.split()))


@cache
def _whole_word(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-zA-Z])(?:{words})(?![a-zA-Z])", flags=re.IGNORECASE)


def question_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the first word of each docstring that opens with a question word."""
    if not _QUOTED_QUESTION.search(source):
        return  # most files: parsing all would take half of the seconds of the whole check
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = _QUESTION.match(ast.get_docstring(node) or "")
            if found:
                yield node.body[0].lineno, found[1]


def long_lines(path: str, text: str) -> Iterator[tuple[int, int]]:
    """The number and the length of each line that is too long.

    A row of a table, a link and a line without a space cannot be broken. Blocks of code show
    what a program prints.
    """
    if path.endswith(".md"):
        text = _CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), start=1):
        breakable = " " in line.strip() and not (
            path.endswith(".md") and (line.startswith("|") or "](http" in line)
        )
        if len(line) > LONGEST_LINE and breakable:
            yield number, len(line)


def long_sentences(page: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each sentence of a Markdown page that has too many words."""
    prose = _CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n") + "\n\n", page)
    start = 0
    for end in [*_SENTENCE_END.finditer(prose), None]:
        sentence = prose[start : end.start() if end else len(prose)]
        text = " ".join(_LIST_OR_TITLE.sub("", sentence).split())
        if len(text.split()) > LONGEST_SENTENCE:
            yield prose.count("\n", 0, start + len(sentence) - len(sentence.lstrip())) + 1, text
        start = end.end() if end else len(prose)
