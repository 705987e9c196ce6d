"""Proposals of a batch size and a learning rate, and their patch of params.yaml."""

import math
from pathlib import Path

import pytest
import torch

from slipway.config.edit import changed_text, difference, propose
from slipway.config.params import load_params
from slipway.planning.tuning import (
    candidate_sizes,
    fastest,
    largest,
    rate_at,
    run_range_test,
    search,
)
from slipway.system.errors import ParamsError, TrainingError
from tests import warm_starts
from tests.training.conftest import ROOT, write_project
from tests.training.real_runs import environment

TEXT = (ROOT / "params.yaml").read_text()


def bowl(index: int, rate: float) -> float:
    """A loss that falls to its lowest at a rate of 0.1, and then rises steeply."""
    return (
        2.0 + (math.log10(rate) + 1) ** 2 / 10 if rate < 0.1 else 2.0 + (math.log10(rate) + 1) * 40
    )


def test_the_range_test_raises_the_rate_in_equal_ratios() -> None:
    rates = [rate_at(index, 7, 1e-6, 1.0) for index in range(7)]
    assert rates == pytest.approx([10.0**power for power in range(-6, 1)])


def test_the_range_test_proposes_a_tenth_of_the_rate_with_the_lowest_loss() -> None:
    found = run_range_test(bowl, 200, 1e-6, 1.0)
    assert found.lowest == pytest.approx(0.1, rel=0.3)
    assert found.proposed == pytest.approx(found.lowest / 10, rel=0.06)
    assert len(found.rates) < 200  # it ended where the loss had diverged


def test_the_range_test_ends_at_a_nonfinite_loss_and_uses_the_steps_before_it() -> None:
    def step(index: int, rate: float) -> float:
        if rate > 0.5:
            raise TrainingError("not finite")
        return bowl(index, rate) if rate < 0.1 else 2.0

    assert max(run_range_test(step, 100, 1e-6, 1.0).rates) <= 0.5


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda index, rate: float("nan"), "not finite after 0 of 50"),
        (lambda index, rate: 1.0 + rate, "did not fall"),
    ],
)
def test_the_range_test_refuses_a_curve_without_a_minimum(step: object, text: str) -> None:
    with pytest.raises(TrainingError, match=text):
        run_range_test(step, 50, 1e-6, 1.0)  # type: ignore[arg-type]


def test_candidate_batch_sizes_are_powers_of_two_up_to_the_number_of_rows() -> None:
    assert candidate_sizes(100) == [1, 2, 4, 8, 16, 32, 64]
    assert candidate_sizes(64)[-1] == 64


def test_the_batch_size_search_ends_before_the_memory_runs_out() -> None:
    ran: list[int] = []

    def step_seconds(rows: int, max_steps: int) -> float:
        ran.append(rows)
        return 1.0 if rows <= 4 else rows / 5  # 4 rows a second, from 8 rows on 5

    trials = search([1, 2, 4, 8, 16, 32], lambda rows: 100 * rows, 2000, step_seconds)
    assert ran == [1, 2, 4, 8, 16]  # 32 rows would take 3,200 of 2,000 bytes
    assert (largest(trials), fastest(trials)) == (16, 8)


def test_the_batch_size_search_ends_if_a_gpu_runs_out_of_memory() -> None:
    def step_seconds(rows: int, max_steps: int) -> float:
        if rows > 2:
            raise torch.cuda.OutOfMemoryError("no more")
        return 1.0

    assert largest(search([1, 2, 4, 8], None, None, step_seconds)) == 2
    assert largest(search([4], None, None, step_seconds)) is None


def test_a_patch_of_params_changes_only_the_numbers() -> None:
    after = changed_text(TEXT, {"train.batch_size": 64, "train.learning_rate": 0.0093})
    changed = [
        (old, new)
        for old, new in zip(TEXT.splitlines(), after.splitlines(), strict=True)
        if old != new
    ]
    assert changed == [
        ("  batch_size: 128 # over all devices", "  batch_size: 64 # over all devices"),
        ("  learning_rate: 0.004", "  learning_rate: 0.0093"),
    ]
    assert difference(TEXT, TEXT) == ""


def test_a_patch_refuses_an_unknown_key_and_an_invalid_value() -> None:
    with pytest.raises(ParamsError, match=r"params.yaml has no key train\.batch"):
        changed_text(TEXT, {"train.batch": 1})
    with pytest.raises(ParamsError, match=r"train\.batch_size"):
        changed_text(TEXT, {"train.batch_size": 0})


def test_propose_writes_params_only_with_apply(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(TEXT)
    patch = propose(path, {"train.batch_size": 64}, apply=False)
    assert path.read_text() == TEXT
    assert propose(path, {"train.batch_size": 64}, apply=True) == patch
    assert load_params(path).train.batch_size == 64


@pytest.mark.nightly(seconds=30)
def test_tuning_commands_propose_changes_of_a_real_project_and_apply_them_on_request(
    tmp_path: Path,
) -> None:
    project = write_project(tmp_path)
    before = (project / "params.yaml").read_text()

    def run(*arguments: str) -> str:
        done = warm_starts.run(
            ["slipway.planning.tuning", *arguments], project, environment(), timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "largest that fits or that there are rows for: 128" in run(
        "batch", "--seconds", "0.5", "--step"
    )
    output = run("learning-rate", "--steps", "60", "--plot", "reports/rate.svg")
    assert "nothing was changed" in output
    assert (project / "params.yaml").read_text() == before
    assert (project / "reports/rate.svg").read_text().lstrip().startswith("<?xml")
    assert "applied." in run("learning-rate", "--steps", "60", "--apply")
    assert 1e-4 < load_params(project / "params.yaml").train.learning_rate != 0.01
