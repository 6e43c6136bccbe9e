"""Opens files that others wrote: regular files alone, so that no pipe is waited for and no device read without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path | str, *, follow: bool = False) -> BinaryIO:
    """`path`, opened for reading bytes; raises OSError, also for what is no regular file.

    Args:
        follow: go along a symbolic link. In a run folder none is followed: it could lead out of it.
    """
    # O_NONBLOCK: opening a pipe must not wait for its writer; of regular files it changes nothing
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags if follow else flags | getattr(os, "O_NOFOLLOW", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_small(path: Path | str, limit: int, *, follow: bool = False) -> bytes:
    """All of a file of at most `limit` bytes; raises OSError, also for a larger one."""
    with open_regular(path, follow=follow) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", str(path))
    return data
