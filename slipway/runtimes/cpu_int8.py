"""Describes the CPU's int8 instructions, and the width of weights that they need.

x86 without VNNI adds two products of uint8 and int8 in 16 bits, which may saturate: 2 * 255 * 127
is twice the range. ONNX Runtime can avoid this (an option that `slipway.runtimes.runtime` sets) by
using uint8 weights, which costs the speed that int8 gains. Weights of 7 bits cannot saturate and
stay fast. With VNNI, and on ARM, nothing saturates.
"""

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_WITHOUT_SATURATION = ("amx_int8", "avx512_vnni", "avx_vnni")  # as Linux names them


def int8_instructions(machine: str | None = None, information: str | None = None) -> str:
    """Return the processor's int8 instructions, such as "avx512_vnni" or "avx2 without VNNI".

    For architectures other than x86, returns the name of the architecture. Both arguments default
    to those of this machine.
    """
    machine = machine or platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return machine
    if information is None:
        information = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    lines = [line for line in information.splitlines() if line.startswith("flags")]
    flags = lines[0].partition(":")[2].split() if lines else []
    for name in _WITHOUT_SATURATION:
        if name in flags:
            return name
    return "avx2 without VNNI" if "avx2" in flags else "x86 without VNNI"


def weight_bits(instructions: str | None = None) -> int:
    """Return the width of quantized weights in bits: 7 if 8 bits might saturate, else 8."""
    return 7 if (instructions or int8_instructions()).endswith("without VNNI") else 8
