"""A run folder (docs/run_folder.md) as rows: hosts, ranks, their metrics and batches, the scheduler's accounting.

Names taken from inside files never leave the run folder: a segment's file must be a plain name, and no link is
followed. The one exception is a trace that the user's own profiler wrote, which lies where they put it.
"""

from __future__ import annotations

import binascii
import json
import re
import sys
from array import array
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import asdict

from stepscope.errors import UnreadableInputError
from stepscope.files import open_regular, read_small
from stepscope.read import streams
from stepscope.read.raw import Losses, RawHost, RawRank, RawRun, RawSegment, RawSeries, Row, Stretches, TraceRef
from stepscope.read.text import (
    LATEST_NS,
    LONGEST_NS,
    boolean,
    clean,
    integer,
    length_ns,
    moment_ns,
    number,
    string,
    within,
)
from stepscope.schema import ACCOUNTING, MAX_ACCOUNTING_BYTES, PHASES, RUN_PART, STEP_COLUMNS

MAX_USER_TRACE_BYTES = 500 * 10**6
MAX_USER_TRACES = 20  # per rank: a script that traces every step must not make a report take hours
MAX_COUNT = 10**12  # steps, samples or fetches beyond this are damage
MAX_TIMES_BYTES = 64 * 2**20  # of a segment of some seconds
MAX_RECORD = 2**31
MAX_INDEX_BYTES = 1_000_000  # of the cells of a notebook
MAX_CELLS = 1_000
LINES_AT_ONCE = 1_000  # of telemetry: a line is a second, with some hundred readings
TIMES_SCHEMA = "stepscope.times/1"
LAST_WORD = "last-word.json"
CELLS, CELLS_INDEX = "notebook", "cells.json"

_RANK = re.compile(r"rank-(\d{1,9})(?:\.(\d{1,9}))?")
_HOST = re.compile(r"host-(.+)", re.DOTALL)
_RAW_FILE = re.compile(r"stacks-(?:(\d{1,18})-)?(\d{1,9})\.raw")
_TRACE = re.compile(r"trace-.*\.json(?:\.gz)?")


class Chosen(msgspec.Struct, frozen=True):
    """What is read of a run: numbers of ranks, names of hosts."""

    ranks: frozenset[int]
    hosts: frozenset[str]


def is_run_folder(path: Path) -> bool:
    """Whether `path` holds a host or rank folder of ours."""
    return path.is_dir() and any(child.is_dir() and RUN_PART.fullmatch(child.name) for child in path.iterdir())


def ranks_in(folder: Path) -> frozenset[int]:
    """Numbers of the ranks that have a folder of their own in a run folder."""
    found = (_RANK.fullmatch(child.name) for child in folder.glob("rank-*") if child.is_dir())
    return frozenset(int(name[1]) for name in found if name is not None)


def read_run_folder(folder: Path, ranks_and_hosts: Chosen | None = None) -> RawRun:
    """Read a run folder, all of it or what is chosen; raises UnreadableInputError when its files hold nothing at all.

    Of a host that is not chosen the manifest alone is read.
    """
    losses = Losses()
    chosen = ranks_and_hosts
    names = parts_of(folder)
    machines = machines_of(names)
    hosts = []
    for name, machine in machines.items():
        if chosen is not None and machine not in chosen.hosts:
            hosts.append(_manifest(folder / name, losses))
        else:
            host, telemetry = (
                _host(folder / name, losses),
                _Files(folder / name, losses).rows("system.jsonl", _has_time),
            )
            hosts.append(msgspec.structs.replace(host, system=tuple(telemetry)))
    wanted = (
        name
        for name in names
        if (match := _RANK.fullmatch(name)) is not None and (chosen is None or int(match[1]) in chosen.ranks)
    )
    ranks = _ranks(folder, wanted, losses)
    if not any(_has_content(host) for host in hosts) and not any(_has_content(rank) for rank in ranks):
        raise UnreadableInputError(
            f"{folder}: a run folder in which nothing can be read; record again with `stepscope run -- COMMAND`"
        )
    accounting = read_accounting(folder / ACCOUNTING, losses)
    return RawRun(folder=folder, hosts=tuple(hosts), ranks=ranks, losses=losses, accounting=accounting)


