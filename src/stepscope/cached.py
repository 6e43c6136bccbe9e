"""Where the tables of traces lie that were read before: the folder, and the name of a file's entry in it."""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from pathlib import Path

from stepscope import __version__
from stepscope.schema import TABLES_SCHEMA

# What an entry is made by: the columns, and which file of it they are in.
LAYOUT = f"{TABLES_SCHEMA} entry/3"
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
