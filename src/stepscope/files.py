"""Opens files that others wrote, regular ones alone, so that no pipe is waited for and no device read without end.

Where the tables of traces lie that were read before: the folder, and the name of a file's entry in it.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from stepscope import __version__
from stepscope.schema import TABLES_SCHEMA

_Kind = TypeVar("_Kind")


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


def decoded_small(path: Path, limit: int, kind: type[_Kind]) -> _Kind | None:
    """A file of JSON of at most `limit` bytes; None where there is none, or none of this kind."""
    try:
        return msgspec.json.decode(read_small(path, limit), type=kind)
    except (OSError, ValueError, RecursionError):  # msgspec's are ValueErrors, as is text that is no UTF-8
        return None


# What an entry is made by: the columns, and which file of it they are in.
LAYOUT = f"{TABLES_SCHEMA} entry/4"
DIGEST_BYTES = 16
INDEX = "trace.json"  # of an entry; written last, so that a folder with it is whole
_READ_BYTES = 1 << 20


def default_folder() -> Path:
    """Where a user's caches go on this system, and stepscope's in it."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if home and Path(home).is_absolute():
        return Path(home) / "stepscope"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "stepscope"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "stepscope" / "cache"
    return Path.home() / ".cache" / "stepscope"


def key_of(path: Path, part: str = "") -> str:
    """Hex digest of the file's bytes, the tables' schema, this version and which `part` is kept; raises OSError."""
    digest = blake2b(f"{LAYOUT} {__version__}{part}\n".encode(), digest_size=DIGEST_BYTES)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
