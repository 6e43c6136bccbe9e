"""Writes reports to files and shows them on streams.

Files appear whole or not at all: they are written beside their place and moved over it. Only a run folder's own
report.json and report.html are ever replaced without being asked; any other existing file needs `--force`.

What makes a page of a report is its caller's choice (`Render`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from msgspec import Struct

from stepscope.errors import EnvironmentRefusal, UsageError
from stepscope.model import Report

if TYPE_CHECKING:
    from rich.console import Console

Render = Callable[[Report], str]  # a report as a page

STDOUT = "-"
JSON_NAME = "report.json"
HTML_NAME = "report.html"


def write(report: Report, folder: Path, render: Render) -> tuple[Path, Path]:
    """Write report.json and report.html into the run folder, replacing older ones; returns their paths.

    Raises `EnvironmentRefusal` where the folder cannot be written.
    """
    paths = folder / JSON_NAME, folder / HTML_NAME
    from stepscope.report.document import report_bytes

    write_file(paths[0], report_bytes(report))
    write_file(paths[1], render(report).encode("utf-8"))
    return paths


def refresh(report: Report, folder: Path, render: Render) -> str | None:
    """Like `write`, for a folder that may be read-only: returns the page's path, or None if nothing was written."""
    try:
        return str(write(report, folder, render)[1])
    except EnvironmentRefusal:
        return None


def write_file(path: Path, data: bytes, *, make_folder: bool = False) -> None:
    """Write `data` so that `path` holds either the old or the new content; raises `EnvironmentRefusal`.

    `make_folder`: the user named the place, and its folder is made where there is none.
    """
    temporary = path.parent / f".{path.name}.{os.urandom(4).hex()}"
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_char_device() or path.is_fifo():  # /dev/null stays what it is
            path.write_bytes(data)
            return
        # exclusive: a link that someone laid in the way is not followed
        with open(temporary, "xb") as handle:
            handle.write(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise EnvironmentRefusal(f"{path}: cannot be written ({error.strerror}); name another place") from None


class Plan(Struct, frozen=True):
    """What the user asked to be written, checked before the long work and done after it."""

    json_file: str | None = None
    html_file: str | None = None
    force: bool = False

    @property
    def uses_stdout(self) -> bool:
        return STDOUT in (self.json_file, self.html_file)

    def check(self, folder: Path | None = None) -> None:
        """Raise `UsageError` if a file would be overwritten; the own report files of run `folder` may be."""
        own = {(folder / JSON_NAME).resolve(), (folder / HTML_NAME).resolve()} if folder else set()
        check_files({"--json": self.json_file, "--html": self.html_file}, force=self.force, own=own)

    def write(self, report: Report, render: Render) -> None:
        """Write the files and say so on stderr; `-` goes to stdout."""
        if self.json_file is not None:
            from stepscope.report.document import report_bytes

            emit(self.json_file, report_bytes(report))
        if self.html_file is not None:
            emit(self.html_file, render(report).encode("utf-8"))


def check_files(files: Mapping[str, str | None], *, force: bool, own: Collection[Path] = ()) -> None:
    """Raise `UsageError` if two of `files` (by option) are one, or one would be overwritten that is not in `own`."""
    given = {option: name for option, name in files.items() if name is not None}
    for first, second in combinations(given, 2):
        if given[first] == given[second] == STDOUT:
            raise UsageError(f"{first} - and {second} - both want stdout; give one of them a file name")
        if given[first] == given[second]:
            raise UsageError(f"{first} and {second} name the same file; give them two names")
    for name in given.values():
        if name == STDOUT:
            continue
        path = Path(name)
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; name a file in it")
        if path.exists() and not force and path.resolve() not in own:
            raise UsageError(f"{path}: exists; add --force to overwrite it, or name another file")


def emit(name: str, data: bytes) -> None:
    """Write `data` to file `name` and say so on stderr; `-` is stdout."""
    if name == STDOUT:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return
    write_file(Path(name), data, make_folder=True)
    from stepscope.report.escape import plain

    print(f"Wrote {plain(name)}", file=sys.stderr)


def console(stream: TextIO) -> Console:
    """A console that shows colour only on a terminal and never fails on a character it cannot encode."""
    from rich.console import Console

    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    made = Console(file=stream, highlight=False, markup=False, emoji=False)
    made.on_broken_pipe = _on_broken_pipe  # type: ignore[method-assign]
    return made


def _on_broken_pipe() -> None:
    """Called where Rich would end the process itself, with a status of its own."""
    raise BrokenPipeError


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Show that work goes on, on stderr, while the block runs; silent when that is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with console(sys.stderr).status(f"{what} …"):
        yield


@contextlib.contextmanager
def reading(what: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """Show how far long reading is, and then that it is analysed, on stderr; silent when that is no terminal.

    Yields what to call with a file's name, the bytes read of it and its size; None where nothing is shown.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from stepscope.report.escape import plain
    from stepscope.report.words import percent

    with console(sys.stderr).status(f"{what} …") as status:
        done: dict[str, tuple[int, int]] = {}

        def progress(name: str, read: int, size: int) -> None:
            done[name] = min(read, size), size
            total = sum(size for _, size in done.values())
            if all(read == size for read, size in done.values()):
                status.update("analysing …")  # until more of another file is read
                return
            share = percent(sum(read for read, _ in done.values()) / total) if total else ""
            files = f" and {len(done) - 1} more" if len(done) > 1 else ""
            status.update(f"{what} {plain(name, 60)}{files} … {share}")

        yield progress
