"""Tests of the fraction of the machine's matrix rate, with given times instead of real ones."""

from collections.abc import Iterator

import pytest
import torch

from slipway.planning.step_memory import step_flop
from slipway.profiling.step_times import PARTS, Round
from slipway.profiling.utilisation import matrix_rate, matrix_rates, utilisation
from slipway.training.distributed.placement import Placement, PrecisionName
from tests.project_params import PROJECT
from tests.training.networks.test_text_networks import TOKENS, network

pytestmark = pytest.mark.unit
NUM_PRODUCTS = 6  # of each side, the first a warm-up


class ProductClock:
    """A clock on which each product takes the next one of the given milliseconds."""

    def __init__(self, *milliseconds: float) -> None:
        self._times = self._edges(milliseconds)
        self.num_products = 0

    def _edges(self, milliseconds: tuple[float, ...]) -> Iterator[float]:
        now = 0.0
        for each in milliseconds:
            yield now
            now += each / 1000
            self.num_products += 1
            yield now

    def __call__(self) -> float:
        return next(self._times)


def placement(
    precision: PrecisionName = "32-true", accelerator: str = "cpu", devices: int = 1
) -> Placement:
    return Placement("ddp", precision, accelerator, devices, 1, None, None, ())


def timed(*step_ms: float) -> list[Round]:
    parts = dict.fromkeys(PARTS, 0.0)
    return [
        Round(step_ms=each, parts_ms=parts, processor_ms=0.0, queued_ms=0.0, row_length=28.0)
        for each in step_ms
    ]


def test_matrix_rate_is_that_of_the_quickest_product_after_the_warm_up() -> None:
    clock = ProductClock(1, 60, 25, 40, 50, 30)
    assert matrix_rate(torch.float32, clock=clock) == pytest.approx(2 * 256**3 / 0.025)
    assert clock.num_products == NUM_PRODUCTS


def test_matrix_rate_doubles_the_matrices_until_a_product_takes_20_ms() -> None:
    clock = ProductClock(*[9] * NUM_PRODUCTS, *[21] * NUM_PRODUCTS)
    assert matrix_rate(torch.float32, clock=clock) == pytest.approx(2 * 512**3 / 0.021)
    assert clock.num_products == 2 * NUM_PRODUCTS


def test_matrix_rate_keeps_the_best_rate_if_a_larger_product_was_disturbed() -> None:
    clock = ProductClock(*[2] * NUM_PRODUCTS, *[500] * NUM_PRODUCTS)
    assert matrix_rate(torch.float32, clock=clock) == pytest.approx(2 * 256**3 / 0.002)


def test_matrix_rate_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    matrix_rate(torch.float32, clock=ProductClock(*[25] * NUM_PRODUCTS))
    assert torch.get_num_threads() == before


def test_utilisation_compares_a_step_with_the_rate_of_its_dtype_in_the_same_round() -> None:
    rates = [{"float32": 2e11, "bfloat16": 8e11}, {"float32": 1e11, "bfloat16": 4e11}]
    flop = 10**10  # 100 and 50 GFLOP/s
    full = utilisation(placement(), flop, timed(100, 200), rates)
    assert (full.fraction.low, full.fraction.high) == pytest.approx((0.5, 0.5))
    half = utilisation(placement("bf16-mixed"), flop, timed(100, 200), rates)
    assert half.dtype == "bfloat16"
    assert half.fraction.median == pytest.approx(0.125)
    assert half.rates == pytest.approx({"float32": 1.5e11, "bfloat16": 6e11})


@pytest.mark.parametrize(("accelerator", "devices", "fraction"), [("gpu", 4, 0.25), ("cpu", 4, 1)])
def test_utilisation_counts_one_rate_for_all_cpu_processes_but_one_for_each_gpu(
    accelerator: str, devices: int, fraction: float
) -> None:
    used = utilisation(
        placement("32-true", accelerator, devices), 10**9, timed(1), [{"float32": 1e12}]
    )
    assert used.fraction.median == pytest.approx(fraction)


@pytest.mark.process
def test_matrix_rates_measures_float32_bfloat16_and_the_dtype_of_the_run() -> None:
    rates = matrix_rates(placement("bf16-mixed"))
    assert list(rates) == ["float32", "bfloat16"]
    assert min(rates.values()) > 1e8


def test_step_flop_counts_the_operations_of_all_rows_and_tokens() -> None:
    built = network("small_transformer", TOKENS, patch=1)
    whole = step_flop(built, PROJECT.train, 8)
    assert step_flop(built, PROJECT.train, 8, length=TOKENS.shape[0]) == whole
    assert step_flop(built, PROJECT.train, 16) == 2 * whole
    assert 0.4 * whole < step_flop(built, PROJECT.train, 8, length=8) < 0.7 * whole
