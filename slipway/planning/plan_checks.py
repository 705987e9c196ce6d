"""Checks params.yaml against this machine, and reports every mismatch with its fix.

A mismatch makes the training impossible, so `slipway plan` fails. A remark is a hint; the plan
succeeds.
"""

import importlib.util
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from slipway.config.training import TrainParams
from slipway.reports.console import size
from slipway.system.cores import num_cores
from slipway.system.errors import SlipwayError
from slipway.training.distributed.placement import Placement, TrainingHost, place

_SHARED_MEMORY = Path("/dev/shm")
_BATCHES_PER_WORKER = 2  # torch's loader prefetches that many
_CHOICES = ("accelerator", "devices", "strategy", "precision")


@dataclass
class Findings:
    """Mismatches and remarks that the checks have found so far."""

    mismatches: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def check_placement(
    params: TrainParams, host: TrainingHost, findings: Findings
) -> Placement | None:
    """Return the placement of the training, and record why the one in params.yaml is impossible.

    After each refusal the refused key is set to "auto" for the next attempt. None if no key helps.
    """
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
    """Return params with the key that causes the refusal set to "auto"; None if there is none."""
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


def check_deepspeed(placement: Placement, findings: Findings) -> None:
    """Check that DeepSpeed is installed if the strategy needs it."""
    if placement.zero_stage is not None and importlib.util.find_spec("deepspeed") is None:
        findings.mismatches.append(
            f"{placement.strategy} needs DeepSpeed, which is not installed; expected what the "
            "extra `train` brings. Install it: pip install 'slipway-ml[train]' (in a clone: "
            "make install), or set train.strategy to auto."
        )


def check_workers(
    params: TrainParams, placement: Placement, batch_bytes: int, findings: Findings
) -> None:
    """Check loader processes against the cores, and their batches against shared memory."""
    workers = params.num_workers * placement.devices
    if workers == 0:
        return
    if workers + placement.devices > num_cores():
        findings.remarks.append(
            f"{params.num_workers} loader processes for each of {placement.devices} trainers are "
            f"more than the {num_cores()} cores here; lower train.num_workers"
        )
    needed = workers * _BATCHES_PER_WORKER * batch_bytes
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
    if free is not None and needed > free:
        findings.mismatches.append(
            f"the loaders' batches take up to {size(needed)} of shared memory, but "
            f"{_SHARED_MEMORY} has {size(free)} free. Lower train.num_workers or "
            "train.max_batch_per_device, or enlarge it (docker: --shm-size)."
        )


def check_disks(written: Iterable[tuple[Path, int]], findings: Findings) -> None:
    """Check the bytes that the training writes in each folder against the free space of its disk.

    Folders on the same disk share its free space.
    """
    totals: Counter[int] = Counter()  # by disk
    for folder, num_bytes in written:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        totals[disk := existing.stat().st_dev] += num_bytes
        free = shutil.disk_usage(existing).free
        if totals[disk] > free:
            findings.mismatches.append(
                f"the training writes up to {size(totals[disk])} to the disk of "
                f"{folder.absolute()}, which has {size(free)} free. Free space there."
            )


def check_memory(needed: int, available: int | None, what: str, findings: Findings) -> None:
    """Check the predicted bytes of `what` against the free bytes (None: unknown, no check)."""
    if available is not None and needed > available:
        findings.mismatches.append(
            f"{what} needs about {size(needed)} of memory, but {size(available)} are free. Lower "
            "train.max_batch_per_device (`slipway tune batch` finds the largest that fits), shard "
            "the state with a deepspeed strategy on more devices, or change train.offload."
        )
