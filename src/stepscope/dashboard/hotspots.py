"""Hotspots on a terminal, as JSON and as CSV.

JSON and CSV begin with the columns that py-spy reports of other tools have, so that scripts which read those go on
working; what is ours follows them. The terminal shows working and waiting apart, and times instead of bare shares where
they are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import asdict, replace
from rich.console import Console
from rich.text import Text

from stepscope.analyze.host.hotspots import PARKED
from stepscope.dashboard import blocks, terminal
from stepscope.dashboard.blocks import Alone, Row, rows_table
from stepscope.model.sampled import Hotspots, SampledProcess
from stepscope.report import words
from stepscope.report.escape import json_bytes, one_line, plain, plain_value
from stepscope.report.table import csv_bytes
from stepscope.report.words import Shortener

SCHEMA = "stepscope.hotspots/1"
MAX_PROCESSES = 8  # named below the table

_LIBRARY = ("library_function_name", "library_function_path", "library_function_line")
_SHARED = ("name", "path", "line", *_LIBRARY)
PROPORTION = "proportion (n)"
_OWN = ("samples", "proportion", "waiting", "kind", "module", "phase", "seconds", "ms_per_step")

_KEEPS = {PARKED: "--parked keeps them"}


def to_json(found: Hotspots, rows: int | None = None) -> bytes:
    """Indented UTF-8 JSON that ends in a line break, with the first `rows` rows; all of them by default."""
    document = msgspec.to_builtins(found)
    shown = document.pop("rows")
    head = {key: document.pop(key) for key in ("samples", "skipped_samples")}
    document = {**head, "rows": shown[:rows], "schema": SCHEMA, **document}
    return json_bytes(plain_value(document))


def to_csv(found: Hotspots, rows: int | None = None) -> bytes:
    """UTF-8, a line of column names and one per row. The last of the shared columns reads `53.05% (7468)`."""
    table: list[list[object]] = [[*_SHARED, PROPORTION, *_OWN]]
    for row in found.rows[:rows]:
        both = f"{100 * row.proportion:.2f}% ({row.samples})"
        table.append([*(getattr(row, key) for key in _SHARED), both, *(getattr(row, key) for key in _OWN)])
    return csv_bytes(table)


def show(found: Hotspots, console: Console, shorten: Shortener, rows: int | None = None) -> None:
    """Print up to `rows` rows of working and of waiting, then what the samples are and what to beware of."""
    working = [row for row in found.rows if not row.waiting]
    waiting = [row for row in found.rows if row.waiting]
    for title, part, total, meaning in (
        (
            "Working",
            working,
            found.working_rows,
            f"{words.count(found.selected_samples - found.waiting_samples)} {found.unit}",
        ),
        (
            "Waiting",
            waiting,
            found.waiting_rows,
            f"{words.count(found.waiting_samples)} {found.unit}, the innermost frame is a known wait",
        ),
    ):
        if part:
            some = f", {words.count(len(part[:rows]))} of {words.count(total)} rows" if len(part[:rows]) < total else ""
            console.print(Text.assemble((title, "bold"), (f": {meaning}{some}", "dim")), soft_wrap=True)
            made = (asdict(row) for row in part[:rows])
            shown = rows_table(Alone(len(part)), "hotspots", made, columns_of=_columns(found, shorten), id="")
            terminal.show_rows(shown, console)
    for text in _facts(found):
        console.print(Text(text), soft_wrap=True)
    for warning in found.warnings:
        console.print(Text.assemble(("! ", "bold yellow"), one_line(warning)), soft_wrap=True)


def _facts(found: Hotspots) -> Iterator[str]:
    share = words.percent(found.waiting_samples / found.selected_samples) if found.selected_samples else "0 %"
    yield f"{words.count(found.selected_samples)} {found.unit}, {share} of them waiting; by {found.by}"
    files = words.things(found.files, "file")
    formats = f" ({', '.join(plain(name) for name in found.formats)})" if found.formats else ""
    skipped = f", {words.count(found.skipped_samples)} unreadable" if found.skipped_samples else ""
    yield f"from {files}{formats} with {words.count(found.samples)} {found.unit}{skipped}"
    if found.left_out:
        parts = (
            f"{words.count(count)} {plain(reason)}" + (f" ({_KEEPS[reason]})" if reason in _KEEPS else "")
            for reason, count in found.left_out.items()
        )
        yield f"left out: {', '.join(parts)}"
    yield from _process_lines(found.processes)
    how = {"recorded": "as recorded", "inferred": "inferred from threads that only wait"}.get(found.idle_source or "")
    state = {True: "waiting was sampled too", False: "waiting was not sampled"}.get(found.idle)  # type: ignore[arg-type]
    steps = f"; {words.count(found.steps)} steady steps of {words.milliseconds(found.mean_step_ms)}"
    mode = f"{state} ({how})" if state else "mode unknown"
    yield f"{mode}; {_lasted(found)}{steps if found.mean_step_ms is not None else ''}"
    kinds = [
        f"{words.FRAME_KINDS.get(kind, plain(kind))} {words.percent(count / found.selected_samples)}"
        for kind, count in found.kinds.items()
        if found.selected_samples and kind != "python"
    ]
    if kinds:
        yield f"of these: {', '.join(kinds)}"


def _process_lines(processes: Sequence[SampledProcess]) -> Iterator[str]:
    for process in processes[:MAX_PROCESSES]:
        name = words.ROLES.get(process.role, plain(process.role))
        of_rank = f" {process.rank}" if process.role == "rank" and process.rank is not None else ""
        if process.role != "rank" and process.rank is not None:
            of_rank = f" of rank {process.rank}"
        pid = f", pid {process.pid}" if process.pid is not None else ""
        host = f" on {plain(process.host)}" if process.host else ""
        threads = words.things(process.threads, "thread") if process.threads else "threads not told apart"
        waiting = words.percent(process.waiting_samples / process.samples) if process.samples else "0 %"
        yield f"  {name}{of_rank}{pid}{host}: {words.count(process.samples)}, {threads}, {waiting} waiting"
    if len(processes) > MAX_PROCESSES:
        rest = Counter(words.ROLES.get(process.role, process.role) for process in processes[MAX_PROCESSES:])
        yield f"  and {', '.join(f'{count} more of {plain(name)}' for name, count in sorted(rest.items()))}"


def _lasted(found: Hotspots) -> str:
    rate = f" at {words.number(found.rate_hz)} Hz" if found.rate_hz else ""
    if found.wall_s is None:
        return f"sampled{rate}, how long is unknown"
    if found.wall_source == "recorded":
        return f"sampled for {words.seconds(found.wall_s)}{rate}"
    least = "" if found.idle else "at least "  # a thread that waits unseen has fewer samples than time
    return f"sampled for {least}{words.seconds(found.wall_s)} (at the nominal rate){rate}"


def _columns(found: Hotspots, shorten: Shortener) -> list[blocks.Col]:
    """Times where they are known, then what `found.by` tells apart."""

    def doing(row: Row) -> str | None:
        """What kind of frame it is where that is not plain Python, the phase, and whose process it mostly is."""
        kind = None if row["kind"] in ("python", "none") else words.FRAME_KINDS.get(row["kind"], plain(row["kind"]))
        phase = None if row["phase"] in (None, "other") or row["kind"] == "import" else words.term(row["phase"])
        role = max(row["roles"], key=row["roles"].__getitem__, default="rank")
        parts = kind, phase, None if role == "rank" else words.ROLES.get(role, plain(role))
        return ", ".join(part for part in parts if part) or None

    def place(row: Row, of: str = "") -> str:
        return shorten(row[f"{of}path"], row[f"{of}line"]) if row[f"{of}path"] else words.MISSING

    def caller(row: Row) -> str | None:
        if row["library_function_path"] is None:
            return None
        if (row["library_function_name"], row["library_function_path"]) == (row["name"], row["path"]):
            return "itself"
        return f"{plain(row['library_function_name'] or '')} {place(row, 'library_function_')}"

    line = "Function: name; File: path; : library_function_path"
    what = {"module": "Module: module", "file": "File: path"}.get(found.by, line)
    called = f"Called from {plain(found.library)}"
    labels = {"samples": blocks.capital(plain(found.unit)), "library_function_path": called}
    declared = blocks.columns(
        f"Per step: ms_per_step ms; Time: seconds s; Share: proportion share; : samples count; {what}; Doing: phase",
        say={
            "module": lambda row: plain(row["module"] or row["name"] or words.MISSING),
            "name": lambda row: plain(row["name"] or words.MISSING),
            "path": place,
            "library_function_path": caller,
            "phase": doing,
        },
    )
    return [replace(each, label=labels.get(each.key, each.label)) for each in declared]
