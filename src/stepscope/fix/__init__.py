"""The change that a finding names, as a difference of the user's files; where it is none, what has to be decided."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from stepscope.errors import EnvironmentRefusal, UsageError
from stepscope.fix.sources import MISSING, NotMechanical, Source, Sources, base_of, difference, write
from stepscope.model import Finding
from stepscope.model.findings import Try

if TYPE_CHECKING:
    from stepscope.api import Run


class Change(Struct, frozen=True):
    """One file: what it holds and what it is to hold. `base` is the folder that the difference names it from."""

    source: Source
    new: bytes
    base: str

    @property
    def difference(self) -> bytes:
        return difference(self.source.path, self.base, self.source.data, self.new)


class Fix(Struct, frozen=True):
    """Of one finding: the changes; without any, a `reason`, or that there is nothing to do (`done`).

    `knobs` set the same for an experiment, empty where no knob does. `notes` say what the change leaves or means.
    """

    finding: Finding
    changes: tuple[Change, ...] = ()
    reason: str = ""
    done: bool = False
    notes: tuple[str, ...] = ()
    knobs: tuple[Try, ...] = ()


def fix_of(run: Run, finding: Finding, *, every: int | None = None, roots: Sequence[Path] = ()) -> Fix:
    """The fix of one finding of a run; nothing is written. Raises `EnvironmentRefusal` without LibCST.

    Args:
        every: how often, in steps, work is to be done that every step does now; chosen by its cost by default.
        roots: folders of the user's code beside the working directory and its git root.
    """
    try:
        from stepscope.fix.recipes import Recipe
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("libcst"):
            raise
        raise EnvironmentRefusal(MISSING) from None
    analysis = run.analysis
    sources = Sources(run.tables.run.source_hashes, roots)
    recipe = Recipe(analysis, sources, finding, every, {}, [], [])
    try:
        planned = recipe.make()
        made = [(source, source.tree.result()) for source in recipe.touched.values()] if planned else []
        changes = tuple(Change(source, new, base_of(source.path)) for source, new in made if new != source.data)
    except NotMechanical as error:
        return Fix(finding, reason=str(error))
    except RecursionError:
        return Fix(finding, reason="the source is nested too deeply to be edited")
    odd = [change.source for change in changes if change.source.changed]
    if odd:
        return Fix(finding, reason=f"{odd[0].path} was changed since it was recorded; record it again")
    return Fix(finding, changes, done=not changes, notes=tuple(dict.fromkeys(recipe.notes)), knobs=tuple(recipe.knobs))


def find(run: Run, name: str) -> Finding:
    """The finding whose id is or begins with `name`; raises `UsageError` where that is none or several."""
    findings = run.diagnosis.findings
    same = [one for one in findings if one.id == name] or [one for one in findings if one.id.startswith(name)]
    if len(same) == 1 and name:
        return same[0]
    known = ", ".join(one.id for one in (same or findings)) or "it has no findings"
    raise UsageError(f"--finding {name}: {'names several' if same else 'no such finding of this run'}: {known}")


def apply(fix: Fix) -> list[str]:
    """Write the changes; returns the files. Raises `UsageError` before anything is written, `EnvironmentRefusal`."""
    for change in fix.changes:
        if change.source.changed is None:
            raise UsageError(
                f"{change.source.path}: what ran was not kept as a hash, so that nobody knows whether this is it; "
                "apply the difference by hand"
            )
        if not os.access(change.source.path, os.W_OK):
            raise EnvironmentRefusal(f"{change.source.path} may not be written; nothing was changed")
    for change in fix.changes:
        write(change.source, change.new)
    return [change.source.path for change in fix.changes]
