"""Recognises disk faults in the exceptions of any library, and describes them with a fix.

Most libraries raise an OSError. torch, safetensors and protobuf raise their own errors, in which
only the text, or the chained error, names the fault.
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
# torch's archive writer only reports that fewer bytes arrived than it wrote.
_SHORT_WRITE = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed|iostream error")
_QUOTED = re.compile(r"'(/?[^'\n]*/[^'\n]*)'")
_PARTIAL = re.compile(r"\.\d+\.partial$")  # of `files`, which the user never sees
_PROBE_BYTES = 64 << 10


def try_to_write(folders: Iterable[Path]) -> None:
    """Raise OSError if one of `folders` exists but has no room for a file of 64 KiB.

    Reports a full disk at the start instead of after an hour of training.
    """
    for folder in filter(Path.is_dir, folders):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_PROBE_BYTES))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder.absolute())) from error


def disk_fault(error: BaseException) -> str | None:
    """Return one line with path, fault and fix if the disk caused `error`; else None."""
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno in _FIXES:
            # filename2 is the target of a copy.
            return _describe(cause.errno, cause.filename2 or cause.filename)
    for cause in _chain(error):
        text = str(cause)
        codes = [code for code in _FIXES if os.strerror(code) in text]
        if _SHORT_WRITE.search(text):
            codes.append(errno.ENOSPC)
        if codes:
            quoted = _QUOTED.search(text)
            return _describe(codes[0], quoted[1] if quoted else None)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _describe(code: int, path: object) -> str:
    place = f"the file system of {Path.cwd()}"
    if isinstance(path, str | bytes):
        place = _PARTIAL.sub("", os.fsdecode(path))
    return f"{place}: {os.strerror(code)}. {_FIXES[code]}"
