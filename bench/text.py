"""Compares trained networks with TF-IDF and logistic regression on the same rows.

`python -m bench.text FILE.csv...` makes three projects of each file in an empty folder, as `slipway
init` proposes them, with three seeds and thus three splits, and runs their stages up to `evaluate`.
A second row of the table has a small transformer on tokens of a BPE learned from the texts. For
comparison, scikit-learn's TfidfVectorizer and LogisticRegression are fitted on the same training
rows: on words and pairs of words, or on characters and pairs of characters if most texts have no
spaces. The strength of the regression is chosen on the validation rows, as is the network's epoch.
The difference in accuracy has a paired interval over the test rows. The table is written after each
row.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from bench.conditions import conditions
from slipway.config.edit import propose
from slipway.data.store.packed import PackedManifest, PackedSplit, open_split, read_manifest
from slipway.data.tables.clean_files import ID_COLUMN
from slipway.data.texts.clean_files import read_texts
from slipway.inputs.texts import TextContract
from slipway.metrics.paired_bootstrap import paired_difference
from slipway.metrics.scores import Resampling
from slipway.system import files

SEEDS = (7, 8, 9)
# Values of params.yaml for tokens; they were not tuned.
TOKENS = {
    "precompute.max_text_bytes": 512,
    "precompute.tokenizer": "bpe",
    "precompute.vocabulary_size": 8000,
    "precompute.max_tokens": 64,
    "train.network": "small_transformer",
    "train.network_arguments": {
        "width": 96,
        "num_layers": 2,
        "num_heads": 4,
        "patch": 1,
        "dropout": 0.2,
    },
    "train.epochs": 6,
    "train.batch_size": 64,
    "train.learning_rate": 0.001,
    "train.warmup_epochs": 1.0,
    "train.weight_decay": 0.05,
    "train.label_smoothing": 0.1,
    "train.ema_decay": None,
}
RESULT = Path.cwd() / "bench/results/text.md"
STAGES = ("code", "clean", "split", "precompute", "augment", "train", "evaluate")
STRENGTHS = (1.0, 10.0, 100.0)  # C: the inverse of the penalty
RESAMPLING = Resampling(seed=7, num_samples=2000, confidence=0.95)
COLUMNS = (
    *("Data", "Seed", "Test rows", "TF-IDF and regression", "Fitting", "Network", "Training"),
    "Difference (95 %, paired)",
)


def texts_of(project: Path, split: PackedSplit, contract: TextContract) -> list[str]:
    """Return the whole texts of the rows of a split, in its order."""
    table = read_texts(project / "data/clean", contract.columns)
    places = pc.index_in(pc.cast(split.ids, "string"), table[ID_COLUMN].combine_chunks())
    rows = table.take(places).to_pylist()
    return [" ".join(row[name] or "" for name in contract.columns) for row in rows]


def baseline(
    texts: dict[str, list[str]], targets: dict[str, NDArray[Any]]
) -> tuple[NDArray[np.float64], float]:
    """Return the probabilities of the test rows, and the processor seconds."""
    begin = time.process_time()
    has_spaces = np.mean([" " in text for text in texts["train"]]) > 0.5
    vectors = TfidfVectorizer(
        analyzer="word" if has_spaces else "char", ngram_range=(1, 2), sublinear_tf=True
    )
    matrices = {"train": vectors.fit_transform(texts["train"])}
    matrices |= {name: vectors.transform(texts[name]) for name in ("val", "test")}
    models = [
        LogisticRegression(C=strength, max_iter=1000).fit(matrices["train"], targets["train"])
        for strength in STRENGTHS
    ]
    best = max(models, key=lambda model: model.score(matrices["val"], targets["val"]))
    return best.predict_proba(matrices["test"]), time.process_time() - begin


def network_answers(
    project: Path, test: PackedSplit, manifest: PackedManifest
) -> NDArray[np.float64]:
    """Return the probabilities that `evaluate` wrote, in the order of the test rows."""
    table = pq.read_table(project / "artifacts/predictions.parquet")
    places = pc.index_in(pc.cast(test.ids, "string"), table["id"].combine_chunks())
    return np.array(table.take(places)["probabilities"].to_pylist(), np.float64)


def trained(data: Path, project: Path, changes: dict[str, Any]) -> float:
    """Make a project with changed values, run its stages; return `train`'s processor seconds."""
    slipway = [sys.executable, "-m", "slipway.cli"]
    run([*slipway, "init", "--data", str(data.absolute()), "--yes", str(project)], Path.cwd())
    propose(project / "params.yaml", changes, apply=True)
    seconds = {
        stage: run([sys.executable, "-m", f"slipway.stages.{stage}"], project) for stage in STAGES
    }
    return seconds["train"]


