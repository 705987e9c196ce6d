"""Compares the digits' models of two commits: weights, answers and metrics.

`python -m bench.same_model EARLIER..LATER ...` runs `dvc repro` on the embedded digits in a fresh
worktree of each commit, with the same packages and threads. Weights are compared by their SHA-256;
each hop of the certificates by its rows, flipped labels, largest difference and metric. The results
are in bench/results/same_model.md.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from bench.conditions import conditions

RESULTS = Path("bench/results/same_model.md")
KEYS = ("rows", "flipped", "max_difference", "metric")


@dataclass
class Model:
    """The model that one commit makes of the digits."""

    commit: str
    file_sha256: str
    weights_sha256: str  # of names, shapes and values of all tensors
    num_weights: int
    hops: dict[str, dict[str, Any]]

    def is_equal(self, later: "Model") -> bool:
        """Return True if `later` has the same weights, and the same figures in each of our hops."""
        shared = {name: later.hops.get(name) for name in self.hops}
        return self.weights_sha256 == later.weights_sha256 and self.hops == shared


def main() -> None:
    ranges = [range.split("..") for range in sys.argv[1:]]
    if not ranges or any(len(pair) != 2 for pair in ranges):
        raise SystemExit("expected ranges: python -m bench.same_model EARLIER..LATER ...")
    with tempfile.TemporaryDirectory() as folder:
        commits = list(dict.fromkeys(commit for pair in ranges for commit in pair))
        models = {name: model_of(name, Path(folder) / str(i)) for i, name in enumerate(commits)}
    pairs = [(models[earlier], models[later]) for earlier, later in ranges]
    RESULTS.write_text(page(pairs), encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))
    if any(not pair[0].is_equal(pair[1]) for pair in pairs):
        raise SystemExit("the models differ")


def model_of(commit: str, checkout: Path) -> Model:
    """Run the pipeline of `commit` in the new folder `checkout`, and read its model."""
    short = _git("rev-parse", "--short=8", commit)
    _git("worktree", "add", "--detach", str(checkout), commit)
    try:
        (checkout / ".venv").symlink_to(Path(sys.prefix))
        unset = ("DVC_SITE_CACHE_DIR", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        subprocess.run(
            ["bash", "-c", "source .venv/bin/activate && dvc repro"],
            cwd=checkout,
            env=environment,
            check=True,
            stdout=sys.stderr,
        )
        # The folder of the model has had two names.
        found = checkout.glob("artifacts/*/weights.safetensors")
        [weights] = [path for path in found if path.parent.name != "pruned"]
        file_digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        digest, count = weights_sha256(weights)
        certificate = json.loads((checkout / "artifacts/certificate.json").read_bytes())
    finally:
        _git("worktree", "remove", "--force", str(checkout))
    return Model(short, file_digest, digest, count, hops_of(certificate))


def weights_sha256(path: Path) -> tuple[str, int]:
    """Return the SHA-256 of all tensors in a file, and the number of their elements."""
    digest, count = hashlib.sha256(), 0
    with safe_open(path, framework="numpy") as file:
        for name in sorted(file.keys()):
            value = file.get_tensor(name)
            digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
            digest.update(value.tobytes())
            count += value.size
    return digest.hexdigest(), count


def hops_of(certificate: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of each executed hop that a timing cannot change."""
    return {
        hop["name"]: {
            "rows": hop["rows"],
            "flipped": len(hop["flipped"]),
            "max_difference": hop["max_difference"],
            "metric": hop["metric"] and hop["metric"]["value"],
        }
        for hop in certificate["hops"]
        if hop["status"] != "not_executed"
    }


def page(pairs: list[tuple[Model, Model]]) -> str:
    """Format the comparisons as a page of Markdown."""
    lines = ["# The digits' models of several commits", ""]
    for earlier, later in pairs:
        lines += [f"## {earlier.commit} and {later.commit}", "", *_section(earlier, later), ""]
    packages = ("torch", "pytorch-lightning", "onnxruntime-gpu", "numpy")
    return "\n".join([*lines, conditions(*packages), ""])


def _section(earlier: Model, later: Model) -> list[str]:
    same = "the same" if earlier.weights_sha256 == later.weights_sha256 else "not the same"
    hops = dict.fromkeys([*earlier.hops, *later.hops])
    rows = [
        [name, *(_both(earlier.hops.get(name), later.hops.get(name), key) for key in KEYS)]
        for name in hops
    ]
    return [
        f"The {later.num_weights:,} numbers of the weights are {same}. SHA-256:",
        "",
        f"* {earlier.commit}: `{earlier.weights_sha256}`, of the file `{earlier.file_sha256}`",
        f"* {later.commit}: `{later.weights_sha256}`, of the file `{later.file_sha256}`",
        "",
        "Hops of the certificates; two values where they differ:",
        "",
        "| Hop | rows | flipped labels | largest difference | accuracy |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _both(earlier: dict[str, Any] | None, later: dict[str, Any] | None, key: str) -> str:
    before, after = (hop[key] if hop else "no hop" for hop in (earlier, later))
    return f"{after}" if before == after else f"{before}, then {after}"


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
