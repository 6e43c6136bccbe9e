"""The file an export becomes: packed where its name ends in .gz, and there whole or not at all.

It is written beside its place under a name nobody can guess and moved over it at the end, so a link at its place is
replaced and never followed, and an export that fails leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stepscope.errors import EnvironmentRefusal, UsageError

_BUFFER = 2**20
_LEVEL = 9  # as the profilers pack their own; at level 6 a whole trace could come out larger than its source
_GZIP = 31  # zlib's way to say: with a gzip header, which then holds neither a name nor a time


class Sink:
    """Takes bytes and counts how many reach the file."""

    def __init__(self, file: BinaryIO, *, packed: bool) -> None:
        self._file = file
        self._packer = zlib.compressobj(_LEVEL, wbits=_GZIP) if packed else None
        self._parts: list[bytes] = []
        self._waiting = 0
        self.written = 0

    def write(self, data: bytes) -> None:
        """Add `data`."""
        self._parts.append(data)
        self._waiting += len(data)
        if self._waiting >= _BUFFER:
            self._flush()

    def finish(self) -> None:
        """Write what waits."""
        self._flush()
        if self._packer is not None:
            self._put(self._packer.flush())

    def _flush(self) -> None:
        data = b"".join(self._parts)
        self._parts, self._waiting = [], 0
        self._put(self._packer.compress(data) if self._packer is not None else data)

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self.written += len(data)


def check(path: Path, inputs: list[Path], *, force: bool) -> None:
    """Raise UsageError if writing `path` would lose something: a file that exists, or one we are about to read."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; name a file in it")
    if path.is_char_device() or path.is_fifo():
        raise UsageError(f"{path}: is no file; name one, or - for standard output")
    if any(_same(path, source) for source in inputs):
        raise UsageError(f"{path}: is one of the traces to read; name another file")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: exists; add --force to overwrite it, or name another file")


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


@contextlib.contextmanager
def atomic(path: Path, *, force: bool) -> Iterator[Sink]:
    """A sink whose content stands at `path` once the block has ended well; raises EnvironmentRefusal.

    Its folder is made where there is none.
    """
    temporary = path.parent / f".{path.name[:200]}.{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:  # exclusive: a link that someone laid in the way is not followed
            sink = Sink(file, packed=path.suffix.lower() == ".gz")
            yield sink
            sink.finish()
        check(path, [], force=force)
        os.replace(temporary, path)
    except OSError as error:
        raise EnvironmentRefusal(f"{path}: cannot be written ({error.strerror}); name another place") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
