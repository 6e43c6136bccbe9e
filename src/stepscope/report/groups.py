"""Findings as a reader takes them in: each cause with what it explains below it, which is no loss in addition.

The order of `report.findings` is that of cost. A group stands where its most expensive member does; the cause leads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from stepscope.model import Report

Row = dict[str, Any]


class Group(Struct, frozen=True):
    """A finding that no other explains, and the findings it explains, directly or not, each once."""

    finding: Row
    explained: tuple[Row, ...]


def groups(report: Report) -> list[Group]:
    """All groups; a finding with several causes stands below the most expensive one."""
    rows = {row["id"]: row for row in report.findings}
    known = {name for row in report.findings for name in row["explains"] if name in rows and name != row["id"]}
    taken: set[str] = set()
    found = []
    for row in (row for row in report.findings if row["id"] not in known):
        below = []
        for name in _below(row, rows):
            if name not in taken:
                taken.add(name)
                below.append(rows[name])
        found.append(Group(row, tuple(below)))
    # a report made elsewhere may hold a circle: nobody leads it, so each of it leads itself
    led = {group.finding["id"] for group in found}
    found += [Group(row, ()) for row in report.findings if row["id"] not in led | taken]
    position = {row["id"]: index for index, row in enumerate(report.findings)}
    return sorted(found, key=lambda group: min(position[row["id"]] for row in (group.finding, *group.explained)))


def members(report: Report, count: int) -> list[Row]:
    """The findings of the first `count` groups."""
    return [row for group in groups(report)[:count] for row in (group.finding, *group.explained)]


def _below(row: Row, rows: dict[str, Row]) -> Iterator[str]:
    """Ids of what a finding explains, level by level."""
    seen, level = {row["id"]}, _explains(row, rows)
    while level:
        new = [name for name in dict.fromkeys(level) if name not in seen]
        seen.update(new)
        yield from new
        level = [below for name in new for below in _explains(rows[name], rows)]


def _explains(row: Row, rows: dict[str, Row]) -> Sequence[str]:
    return [name for name in row["explains"] if name in rows]
