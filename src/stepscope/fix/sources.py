"""The user's files as a fix may read and write them, and the difference it makes of them.

A run folder is untrusted and names files as it likes. So a file is looked at only where it lies, after links are
resolved, in a folder of the reader's own (the working directory, its git root, `--source-root`), is a regular file of
Python source and of no installed package; and it is written only while it has the content that ran, by its hash.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from stepscope.errors import EnvironmentRefusal
from stepscope.files import read_small
from stepscope.report.source import MAX_FILE_BYTES, own_folders

SUFFIXES = (".py", ".pyw")
_INSTALLED = {"site-packages", "dist-packages", "__pypackages__", "node_modules"}
MAX_FILES = 1000  # as many as the recorder hashes, looked through for a word
MISSING = "`stepscope fix` needs LibCST, which is not installed; pip install 'stepscope[fix]'"


class NotMechanical(Exception):
    """Why no edit can be made: what a person has to decide, as a sentence."""


class Source:
    """One file: its bytes, its tree, and the places in it. Parsed when first asked for."""

    def __init__(self, path: str, data: bytes, *, changed: bool | None) -> None:
        self.path = path
        self.data = data
        self.changed = changed  # since it was recorded; None where the recorder kept no hash of it
        self._tree: Any = None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def forget(self) -> None:
        """Drop what was planned."""
        self._tree = None

    @property
    def tree(self) -> Any:
        """The `edits.Tree`; raises `NotMechanical` for what LibCST does not keep byte for byte."""
        if self._tree is None:
            from stepscope.fix.edits import Tree

            self._tree = Tree(self.data, self.name)
        return self._tree


class Sources:
    """The user's files of a run."""

    def __init__(self, hashes: Mapping[str, str], roots: Sequence[Path] = ()) -> None:
        folders = (os.path.realpath(folder) for folder in (*own_folders(), *map(str, roots)))
        self.roots = tuple(folder for folder in dict.fromkeys(folders) if folder != os.sep)
        self._hashes = hashes
        self._files: dict[str, Source | str] = {}

    def open(self, file: str) -> Source:
        """The file; raises `NotMechanical` where it is none of the reader's, cannot be read, or is no source."""
        found = self._files.get(file)
        if found is None:
            try:
                found = self._files[file] = self._read(file)
            except (OSError, ValueError) as error:  # a name that no file can have
                found = self._files[file] = f"{file!r}: {error}"
        if isinstance(found, str):
            raise NotMechanical(found)
        return found

    def all(self, first: Iterable[str] = ()) -> list[Source]:
        """Every file that may be opened: `first`, then what the recorder has seen of the user's."""
        found = {}
        for file in [*dict.fromkeys((*first, *sorted(self._hashes)))][:MAX_FILES]:
            with contextlib.suppress(NotMechanical):
                source = self.open(file)
                found[source.path] = source
        return [*found.values()]

    def _read(self, file: str) -> Source | str:
        if not os.path.isabs(file) or "\0" in file:
            return f"{file} is no file of yours"
        path = os.path.realpath(file)
        if not any(path.startswith(root + os.sep) for root in self.roots):
            return f"{file} lies in none of your folders ({', '.join(self.roots)}); name its folder with --source-root"
        if not path.endswith(SUFFIXES):
            return f"{file} is no Python source"
        parts = Path(path).parts
        beside = (Path(*parts[:length]) / "pyvenv.cfg" for length in range(2, len(parts)))
        if _INSTALLED & set(parts) or any(config.is_file() for config in beside):
            return f"{file} belongs to an installed package"
        known = self._hashes.get(os.path.normpath(file)) or self._hashes.get(path)
        for same in self._files.values():
            if isinstance(same, Source) and same.path == path:
                return same
        try:
            data = read_small(path, MAX_FILE_BYTES)
        except OSError as error:
            return f"{file}: {error.strerror or error}"
        changed = None if known is None else hashlib.sha256(data).hexdigest() != known
        return Source(path, data, changed=changed)


def base_of(path: str) -> str:
    """The folder that a difference names a file from: its git root, else the working directory, else its own."""
    folders = Path(path).parents
    root = next((folder for folder in folders if (folder / ".git").exists()), None)
    here = Path(os.path.realpath(os.curdir))
    return str(root or (here if here in folders else folders[0]))


def difference(path: str, base: str, old: bytes, new: bytes) -> bytes:
    """A unified difference as `patch -p1` and `git apply` take it, in the bytes of the file."""
    name = Path(path).relative_to(base).as_posix()
    # one character for each byte; no line ends but those of the program that applies it
    before, after = [re.findall(r"[^\n]*\n|[^\n]+", data.decode("latin-1")) for data in (old, new)]
    out = []
    for line in islice(difflib.unified_diff(before, after), 2, None):  # without its own heads
        whole = line.encode("latin-1")
        out.append(whole if line.endswith("\n") else whole + b"\n\\ No newline at end of file\n")
    sides = [_quoted(f"{side}/{name}") for side in "ab"]
    # with the first line git takes the names from its root, wherever it is called
    heads = [b"diff --git " + b" ".join(sides) + b"\n"]
    heads += [
        start + side + (b"\t" if b" " in side else b"") + b"\n"
        for start, side in zip((b"--- ", b"+++ "), sides, strict=True)
    ]
    return b"".join([*heads, *out] if out else [])


def _quoted(name: str) -> bytes:
    """A name as the head of a difference holds it: in C's quotes where it needs them."""
    raw = os.fsencode(name)
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in raw):
        return raw
    escapes = {9: b"\\t", 10: b"\\n", 34: b'\\"', 92: b"\\\\"}
    inside = (escapes.get(byte) or (bytes([byte]) if 32 <= byte < 127 else b"\\%03o" % byte) for byte in raw)
    return b'"' + b"".join(inside) + b'"'


def write(source: Source, new: bytes) -> None:
    """Put `new` in the file's place, whole or not at all, with its mode; raises `EnvironmentRefusal`."""
    temporary = None
    try:
        status = os.stat(source.path, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or read_small(source.path, MAX_FILE_BYTES) != source.data:
            raise EnvironmentRefusal(f"{source.path} has just been changed by someone else; nothing was written")
        folder = os.path.dirname(source.path)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{source.name[:100]}.", dir=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(new)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, stat.S_IMODE(status.st_mode))
        os.replace(temporary, source.path)
        temporary = None
    except OSError as error:
        why = error.strerror or error
        raise EnvironmentRefusal(f"{source.path} cannot be written: {why}; apply the difference by hand") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
