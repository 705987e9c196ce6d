"""The README's commands, run as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.params import parse_params
from tests.end_to_end.project import Project, copy_checkout, wait_until_ready

YAML_BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
# These two build and test everything, this test included: .ci/run runs them.
RUN_BY_CI = {"make demo", "make test"}
SERVERS = {"make serve", "bentoml serve"}


def commands(readme: str) -> list[str]:
    """Every line of the bash blocks, without comments."""
    lines = (line.split(" # ")[0].strip() for block in BLOCK.findall(readme) for line in block.splitlines())
    return [line for line in lines if line]


@pytest.fixture(name="readme")
def _readme(root: Path) -> str:
    return (root / "README.md").read_text()


def changed_params(root: Path, readme: str) -> list[dict[str, Any]]:
    """`params.yaml` with the keys of one yaml block, for each of the blocks."""
    found = []
    for block in YAML_BLOCK.findall(readme):
        content = yaml.safe_load((root / "params.yaml").read_text())
        for section, values in yaml.safe_load(block).items():
            content[section].update(values)
        found.append(content)
    return found


def test_the_readme_is_short(readme: str) -> None:
    assert len(readme.splitlines()) < 200


def test_ci_runs_the_two_commands_of_the_start(readme: str, root: Path) -> None:
    assert set(commands(readme)) >= RUN_BY_CI
    assert set((root / ".ci" / "run").read_text().splitlines()) >= RUN_BY_CI


def test_every_file_the_readme_names_exists(readme: str, root: Path) -> None:
    named = set(re.findall(r"\]\(([\w./-]+)\)", readme)) | set(re.findall(r"`((?:slipway|serving|stages|tests|docs)/[\w./-]+)`", readme))
    assert [name for name in named if not (root / name).exists()] == []


def test_the_params_that_the_readme_shows_are_valid(readme: str, root: Path) -> None:
    tasks = [parse_params(content).data.task for content in changed_params(root, readme)]
    assert tasks == ["image_classification", "table_classification"]


@pytest.mark.slow
def test_the_table_goes_the_whole_way_and_its_curl_line_gets_a_prediction(tmp_path: Path, readme: str) -> None:
    project = copy_checkout(tmp_path)
    content = next(content for content in changed_params(project.path, readme) if content["data"]["task"] == "table_classification")
    (project.path / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    project.shell("dvc repro")
    curl = next(line for line in commands(readme) if "application/json" in line)
    with project.service("bentoml serve") as address:
        wait_until_ready(address)
        assert '"label":"1"' in project.shell(curl.replace("http://127.0.0.1:3000", address)).replace(" ", "")


@pytest.mark.slow
def test_the_experiment_commands_run_and_a_new_learning_rate_touches_nothing_before_train(finished: Project, readme: str) -> None:
    lines = [line for line in commands(readme) if line.startswith("dvc ")]
    outputs = {line: finished.shell(line) for line in lines}
    ran = re.findall(r"Running stage '(\w+)'", outputs["dvc exp run -S train.learning_rate=0.01"])
    assert ran == ["train", "evaluate", "export", "compile", "verify"]
    table = next(output for line, output in outputs.items() if line.startswith("dvc exp show"))
    assert "learning_rate" in table
    assert "0.01" in table
    assert "accuracy" in outputs["dvc metrics show"]


@pytest.mark.slow
def test_the_servers_start_and_the_curl_line_gets_a_prediction(finished: Project, readme: str) -> None:
    curl = next(line for line in commands(readme) if line.startswith("curl -F"))
    assert set(commands(readme)) >= SERVERS
    with finished.service("bentoml serve") as address:
        wait_until_ready(address)
        answer = finished.shell(curl.replace("http://127.0.0.1:3000", address))
    assert '"label"' in answer


def test_every_command_is_run_by_some_test(readme: str) -> None:
    tested = RUN_BY_CI | SERVERS | {"source env.sh"}
    untested = [line for line in commands(readme) if line not in tested and not line.startswith(("dvc ", "curl "))]
    assert untested == []