def run(command: list[str], folder: Path) -> float:
    """Run a command of this checkout in a folder; return its processor seconds."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


def compare(
    data: Path, seed: int, project: Path, changes: dict[str, Any], known: dict[str, Any]
) -> tuple[list[str], float]:
    """Return the row of one file, split and network, and the difference.

    `known` has the answers of the regression by the ids of its rows.
    """
    training = trained(data, project, {"seed": seed, **changes})
    manifest = read_manifest(project / "data/packed")
    contract = manifest.input
    assert isinstance(contract, TextContract), f"{project} has no texts"
    splits = {
        name: open_split(project / "data/packed", manifest, name, verify=True)
        for name in ("train", "val", "test")
    }
    texts = {name: texts_of(project, split, contract) for name, split in splits.items()}
    targets = {name: split.targets.astype(np.int64) for name, split in splits.items()}
    rows = str([splits[name].ids for name in splits])
    if rows not in known:
        known[rows] = baseline(texts, targets)
    before, fitting = known[rows]
    after = network_answers(project, splits["test"], manifest)
    found = paired_difference(manifest.task, "accuracy", targets["test"], before, after, RESAMPLING)
    model = json.loads((project / "artifacts/model/model.json").read_text())
    row = [
        data.stem,
        str(seed),
        f"{found.rows:,}",
        f"{found.before:.4f}",
        f"{fitting:.0f} s",
        f"{model['network']['name']} {found.after:.4f}",
        f"{training:.0f} s",
        f"{found.difference:+.4f} ({found.low:+.4f} to {found.high:+.4f})",
    ]
    return row, found.difference


def main() -> None:
    """Write the table of all files."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    differences: dict[str, list[float]] = {}
    kinds: dict[str, dict[str, Any]] = {"hashed_ngrams": {}, "small_transformer": TOKENS}
    known: dict[str, Any] = {}
    for name, data, seed in product(kinds, map(Path, sys.argv[1:]), SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            row, difference = compare(data, seed, Path(folder) / "project", kinds[name], known)
        lines.append("| " + " | ".join(row) + " |")
        differences.setdefault(f"{name} on {data.stem}", []).append(difference)
        print(lines[-1], flush=True)
        write(lines, differences)


def write(lines: list[str], differences: dict[str, list[float]]) -> None:
    """Write the table of all measurements so far."""
    means = "\n".join(
        f"* {name}: mean difference {np.mean(found):+.4f} over {len(found)} splits"
        for name, found in differences.items()
    )
    has_tokens = any(name.startswith("small_transformer") for name in differences)
    tokens = "; small_transformer reads tokens, with the settings in bench/text.py" * has_tokens
    note = (
        "One run for each seed, which divides the rows differently. hashed_ngrams has the settings "
        f"that `slipway init` proposes{tokens}. Seconds are those of the processor, of all "
        f"threads; training includes its start. {conditions('scikit-learn', 'torch')}"
    )
    title = "# Networks for texts, and TF-IDF with logistic regression"
    table = "\n".join(lines)
    files.write_text(RESULT, f"{title}\n\n{table}\n\n{means}\n\n{note}\n")


if __name__ == "__main__":
    main()
