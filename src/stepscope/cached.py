"""Where the tables of traces lie that were read before: the folder, and the name of a file's entry in it."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from stepscope import __version__
from stepscope.schema import TABLES_SCHEMA

# What an entry is made by: the columns, and which file of it they are in.
LAYOUT = f"{TABLES_SCHEMA} entry/2"
DIGEST_BYTES = 16
INDEX = "trace.json"  # of an entry; written last, so that a folder with it is whole
_READ_BYTES = 1 << 20
_REMEMBERED = 64  # files whose key is asked for more than once in a moment


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


def key_of(path: Path) -> str:
    """Hex digest of the file's bytes, the tables' schema and this version; raises OSError."""
    found = path.stat()
    return _digest(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))


def is_cached(path: Path, folder: Path | None) -> bool:
    """Whether there is an entry of the file in `folder`; it may turn out to be damaged."""
    try:
        return folder is not None and path.is_file() and (folder / key_of(path) / INDEX).is_file()
    except OSError:
        return False


@lru_cache(_REMEMBERED)
def _digest(path: Path, _state: tuple[int, ...]) -> str:
    digest = blake2b(f"{LAYOUT} {__version__}\n".encode(), digest_size=DIGEST_BYTES)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
