"""Which instructions a CPU multiplies int8 with, and what that asks of the weights.

x86 without VNNI adds two products of uint8 and int8 in 16 bits, where they saturate: 2 * 255 * 127 is twice what fits. ONNX Runtime avoids
it where it is asked to (`slipway.runtimes.runtime` does) by taking weights as uint8, which costs what int8 gains. Weights of 7 bits
cannot saturate, so these are as fast as ever. With VNNI, and on ARM, nothing saturates.
"""

import platform
from pathlib import Path

_INFORMATION = Path("/proc/cpuinfo")
_WITH_32_BITS = ("amx_int8", "avx512_vnni", "avx_vnni")  # as Linux calls them


def int8_instructions(machine: str | None = None, information: str | None = None) -> str:
    """Such as avx512_vnni or "avx2 without VNNI", or the architecture where it is another; of this machine where nothing is given."""
    machine = machine or platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return machine
    if information is None:
        information = _INFORMATION.read_text() if _INFORMATION.exists() else ""
    flags = next(
        (
            line.partition(":")[2].split()
            for line in information.splitlines()
            if line.startswith("flags")
        ),
        [],
    )
    found = [name for name in _WITH_32_BITS if name in flags]
    if found:
        return found[0]
    return "avx2 without VNNI" if "avx2" in flags else "x86 without VNNI"


def weight_bits(instructions: str | None = None) -> int:
    """7 where products of 8 bits would saturate, else 8."""
    return 7 if (instructions or int8_instructions()).endswith("without VNNI") else 8