def read_parts(folder: Path, names: Iterable[str]) -> RawRun:
    """These host and rank folders of a run and no others, by name (`parts_of`); what is none of either is left out.

    Of hosts all but their telemetry, which `read_telemetry` reads bit by bit.
    """
    losses, names = Losses(), tuple(names)
    hosts = tuple(_host(folder / name, losses) for name in names if _HOST.fullmatch(name) is not None)
    ranks = _ranks(folder, (name for name in names if _RANK.fullmatch(name) is not None), losses)
    return RawRun(folder=folder, hosts=hosts, ranks=ranks, losses=losses)


def read_telemetry(folder: Path, losses: Losses) -> Iterator[RawHost]:
    """The telemetry of a host's folder, some lines at a time."""
    files, rows = _Files(folder, losses), list[Row]()
    for value in streams.read_values(*files.named("system.jsonl")):
        if isinstance(value, dict) and _has_time(value):
            rows.append(value)
        else:
            losses.add("bad_lines", f"{folder.name}/system.jsonl")
        if len(rows) >= LINES_AT_ONCE:
            yield RawHost(_host_name(folder), system=tuple(rows))
            rows = []
    yield RawHost(_host_name(folder), system=tuple(rows))


def parts_of(folder: Path) -> list[str]:
    """The names of a run's folders of hosts and ranks, in order; no link that leads out of the run is followed."""
    inside = folder.resolve()
    named = (child for child in folder.iterdir() if _HOST.fullmatch(child.name) or _RANK.fullmatch(child.name))
    return sorted(child.name for child in named if child.is_dir() and child.resolve().is_relative_to(inside))


def machines_of(names: Iterable[str]) -> dict[str, str]:
    """Folders of hosts, and the machine of each: further launchers on one write into host-H.2, host-H.3 and so on."""
    hosts = {name: match[1] for name in names if (match := _HOST.fullmatch(name)) is not None}
    found = {}
    for name, host in hosts.items():
        base, _, number = host.rpartition(".")
        further = number.isascii() and number.isdecimal() and f"host-{base}" in hosts
        found[name] = base if further else host
    return found


def _ranks(folder: Path, names: Iterable[str], losses: Losses) -> tuple[RawRank, ...]:
    ranks = [_rank(folder / name, losses) for name in names]
    return tuple(sorted(ranks, key=lambda rank: (rank.rank, len(rank.name), rank.name)))


def _has_content(part: RawHost | RawRank) -> bool:
    return any(value for name, value in asdict(part).items() if name not in ("name", "rank"))


class _Files:
    """The files of a host's or rank's folder by name; what cannot be read of one is counted under its name."""

    def __init__(self, folder: Path, losses: Losses) -> None:
        self.folder, self.losses = folder, losses

    def named(self, name: str) -> tuple[Path, Losses, str]:
        """What a reader takes: path, losses, label."""
        return self.folder / name, self.losses, f"{self.folder.name}/{name}"

    def object(self, name: str) -> Row | None:
        return streams.read_object(*self.named(name))

    def rows(self, name: str, good: Callable[[Row], bool]) -> list[Row]:
        rows = streams.read_rows(*self.named(name))
        found = [row for row in rows if good(row)]
        self.losses.add("bad_lines", f"{self.folder.name}/{name}", len(rows) - len(found))
        return found

    def last_word(self) -> Row | None:
        """What the recorder said in the block that it had taken ahead of time; None where nothing was."""
        return next(iter(streams.read_rows(*self.named(LAST_WORD))), None)


def _host_name(folder: Path) -> str:
    return folder.name.removeprefix("host-")


