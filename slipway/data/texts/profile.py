"""Finds words that are typical of the texts of each class, and passages that only one class has.

Both are found in a sample of the texts, those with the first ids, so that memory does not grow with
the data. A passage that many texts of one class share and no other text has, such as a signature,
may give the class away in this data set only.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.label_sets import labels_in
from slipway.config.sections import CleanParams
from slipway.data.engine.scratch import each_true, scratch_array, slices
from slipway.data.rules.report import CleanReport, SharedPassage, TextProfile
from slipway.data.sources.raw_tables import RawTable
from slipway.data.tables.ledger import Ledger
from slipway.data.tables.targets import Annotations
from slipway.data.texts.columns import BLOCK_ROWS, PERSONAL, TextColumn, joined_texts
from slipway.data.texts.scripts import NO_SCRIPT, main_script
from slipway.inputs.personal_data import mask
from slipway.inputs.texts import SEPARATOR

SAMPLE_CHARACTERS = 1 << 20  # characters of the texts in a sample
_MOST_OF_A_TEXT = 1 << 11  # characters of a single text in a sample
_MOST_CLASSES = 20
_MOST_TERMS, _MOST_PASSAGES = 10, 3  # terms and passages shown for a class
_LEAST_ROWS, _LEAST_SCORE = 5, 3.0  # fewest rows and lowest score of a shown term
_PRIOR = 100.0  # strength of the prior, in rows distributed as over all classes
# Scripts without spaces: each letter counts as a word.
_WIDE = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_WIDE}]|[^\W{_WIDE}]+")
_IS_WIDE = re.compile(f"[{_WIDE}]")
_PASSAGE_BYTES = 24
_PASSAGE_ROWS, _PASSAGE_FRACTION = 10, 0.05  # the fewest of a class, and of its sampled texts
_ELSEWHERE = 0.01  # largest number in other classes, as a fraction of that number
_RARE_SCRIPT = 0.01  # a script of a smaller fraction of the texts is rare
_EXCERPT_CHARACTERS = 160
_HALF_ELSEWHERE = 0.2  # of the fraction of texts that have half of it, at most in other classes
_PRIME = np.uint64(0x9E3779B97F4A7C15)


class SampledText(NamedTuple):
    """A text in lower case, and its classes."""

    text: str
    classes: Sequence[str]


def sampled(texts: Iterable[SampledText]) -> list[SampledText]:
    """Return the first texts, up to the size of a sample."""
    found, size = [], 0
    for text, classes in texts:
        found.append(SampledText(text[:_MOST_OF_A_TEXT], classes))
        size += len(found[-1].text)
        if size > SAMPLE_CHARACTERS:
            break
    return found


def telling_terms(sample: Sequence[SampledText]) -> dict[str, list[str]]:
    """Return the terms that are most typical of each class: words, pairs of words or wide letters.

    Terms are ordered by their log-odds ratio over its standard error, with a prior of the
    frequency in all texts (Monroe, Colaresi and Quinn 2008, "Fightin' Words").
    """
    sizes = _class_sizes(sample)
    everywhere: Counter[str] = Counter()
    within: dict[str, Counter[str]] = {name: Counter() for name in sizes}
    for text, classes in sample:
        found = _terms(text)
        everywhere.update(found)
        for name in classes:
            if name in within:
                within[name].update(found)
    total = len(sample)
    # A term of all texts tells nothing.
    frequent = {term: rows for term, rows in everywhere.items() if _LEAST_ROWS <= rows < total}
    best = {}
    for name, counts in within.items():
        scores = {
            term: _score(counts[term], sizes[name], rows, total)
            for term, rows in frequent.items()
            if counts[term] >= _LEAST_ROWS
        }
        order = sorted(scores, key=lambda term: (-scores[term], term))
        best[name] = [term for term in order[:_MOST_TERMS] if scores[term] >= _LEAST_SCORE]
    return best


def shared_passages(sample: Sequence[SampledText]) -> list[SharedPassage]:
    """Return passages of 24 bytes or more that are common in one class and absent in others."""
    sizes = _class_sizes(sample)
    if len(sizes) < 2:
        return []
    windows = [_windows(text) for text, _ in sample]
    hashes, rows = (
        np.concatenate(windows),
        np.repeat(np.arange(len(windows)), list(map(len, windows))),
    )
    order = np.lexsort((rows, hashes))
    hashes, rows = hashes[order], rows[order]
    is_new = np.ones(len(hashes), bool)
    is_new[1:] = (hashes[1:] != hashes[:-1]) | (rows[1:] != rows[:-1])
    hashes, rows = hashes[is_new], rows[is_new]  # count each passage once for each text
    passages: list[SharedPassage] = []
    for name, size in sizes.items():
        is_own = np.array([name in classes for _, classes in sample])
        values, counts = np.unique(hashes[is_own[rows]], return_counts=True)
        is_common = counts >= max(_PASSAGE_ROWS, _PASSAGE_FRACTION * size)
        values, counts = values[is_common], counts[is_common]
        others = hashes[~is_own[rows]]
        elsewhere = np.isin(others, values)
        outside = np.bincount(np.searchsorted(values, others[elsewhere]), minlength=len(values))
        is_only = outside <= _ELSEWHERE * counts
        common = dict(zip(values[is_only].tolist(), counts[is_only].tolist(), strict=True))
        passages += _joined_passages(name, size, common, sample, windows, is_own)
    return passages


def _class_sizes(sample: Sequence[SampledText]) -> dict[str, int]:
    """Return the number of sampled texts in each of the largest classes, by class."""
    sizes = Counter(name for _, classes in sample for name in classes)
    return dict(sorted(sizes.most_common(_MOST_CLASSES)))


def _terms(text: str) -> set[str]:
    words = _WORD.findall(text)
    single = {word for word in words if not _IS_WIDE.fullmatch(word)}
    pairs = itertools.pairwise(words)
    return single | {
        f"{one}{other}" if _IS_WIDE.match(one) and _IS_WIDE.match(other) else f"{one} {other}"
        for one, other in pairs
    }


def _score(inside: int, size: int, rows: int, total: int) -> float:
    """Return the log-odds ratio of a term in a class, divided by its standard error."""
    prior = _PRIOR * rows / total
    has = np.array([inside, rows - inside]) + prior
    lacks = np.array([size - inside, total - size - rows + inside]) + _PRIOR - prior
    logits = np.log(has / lacks)
    return float((logits[0] - logits[1]) / np.sqrt((1 / has + 1 / lacks).sum()))


def _windows(text: str) -> NDArray[np.uint64]:
    """Return the hash of each run of 24 bytes of a text, in order."""
    payload = np.frombuffer(text.encode(), np.uint8).astype(np.uint64)
    size = max(0, len(payload) - _PASSAGE_BYTES + 1)
    hashes = np.zeros(size, np.uint64)
    for place in range(_PASSAGE_BYTES if size else 0):
        hashes = (hashes + payload[place : place + size] + np.uint64(1)) * _PRIME
    return hashes ^ (hashes >> np.uint64(29))


def _joined_passages(
    name: str,
    size: int,
    common: dict[int, int],
    sample: Sequence[SampledText],
    windows: Sequence[NDArray[np.uint64]],
    is_own: NDArray[np.bool_],
) -> list[SharedPassage]:
    """Return the passages of one class, with overlapping ones joined, the most common first."""
    found: list[SharedPassage] = []
    while common and len(found) < _MOST_PASSAGES:
        most = max(common.values())
        best = min(value for value, count in common.items() if count == most)
        row = next(r for r in np.flatnonzero(is_own).tolist() if (windows[r] == best).any())
        values = windows[row].tolist()
        begin = end = values.index(best)
        while begin > 0 and common.get(values[begin - 1], 0) >= 0.9 * most:
            begin -= 1
        while end + 1 < len(values) and common.get(values[end + 1], 0) >= 0.9 * most:
            end += 1
        payload = sample[row].text.encode()[begin : end + _PASSAGE_BYTES]
        # Neighbours that fewer texts have tell of the same passage.
        for value in values[max(0, begin - _PASSAGE_BYTES) : end + _PASSAGE_BYTES + 1]:
            common.pop(value, None)
        text = payload.decode(errors="ignore").strip()
        is_known = any(text in other.text or other.text in text for other in found)
        if not is_known and _are_own_halves(text, sample, is_own):
            found.append(SharedPassage(text=text, of=name, fraction=most / size))
    return found


def _are_own_halves(text: str, sample: Sequence[SampledText], is_own: NDArray[np.bool_]) -> bool:
    """Return True if each half of a passage, too, is rare in the classes without the passage.

    Otherwise the passage is a word of this class beside a passage that all classes have.
    """
    for half in (text[: len(text) // 2], text[len(text) // 2 :]):
        has_half = np.array([half in each.text for each in sample])
        if has_half[~is_own].mean() > _HALF_ELSEWHERE * has_half[is_own].mean():
            return False
    return True


def profile_of(
    columns: Sequence[TextColumn],
    order: NDArray[np.int64],
    scripts: dict[str, int],
    annotations: Annotations,
    *,
    several: bool,
) -> TextProfile:
    """Return the terms and passages that set the classes apart in a sample of texts.

    The sample consists of the texts with the first ids. `several` is True if a label is a set of
    labels. For a numeric target the result has no terms and passages.
    """

    def texts() -> Iterator[SampledText]:
        assert annotations.labels is not None
        for part in slices(len(order), BLOCK_ROWS):
            for row, text in zip(order[part], joined_texts(columns, order[part]), strict=True):
                label = annotations.labels[row]
                classes = labels_in(label) if several else [label]
                yield SampledText(mask(text, PERSONAL), classes)

    sample = [] if annotations.labels is None else sampled(texts())
    return TextProfile(
        scripts=scripts,
        sampled=len(sample),
        terms=telling_terms(sample),
        passages=shared_passages(sample),
    )


def apply_script_rule(
    columns: Sequence[TextColumn], order: NDArray[np.int64], clean: CleanParams, ledger: Ledger
) -> dict[str, int]:
    """Apply `clean.rules.rare_script` to the texts in a writing system that few texts use.

    Returns the number of texts in each writing system, the most frequent first.
    """
    found = scratch_array((len(order),), np.uint8)
    names: dict[str, int] = {}
    for part in slices(len(order), BLOCK_ROWS):
        scripts = map(main_script, joined_texts(columns, order[part]))
        found[part] = [names.setdefault(script, len(names)) for script in scripts]
    counts = {script: int(np.count_nonzero(found == place)) for script, place in names.items()}
    for script, count in counts.items():
        if script != NO_SCRIPT and count < _RARE_SCRIPT * len(order):
            detail = f"the script {script}, which {count:,} of {len(order):,} texts are in"
            details = ((int(order[at]), detail) for at in each_true(found == names[script]))
            ledger.apply(clean.rules.rare_script, "rare_script", details)
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def apply_passage_rule(
    profile: TextProfile,
    columns: Sequence[TextColumn],
    order: NDArray[np.int64],
    clean: CleanParams,
    ledger: Ledger,
) -> None:
    for part in slices(len(order) if profile.passages else 0, BLOCK_ROWS):
        for row, text in zip(order[part].tolist(), joined_texts(columns, order[part]), strict=True):
            hidden = mask(text, PERSONAL)
            found = [each for each in profile.passages if each.text in hidden]
            details = ((row, _passage_text(each)) for each in found[:1])
            ledger.apply(clean.rules.boilerplate, "boilerplate", details)


def _passage_text(passage: SharedPassage) -> str:
    """Return a sentence on a passage that may give away its class."""
    return (
        f"{_shorten(passage.text)!r}, which {passage.fraction:.0%} of the texts of {passage.of!r} "
        "have, and nearly no other"
    )


def _shorten(text: str) -> str:
    """Return the first characters of a text, in one line."""
    line = text.replace(SEPARATOR, " ")
    return line if len(line) <= _EXCERPT_CHARACTERS else line[: _EXCERPT_CHARACTERS - 3] + "..."


def passage_hints(profile: TextProfile) -> list[str]:
    return [
        f"a passage may give its class away: {_passage_text(each)}. If new texts may lack it, "
        "remove it from these"
        for each in profile.passages
    ]


def excerpts_of(
    report: CleanReport, raw: RawTable, columns: Sequence[TextColumn]
) -> dict[str, str]:
    """Return the beginning of the text of each example in the report, without personal data."""
    rules = [*report.refused.values(), *report.flagged.values()]
    clusters = report.clusters.examples if report.clusters else []
    named = [example.source for rule in rules for example in rule.examples]
    sources = list(dict.fromkeys([*named, *(source for group in clusters for source in group)]))
    numbers = np.array([int(source.partition(":")[0]) for source in sources], np.int64)
    rows = np.minimum(np.searchsorted(raw.numbers, numbers), max(0, len(raw.numbers) - 1))
    cells = zip(*(column.texts(rows) for column in columns), strict=True)
    return {
        source: _shorten(mask(SEPARATOR.join(row).strip(), PERSONAL))
        for source, number, row, place in zip(sources, numbers, cells, rows, strict=True)
        if raw.numbers[place] == number  # a malformed row has no cells
    }
