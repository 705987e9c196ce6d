"""Faults of a disk are described in one line, with the file that the user knows."""

import errno
import os

from slipway.system.disk_faults import disk_fault


def test_a_read_only_disk_is_named_with_the_file_and_not_with_its_partial_copy() -> None:
    error = OSError(errno.EROFS, os.strerror(errno.EROFS), "project/params.yaml.4640.partial")
    assert disk_fault(error) == (
        "project/params.yaml: Read-only file system. Run in a folder that can be written."
    )
