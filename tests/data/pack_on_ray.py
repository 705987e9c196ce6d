"""Packs 600 images on Ray, and with `kill` ends one of Ray's workers midway.

`python -m tests.data.pack_on_ray FOLDER ENGINE [kill]` runs in its own process, like a stage,
because Ray changes the process that connects to it. It prints the number of killed workers.
"""

import os
import signal
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import cast

from slipway.data.engine import parallel
from slipway.data.engine.parallel import Engine
from slipway.data.engine.work_folder import work_folder
from slipway.data.sources.samples import RawSample
from slipway.data.store.packing import pack, packing_key
from slipway.data.store.store_form import StoreForm
from slipway.inputs import user_function
from slipway.inputs.images import TransformContract
from slipway.system import files
from tests.data.pictures import CONTRACT
from tests.data.store.test_packing import data_set


def ray_workers(parent: int) -> list[int]:
    """Return the processes below `parent` that are running a task of Ray."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if (
            entry.name.isdigit()
            and command.startswith(b"ray::_map_chunk")
            and is_below(int(fields[1]), parent)
        ):
            found.append(int(entry.name))
    return found


def is_below(process: int, parent: int) -> bool:
    """Return True if `process` is `parent` or descends from it."""
    while process > 1:
        if process == parent:
            return True
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def main(root: Path, engine: Engine, kill: bool) -> None:
    """Pack the images into `root/packed`."""
    parallel._CHUNK_ITEMS = 16
    samples, rows = data_set(600)
    function = "slow_transform:halve"
    transform = TransformContract(function=function, sha256=user_function.code_digest(function))
    network = CONTRACT.model_copy(update={"transform": transform})
    form = StoreForm(network=network, train_size_px=16, encoding="jpeg", jpeg_quality=90)

    def read(sources: Collection[str]) -> Iterator[RawSample]:
        return (sample for sample in samples if sample.source in sources)

    num_killed = 0
    with work_folder(
        root / "work", packing_key(rows, form, "image_classification"), "packing"
    ) as work:
        for done, _ in enumerate(pack(read, rows, form, "image_classification", work, 2, engine)):
            if kill and not num_killed and done >= 100:
                for worker in ray_workers(os.getpid())[:1]:
                    os.kill(worker, signal.SIGKILL)
                    num_killed += 1
        files.move_directory(work / "store", root / "packed")
    print(num_killed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), cast(Engine, sys.argv[2]), sys.argv[3:] == ["kill"])
