"""Where an unfinished result lies, so that a killed run can go on: `.work/STAGE/KEY`, known to neither git nor DVC.

DVC removes a stage's outputs before it runs, so what is unfinished must not be among them. The key is a digest of all that
the result depends on: with another key the work begins anew, and the old is removed.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipway.config.sealing import check_inputs
from slipway.system import files


@contextmanager
def work_folder(root: Path, key: str, purpose: str) -> Iterator[Path]:
    """The folder `root/key`, as it was left or new; removed when the block ends without an error.

    LockedError while another process works below `root`; SealError if the stage's inputs changed, and the folder stays then.
    Folders of other keys are removed.
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
