"""Why it compiled, broke or transferred: events of one cause together, with what changed from step to step."""

from __future__ import annotations

import hashlib
import posixpath
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.compilers.prepared import CHANGES_SHOWN, STEPS_SHOWN, TORCH_COMPILE, Prepared, by_group
from stepscope.engine.user_code import UserCode
from stepscope.model import Place
from stepscope.model.compilers import Change, CompilerCause

Row = Mapping[str, Any]
_KEY = ("backend", "kind", "function", "def_file", "def_line", "file", "line", "cause", "operator")


class Group(Struct, frozen=True):
    """A cause and the rows of `Prepared.rows` it is made of, later backward passes left out."""

    cause: CompilerCause
    rows: tuple[Row, ...]


def groups(prepared: Prepared, code: UserCode) -> tuple[Group, ...]:
    """All causes, most expensive first; those without time behind, by count."""
    rows = list(prepared.rows.iter_rows(named=True))
    numbers: dict[tuple[Any, ...], int] = {}
    of_row: dict[int, int] = {}
    for row in rows:  # owners come before what belongs to them
        key = tuple(row[name] for name in _KEY)
        own = row["owner"] == row["pos"]
        of_row[row["pos"]] = numbers.setdefault(key, len(numbers)) if own else of_row[row["owner"]]
    assigned = np.array([of_row[row["pos"]] for row in rows], np.int64)
    whole, inside = by_group(prepared.rows, assigned, prepared.steps)
    members: list[list[Row]] = [[] for _ in numbers]
    for row, number in zip(rows, assigned.tolist(), strict=True):
        if row["owner"] == row["pos"]:
            members[number].append(row)
    found = [
        Group(_cause(own, code, _ms(whole.get(number)), _ms(inside.get(number))), tuple(own))
        for number, own in enumerate(members)
    ]
    ranked = sorted(found, key=_rank)
    seen: Counter[str] = Counter()
    for number, group in enumerate(ranked):  # two causes whose files differ by folder alone would share an id
        cause = group.cause
        seen[cause.id] += 1
        if seen[cause.id] > 1:
            ranked[number] = replace(group, cause=replace(cause, id=f"{cause.id}-{seen[cause.id]}"))
    return tuple(ranked)


def _rank(group: Group) -> tuple[bool, float, int, str]:
    cause = group.cause
    return cause.total_ms is None, -(cause.total_ms or 0.0), -cause.count, cause.id


def _cause(rows: Sequence[Row], code: UserCode, total_ms: float | None, inside_ms: float | None) -> CompilerCause:
    first, last = rows[0], rows[-1]
    in_order = sorted(rows, key=lambda row: (row["step"] is None, row["step"] or 0))
    steps = list(dict.fromkeys(row["step"] for row in in_order if row["step"] is not None))
    subject = _most_common(row["subject"] for row in rows)
    single = [row["duration_ns"] for row in rows if row["count"] == 1 and row["duration_ns"] is not None]
    place, definition, call = places(first, code)
    return CompilerCause(
        id=_id(first, subject),
        backend=first["backend"] or "",
        kind=first["kind"],
        cause=first["cause"] or "",
        text=_reason(_last(rows, "reason")),
        function=first["function"],
        place=place,
        definition=definition,
        call=call,
        hint=_last(rows, "hint"),
        operator=first["operator"],
        subject=subject,
        count=sum(row["count"] for row in rows),
        total_ms=total_ms if total_ms is not None else _plain_ms(rows),
        longest_ms=_ms(max(single)) if single else None,
        steps=tuple(steps[:STEPS_SHOWN]),
        step_count=len(steps),
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        changes=_changes(in_order),
        cache_entries=_most(rows, "cache_entries"),
        limit=_last(rows, "limit"),
        ranks=tuple(sorted({row["rank"] for row in rows if row["rank"] is not None})),
        kinds=tuple(sorted({row["step_kind"] for row in rows if row["step_kind"]}, key=lambda k: (k != "train", k))),
        in_main_steps_ms=inside_ms if total_ms is not None else _plain_ms(row for row in rows if row["at"] is not None),
        source="; ".join(dict.fromkeys(row["source"] for row in (first, last) if row["source"])),
        counted=all(row["counted"] for row in rows),
    )


def places(row: Row, code: UserCode) -> tuple[Place | None, Place | None, Place | None]:
    """The user's line to blame, where the compiled function begins, and the user's line that called it.

    To blame is the line the compiler named, where it is the user's; else the call, else the definition.
    """
    # torch.compile names the compiled function, and a cause may lie in one that it calls
    inner = None if row["backend"] == TORCH_COMPILE else row["function"]
    cause = _users(code, row["file"], row["line"], inner)
    call = _users(code, row["call_file"], row["call_line"], None)
    begins = _users(code, row["def_file"], row["def_line"], row["function"])
    definition = begins or (Place(row["def_file"], row["def_line"], row["function"]) if row["def_file"] else None)
    return cause or call or begins, definition, call


def _users(code: UserCode, file: str | None, line: int | None, function: str | None) -> Place | None:
    resolved = code.resolve(file)
    return Place(resolved, line, function) if resolved else None


def _changes(rows: Iterable[Row]) -> tuple[Change, ...]:
    """What changed, step by step; ranks that saw the same are one."""
    told = (row for row in rows if row["old"] is not None or row["new"] is not None)
    found = dict.fromkeys(Change(row["step"], row["old"], row["new"], row["subject"]) for row in told)
    return tuple(found)[:CHANGES_SHOWN]


def _id(row: Row, subject: str | None) -> str:
    """Ten hex digits that stay the same from run to run, and from machine to machine."""
    file, line = next(
        ((row[f"{at}file"], row[f"{at}line"]) for at in ("", "def_", "call_") if row[f"{at}file"]), (None, None)
    )
    where = f"{posixpath.basename(file)}:{line}" if file else ""
    parts = (row["kind"], row["function"], where, row["cause"], subject, row["operator"])
    return hashlib.sha256("\x00".join(str(part or "") for part in parts).encode()).hexdigest()[:10]


def _plain_ms(rows: Iterable[Row]) -> float | None:
    """The sum of durations that are no compiling: of transfers."""
    told = [row["duration_ns"] for row in rows if row["duration_ns"] is not None]
    return sum(told) / 1e6 if told else None


def _reason(text: str | None) -> str:
    """The first line without the graph id before it ("2/7: "), the source quoted behind it and the advice."""
    line = next((line.strip() for line in (text or "").splitlines() if line.strip()), "")
    head, colon, tail = line.partition(": ")
    if colon and "/" in head and head.replace("/", "").isdigit():
        line = tail
    return line.partition("(HINT")[0].partition("  # ")[0].strip()


def _last(rows: Sequence[Row], name: str) -> Any:
    return next((row[name] for row in reversed(rows) if row[name] is not None), None)


def _most(rows: Iterable[Row], name: str) -> int | None:
    return max((row[name] for row in rows if row[name] is not None), default=None)


def _most_common(values: Iterable[str | None]) -> str | None:
    counts = Counter(value for value in values if value is not None)
    return counts.most_common(1)[0][0] if counts else None


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6
