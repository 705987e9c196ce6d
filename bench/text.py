"""Compares trained networks with TF-IDF and logistic regression on the same rows.

`python -m bench.text FILE.csv...` makes a project of each file in an empty folder, as
`slipway init` proposes it, and runs its stages up to `evaluate`. It fits scikit-learn's
TfidfVectorizer and LogisticRegression on the same training rows: words and pairs of words, or
characters and pairs of characters if most texts have no spaces. The strength of the regression is
chosen on the validation rows, as the network's epoch is. The difference in accuracy has its paired
interval over the test rows.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from bench.conditions import conditions
from slipway.data.store.packed import PackedManifest, PackedSplit, open_split, read_manifest
from slipway.data.tables.files import ID_COLUMN
from slipway.data.texts.files import read_texts
from slipway.inputs.texts import TextContract
from slipway.metrics.paired_bootstrap import paired_difference
from slipway.metrics.scores import Resampling
from slipway.system import files

RESULT = Path.cwd() / "bench/results/text.md"
STAGES = ("code", "clean", "split", "precompute", "augment", "train", "evaluate")
STRENGTHS = (1.0, 10.0, 100.0)  # C: the inverse of the penalty
RESAMPLING = Resampling(seed=7, num_samples=2000, confidence=0.95)
COLUMNS = (
    *("Data", "Test rows", "TF-IDF and regression", "Fitting", "Network", "Training"),
    "Difference (95 %, paired)",
)


def texts_of(project: Path, split: PackedSplit, contract: TextContract) -> list[str]:
    """The whole texts of the rows of a split, in its order."""
    table = read_texts(project / "data/clean", contract.columns)
    places = pc.index_in(pc.cast(split.ids, "string"), table[ID_COLUMN].combine_chunks())
    rows = table.take(places).to_pylist()
    return [" ".join(row[name] or "" for name in contract.columns) for row in rows]


def baseline(
    texts: dict[str, list[str]], targets: dict[str, NDArray[Any]]
) -> tuple[NDArray[np.float64], float]:
    """Probabilities of the test rows, and the processor's seconds."""
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
    """The probabilities that `evaluate` wrote, in the order of the test rows."""
    table = pq.read_table(project / "artifacts/predictions.parquet")
    places = pc.index_in(pc.cast(test.ids, "string"), table["id"].combine_chunks())
    return np.array(table.take(places)["probabilities"].to_pylist(), np.float64)


def trained(data: Path, project: Path) -> float:
    """Make a project and run its stages; the processor's seconds of `train`."""
    slipway = [sys.executable, "-m", "slipway.cli"]
    run([*slipway, "init", "--data", str(data.absolute()), "--yes", str(project)], Path.cwd())
    seconds = {
        stage: run([sys.executable, "-m", f"slipway.stages.{stage}"], project) for stage in STAGES
    }
    return seconds["train"]


def run(command: list[str], folder: Path) -> float:
    """Run a command of this checkout in a folder; the processor's seconds."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


def compare(data: Path, project: Path) -> list[str]:
    """The row of one file."""
    training = trained(data, project)
    manifest = read_manifest(project / "data/packed")
    contract = manifest.input
    assert isinstance(contract, TextContract), f"{project} has no texts"
    splits = {
        name: open_split(project / "data/packed", manifest, name, verify=True)
        for name in ("train", "val", "test")
    }
    texts = {name: texts_of(project, split, contract) for name, split in splits.items()}
    targets = {name: split.targets.astype(np.int64) for name, split in splits.items()}
    before, fitting = baseline(texts, targets)
    after = network_answers(project, splits["test"], manifest)
    found = paired_difference(manifest.task, "accuracy", targets["test"], before, after, RESAMPLING)
    model = json.loads((project / "artifacts/model/model.json").read_text())
    return [
        data.stem,
        f"{found.rows:,}",
        f"{found.before:.4f}",
        f"{fitting:.0f} s",
        f"{model['network']['name']} {found.after:.4f}",
        f"{training:.0f} s",
        f"{found.difference:+.4f} ({found.low:+.4f} to {found.high:+.4f})",
    ]


def main() -> None:
    """The table of all files."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    with tempfile.TemporaryDirectory() as folder:
        for given in map(Path, sys.argv[1:]):
            row = compare(given, Path(folder) / given.stem)
            lines.append("| " + " | ".join(row) + " |")
            print(lines[-1], flush=True)
    text = "\n".join(lines)
    note = (
        "One split and one run of each, with the settings that `slipway init` proposes. "
        "Seconds are those of the processor, of all threads; training includes its start. "
        f"{conditions('scikit-learn', 'torch')}"
    )
    files.write_text(
        RESULT, f"# Networks for texts, and TF-IDF with logistic regression\n\n{text}\n\n{note}\n"
    )


if __name__ == "__main__":
    main()
