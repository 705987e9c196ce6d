"""The folder `.work/STAGE/KEY` of an unfinished result, from which a killed run resumes.

DVC removes a stage's outputs before it runs, so unfinished work is stored elsewhere. The key is a
digest of everything that the result depends on. Work under another key is removed, never resumed.
Neither git nor DVC tracks `.work/`.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipway.config.seals import check_inputs
from slipway.system import files


@contextmanager
def work_folder(root: Path, key: str, purpose: str) -> Iterator[Path]:
    """Open the folder `root/key`, new or as the last run left it; remove it after the block.

    If the block raises, the folder stays for the next run. Folders of other keys are removed.
    Raises LockedError if another process works below `root`, and SealError if the stage's inputs
    changed.
    """
    root.mkdir(parents=True, exist_ok=True)
    with files.lock(root / "lock", purpose):
        for other in root.iterdir():
            if other.is_dir() and other.name != key:
                shutil.rmtree(other)
        (root / key).mkdir(exist_ok=True)
        yield root / key
        check_inputs()
        shutil.rmtree(root / key)
