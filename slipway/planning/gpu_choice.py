"""The smallest number of GPUs of a type on which a training fits, its hours and its price.

The memory is that of the plan; a tenth of a GPU stays free for the CUDA context and fragmentation.
The time is the floating-point operations of all steps, at 40 % of the rate in the data sheet.
Communication and loading are left out, so the hours are a lower bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipway.planning.memory_plan import DeviceMemory, Traces, device_memory
from slipway.reports.console import size, text_table
from slipway.system.errors import ParamsError

_USABLE, _UTILISATION = 0.9, 0.4
_MOST_GPUS = 64
# From the least communication to the most.
STRATEGIES_BY_TRAFFIC = (
    "ddp",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "fsdp",
    "deepspeed_stage_3",
)


@dataclass(frozen=True)
class GpuType:
    """Figures of NVIDIA's data sheets: GB of memory, dense 10^12 operations a second."""

    memory_gb: float
    half_rate: float  # fp16 or bf16 on tensor cores
    full_rate: float  # float32 without TF32
    has_bfloat16: bool = True


GPU_TYPES = {
    "T4": GpuType(16, 65, 8.1, has_bfloat16=False),
    "L4": GpuType(24, 121, 30.3),
    "A10": GpuType(24, 125, 31.2),
    "L40S": GpuType(48, 362, 91.6),
    "A100-40GB": GpuType(40, 312, 19.5),
    "A100-80GB": GpuType(80, 312, 19.5),
    "H100": GpuType(80, 989, 67),
    "H200": GpuType(141, 989, 67),
}


@dataclass(frozen=True)
class GpuChoice:
    """The smallest setting of one type."""

    name: str
    num_gpus: int
    strategy: str
    memory: DeviceMemory
    hours: float
    price: float | None  # of the run; None if the hourly price is missing


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Parse `NAME=PRICE` arguments; ParamsError if a type is unknown or a price is no amount."""
    prices = {}
    for text in texts:
        name, _, amount = text.partition("=")
        if name not in GPU_TYPES:
            raise ParamsError(
                f"--price-per-gpu-hour names {name!r}, expected NAME=PRICE with a type of "
                f"{', '.join(GPU_TYPES)}. Write for example H100=2.5."
            )
        try:
            prices[name] = float(amount)
        except ValueError:
            prices[name] = -1.0
        if not 0 <= prices[name] < float("inf"):
            raise ParamsError(
                f"--price-per-gpu-hour is {text!r}, whose price is no amount from 0 on. Write for "
                f"example {name}=2.5."
            )
    return prices


def choose_gpus(
    traces: Traces,
    precision: str,
    batch_size: int,
    flop: float,
    prices: Mapping[str, float],
) -> list[GpuChoice]:
    """Find the smallest setting of each type; types on which nothing fits are left out.

    Args:
        traces: of a step of the rows of one device, at most.
        flop: floating-point operations of the whole training.
    """
    found = []
    for name, kind in GPU_TYPES.items():
        setting = _smallest(traces, precision, batch_size, kind)
        if setting is None or (precision == "bf16-mixed" and not kind.has_bfloat16):
            continue
        num_gpus, strategy, memory = setting
        rate = kind.full_rate if precision == "32-true" else kind.half_rate
        hours = flop / (num_gpus * rate * 1e12 * _UTILISATION) / 3600
        price = prices[name] * hours * num_gpus if name in prices else None
        found.append(GpuChoice(name, num_gpus, strategy, memory, hours, price))
    return found


def _smallest(
    traces: Traces, precision: str, batch_size: int, kind: GpuType
) -> tuple[int, str, DeviceMemory] | None:
    usable, num_gpus = _USABLE * kind.memory_gb * 1e9, 1
    while num_gpus <= min(_MOST_GPUS, batch_size):
        for strategy in STRATEGIES_BY_TRAFFIC if num_gpus > 1 else ("single",):
            if batch_size % num_gpus or (strategy == "fsdp" and precision == "16-mixed"):
                continue
            memory = device_memory(traces, strategy, precision, num_gpus, on_gpu=True)
            if memory.total <= usable:
                return num_gpus, strategy, memory
        num_gpus *= 2
    return None


def describe_choices(choices: Sequence[GpuChoice], prices: Mapping[str, float]) -> str:
    """Tabulate the settings, and name the cheapest, the fastest, and missing prices."""
    if not choices:
        return (
            f"gpus      fits on none of {', '.join(GPU_TYPES)}, with at most {_MOST_GPUS} of them. "
            "Lower train.max_batch_per_device, or use train.offload."
        )
    rows = [
        [
            choice.name,
            str(choice.num_gpus),
            choice.strategy,
            size(choice.memory.total),
            f"{choice.hours:,.2f}",
            "" if choice.price is None else f"{choice.price:,.2f}",
        ]
        for choice in choices
    ]
    columns = ["smallest setting", "GPUs", "strategy", "memory of each", "hours", "price"]
    lines = [text_table(columns, rows, "  ")]
    fastest = min(choices, key=lambda choice: choice.hours)
    lines.append(f"fastest   {fastest.num_gpus} x {fastest.name} with {fastest.strategy}")
    priced = [choice for choice in choices if choice.price is not None]
    if priced:
        cheapest = min(priced, key=lambda choice: choice.price or 0.0)
        lines.append(f"cheapest  {cheapest.num_gpus} x {cheapest.name}, {cheapest.price:,.2f}")
    missing = [choice.name for choice in choices if choice.name not in prices]
    if prices and missing:
        lines.append(
            f"note      no price for {', '.join(missing)}: add --price-per-gpu-hour NAME=PRICE"
        )
    return "\n".join(lines)
