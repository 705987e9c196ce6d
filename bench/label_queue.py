"""Measures the gain of the label queue against rows labelled at random, on real texts.

`python -m bench.label_queue` reads the files below ../shared/data/text and skips missing ones. For
each seed a small model learns from few labelled texts and answers a pool of others, as a service
would. `choose`, the function of `slipway dataset label --choose`, picks rows of the pool by these
answers; as many others are drawn at random. Both are labelled with their true labels, added, and
the model is trained again. Its accuracy on the same test texts is compared, seed by seed. The model
is TF-IDF with a logistic regression, so that many seeds can be measured.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.csv
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from bench.conditions import conditions
from slipway.system import files
from slipway.traffic.label_queue import choose
from slipway.traffic.selection import Content, Key, LoggedItem

SHARED = Path("../shared/data/text")
RESULT = Path("bench/results/label_queue.md")
# File, column with the label, and the analyzer of scikit-learn for its language.
DATA = (
    ("sms_spam.csv", "label", "word"),
    ("ag_news_7600.csv", "label", "word"),
    ("waimai_10k.csv", "label", "char"),
)
BASE, POOL, TEST = 200, 3000, 2000
LABELLED = (50, 100, 200)
SEEDS = range(100, 112)  # not those on which the queue's rule was chosen: 0 to 5
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Texts:
    """Shuffled rows of a file: `BASE` labelled ones, `POOL` logged ones, and the test rows."""

    texts: list[str]
    labels: NDArray[np.str_]
    analyzer: str

    @property
    def pool(self) -> range:
        return range(BASE, min(BASE + POOL, len(self.texts) - TEST))

    @property
    def test(self) -> range:
        return range(len(self.texts) - TEST, len(self.texts))


def read(name: str, label: str, analyzer: str, seed: int) -> Texts:
    """Read a file without equal rows, and shuffle it by the seed."""
    table = pyarrow.csv.read_csv(
        SHARED / name, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True)
    )
    columns = [column for column in table.column_names if column != label]
    cells = zip(*(table[column].cast("string").to_pylist() for column in columns), strict=True)
    rows = zip((" ".join(map(str, row)) for row in cells), table[label].to_pylist(), strict=True)
    known = list(dict(rows).items())
    np.random.default_rng(seed).shuffle(known)
    texts, labels = zip(*known, strict=True)
    return Texts(list(texts), np.array(labels, str), analyzer)


def fitted(rows: Texts, places: Sequence[int]) -> LogisticRegression:
    """Train the small model on the rows at these places."""
    pieces = TfidfVectorizer(analyzer=rows.analyzer, ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(pieces, LogisticRegression(C=10.0, max_iter=300))
    return model.fit([rows.texts[place] for place in places], rows.labels[list(places)])


def accuracy(rows: Texts, places: Sequence[int]) -> float:
    """Return the accuracy on the test rows after a training on the rows at these places."""
    answers = fitted(rows, places).predict([rows.texts[place] for place in rows.test])
    return float((answers == rows.labels[rows.test]).mean())


def logged(rows: Texts) -> list[LoggedItem]:
    """Return the pool's rows with the answers of the model that the base rows trained."""
    model = fitted(rows, range(BASE))
    probabilities = model.predict_proba([rows.texts[place] for place in rows.pool])
    ordered = np.sort(probabilities, axis=1)
    return [
        LoggedItem(
            key=(str(place), 0, float(place)),
            model="first",
            digest=hashlib.sha256(rows.texts[place].encode()).hexdigest(),
            truth=None,
            predicted=str(model.classes_[probabilities[number].argmax()]),
            doubt=float(1 - probabilities[number].max()),
            ood_score=0.0,
            is_ood=False,
            drifted=False,
            ambiguity=float(1 - ordered[number, -1] + ordered[number, -2]),
        )
        for number, place in enumerate(rows.pool)
    ]


def measure(name: str, label: str, analyzer: str, seed: int) -> NDArray[np.float64]:
    """Return (amounts, 3) accuracies: without further labels, at random, and by the queue."""
    rows = read(name, label, analyzer, seed)
    items, base = logged(rows), range(BASE)

    def contents(keys: set[Key]) -> dict[Key, Content]:
        return {key: {"text": rows.texts[int(key[0])]} for key in keys}

    before, found = accuracy(rows, base), []
    for amount in LABELLED:
        drawn = np.random.default_rng(seed).choice(rows.pool, amount, replace=False)
        chosen = choose(items, contents, amount, 0.2, seed)
        assert len(chosen) == amount
        found.append(
            [
                before,
                accuracy(rows, [*base, *drawn]),
                accuracy(rows, [*base, *(int(row.request_id) for row in chosen)]),
            ]
        )
    return np.array(found)


def main() -> None:
    lines = []
    seeds = SEEDS[: int(sys.argv[1])] if len(sys.argv) > 1 else SEEDS
    for name, label, analyzer in DATA:
        if not (SHARED / name).is_file():
            print(f"{SHARED / name} is missing, so it is not measured", file=sys.stderr)
            continue
        every = np.array([measure(name, label, analyzer, seed) for seed in seeds])
        for place, amount in enumerate(LABELLED):
            gains = 100 * (every[:, place, 2] - every[:, place, 1])
            half = stats.t.ppf((1 + CONFIDENCE) / 2, len(gains) - 1) * stats.sem(gains)
            means = " | ".join(f"{mean:.4f}" for mean in every[:, place].mean(axis=0))
            lines.append(
                f"| {name} | {amount} | {means} | {gains.mean():+.2f} ({gains.mean() - half:+.2f} "
                f"to {gains.mean() + half:+.2f}) | {(gains > 0).sum()} of {len(gains)} |"
            )
            print(lines[-1], flush=True)
    text = f"""# The gain of the label queue

{BASE} labelled texts train a model, TF-IDF with a logistic regression. It answers up to {POOL:,} \
others, of which some get their true labels: drawn at random, or chosen by \
`slipway dataset label --choose` with its usual fifth at random. Then it is trained again. \
Accuracies are on the same {TEST:,} test texts, means over {len(seeds)} seeds, each with another \
order of the rows. The gain of the queue is paired by seed, with an interval of \
{CONFIDENCE:.0%} by Student's t.

| texts | labels | before | at random | by the queue | gain, points | seeds with a gain |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}

{conditions("numpy", "scikit-learn")}
"""
    if lines:
        files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