def _manifest(folder: Path, losses: Losses) -> RawHost:
    files = _Files(folder, losses)
    manifest, last_word = files.object("manifest.json"), files.last_word()
    if last_word is not None and (manifest or {}).get("ended_ns") is None:
        manifest = {**(manifest or {}), **last_word}
    return RawHost(_host_name(folder), manifest)


def _host(folder: Path, losses: Losses) -> RawHost:
    files = _Files(folder, losses)
    return msgspec.structs.replace(
        _manifest(folder, losses),
        agents=tuple(files.rows("agents.jsonl", _has_pid)),
        processes=tuple(files.rows("processes.jsonl", _has_pid)),
        segments=tuple(_segments(files)),
    )


def _has_pid(row: Row) -> bool:
    return integer(row.get("pid")) is not None


def _has_time(row: Row) -> bool:
    return moment_ns(row.get("time_ns")) is not None


def _segments(files: _Files) -> Iterator[RawSegment]:
    """Segments of the index, then raw files without a line there: the sampler was killed before it wrote one."""
    seen: set[str] = set()

    def is_new(row: Row) -> bool:
        file = row.get("file")
        if not isinstance(file, str) or not _is_raw(files.folder, file) or file in seen:
            return False
        seen.add(file)
        return True

    for row in files.rows("stacks.jsonl", is_new):
        yield _segment(files, row["file"], row)
    for path in sorted(files.folder.glob("stacks-*.raw")):
        if path.name not in seen and _is_raw(files.folder, path.name):
            yield _segment(files, path.name, {})


def _is_raw(folder: Path, file: str) -> bool:
    return _RAW_FILE.fullmatch(file) is not None and not (folder / file).is_symlink()


def _segment(files: _Files, file: str, row: Row) -> RawSegment:
    from stepscope.read.stack_lines import PySpyRaw  # patterns, which a run without samples does not need

    match = _RAW_FILE.fullmatch(file)
    from_agent, counter = (match[1], int(match[2])) if match else (None, 0)
    segment = integer(row.get("segment"))
    path, _, label = files.named(file)
    return RawSegment(
        number=counter if segment is None else segment,
        file=file,
        source=string(row.get("source")) or ("agent" if from_agent else "py-spy"),
        pid=integer(row.get("pid")) or (int(from_agent) if from_agent else None),
        start_ns=moment_ns(row.get("start_ns")),
        end_ns=moment_ns(row.get("end_ns")),
        rate_hz=number(row.get("rate_hz")),
        idle=boolean(row.get("idle")),
        blocking=boolean(row.get("blocking")),
        errors=integer(row.get("errors")),
        status=string(row.get("status")) or "unknown",
        stacks=PySpyRaw(path, label),
        stretches=read_times(*files.named(file.removesuffix(".raw") + ".times.json")),
    )


class _Columns(msgspec.Struct):
    record: list[int]
    start_us: list[int]
    end_us: list[int]


class _Times(msgspec.Struct):
    schema: str
    start_ns: int
    stretches: _Columns


def read_times(path: Path, losses: Losses, label: str) -> Stretches:
    """The times of a segment's samples; none where there is no such file or it is none.

    Counts `unreadable_files`, and `bad_stretches` for single ones that end before they begin or lie nowhere.
    """
    found = Stretches()
    try:
        if path.stat().st_size > MAX_TIMES_BYTES:
            losses.add("oversized_files", label)
            return found
        times = msgspec.json.decode(read_small(path, MAX_TIMES_BYTES), type=_Times)
        if times.schema != TIMES_SCHEMA or moment_ns(times.start_ns) is None:
            raise ValueError
    except FileNotFoundError:
        return found
    except (OSError, ValueError, RecursionError):  # a msgspec error is a ValueError
        losses.add("unreadable_files", label)
        return found
    columns, start_ns = times.stretches, times.start_ns
    for record, start_us, end_us in zip(columns.record, columns.start_us, columns.end_us, strict=False):
        if 0 <= record < MAX_RECORD and 0 <= start_us <= end_us <= LONGEST_NS // 1000:
            found.record.append(record)
            found.start_ns.append(start_ns + start_us * 1000)
            found.end_ns.append(start_ns + end_us * 1000)
    longest = max(len(columns.record), len(columns.start_us), len(columns.end_us))
    losses.add("bad_stretches", label, longest - len(found.record))
    return found


