"""What a measurement ran on, in one line."""

import os
import platform

import torch

from slipway.cores import num_cores


def describe_machine() -> str:
    """Cores, GPUs, versions, and how busy the machine is."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = f"{num_cores()} cores ({platform.machine()}), {', '.join(gpus) or 'no GPU'}"
    return f"{devices}; Python {platform.python_version()}, torch {torch.__version__}; load average {os.getloadavg()[0]:.1f}"
