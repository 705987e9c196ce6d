"""Finds the fewest GPUs of each type on which a training fits, and predicts its hours and price.

A training fits if its planned memory takes at most 90 % of a GPU; the rest is for the CUDA context
and fragmentation. The time of a step is predicted from its floating-point operations, at 40 % of
the rate in the data sheet, and from its communication. Data loading and the latency of messages
are not counted, so the hours are a lower bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipway.config.training import SHARING
from slipway.planning.strategy_settings import GPUS_OF_A_MACHINE, MOST_GPUS, Setting
from slipway.reports.console import size, text_table
from slipway.system.errors import ParamsError
from slipway.training.distributed.placement import TrainingHost, auto_precision

_USABLE, _UTILISATION = 0.9, 0.4
_NETWORK_RATE = 12.5  # GB/s between machines for each GPU: 100 Gb/s


@dataclass(frozen=True)
class GpuType:
    """Figures from NVIDIA's data sheets; rates are in dense TFLOP/s."""

    memory_gb: float  # 10^9 bytes
    half_rate: float  # fp16 or bf16 on tensor cores
    full_rate: float  # float32 without TF32
    link_rate: float  # GB/s in one direction to the GPUs of the same machine: PCIe or NVLink
    bus_rate: float  # GB/s in one direction to the host's memory: PCIe
    has_bfloat16: bool = True


GPU_TYPES = {
    "T4": GpuType(16, 65, 8.1, 16, 16, has_bfloat16=False),
    "L4": GpuType(24, 121, 30.3, 32, 32),
    "A10": GpuType(24, 125, 31.2, 32, 32),
    "L40S": GpuType(48, 362, 91.6, 32, 32),
    "A100-40GB": GpuType(40, 312, 19.5, 300, 32),
    "A100-80GB": GpuType(80, 312, 19.5, 300, 32),
    "H100": GpuType(80, 989, 67, 450, 64),
    "H200": GpuType(141, 989, 67, 450, 64),
}


@dataclass(frozen=True)
class GpuChoice:
    """A setting on one type of GPU, with the hours and the price of the training."""

    name: str
    setting: Setting
    precision: str
    hours: float
    price: float | None  # price of the whole training; None if the user gave no hourly price

    @property
    def label(self) -> str:
        return f"{self.setting.num_gpus} x {self.name} with {self.setting.name}"


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Parse `NAME=PRICE` arguments into prices per GPU and hour.

    Raises ParamsError for an unknown type of GPU, or a price that is negative or not a number.
    """
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
                f"--price-per-gpu-hour is {text!r}, expected a price of at least 0. Write for "
                f"example {name}=2.5."
            )
    return prices


def step_seconds(setting: Setting, kind: GpuType, precision: str) -> float:
    """Predict the seconds of one optimizer step on GPUs of type `kind`.

    Data parallelism sends gradients while it computes, so the longer of the two times counts.
    With `pipeline` and `tensor_parallel` GPUs wait for each other's values, so the times of
    computing and sending add up. They also do with `fsdp` and `model_parallel`, while GPUs
    exchange weights and gradients with the other copies. Offload adds the time on the bus, but
    not that of the CPU.
    """
    rate = kind.full_rate if precision == "32-true" else kind.half_rate
    computing = setting.flop / (rate * 1e12 * _UTILISATION)
    sending = setting.sent_bytes / _link_rate(kind, setting.model_parallel or setting.num_gpus)
    averaging = setting.averaged_bytes / _link_rate(kind, setting.num_gpus)
    if setting.strategy in SHARING:
        return computing + sending + averaging
    if setting.model_parallel:
        return max(computing + sending, averaging)
    return max(computing, sending) + setting.moved_bytes / (kind.bus_rate * 1e9)


def _link_rate(kind: GpuType, num_gpus: int) -> float:
    """Return the bytes per second that each of `num_gpus` GPUs can send to the others."""
    return 1e9 * (kind.link_rate if num_gpus <= GPUS_OF_A_MACHINE else _NETWORK_RATE)


def choose_gpus(
    settings: Sequence[Setting], precision: str, num_steps: int, prices: Mapping[str, float]
) -> list[GpuChoice]:
    """List each setting on each type of GPU whose memory is large enough for it.

    For each type, settings are ordered by their number of GPUs, then by their hours. `prices` are
    per GPU and hour, by type. `precision` may be "auto", for settings in half precision.
    """
    found = []
    for name, kind in GPU_TYPES.items():
        fitting = [
            _choice(name, setting, chosen, num_steps * step_seconds(setting, kind, chosen), prices)
            for setting in settings
            if setting.memory.total <= _USABLE * kind.memory_gb * 1e9
            for chosen in _possible_precision(kind, setting.strategy, precision)
        ]
        found += sorted(fitting, key=lambda choice: (choice.setting.num_gpus, choice.hours))
    return found


def _possible_precision(kind: GpuType, strategy: str, precision: str) -> list[str]:
    """Return the precision of a training on GPUs of type `kind`, or nothing if there is none."""
    if precision == "auto":
        host = TrainingHost(1, has_bfloat16=kind.has_bfloat16, launch=None)
        chosen: str = auto_precision(host, "gpu", strategy, [])
        return [] if chosen == "32-true" else [chosen]  # which takes more memory than was planned
    return [] if precision == "bf16-mixed" and not kind.has_bfloat16 else [precision]


def _choice(
    name: str, setting: Setting, precision: str, seconds: float, prices: Mapping[str, float]
) -> GpuChoice:
    hours = seconds / 3600
    price = prices[name] * hours * setting.num_gpus if name in prices else None
    return GpuChoice(name, setting, precision, hours, price)


def describe_choices(choices: Sequence[GpuChoice], prices: Mapping[str, float]) -> str:
    """Format a table of each type's smallest setting, then the fastest and the cheapest one."""
    if not choices:
        return (
            f"gpus      fits on none of {', '.join(GPU_TYPES)}, with at most {MOST_GPUS} of them. "
            "Lower train.max_batch_per_device, or use train.offload."
        )
    smallest: dict[str, GpuChoice] = {}
    for choice in choices:
        smallest.setdefault(choice.name, choice)
    rows = [
        [
            choice.name,
            str(choice.setting.num_gpus),
            choice.setting.name,
            choice.precision,
            size(choice.setting.memory.total),
            size(int(choice.setting.every_sent_byte)),
            f"{choice.hours:,.2f}",
            "" if choice.price is None else f"{choice.price:,.2f}",
        ]
        for choice in smallest.values()
    ]
    columns = ["smallest setting", "GPUs", "strategy", "precision", "memory of each"]
    columns += ["sent a step", "hours", "price"]
    if any(choice.setting.host_bytes for choice in choices):
        columns.append("memory of each host")
        for row, choice in zip(rows, smallest.values(), strict=True):
            row.append(size(choice.setting.host_bytes))
    lines = [text_table(columns, rows, "  ")]
    fastest = min(choices, key=lambda choice: choice.hours)
    lines.append(f"fastest   {fastest.label}, {fastest.hours:,.2f} hours")
    priced = [(choice.price, choice) for choice in choices if choice.price is not None]
    if priced:
        price, cheapest = min(priced, key=lambda pair: (pair[0], pair[1].setting.num_gpus))
        lines.append(f"cheapest  {cheapest.label}, {price:,.2f}")
    missing = [name for name in smallest if name not in prices]
    if prices and missing:
        lines.append(
            f"note      no price for {', '.join(missing)}: add --price-per-gpu-hour NAME=PRICE"
        )
    return "\n".join(lines)