def read_rank_steps(folder: Path) -> RawRank:
    """Of a rank's folder who it is and its steps, without the rest of its journal."""
    losses = Losses()
    return _who(_Files(folder, losses), tuple(read_steps(folder / "steps.jsonl", losses, folder.name)))


def read_rank_traces(folder: Path) -> list[TraceRef]:
    """The traces of a rank's folder, not opened."""
    losses = Losses()
    return _traces(
        folder, _Files(folder, losses).rows("events.jsonl", lambda row: row.get("kind") == "user_trace"), losses
    )


def _who(files: _Files, steps: tuple[Row, ...]) -> RawRank:
    match = _RANK.fullmatch(files.folder.name)
    info = files.object("rank.json")
    recorded = integer((info or {}).get("rank"))
    number = recorded if recorded is not None and 0 <= recorded < 2**31 else int(match[1]) if match else 0
    return RawRank(files.folder.name, number, info, steps)


def _rank(folder: Path, losses: Losses) -> RawRank:
    files = _Files(folder, losses)
    who = _who(files, tuple(read_steps(*files.named("steps.jsonl"))))
    events = files.rows("events.jsonl", lambda row: string(row.get("kind")) is not None and _has_time(row))
    metrics = [row for row in events if row["kind"] == "metrics"]
    series = [*(found for row in metrics for found in read_series(row)), *read_moments(metrics)]
    files.losses.add("bad_lines", f"{folder.name}/events.jsonl", series.count(None))
    journal = [
        {**row, "duration_ns": length_ns(row.get("duration_ns")), "step": integer(row.get("step"))}
        for row in events
        if row["kind"] != "metrics"
    ]
    return msgspec.structs.replace(
        who,
        journal=tuple(journal),
        metrics=tuple(found for found in series if found is not None),
        traces=tuple(_traces(folder, journal, losses)),
        last_word=files.last_word(),
    )


def _traces(folder: Path, journal: list[Row], losses: Losses) -> list[TraceRef]:
    """The traces of a rank, not opened: our own windows, the plain file where a packed one is not finished, then the
    script's own profiler's.
    """
    own: dict[str, TraceRef] = {}
    for path in sorted(folder.iterdir()):
        if _TRACE.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            name = path.name.removesuffix(".gz")
            own.setdefault(name, TraceRef(path, name, "stepscope"))
    user = [row["path"] for row in journal if row["kind"] == "user_trace" and isinstance(row.get("path"), str)]
    paths = [text for text in dict.fromkeys(user) if Path(text).name.removesuffix(".gz") not in own]
    losses.add("user_traces_left_out", folder.name, len(paths) - MAX_USER_TRACES)
    traces = list(own.values())
    for text in paths[:MAX_USER_TRACES]:
        if _adoptable(Path(text)):
            traces.append(TraceRef(Path(text), text, "user"))
        else:
            losses.add("user_traces_left_out", f"{folder.name}: {text}")
    return traces


def _adoptable(path: Path) -> bool:
    try:
        return (
            path.name.endswith((".json", ".json.gz")) and path.is_file() and path.stat().st_size <= MAX_USER_TRACE_BYTES
        )
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False


# A column that a journal of an older or newer recorder lacks is None; one that is not known here is left out. A row
# that breaks a bound is skipped and counted, as is a step number that was there before; rows out of order are sorted.
_CHECKS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(STEP_COLUMNS, lambda value: within(value, MAX_COUNT)),
    **{f"{phase}_ns": length_ns for phase in PHASES},
    "wall_ns": length_ns,
    "device_ns": length_ns,
    "start_ns": moment_ns,
    "kind": string,
    "signal": string,
    "first_batch": boolean,
    "in_window": boolean,
}
_REQUIRED = ("step", "kind", "start_ns", "wall_ns")


