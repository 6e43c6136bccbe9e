"""One script through its fixes: of each run, what was changed since the one before, and which findings are left.

One run of each cannot tell a small change of the step time from chance; `compare` can, of several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from stepscope.comparison.changes import CHANGED, GONE, NEW, environment_changes, finding_changes
from stepscope.comparison.profile import LOAD, Profile, relative_to
from stepscope.comparison.thresholds import THRESHOLD
from stepscope.model.comparison import Change, Left, Version

OF_A_MACHINE = frozenset({LOAD})  # what no fix changes
SOURCE = "source"


def versions(profiles: Iterable[Profile]) -> tuple[Version, ...]:
    """The runs in the order in which they started."""
    ordered = sorted(profiles, key=lambda one: (one.started_ns or 0, one.path))
    found: list[Version] = []
    for before, one in zip([None, *ordered], ordered, strict=False):
        version = _alone(one)
        found.append(version if before is None else _after(version, found, before, one))
    return tuple(found)


def _alone(one: Profile) -> Version:
    measure = one.measured.measure if one.measured is not None else None
    findings = one.diagnosis.findings if one.diagnosis is not None else ()
    return Version(
        label=one.label,
        path=one.path,
        started_ns=one.started_ns,
        mean_ms=measure.mean_ms if measure is not None else None,
        samples_per_second=measure.samples_per_second if measure is not None else None,
        findings=tuple(Left(each.rule, each.title, each.cost_ms_per_step) for each in findings),
    )


def _after(version: Version, earlier: Sequence[Version], before: Profile, one: Profile) -> Version:
    changed = environment_changes([before.environment], [one.environment])
    floor = THRESHOLD * min((each for each in (version.mean_ms, earlier[-1].mean_ms) if each), default=0.0)
    of_findings = finding_changes([before], [one], floor)[0]
    first = next((each.mean_ms for each in earlier if each.mean_ms), None)
    return replace(
        version,
        ratio=_ratio(version.mean_ms, earlier[-1].mean_ms),
        of_first=_ratio(version.mean_ms, first),
        changed=(*_sources(before, one), *(each for each in changed if each.name not in OF_A_MACHINE)),
        new=tuple(each.name for each in of_findings if each.status == NEW),
        gone=tuple(each.name for each in of_findings if each.status == GONE),
    )


def _ratio(after: float | None, before: float | None) -> float | None:
    return after / before if after is not None and before else None


def _sources(before: Profile, one: Profile) -> Iterator[Change]:
    """The user's files that are not what they were; None where one of the runs did not keep what its files held."""
    sides = []
    for each in (before, one):
        name = relative_to(each.roots)
        sides.append({name(file): told for file, told in each.source_files.hashes.items()})
    ours, theirs = sides
    for file in sorted({*ours, *theirs}) if ours and theirs else ():
        if ours.get(file) != theirs.get(file):
            status = NEW if file not in ours else GONE if file not in theirs else CHANGED
            yield Change(SOURCE, file, ours.get(file), theirs.get(file), None, "", status, file)
