"""Finds the cause of a failed `dvc repro` in the output of DVC and the stages."""

import re
from dataclasses import dataclass

from slipway.system.disk_faults import disk_fault

_STAGE = re.compile(r"failed to reproduce '([^']+)'")
_OWN = re.compile(r"^error: (.+?)(?=^ERROR: |\Z)", re.MULTILINE | re.DOTALL)
_OF_DVC = re.compile(r"^ERROR: (.+?)(?=^\S+: |\Z)", re.MULTILINE | re.DOTALL)
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):$", re.MULTILINE)
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)?(?:: .*)?)$", re.M)
_KILLED = re.compile(r"exited with (-9|137)\b")
_BUSY = re.compile(r"blocked by \(PID (\d+)\)|blocked by.*?PID (\d+)", re.DOTALL)
_DAMAGED_LOCK = re.compile(r"Unable to read RWLock-file '?([^\s':]+)")
_REPRO_LOCKED = re.compile(r"Unable to acquire lock|Another DVC process")
_MEMORY = re.compile(r"MemoryError|CUDA out of memory|DefaultCPUAllocator: can't allocate")
_FEWER_ROWS = (
    "Expected a batch and a network that fit. Lower train.max_batch_per_device, or see "
    "`slipway plan`, then run again"
)


@dataclass(frozen=True)
class Cause:
    """The stage that failed ("" if none had started), and the reason with its remedy."""

    stage: str
    text: str


def find_cause(output: str) -> Cause:
    """Find the stage and the reason in the end of a run's output."""
    text = _plain(output)
    stages = _STAGE.findall(text)
    return Cause(stages[-1] if stages else "", _reason(text))


def _plain(output: str) -> str:
    """Remove colour codes, and the lines that a progress bar overwrote."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r\n", "\n")
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))


def _reason(text: str) -> str:
    own, of_dvc = _OWN.findall(text), _OF_DVC.findall(text)
    if own:
        return str(own[-1]).strip()
    if found := _DAMAGED_LOCK.search(text):
        return (
            f"a killed DVC left the damaged lock {found[1]}, expected none or a readable one. "
            f"If no other DVC runs, remove it: rm {found[1]}"
        )
    if found := _BUSY.search(text):
        process = found[1] or found[2]
        return (
            f"another DVC, process {process}, works in this project; expected none. Wait for it, "
            "then run again"
        )
    if _REPRO_LOCKED.search(text):
        return (
            "another DVC works in this project; expected none. Wait for it, then run again. "
            "If none runs, remove .dvc/tmp/lock"
        )
    exception = _last_exception(text)
    if fault := disk_fault(OSError(" ".join([exception, *of_dvc[-1:]]))):
        return fault
    if _MEMORY.search(text):
        return f"out of memory. {_FEWER_ROWS}"
    if _KILLED.search(text):
        return f"the stage was killed (signal 9), as Linux does if memory runs out. {_FEWER_ROWS}"
    if exception:
        return f"{exception}; the traceback has the line to correct"
    return str(of_dvc[-1]).strip() if of_dvc else "DVC ended without a message"


def _last_exception(text: str) -> str:
    """Return the last line of the last traceback."""
    starts = [found.end() for found in _TRACEBACK.finditer(text)]
    found = _EXCEPTION.search(text, starts[-1]) if starts else None
    return found[1] if found else ""