def read_steps(path: Path, losses: Losses, label: str) -> list[Row]:
    """The steps of a journal in order of time; every row has all of `STEP_COLUMNS` and `before_forward_ns`."""
    columns: tuple[str, ...] | None = None
    rows: dict[int, Row] = {}
    last_start = -1
    for value in streams.read_values(path, losses, label):
        if isinstance(value, dict):
            # An appended second header (a recorder that was started again) may name other columns.
            columns = _header(value) or columns
            if _header(value) is None:
                losses.add("bad_lines", label)
            continue
        row = _row(value, columns or STEP_COLUMNS)
        if row is None or row["step"] in rows:
            losses.add("bad_steps", label)
            continue
        if row["start_ns"] < last_start:
            losses.add("unordered_steps", label)
        last_start = row["start_ns"]
        rows[row["step"]] = row
    return sorted(rows.values(), key=lambda row: (row["start_ns"], row["step"]))


def _header(value: Row) -> tuple[str, ...] | None:
    columns = value.get("columns")
    if isinstance(columns, list) and columns and all(isinstance(name, str) for name in columns):
        return tuple(columns)
    return None


def _row(value: Any, columns: tuple[str, ...]) -> Row | None:
    if not isinstance(value, list) or len(value) != len(columns):
        return None
    given = dict(zip(columns, value, strict=True))
    row: Row = {}
    for name in STEP_COLUMNS:
        raw = given.get(name)
        checked = None if raw is None else _CHECKS[name](raw)
        if checked is None and (raw is not None or name in _REQUIRED):
            return None
        row[name] = checked
    row["before_forward_ns"] = None
    if row["fetches"] == 0:  # no loader was asked: nothing says that this was a wait for data
        row["before_forward_ns"], row["data_wait_ns"] = row["data_wait_ns"], None
    return row


def cells(run: Path) -> tuple[Path | None, tuple[tuple[str, str], ...]]:
    """The folder with a notebook's cells in a run, None where there is none, and (name of the code, file) of each.

    The index maps names that the kernel had compiled cells under to files; what does not look right in it is left out,
    and no name leads out of the folder.
    """
    folder = (run / CELLS).absolute()
    if not folder.is_dir():
        return None, ()
    try:
        with open_regular(folder / CELLS_INDEX) as handle:
            named = json.loads(handle.read(MAX_INDEX_BYTES))
    except (OSError, ValueError, RecursionError):
        return folder, ()
    if not isinstance(named, dict):
        return folder, ()
    pairs = [(name, file) for name, file in named.items() if isinstance(file, str) and name.startswith("/")]
    return folder, tuple((name, str(folder / Path(file).name)) for name, file in pairs[:MAX_CELLS])


MOST_ROWS = 20_000
_NEEDED = ("State",)
_IDS = ("JobIDRaw", "JobID")


def read_accounting(path: Path, losses: Losses) -> tuple[Row, ...] | None:
    """Rows by the names of the head; None where there is no such file. A row of another width is counted and left out.

    `id` of a row is its `JobIDRaw`, or its `JobID`.
    """
    try:
        data = read_small(path, MAX_ACCOUNTING_BYTES)
    except FileNotFoundError:
        return None
    except OSError:
        losses.add("unreadable_files", path.name)
        return ()
    head, *lines = clean(data.decode("utf-8", "backslashreplace")).splitlines() or [""]
    names = [name.strip() for name in head.split("|")]
    id = next((name for name in _IDS if name in names), None)
    if id is None or not set(_NEEDED) <= set(names):
        losses.add("bad_lines", path.name)
        return ()
    lines = [line for line in lines if line.strip()]
    good = [cells for line in lines[:MOST_ROWS] if len(cells := line.split("|")) == len(names)]
    losses.add("bad_lines", path.name, len(lines) - len(good))
    rows = (dict(zip(names, cells, strict=True)) for cells in good)
    return tuple({**row, "id": row[id]} for row in rows)


