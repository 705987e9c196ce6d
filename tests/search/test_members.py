"""The best trials of a search become members of an ensemble, or the command says why not."""

from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.bundle import Metric
from slipway.config.params import load_params, read_content
from slipway.experiments.records import ExperimentRecord, Validation, params_of, write_record
from slipway.planning.search_space import Values, changed_content
from slipway.search.members import write_members
from slipway.system.errors import ParamsError

METRIC = Metric(value=0.5, low=0.4, high=0.6, confidence=0.95, rows=100)


def record(number: int, score: float | None, values: Values, **changes: Any) -> ExperimentRecord:
    """The record of a trial with these values, on top of those of params.yaml."""
    found = ExperimentRecord(
        format_version=1,
        name=f"search-1-{number:03d}",
        started=f"2026-01-01T00:00:0{number}.000+00:00",
        seconds=1.0,
        status="done",
        cause="",
        stage="train",
        params=params_of(changed_content(read_content(), values)),
        results=None,
        process=1,
        group=None,
        search="search-1",
        validation=score and Validation(name="accuracy", epoch=2, value=score, metric=METRIC),
    )
    return found.model_copy(update=changes)


@pytest.fixture(autouse=True)
def project(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The params of the checkout in an empty project."""
    (tmp_path / "params.yaml").write_text((root / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_best_trials_become_members_with_the_values_that_differ(project: Path) -> None:
    before = (project / "params.yaml").read_text()
    write_record(record(0, 0.8, {}))
    write_record(record(1, 0.9, {"train.learning_rate": 0.02}))
    write_record(record(2, 0.7, {"train.network_arguments.width": 16}))
    write_record(record(3, 0.99, {"train.learning_rate": 0.5}, status="stopped"))
    text = write_members(None, 3)
    assert "search-1-001  accuracy 0.9" in text
    ensemble = load_params(Path("params.yaml")).ensemble
    assert ensemble.method == "greedy"
    assert [member.train for member in ensemble.members] == [
        {"learning_rate": 0.02},
        {},
        {"network_arguments": {"width": 16}},
    ]
    after = (project / "params.yaml").read_text()
    assert before.count("#") == after.count("#"), "comments stay"
    write_members("search-1", 2)
    assert len(load_params(Path("params.yaml")).ensemble.members) == 2


def test_member_with_another_network_has_all_of_its_arguments() -> None:
    write_record(record(0, 0.8, {}))
    arguments: dict[str, Any] = {}
    values = {"train.network": "timm/resnet18", "train.network_arguments": arguments}
    write_record(record(1, 0.9, values))
    write_members(None, 2)
    first = load_params(Path("params.yaml")).ensemble.members[0]
    assert first.train == {"network": "timm/resnet18", "network_arguments": {}}


def test_taking_more_members_than_finished_trials_is_refused() -> None:
    write_record(record(0, 0.8, {}))
    write_record(record(1, None, {"train.epochs": 3}, status="failed"))
    with pytest.raises(ParamsError, match=r"from 2 to the 1 finished trials of search-1\. Choose"):
        write_members(None, 2)


def test_taking_members_of_an_unknown_or_missing_search_is_refused() -> None:
    with pytest.raises(ParamsError, match=r"there is no search yet.*Run `slipway search` first"):
        write_members(None, 2)
    write_record(record(0, 0.8, {}))
    with pytest.raises(ParamsError, match="no search 'other', expected one of search-1"):
        write_members("other", 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("precompute.image_size_px", 24),
        ("data.task", "image_regression"),
        ("split.test", 0.3),
        ("seed", 99),  # of the split as well
    ],
)
def test_member_of_another_task_split_or_input_is_refused_and_params_stay_unchanged(
    project: Path, key: str, value: Any
) -> None:
    before = (project / "params.yaml").read_text()
    write_record(record(0, 0.8, {}))
    other = record(1, 0.9, {})
    assert key in other.params
    write_record(other.model_copy(update={"params": other.params | {key: value}}))
    with pytest.raises(ParamsError, match=rf"search-1-001 was trained with {key} {value!r}, which"):
        write_members(None, 2)
    assert (project / "params.yaml").read_text() == before
