"""`stepscope fix`: the change that a finding names as a difference of the source, and the command that proves it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.cli import say
from stepscope.cli.options import Reading, SourceRoot, argument, option
from stepscope.errors import StepscopeError, UsageError

if TYPE_CHECKING:
    from stepscope.api import Run
    from stepscope.fix import Fix

WHOLE = 4000  # characters of a line: reasons are never cut, names of others are bounded


def fix(
    path: Annotated[Path, argument("RUN", "A run folder.")],
    finding: Annotated[
        str | None, option("--finding ID", "Show the change that this finding names; its id or how that begins.")
    ] = None,
    apply: Annotated[bool, option("--apply", "Write the change into the files.")] = False,
    every: Annotated[
        int | None, option("--every N", "Work of every step is done every N steps; by its cost otherwise.")
    ] = None,
    source_root: SourceRoot = None,
) -> None:
    """Show the change that a finding names as a unified difference, where it is one that can be made mechanically.

    Without --finding every finding is listed: with what would change, or with what a person has to decide. With it the
    difference stands on stdout, as `patch -p1` and `git apply` take it, and on stderr what it means and the command
    that proves it. Only with --apply files are written: those in the working folder, its git root or a --source-root
    that still hold what ran. All but the change stays as it is, byte for byte.

    What is mechanical: arguments of loaders, optimizers and frameworks' settings, threads and other settings of the
    process, autocast, torch.compile, calls that a step does not need, and work that every N steps will do. A value
    that an option of the command line sets is left to it, and the option is named.

    Ends with status 1 where a finding has no mechanical change. Needs `pip install 'stepscope[fix]'`.
    """
    from stepscope import api
    from stepscope import fix as fixes
    from stepscope.report import outputs

    if apply and finding is None:
        raise UsageError("--apply writes the change of one finding; name it with --finding ID")
    if every is not None and every < 2:
        raise UsageError(f"--every {every}: a number of steps, 2 or more")
    with outputs.reading("reading") as progress:
        run = api.open_run(path, options=Reading(source_root=source_root).options(progress, judged=True))
        roots = tuple(source_root or ())
        chosen = [fixes.find(run, finding)] if finding is not None else list(run.diagnosis.findings)
        found = [fixes.fix_of(run, one, every=every, roots=roots) for one in chosen]
    if finding is None:
        _list(found, path)
        return
    one = found[0]
    say(f"{one.finding.id}: {one.finding.title}")
    if one.reason:
        raise StepscopeError(f"no mechanical change: {one.reason}. {one.finding.fix}")
    if one.done:
        say("nothing to do: the source has this change already")
        return
    if apply:
        for file in fixes.apply(one):
            say(f"wrote {file}")
    else:
        _show(one)
    for note in (one.finding.caveat, *one.notes):
        if note:
            say(f"note: {note}")
    if not apply:
        base = shlex.quote(one.changes[0].base)
        say(f"apply: stepscope fix {shlex.quote(str(path))} --finding {one.finding.id} --apply, or patch -p1 -d {base}")
    for what, command in proofs(run, one, path, applied=apply):
        say(f"{what}: {command}")


def _show(one: Fix) -> None:
    """The difference: as bytes for a program, with control characters shown on a terminal."""
    from stepscope.report.escape import visible

    data = b"".join(change.difference for change in one.changes)
    if not sys.stdout.isatty() and hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    lines = (line.split("\t") for line in data.decode("utf-8", errors="replace").split("\n"))
    sys.stdout.write("\n".join("\t".join(visible(part) for part in parts) for parts in lines))


def _list(found: list[Fix], path: Path) -> None:
    from stepscope.report.escape import one_line

    def tell(text: str) -> None:
        print(one_line(text, WHOLE))

    if not found:
        tell("No findings: nothing to fix")
    for one in found:
        tell(f"{one.finding.id}: {one.finding.title}")
        if one.reason:
            print("  by hand: " + one_line(f"{one.reason}. {one.finding.fix}", WHOLE))
        elif one.done:
            print("  done: the source has this change already")
        else:
            names = ", ".join(os.path.relpath(change.source.path) for change in one.changes)
            print(
                "  changes " + one_line(f"{names}: stepscope fix {shlex.quote(str(path))} --finding {one.finding.id}")
            )


def proofs(run: Run, one: Fix, path: Path, *, applied: bool) -> list[tuple[str, str]]:
    """(what for, command) that shows what the change gains: by knobs before it is written, where they set the same."""
    facts = run.tables.run
    command = shlex.join(facts.command) if facts.command else "COMMAND"
    here = os.path.realpath(os.curdir)
    there = f"cd {shlex.quote(facts.cwd)} && " if facts.cwd and os.path.realpath(facts.cwd) != here else ""
    folder = shlex.quote(str(path.absolute() if there else path))
    if one.knobs and not applied:
        from stepscope.report import sentences

        tries = [{"knob": knob.knob, "value": knob.value} for knob in one.knobs]
        started = {"command": facts.command or ("COMMAND",), "folder": str(path.absolute() if there else path)}
        line = sentences.proof({"try": tries}, started)
        return [("prove it before", there + line)] if line else []
    after = shlex.quote(f"{(path.absolute() if there else path)}-fixed")
    line = f"{there}stepscope run --out {after} -- {command} && stepscope compare {folder} {after}"
    return [("prove it" if applied else "prove it when it is applied", line)]
