"""Estimates this machine's training speed, very roughly, and the precision it supports."""

from dataclasses import dataclass
from pathlib import Path

from slipway.runtimes.runtime import why_no_cuda_driver
from slipway.system.cores import num_cores

_FLOPS_PER_CORE = 30e9  # speed of a convolution in float32, beside some other load
_FLOPS_OF_GPU = 4e12
_FASTER_BF16 = 2.0  # factor with AMX


@dataclass(frozen=True)
class Machine:
    """A machine: its number of cores, GPU, and AMX, by which bfloat16 is fast on the CPU."""

    cores: int
    has_gpu: bool
    has_amx: bool

    @property
    def flops(self) -> float:
        """Operations per second in training, as a rule of thumb."""
        if self.has_gpu:
            return _FLOPS_OF_GPU
        return self.cores * _FLOPS_PER_CORE * (_FASTER_BF16 if self.has_amx else 1)

    def __str__(self) -> str:
        if self.has_gpu:
            return "the GPU of this machine"
        return f"{self.cores} core{'s' * (self.cores > 1)} without a GPU"


def this_machine() -> Machine:
    """Return facts about this machine, without importing torch."""
    information = Path("/proc/cpuinfo")
    has_amx = information.exists() and "amx_bf16" in information.read_text(errors="replace")
    return Machine(num_cores(), why_no_cuda_driver() is None, has_amx)
