"""What stands between `params.yaml` and a training on this machine: every mismatch at once, each with its fix.

A mismatch stops the plan; a remark is worth knowing and stops nothing.
"""

import importlib.util
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from slipway.config.sections import TrainParams
from slipway.reports.console import size
from slipway.system.cores import num_cores
from slipway.system.errors import SlipwayError
from slipway.training.distributed.strategies import Placement, TrainingHost, place

_SHARED_MEMORY = Path("/dev/shm")
_BATCHES_PER_WORKER = 2  # torch's loader fetches so many ahead
_CHOICES = ("accelerator", "devices", "strategy", "precision")


@dataclass
class Findings:
    """What was found so far."""

    mismatches: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def check_placement(
    params: TrainParams, host: TrainingHost, findings: Findings
) -> Placement | None:
    """The placement asked for, or the nearest that can be had here once each refused key is left to "auto"."""
    while True:
        try:
            return place(params, host)
        except SlipwayError as error:
            findings.mismatches.append(str(error))
            relaxed = _relaxed(params, host, str(error))
            if relaxed is None:
                return None
            params = relaxed


def _relaxed(params: TrainParams, host: TrainingHost, refusal: str) -> TrainParams | None:
    """With the key at "auto" that the refusal comes from."""
    for key in _CHOICES:
        if getattr(params, key) == "auto":
            continue
        candidate = params.model_copy(update={key: "auto"})
        try:
            place(candidate, host)
        except SlipwayError as error:
            if str(error) == refusal:
                continue
        return candidate
    return None


def check_packages(params: TrainParams, placement: Placement, findings: Findings) -> None:
    """What has to be installed for it."""
    needed = {"deepspeed"} if placement.zero_stage is not None else set()
    needed |= (
        {"timm"}
        if params.network.startswith("timm/")
        else {"tabm"}
        if params.network == "tabm"
        else set()
    )
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        findings.mismatches.append(
            f"{', '.join(missing)} is not installed, but what params.yaml asks for needs it. Run `make install`."
        )


def check_workers(
    params: TrainParams, placement: Placement, batch_bytes: int, findings: Findings
) -> None:
    """Loader processes against cores and shared memory, through which they hand over their batches."""
    workers = params.num_workers * placement.devices
    if workers == 0:
        return
    if workers + placement.devices > num_cores():
        findings.remarks.append(
            f"{params.num_workers} loader processes for each of {placement.devices} trainers are more than the {num_cores()} cores here; "
            "lower train.num_workers"
        )
    needed = workers * _BATCHES_PER_WORKER * batch_bytes
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
    if free is not None and needed > free:
        findings.mismatches.append(
            f"the loaders' batches take up to {size(needed)} of shared memory, {_SHARED_MEMORY} has {size(free)} free. "
            "Lower train.num_workers or train.max_batch_per_device, or enlarge it (docker: --shm-size)."
        )


def check_disk(needed: int, place: Path, findings: Findings) -> None:
    """What the training writes against what is free below `place`."""
    free = shutil.disk_usage(existing(place)).free
    if needed > free:
        findings.mismatches.append(
            f"the training writes up to {size(needed)}, {place.absolute()} has {size(free)} free. Free space there."
        )


def check_memory(needed: int, available: int | None, what: str, findings: Findings) -> None:
    """The predicted memory against what there is; None where that is not known."""
    if available is not None and needed > available:
        findings.mismatches.append(
            f"{what} needs about {size(needed)} of memory, {size(available)} are there. Lower train.max_batch_per_device "
            "(`make tune-batch` finds the largest that fits), or share the state out with a deepspeed strategy on more devices."
        )


def existing(path: Path) -> Path:
    """The nearest folder above `path` that is there, or itself."""
    return path if path.exists() else existing(path.absolute().parent)
