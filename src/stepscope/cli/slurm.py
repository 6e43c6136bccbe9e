"""`stepscope slurm`: a copy of a batch script with recording switched on, and what differs."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.options import Force
from stepscope.errors import UnreadableInputError, UsageError

if TYPE_CHECKING:
    from stepscope.record.host.slurm import SwitchedOn

_STDOUT = "-"
_MOST_BYTES = 4_000_000
_LONGEST_LINE = 10_000  # of the difference shown; the file has all of it


def slurm(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The script that is handed to sbatch.")],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="The copy; NAME.stepscope.sbatch by default; - is stdout."),
    ] = None,
    program: Annotated[
        str, typer.Option("--stepscope", metavar="PATH", help="How stepscope is called in the job.")
    ] = "stepscope",
    force: Force = False,
) -> None:
    """Write a copy of a batch script that records every training it starts.

    The recorder goes behind srun, mpirun or a container and in front of python, torchrun and other launchers. The
    script itself stays as it is; the difference is shown. Lines that may start a training but are not understood are
    left alone and named.
    """
    from stepscope.record.host.slurm import switch_on

    text = _read(script)
    switched = switch_on(text, program=program)
    if not switched.lines:
        _nothing_to_do(script, switched)
        return
    target = None if out == _STDOUT else Path(out) if out is not None else default_name(script)
    if target is not None:
        _check(script, target, force=force)
        _write(script, target, switched.text)
    _show(script, text, target, switched)


def default_name(script: Path) -> Path:
    """`train.sbatch` becomes `train.stepscope.sbatch`."""
    return script.with_name(f"{script.stem}.stepscope{script.suffix}")


def _read(script: Path) -> str:
    try:
        if script.stat().st_size > _MOST_BYTES:
            raise UnreadableInputError(f"{script}: too large for a batch script; give the one handed to sbatch")
        # surrogates keep bytes that are no UTF-8, and no line end is changed
        return script.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UnreadableInputError(f"{script}: {error.strerror}; give the script that is handed to sbatch") from None


def _nothing_to_do(script: Path, switched: SwitchedOn) -> None:
    if switched.recorded:
        _say(f"{script} records already ({_lines(switched.recorded)}); nothing written")
        _say_left(switched)
        return
    _say_left(switched)
    raise UsageError(
        f"{script}: no line that starts a training was recognised; "
        "put `stepscope run --` before its command, behind srun and its options"
    )


def _check(script: Path, target: Path, *, force: bool) -> None:
    if target.exists() and (os.path.samefile(script, target) or target.is_dir()):
        what = "is a folder" if target.is_dir() else "is the script itself, which is never changed"
        raise UsageError(f"{target}: {what}; name another file with --out")
    if target.exists() and not force:
        raise UsageError(f"{target}: exists; add --force to overwrite it, or name another file with --out")


def _write(script: Path, target: Path, text: str) -> None:
    from stepscope.report.outputs import write_file

    write_file(target, text.encode("utf-8", "surrogateescape"))
    target.chmod(script.stat().st_mode & 0o777)


def _show(script: Path, text: str, target: Path | None, switched: SwitchedOn) -> None:
    """The difference on stdout, or on stderr where stdout takes the script; everything else on stderr."""
    from stepscope.report.escape import plain

    if target is None:
        sys.stdout.buffer.write(switched.text.encode("utf-8", "surrogateescape"))
        sys.stdout.flush()
    stream = sys.stderr if target is None else sys.stdout
    before, after = (part.splitlines() for part in (text, switched.text))
    names = str(script), str(target) if target is not None else f"{script} with recording"
    for line in difflib.unified_diff(before, after, *names, lineterm=""):
        print(plain(line, _LONGEST_LINE), file=stream)
    stream.flush()
    for remark in switched.remarks:
        _say(f"line {remark.line}: {remark.text}")
    if switched.recorded:
        _say(f"recorded already: {_lines(switched.recorded)}")
    _say_left(switched)
    if target is not None:
        print(f"Wrote {plain(str(target))}; submit it with: sbatch {plain(shlex.quote(str(target)))}", file=sys.stderr)


def _say_left(switched: SwitchedOn) -> None:
    for remark in switched.left:
        _say(f"left alone: line {remark.line}: {remark.text}")


def _lines(numbers: tuple[int, ...]) -> str:
    return ("line " if len(numbers) == 1 else "lines ") + ", ".join(map(str, numbers))


def _say(text: str) -> None:
    from stepscope.report.escape import one_line

    print(f"stepscope: {one_line(text)}", file=sys.stderr)