MAX_NAME = 200  # characters
_COLUMNS = ("name", "source", "start_ns", "after_ns", "times_ns", "values", "updates", "optimizers")
_WORDS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def read_series(event: Row) -> Iterator[RawSeries | None]:
    """The stretches of an event; None for each that makes no sense."""
    series = event.get("series", [] if "together" in event else None)
    for entry in series if isinstance(series, list) else (None,):
        yield _stretch(entry) if isinstance(entry, dict) else None


def read_moments(events: Iterable[Row]) -> Iterator[RawSeries | None]:
    """The values that events hold together, of one moment each; None for each that makes no sense.

    An event gives the names or, by number, those of an event before it.
    """
    known: dict[int, tuple[str, ...]] = {}
    found: dict[tuple[str, tuple[str, ...]], list[tuple[int, list[float]]]] = {}
    for event in events:
        moment = event.get("together")
        if moment is None:
            continue
        moment = moment if isinstance(moment, dict) else {}
        names, told, number_of = moment.get("names"), moment.get("values"), integer(moment.get("set"))
        own = known.get(number_of) if number_of is not None else None
        if isinstance(names, list) and all(isinstance(name, str) and name for name in names):
            own = tuple(name[:MAX_NAME] for name in names)
            if number_of is not None:
                known[number_of] = own
        source, time = string(moment.get("source")), moment_ns(moment.get("time_ns"))
        values = [_value(value) for value in told] if isinstance(told, list) else [None]
        if source is None or time is None or own is None or len(values) != len(own) or None in values:
            yield None
            continue
        found.setdefault((source[:MAX_NAME], own), []).append((time, values))  # type: ignore[arg-type]
    for (source, own), moments in found.items():
        times, table = np.array([time for time, _ in moments], np.int64), np.array([row for _, row in moments])
        for column, name in enumerate(own):
            yield RawSeries(name=name, source=source, times_ns=times, values=table[:, column])


def _stretch(entry: Row) -> RawSeries | None:
    name, source = string(entry.get("name")), string(entry.get("source"))
    values = _numbers(entry.get("values"), np.float64)
    times = _numbers(entry.get("times_ns"), np.int64)
    if "times_ns" not in entry:  # as recordings of before have them
        start, after = moment_ns(entry.get("start_ns")), _numbers(entry.get("after_ns"), np.int64)
        if start is None or after is None or ((after < 0) | (after > LONGEST_NS)).any():
            return None
        times = after + start
    columns = {key: _numbers(entry[key], np.int64) for key in ("updates", "optimizers") if entry.get(key) is not None}
    if not name or source is None or values is None or times is None:
        return None
    if any(column is None or len(column) != len(values) for column in (times, *columns.values())):
        return None
    if ((times < 0) | (times > LATEST_NS)).any():
        return None
    return RawSeries(
        name=name[:MAX_NAME],
        source=source[:MAX_NAME],
        times_ns=times,
        values=values,
        about={key: value for key, value in entry.items() if key not in _COLUMNS},
        **columns,
    )


def _numbers(column: Any, kind: type[np.generic]) -> npt.NDArray[Any] | None:
    """A column of numbers of eight bytes as base64, or, of recordings of before, a list; None where it is neither."""
    if isinstance(column, str):
        try:
            return np.frombuffer(b64decode(column, validate=True), np.dtype(kind).newbyteorder("<")).astype(kind)
        except ValueError:
            return None
    read = _value if kind is np.float64 else integer
    numbers = [read(number) for number in column] if isinstance(column, list) else [None]
    return None if None in numbers else np.array(numbers, kind)


def _value(value: Any) -> float | None:
    return _WORDS.get(value) if isinstance(value, str) else number(value)


FILE = "batches.jsonl"
CODES = ("H", "I", "q")  # of `array`: two, four and eight bytes
MAX_BATCHES = 10_000  # of a step, or in a line
MAX_USES = 1_000_000  # the recorder's limit on the file leaves no room for more
MAX_STEPS = 2**40


