"""`slipway search` on pictures and texts: the winner is that of a plain run, and is certified."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipway.system import files
from tests.end_to_end.conftest import SMALL
from tests.end_to_end.project import Project, copy_checkout, draw_shapes
from tests.end_to_end.test_texts import project_of_sentences

WEIGHTS = Path("artifacts/model/weights.safetensors")
TRAIN = {
    "epochs": 4,
    "warmup_epochs": 0.5,
    "strategy": "single",
    "precision": "32-true",
    "devices": 1,
}
SEARCH: dict[str, Any] = {
    "method": "random",
    "metric": "accuracy",
    "direction": "maximize",
    "budget": {"trials": 3, "epochs": None, "minutes": None},
    "halving": {"reduction": 2, "first_rung": 1},
    "workers": 2,
    "seed": 3,
    "space": {
        "train.learning_rate": {"log_range": [0.002, 0.02]},
        "train.network_arguments.width": {"choice": [16, 32]},
    },
}


def make_project(folder: Path) -> Project:
    """A project with untracked pictures, and an edit of params.yaml that is in no commit."""
    folder.mkdir()
    project = copy_checkout(folder)
    draw_shapes(folder / "data/own")
    project.set_params(SMALL)
    project.set_params({"train": TRAIN, "evaluate": {"gates": {}}})
    project.set_value("clean.rules.near_duplicate", None)
    return project


@pytest.mark.nightly(seconds=300)
def test_the_winner_has_the_weights_of_a_plain_repro_and_take_certifies_it(tmp_path: Path) -> None:
    project = make_project(tmp_path / "search")
    found = search(project, SEARCH)
    best = next(row for row in found["trials"] if row["name"] == found["best"])
    assert best["interval"]["rows"] > 0
    assert best["epochs"] == TRAIN["epochs"]
    log = (project.path / f".work/experiments/{best['name']}.log").read_text()
    assert "paused    after epoch 1" in log
    assert "resumed   after epoch 1" in log
    assert (project.path / "reports/search.html").is_file()
    assert not (project.path / "metrics/evaluate.json").exists()

    plain = make_project(tmp_path / "plain")
    for key, value in best["params"].items():
        if plain_value(plain, key) != value:
            plain.set_value(key, value)
    plain.shell(f"OMP_THREAD_LIMIT={found['threads']} dvc repro train")
    expected = files.sha256_file(plain.path / WEIGHTS)

    project.shell(f"slipway take {best['name']}")
    assert files.sha256_file(project.path / WEIGHTS) == expected
    assert json.loads((project.path / "metrics/verify.json").read_text())["certified"]
    assert "search:" in (project.path / "params.yaml").read_text()


@pytest.mark.nightly(seconds=120)
def test_the_winner_of_a_search_on_texts_is_certified(tmp_path: Path) -> None:
    project = project_of_sentences(tmp_path)
    space = {
        "precompute.max_text_bytes": {"choice": [64, 128]},
        "train.network_arguments.byte_ngrams": {"choice": [[3, 6], [2, 4]]},
    }
    found = search(project, SEARCH | {"method": "grid", "halving": None, "space": space})
    assert [trial["status"] for trial in found["trials"]] == ["done"] * 3
    assert len({json.dumps(trial["params"]) for trial in found["trials"]}) == 3
    assert not (project.path / "metrics/evaluate.json").exists()
    project.shell(f"slipway take {found['best']}")
    assert json.loads((project.path / "metrics/verify.json").read_text())["certified"]


def search(project: Project, section: dict[str, Any]) -> dict[str, Any]:
    """Run `slipway search` with this section, and return what it prints as JSON."""
    project._write_params(project._read_params() | {"search": section})
    output = project.shell("slipway search --json 2>progress.log || cat progress.log")
    found: dict[str, Any] = json.loads(output[output.index("{\n") :])
    return found


def plain_value(project: Project, key: str) -> Any:
    value: Any = project._read_params()
    for part in key.split("."):
        value = value[part]
    return value
