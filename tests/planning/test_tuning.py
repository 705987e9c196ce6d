"""Proposals of a batch size and a learning rate, and the patch that carries them."""

import math
from pathlib import Path

import pytest
import torch

from slipway.config.edit import changed_text, difference, propose
from slipway.config.params import load_params
from slipway.planning.batch_size_search import candidate_sizes, fastest, largest, search
from slipway.planning.range_test import rate_at, run_range_test
from slipway.system.errors import ParamsError, TrainingError
from tests import warm_starts
from tests.training.conftest import ROOT, write_project
from tests.training.real_runs import environment

TEXT = (ROOT / "params.yaml").read_text()


def bowl(index: int, rate: float) -> float:
    """A loss that is flat, falls to its lowest at 0.1, and rises steeply."""
    return (
        2.0 + (math.log10(rate) + 1) ** 2 / 10 if rate < 0.1 else 2.0 + (math.log10(rate) + 1) * 40
    )


def test_the_rates_go_up_in_equal_ratios() -> None:
    rates = [rate_at(index, 7, 1e-6, 1.0) for index in range(7)]
    assert rates == pytest.approx([10.0**power for power in range(-6, 1)])


def test_the_proposed_rate_lies_ten_times_below_the_lowest_loss() -> None:
    found = run_range_test(bowl, 200, 1e-6, 1.0)
    assert found.lowest == pytest.approx(0.1, rel=0.3)
    assert found.proposed == pytest.approx(found.lowest / 10, rel=0.06)
    assert len(found.rates) < 200  # it ended where the loss had diverged


def test_a_loss_that_is_not_finite_ends_the_test_and_keeps_what_came_before() -> None:
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
def test_a_curve_that_says_nothing_is_refused(step: object, text: str) -> None:
    with pytest.raises(TrainingError, match=text):
        run_range_test(step, 50, 1e-6, 1.0)  # type: ignore[arg-type]


def test_sizes_are_powers_of_two_up_to_the_rows() -> None:
    assert candidate_sizes(100) == [1, 2, 4, 8, 16, 32, 64]
    assert candidate_sizes(64)[-1] == 64


def test_the_search_ends_where_the_memory_does() -> None:
    ran: list[int] = []

    def step_seconds(rows: int, most_steps: int) -> float:
        ran.append(rows)
        return 1.0 if rows <= 4 else rows / 5  # 4 rows a second, from 8 rows on 5

    trials = search([1, 2, 4, 8, 16, 32], lambda rows: 100 * rows, 2000, step_seconds)
    assert ran == [1, 2, 4, 8, 16]  # 32 rows would take 3,200 of 2,000 bytes
    assert (largest(trials), fastest(trials)) == (16, 8)


def test_a_gpu_that_runs_out_of_memory_ends_the_search() -> None:
    def step_seconds(rows: int, most_steps: int) -> float:
        if rows > 2:
            raise torch.cuda.OutOfMemoryError("no more")
        return 1.0

    assert largest(search([1, 2, 4, 8], None, None, step_seconds)) == 2
    assert largest(search([4], None, None, step_seconds)) is None


def test_a_patch_touches_the_numbers_alone() -> None:
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


def test_a_key_that_is_not_there_and_a_value_that_is_not_valid_are_refused() -> None:
    with pytest.raises(ParamsError, match=r"params.yaml has no key train\.batch"):
        changed_text(TEXT, {"train.batch": 1})
    with pytest.raises(ParamsError, match=r"train\.batch_size"):
        changed_text(TEXT, {"train.batch_size": 0})


def test_only_applying_writes(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(TEXT)
    patch = propose(path, {"train.batch_size": 64}, apply=False)
    assert path.read_text() == TEXT
    assert propose(path, {"train.batch_size": 64}, apply=True) == patch
    assert load_params(path).train.batch_size == 64


@pytest.mark.process
def test_both_commands_propose_on_a_real_project_and_apply_when_asked(tmp_path: Path) -> None:
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
    told = run("learning-rate", "--steps", "60", "--plot", "reports/rate.svg")
    assert "nothing was changed" in told
    assert (project / "params.yaml").read_text() == before
    assert (project / "reports/rate.svg").read_text().lstrip().startswith("<?xml")
    assert "applied." in run("--apply", "learning-rate", "--steps", "60")
    assert 1e-4 < load_params(project / "params.yaml").train.learning_rate != 0.01