class Uses(NamedTuple):
    """`steps` steps from `step` on used `batches` of an iterator each, one after the other from batch `first` on."""

    step: int
    iterator: int
    first: int
    batches: int
    steps: int


def batches_of(folder: Path, step: int, before: int) -> list[Row]:
    """The batches of `step` and the `before` ones before them, in order of use; empty where they were not logged.

    Each has `step`, `suspect` (it is of `step`) and `batch`, and where its samples were logged `loader`, `epoch`,
    `samples`, `indices` and a `reason` for none. `folder` is that of the process, and as untrusted as all of a run.
    """
    uses = [*islice((use for row in _batch_rows(folder) for use in _uses(row.get("uses"))), MAX_USES)]
    used = _back_from(uses, step)
    own = [*takewhile(lambda entry: entry[0] == step, islice(used, MAX_BATCHES))]
    if not own:
        return []
    wanted = dict.fromkeys(own)
    for entry in islice(_back_from(uses, step), MAX_USES):
        if entry[0] != step and entry[1:] not in {known[1:] for known in wanted}:  # two steps may use one batch
            if len(wanted) >= len(own) + before:
                break
            wanted[entry] = None
    lists: dict[tuple[int, int], Row] = {}
    for row in _batch_rows(folder):
        lists.update(_lists(row.get("lists"), {entry[1:] for entry in wanted}))
    return [
        {"step": at, "suspect": at == step, "batch": number, **lists.get((iterator, number), {})}
        for at, iterator, number in reversed(wanted)
    ]


def _batch_rows(folder: Path) -> Iterator[Row]:
    return (row for row in streams.read_values(folder / FILE, Losses(), FILE) if isinstance(row, dict))


def _uses(entries: Any) -> Iterator[Uses]:
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, list) and len(entry) == 5 and all(within(value, MAX_STEPS) is not None for value in entry):
            use = Uses(*entry)
            if 0 < use.batches <= MAX_BATCHES and use.steps > 0:
                yield use


def _back_from(uses: Iterable[Uses], step: int) -> Iterator[tuple[int, int, int]]:
    """(step, iterator, batch) of all steps up to `step`, the last first."""
    for use in sorted(uses, key=lambda use: -use.step):
        for at in range(min(step, use.step + use.steps - 1), use.step - 1, -1):
            last = use.first + (at - use.step + 1) * use.batches - 1
            for batch in range(last, last - use.batches, -1):
                yield at, use.iterator, batch


def _lists(entries: Any, wanted: set[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Row]]:
    """What a line knows of the wanted (iterator, batch)."""
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            continue
        iterator, first, sizes = entry.get("iterator"), integer(entry.get("first")), entry.get("sizes")
        about = {"loader": entry.get("loader"), "epoch": entry.get("epoch")}
        for key in wanted:
            if key[0] != iterator or first is None or key[1] < first:
                continue
            reason = string(entry.get("reason"))
            if reason is not None:
                yield key, {**about, "reason": reason}
                continue
            indices = _unpacked(entry, sizes, key[1] - first)
            if indices is not None:
                yield key, {**about, "indices": indices, "samples": len(indices)}


def _unpacked(entry: Row, sizes: Any, at: int) -> list[int] | None:
    """The indices of the batch at a position of a line; None where it is beyond them, or the line is damaged."""
    known = sizes if isinstance(sizes, list) else [sizes] * min(at + 1, MAX_BATCHES)
    if at >= len(known) or not all(within(size, streams.MAX_LINE_BYTES) for size in known[: at + 1]):
        return None
    if entry.get("code") not in CODES:
        return None
    packed: array[int] = array(entry["code"])
    try:
        packed.frombytes(b64decode(string(entry.get("indices")) or "", validate=True))
    except (ValueError, binascii.Error):
        return None
    if sys.byteorder == "big":
        packed.byteswap()
    start = sum(known[:at])
    return packed[start : start + known[at]].tolist() if start + known[at] <= len(packed) else None
