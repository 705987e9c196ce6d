"""Measures how close a training step comes to the machine's rate of matrix products.

torch's `FlopCounterMode` counts the operations of a step's forward and backward pass: products,
convolutions and attention. The machine's rate is that of products of large square matrices in the
same dtype, measured between the rounds of steps.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median

import torch

from slipway.planning.step_memory import step_flop
from slipway.profiling.measured_run import ProfiledProject
from slipway.profiling.report import Utilisation, spread
from slipway.profiling.step_times import Round
from slipway.system.cores import num_cores
from slipway.training.distributed.placement import Placement
from slipway.training.job import network_spec, open_data
from slipway.training.networks.networks import build_network

_FIRST_SIDE, _MAX_SIDE = 256, 8192
_LONG_S = 0.02  # seconds of a product that is large enough for the measurement
_NUM_PRODUCTS = 5
_DTYPES = {"32-true": "float32", "bf16-mixed": "bfloat16", "16-mixed": "float16"}


def matrix_rate(
    dtype: torch.dtype, device: str = "cpu", clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the highest rate at which the device multiplies square matrices, in FLOP/s.

    The side of the matrices doubles until a product takes 20 ms, or the side is 8192, or the GPU's
    memory is full. On the CPU all cores compute the product.
    """
    best, side, num_threads = 0.0, _FIRST_SIDE, torch.get_num_threads()
    torch.set_num_threads(num_cores())
    try:
        while True:
            seconds = _quickest_product(side, dtype, device, clock)
            best = max(best, 2 * side**3 / seconds)
            if seconds >= _LONG_S or side >= _MAX_SIDE:
                return best
            side *= 2
    except torch.OutOfMemoryError:
        if not best:
            raise
        return best
    finally:
        torch.set_num_threads(num_threads)
        if device == "cuda":
            torch.cuda.empty_cache()  # free the memory for the training


def _quickest_product(
    side: int, dtype: torch.dtype, device: str, clock: Callable[[], float]
) -> float:
    """Return the seconds of the fastest of several matrix products, after a warm-up product."""
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(1 + _NUM_PRODUCTS):
        begin = clock()
        torch.matmul(left, right)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - begin)
    return min(seconds[1:])


def matrix_rates(placement: Placement) -> dict[str, float]:
    """Return the FLOP/s of one device for float32, bfloat16 and the dtype of the training."""
    names = dict.fromkeys(["float32", "bfloat16", _DTYPES[placement.precision]])
    device = "cuda" if placement.accelerator == "gpu" else "cpu"
    return {name: matrix_rate(getattr(torch, name), device) for name in names}


def utilisation(
    placement: Placement, flop: int, rounds: Sequence[Round], rates: Sequence[Mapping[str, float]]
) -> Utilisation:
    """Return the speed of a step's operations, as a fraction of the device's FLOP/s.

    Args:
        flop: floating-point operations of a step, over all processes.
        rates: FLOP/s of one device by dtype. Processes on the CPU share the machine's cores.
    """
    dtype = _DTYPES[placement.precision]
    num_devices = placement.devices if placement.accelerator == "gpu" else 1
    return Utilisation(
        step_flop=flop,
        dtype=dtype,
        num_devices=num_devices,
        rates={name: median(each[name] for each in rates) for name in rates[0]},
        fraction=spread(
            flop / (round_.step_ms / 1000) / (rate[dtype] * num_devices)
            for round_, rate in zip(rounds, rates, strict=True)
        ),
    )


def flop_of_step(project: ProfiledProject, rounds: Sequence[Round]) -> int:
    """Return the floating-point operations of a training step, with rows as long as in `rounds`."""
    train = project.params.train
    spec = network_spec(train, open_data(project.packed, project.augmented).manifest)
    length = round(mean(each.row_length for each in rounds))
    return step_flop(
        build_network(spec),
        train,
        train.batch_size,
        length=length if spec.input.varies_in_length else None,
    )
