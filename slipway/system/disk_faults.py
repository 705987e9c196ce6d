"""What a disk refuses, found in whatever exception a library makes of it, and what a user can do about it.

Most libraries raise an OSError. torch, safetensors and protobuf raise their own, in which only the text, or the error before it, tells.
"""

import errno
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

_FIXES = {
    errno.ENOSPC: "Free space there, then run the same command again.",
    errno.EDQUOT: "Free space, or have the quota raised, then run the same command again.",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), then run the same command again.",
    errno.EROFS: "Run in a folder that can be written.",
    errno.EACCES: "Give this user the right to it.",
    errno.EPERM: "Give this user the right to it.",
    errno.EIO: "Check the disk.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
}
# torch's writer of archives notices that fewer bytes arrived than it wrote, and nothing else.
_SHORT_WRITE = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed|iostream error")
_QUOTED = re.compile(r"'(/?[^'\n]*/[^'\n]*)'")
_TRIED_BYTES = 64 << 10


def try_to_write(folders: Iterable[Path]) -> None:
    """OSError, naming the folder, where one that exists takes no 64 KiB: told at the start, and not after an hour of training."""
    for folder in filter(Path.is_dir, folders):
        try:
            with tempfile.TemporaryFile(
                dir=folder
            ) as file:  # without a name where the file system can do that
                file.write(bytes(_TRIED_BYTES))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder.absolute())) from error


def disk_fault(error: BaseException) -> str | None:
    """One line with the path, the fault and the fix; None if no disk is to blame."""
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno in _FIXES:
            return _line(
                one.errno, one.filename2 or one.filename
            )  # of a copy the target comes second
    for one in _chain(error):
        found = next((code for code in _FIXES if os.strerror(code) in str(one)), None)
        if found is None and _SHORT_WRITE.search(str(one)):
            found = errno.ENOSPC
        quoted = _QUOTED.search(str(one))
        if found is not None:
            return _line(found, quoted[1] if quoted else None)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _line(code: int, path: object) -> str:
    place = (
        os.fsdecode(path) if isinstance(path, str | bytes) else f"the file system of {Path.cwd()}"
    )
    return f"{place}: {os.strerror(code)}. {_FIXES[code]}"
