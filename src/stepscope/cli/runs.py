"""`stepscope runs`: the runs of a folder as a list, and deleting those that nobody needs any more."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.cli import say
from stepscope.cli.options import CsvFile, Force, JsonFile, argument, option
from stepscope.errors import EnvironmentRefusal, UnreadableInputError, UsageError, refuse

if TYPE_CHECKING:
    from stepscope.dashboard.server.catalog import Place

FIGURES = ("Frees", "Duration", "Steps", "Mean step")
STATES = ("running", "finished", "failed", "vanished")
DEFAULT = Path("stepscope-runs")
HOSTS_SCHEMA = "stepscope.hosts/1"
DAY_NS = 86_400 * 10**9
MOST_DAYS = 100_000.0
MOST_VERSIONS = 50  # of a history: each is read as a whole


def runs(
    paths: Annotated[
        list[Path] | None,
        argument("PATH...", "Folders of runs, runs or traces; stepscope-runs by default.", show_default=False),
    ] = None,
    text: Annotated[str, option("--search WORDS", "Only with all of these words in name, path, command or tags.")] = "",
    tag: Annotated[list[str] | None, option("--tag TAG", "Only with this tag; repeatable.")] = None,
    knob: Annotated[
        list[str] | None, option("--knob KNOB[=VALUE]", "Only run with this knob, or with this value; repeatable.")
    ] = None,
    state: Annotated[
        str | None, option("--state STATE", "Only those that are: running, finished, failed, vanished.")
    ] = None,
    older_than: Annotated[float | None, option("--older-than DAYS", "Only those that began before.")] = None,
    prune: Annotated[bool, option("--prune", "Say which of them would be deleted, and what that frees.")] = False,
    keep: Annotated[int, option("--keep N", "With --prune, the newest N of them stay.")] = 0,
    yes: Annotated[bool, option("--yes", "With --prune, delete them.")] = False,
    history: Annotated[
        bool, option("--history", "Say of each run of one script what was changed, and which findings are left.")
    ] = False,
    hosts: Annotated[bool, option("--hosts", "Say of each host in how many of the runs it was late, and why.")] = False,
    json_file: JsonFile = None,
    csv: CsvFile = None,
    force: Force = False,
) -> None:
    """List runs, experiments and traces, newest first, or delete some of them.

    `stepscope runs --tag nightly --knob loader.num_workers=4` is the list of `stepscope view`, with the same search.

    `stepscope runs --older-than 30 --keep 5 --prune` names what would go, what each takes on the disk, and what is not
    stepscope's in its folder and so stays; the same with `--yes` deletes. A run that goes on, one of an experiment, and
    a trace that somebody else recorded are never deleted.

    `stepscope runs --search train.py --history` reads the runs of one script, the oldest first: which files, arguments,
    knobs and settings were changed since the run before, the mean step, and the findings that came, went and are left.

    `stepscope runs --hosts` lists the nodes that the runs were on: in how many each was judged beside others, and late,
    by how much and by what cause, when it was last seen. It is made of the verdicts in the runs' report.json; a run
    without one is named as not judged.

    The exit status is 4 where something could not be deleted.
    """
    from stepscope.api import ReadOptions
    from stepscope.dashboard.server import catalog
    from stepscope.report import outputs

    outputs.check_files({"--json": json_file, "--csv": csv}, force=force)
    _check(state, prune=prune, keep=keep, yes=yes, older_than=older_than, history=history)
    refuse(
        {
            "--hosts is a table of its own; leave out --history and --prune": hosts and (history or prune),
            "--csv writes the table of --hosts; give it too": csv is not None and not hosts,
        }
    )
    if prune and not (text or tag or knob or state or older_than is not None or keep):
        raise UsageError("--prune would take every run; say which: --older-than DAYS, --keep N, --tag, --knob, --state")
    if not paths and not DEFAULT.is_dir():
        raise UsageError(f"no folder {DEFAULT} here; name a folder of runs")
    listed = catalog.Catalog(paths or [DEFAULT], lambda place: catalog.opened(place, ReadOptions()))
    places = listed.matching(catalog.Filter(text, tuple(tag or ()), tuple(knob or ())))
    before_ns = None if older_than is None else time.time_ns() - int(older_than * DAY_NS)
    rows = {place: catalog.entry(place) for place in places}
    for place, row in list(rows.items()):
        late = before_ns is not None and not (row["started_ns"] or before_ns) < before_ns
        if state not in (None, row["state"]) or late:
            del rows[place]
    for place in list(rows)[:keep]:
        del rows[place]
    if hosts:
        _hosts([place for place in rows if place.recorded], json_file, csv)
        return
    if history:
        _history([place for place in rows if place.recorded], json_file)
        return
    document: dict[str, Any] = {"schema": catalog.LIST_SCHEMA, "runs": [*rows.values()], "total": len(rows)}
    problems = _prune(rows, document, delete=yes) if prune else []
    if json_file is not None:
        outputs.emit(json_file, json.dumps(document, indent=1).encode() + b"\n")
    if json_file != outputs.STDOUT:
        _show(document)
    for problem in problems:
        say(f"not deleted: {problem}")
    raise typer.Exit(EnvironmentRefusal.exit_code if problems else 0)


def _check(state: str | None, *, prune: bool, keep: int, yes: bool, older_than: float | None, history: bool) -> None:
    known = f"there are {', '.join(STATES)}"
    refuse(
        {
            f"--state {state}: no such state; {known}": state not in (None, *STATES),
            "--keep and --yes are about --prune; give it too": (keep != 0 or yes) and not prune,
            "--history and --prune contradict each other; give one of them": history and prune,
            "--keep and --older-than take no number below 0": keep < 0 or not 0 <= (older_than or 0) < MOST_DAYS,
        }
    )


def _prune(rows: Mapping[Place, dict[str, Any]], document: dict[str, Any], *, delete: bool) -> list[str]:
    """Add what each run takes, why one stays, and what is freed in all; what could not be deleted, in lines."""
    from stepscope.dashboard.server import catalog

    problems, freed_bytes = [], 0
    for place, row in rows.items():
        freed = catalog.look(place)
        problem = catalog.delete(place) if delete and freed.why is None else None
        problems += [problem] if problem else []
        stays = freed.why or problem
        row |= {"bytes": None if stays else freed.bytes, "stays": stays, "others": list(freed.others)}
        freed_bytes += 0 if stays else freed.bytes
    document |= {"freed_bytes": freed_bytes, "deleted": delete}
    return problems


def _history(places: Sequence[Place], json_file: str | None) -> None:
    from stepscope import comparing
    from stepscope.dashboard import history, terminal
    from stepscope.dashboard.blocks import Alone
    from stepscope.dashboard.server.catalog import manifest_of
    from stepscope.report import outputs
    from stepscope.report.escape import json_bytes

    scripts = {place: manifest_of(place).of_script for place in places}
    known = sorted(set(scripts.values()), key=lambda script: -list(scripts.values()).count(script))
    if not places:
        raise UnreadableInputError("no recorded run matches; name a folder of runs")
    if len(known) > 1:
        raise UsageError(f"these are runs of {len(known)} scripts; choose one: --search {shlex.quote(known[0])}")
    if len(places) > MOST_VERSIONS:
        say(f"the newest {MOST_VERSIONS} of {len(places)} runs")
    with outputs.reading("reading"):
        versions, notes = comparing.history(place.path for place in places[:MOST_VERSIONS])
    document = history.document(versions, notes)
    if json_file is not None:
        outputs.emit(json_file, json_bytes(document))
    if json_file != outputs.STDOUT:
        terminal.show([list(history.table(Alone(), document, ""))], outputs.console(sys.stdout))


def _hosts(places: Sequence[Place], json_file: str | None, csv: str | None) -> None:
    from stepscope.comparison import hosts
    from stepscope.dashboard import history, terminal
    from stepscope.dashboard.blocks import Alone
    from stepscope.model.comparison import HostHistory
    from stepscope.report import outputs
    from stepscope.report.escape import json_bytes, plain_mapping
    from stepscope.report.table import csv_bytes

    if not places:
        raise UnreadableInputError("no recorded run matches; name a folder of runs")
    with outputs.progress("reading"):
        found = [hosts.run_on_hosts(place.path, place.name) for place in places]
    rows = [plain_mapping(row) for row in hosts.table(found)]
    left = [{"run": name, "reason": reason} for name, reason in hosts.not_judged(found)]
    document = {"schema": HOSTS_SCHEMA, "runs": len(found), "hosts": rows, "not_judged": left}
    if json_file is not None:
        outputs.emit(json_file, json_bytes(document))
    if csv is not None:
        keys = list(HostHistory.__struct_fields__)
        cells = ([_joined(row[key]) for key in keys] for row in rows)
        outputs.emit(csv, csv_bytes([keys, *cells]))
    if outputs.STDOUT not in (json_file, csv):
        terminal.show([list(history.hosts(Alone(), document))], outputs.console(sys.stdout))


def _joined(value: Any) -> Any:
    return "; ".join(f"{name}: {count}" for name, count in value.items()) if isinstance(value, dict) else value


def _show(document: Mapping[str, Any]) -> None:
    from stepscope.dashboard.text_columns import TextColumn, lines
    from stepscope.report.words import MISSING, count, milliseconds, seconds, size, things

    rows, prune = document["runs"], "deleted" in document
    if not rows:
        say("no run matches")
        return
    columns: dict[str, Callable[[Any], str | None]] = {
        "Run": lambda row: row["name"],
        "State": lambda row: row["state"],
        "Started": lambda row: _date(row["started_ns"]),
        "Frees": lambda row: size(row["bytes"]) if prune else None,
        "Stays": lambda row: row.get("stays"),
        "Not ours": lambda row: ", ".join(row.get("others", ())),
        "Duration": lambda row: seconds(row["duration_s"]),
        "Steps": lambda row: count(row["steps"]),
        "Mean step": lambda row: milliseconds(row["mean_ms"]),
        "First finding": lambda row: row["first_finding"],
        "Knobs": lambda row: ", ".join(row["knobs"]),
        "Note": lambda row: row["note"],
    }
    shown = []
    for heading, say_it in columns.items():
        cells = [say_it(row) or MISSING for row in rows]
        if set(cells) != {MISSING}:
            shown.append(TextColumn(heading, cells, flexible=heading not in FIGURES))
    for line in lines(shown, shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize):
        print(line.plain)
    if prune:
        told = f"{things(sum(not row['stays'] for row in rows), 'run')}, {size(document['freed_bytes'])}"
        say(f"deleted {told}" if document["deleted"] else f"{told} would be freed; nothing was deleted, --yes does it")


def _date(time_ns: int | None) -> str | None:
    """As people write it; None for a time that no clock shows."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        return datetime.fromtimestamp((time_ns or 0) / 1e9).strftime("%Y-%m-%d %H:%M") if time_ns else None
    return None
