"""`stepscope slurm`: a copy of a batch script with recording switched on, and what differs."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

from stepscope.cli import say
from stepscope.cli.options import Force, argument, option
from stepscope.errors import UnreadableInputError, UsageError

_STDOUT = "-"
_MOST_BYTES = 4_000_000
_LONGEST_LINE = 10_000  # of the difference shown; the file has all of it


def slurm(
    script: Annotated[Path, argument("SCRIPT", "The script that is handed to sbatch.")],
    out: Annotated[
        str | None, option("--out -o FILE", "The copy; NAME.stepscope.sbatch by default; - is stdout.")
    ] = None,
    program: Annotated[str, option("--stepscope PATH", "How stepscope is called in the job.")] = "stepscope",
    force: Force = False,
) -> None:
    """Write a copy of a batch script that records every training it starts.

    The recorder goes behind srun, mpirun or a container and in front of python, torchrun and other launchers. The
    script itself stays as it is; the difference is shown. Lines that may start a training but are not understood are
    left alone and named.
    """
    from stepscope.record.host.slurm import switch_on
    from stepscope.report.escape import plain
    from stepscope.report.outputs import write_file

    try:
        if script.stat().st_size > _MOST_BYTES:
            raise UnreadableInputError(f"{script}: too large for a batch script; give the one handed to sbatch")
        # surrogates keep bytes that are no UTF-8, and no line end is changed
        text = script.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UnreadableInputError(f"{script}: {error.strerror}; give the script that is handed to sbatch") from None
    switched = switch_on(text, program=program)
    if switched.lines:
        named = script.with_name(f"{script.stem}.stepscope{script.suffix}") if out is None else Path(out)
        target = None if out == _STDOUT else named
        if target is not None:
            if target.exists() and (os.path.samefile(script, target) or target.is_dir()):
                what = "is a folder" if target.is_dir() else "is the script itself, which is never changed"
                raise UsageError(f"{target}: {what}; name another file with --out")
            if target.exists() and not force:
                raise UsageError(f"{target}: exists; add --force to overwrite it, or name another file with --out")
            write_file(target, switched.text.encode("utf-8", "surrogateescape"))
            target.chmod(script.stat().st_mode & 0o777)
        _show_difference(script, text, target, switched.text)
        for line, remark in switched.remarks:
            say(f"line {line}: {remark}")
    if switched.recorded:
        numbers = ("line " if len(switched.recorded) == 1 else "lines ") + ", ".join(map(str, switched.recorded))
        already = f"recorded already: {numbers}" if switched.lines else ""
        say(already or f"{script} records already ({numbers}); nothing written")
    for line, reason in switched.left:
        say(f"left alone: line {line}: {reason}")
    if not switched.lines and not switched.recorded:
        raise UsageError(
            f"{script}: no line that starts a training was recognised; "
            "put `stepscope run --` before its command, behind srun and its options"
        )
    if switched.lines and target is not None:
        print(f"Wrote {plain(str(target))}; submit it with: sbatch {plain(shlex.quote(str(target)))}", file=sys.stderr)


def _show_difference(script: Path, text: str, target: Path | None, switched: str) -> None:
    """On stdout, or on stderr where stdout takes the script."""
    from stepscope.report.escape import plain

    if target is None:
        sys.stdout.buffer.write(switched.encode("utf-8", "surrogateescape"))
        sys.stdout.flush()
    stream = sys.stderr if target is None else sys.stdout
    names = str(script), str(target) if target is not None else f"{script} with recording"
    for line in difflib.unified_diff(text.splitlines(), switched.splitlines(), *names, lineterm=""):
        print(plain(line, _LONGEST_LINE), file=stream)
    stream.flush()
