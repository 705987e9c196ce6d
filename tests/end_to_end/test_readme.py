"""Promises of the README: it is short, its files exist, and CI runs its first commands."""

import json
import re
from pathlib import Path

import pytest
import yaml

from slipway.config.params import parse_params
from tests.end_to_end.pages import blocks_of
from tests.end_to_end.project import Project, shown_params

# These two build and test everything, this test included: .ci/run runs them.
RUN_BY_CI = {"make demo", "make test"}
LONGEST = 120  # lines


def commands(page: str) -> list[str]:
    """Every line of the bash blocks, without comments."""
    text = "".join(block.text for block in blocks_of(page) if block.language == "bash")
    lines = (line.split(" # ")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


@pytest.fixture(name="readme")
def _readme(root: Path) -> str:
    return (root / "README.md").read_text()


def test_the_readme_is_short(readme: str) -> None:
    assert len(readme.splitlines()) <= LONGEST


def test_ci_runs_the_two_commands_of_the_start(readme: str, root: Path) -> None:
    assert set(commands(readme)) >= RUN_BY_CI
    ran = (line.partition(" 2>")[0] for line in (root / ".ci" / "run").read_text().splitlines())
    assert set(ran) >= RUN_BY_CI


def test_every_file_the_readme_names_exists(readme: str, root: Path) -> None:
    named = set(re.findall(r"\]\(([\w./-]+)\)", readme)) | set(
        re.findall(r"`((?:slipway|serving|stages|tests|docs)/[\w./-]+)`", readme)
    )
    assert [name for name in named if not (root / name).exists()] == []


def test_the_params_that_a_page_shows_are_valid(root: Path) -> None:
    small, table = shown_params()
    content = yaml.safe_load((root / "params.yaml").read_text())
    for section, values in small.items():
        content.setdefault(section, {}).update(values)
    parse_params(content)
    assert parse_params(table).train.network == "tabm"


@pytest.mark.nightly(seconds=80)
def test_a_new_learning_rate_reruns_only_code_and_the_stages_from_train_on(
    finished: Project, root: Path
) -> None:
    page = (root / "docs/reference/pipeline.md").read_text()
    lines = [line for line in commands(page) if line.startswith("dvc ") and line != "dvc repro"]
    outputs = {line: finished.shell(line) for line in lines}
    ran = re.findall(r"Running stage '(\w+)'", outputs["dvc exp run -S train.learning_rate=0.01"])
    assert [stage for stage in ran if stage not in ("audit", "code")] == [
        "train",
        "evaluate",
        "prune",
        "export",
        "compile",
        "verify",
    ]
    table = next(output for line, output in outputs.items() if line.startswith("dvc exp show"))
    assert "learning_rate" in table
    assert "0.01" in table
    assert "accuracy" in outputs["dvc metrics show"]


@pytest.mark.process
def test_the_curl_line_for_a_row_gets_a_prediction(
    finished_table: Project, table_service: str, readme: str
) -> None:
    curl = next(line for line in commands(readme) if "application/json" in line)
    answer = finished_table.shell(curl.replace("http://127.0.0.1:3000", table_service))
    assert json.loads(answer[answer.index('{"label"') :].splitlines()[0])["label"] == "1"
