"""A run folder (docs/run_folder.md) as rows: every host, every rank, whatever of it is there.

Names taken from inside files never leave the run folder: a segment's file must be a plain name, and no link is
followed. The one exception is a trace that the user's own profiler wrote, which lies where they put it.
"""

from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import asdict

from stepscope.errors import UnreadableInputError
from stepscope.read import jsonl
from stepscope.read.raw import Losses, RawHost, RawRank, RawRun, RawSegment, Row, TraceRef
from stepscope.read.stacks.pyspy_raw import PySpyRaw
from stepscope.read.stacks.stretches import read_times
from stepscope.read.steps import read_steps
from stepscope.read.text import boolean, integer, length_ns, moment_ns, number, string

MAX_USER_TRACE_BYTES = 500 * 10**6
MAX_USER_TRACES = 20  # per rank: a script that traces every step must not make a report take hours

LAST_WORD = "last-word.json"

_RANK = re.compile(r"rank-(\d{1,9})(?:\.(\d{1,9}))?")
_HOST = re.compile(r"host-(.+)", re.DOTALL)
_RAW_FILE = re.compile(r"stacks-(?:(\d{1,18})-)?(\d{1,9})\.raw")
_TRACE = re.compile(r"trace-.*\.json(?:\.gz)?")


def is_run_folder(path: Path) -> bool:
    """Whether `path` holds a host or rank folder of ours."""
    return path.is_dir() and any(
        child.is_dir() and (_HOST.fullmatch(child.name) or _RANK.fullmatch(child.name)) for child in path.iterdir()
    )


def read_run_folder(folder: Path) -> RawRun:
    """Read all of a run folder; raises UnreadableInputError when its files hold nothing at all."""
    losses = Losses()
    inside = folder.resolve()
    children = sorted(child for child in folder.iterdir() if child.is_dir() and child.resolve().is_relative_to(inside))
    hosts = tuple(_host(child, losses) for child in children if _HOST.fullmatch(child.name))
    ranks = tuple(_rank(child, losses) for child in children if _RANK.fullmatch(child.name))
    ranks = tuple(sorted(ranks, key=lambda rank: (rank.rank, len(rank.name), rank.name)))
    if not any(_has_content(host) for host in hosts) and not any(_has_content(rank) for rank in ranks):
        raise UnreadableInputError(
            f"{folder}: a run folder in which nothing can be read; record again with `stepscope run -- COMMAND`"
        )
    return RawRun(folder=folder, hosts=hosts, ranks=ranks, losses=losses)


def _has_content(part: RawHost | RawRank) -> bool:
    return any(value for name, value in asdict(part).items() if name not in ("name", "rank"))


# --------------------------------------------------------------------------------------------------------- host


def _host(folder: Path, losses: Losses) -> RawHost:
    label = folder.name

    def rows(name: str) -> list[Row]:
        return jsonl.read_rows(folder / name, losses, f"{label}/{name}")

    manifest = jsonl.read_object(folder / "manifest.json", losses, f"{label}/manifest.json")
    last_word = _last_word(folder, losses)
    if last_word is not None and (manifest or {}).get("ended_ns") is None:
        manifest = {**(manifest or {}), **last_word}
    system = [row for row in rows("system.jsonl") if _timed(row, losses, f"{label}/system.jsonl")]
    return RawHost(
        name=label.removeprefix("host-"),
        manifest=manifest,
        agents=tuple(_with_pid(rows("agents.jsonl"), losses, f"{label}/agents.jsonl")),
        processes=tuple(_with_pid(rows("processes.jsonl"), losses, f"{label}/processes.jsonl")),
        system=tuple(system),
        segments=tuple(_segments(folder, rows("stacks.jsonl"), losses)),
    )


def _last_word(folder: Path, losses: Losses) -> Row | None:
    """What was said in the block taken ahead of time; None where nothing was."""
    return next(iter(jsonl.read_rows(folder / LAST_WORD, losses, f"{folder.name}/{LAST_WORD}")), None)


def _with_pid(rows: list[Row], losses: Losses, label: str) -> list[Row]:
    good = [row for row in rows if integer(row.get("pid")) is not None]
    losses.add("bad_lines", label, len(rows) - len(good))
    return good


def _timed(row: Row, losses: Losses, label: str) -> bool:
    if moment_ns(row.get("time_ns")) is not None:
        return True
    losses.add("bad_lines", label)
    return False


def _segments(folder: Path, index: list[Row], losses: Losses) -> list[RawSegment]:
    """Segments of the index, then raw files without a line there: the sampler was killed before it wrote one."""
    segments: list[RawSegment] = []
    seen: set[str] = set()
    for row in index:
        file = string(row.get("file"))
        if file is None or not _RAW_FILE.fullmatch(file) or file in seen or (folder / file).is_symlink():
            losses.add("bad_lines", f"{folder.name}/stacks.jsonl")
            continue
        seen.add(file)
        segments.append(_segment(folder, file, row, losses))
    for path in sorted(folder.glob("stacks-*.raw")):
        if path.name not in seen and _RAW_FILE.fullmatch(path.name) and not path.is_symlink():
            segments.append(_segment(folder, path.name, {}, losses))
    return segments


def _segment(folder: Path, file: str, row: Row, losses: Losses) -> RawSegment:
    match = _RAW_FILE.fullmatch(file)
    from_agent, counter = (match[1], int(match[2])) if match else (None, 0)
    segment = integer(row.get("segment"))
    times = file.removesuffix(".raw") + ".times.json"
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
        stacks=PySpyRaw(folder / file, f"{folder.name}/{file}"),
        stretches=read_times(folder / times, losses, f"{folder.name}/{times}"),
    )


# --------------------------------------------------------------------------------------------------------- rank


def _rank(folder: Path, losses: Losses) -> RawRank:
    match = _RANK.fullmatch(folder.name)
    info = jsonl.read_object(folder / "rank.json", losses, f"{folder.name}/rank.json")
    journal = _journal(folder, losses)
    recorded = integer((info or {}).get("rank"))
    return RawRank(
        name=folder.name,
        rank=recorded if recorded is not None and 0 <= recorded < 2**31 else int(match[1]) if match else 0,
        info=info,
        steps=tuple(read_steps(folder / "steps.jsonl", losses, f"{folder.name}/steps.jsonl")),
        journal=tuple(journal),
        traces=tuple(_traces(folder, journal, losses)),
        last_word=_last_word(folder, losses),
    )


def _journal(folder: Path, losses: Losses) -> list[Row]:
    label = f"{folder.name}/events.jsonl"
    rows: list[Row] = []
    for row in jsonl.read_rows(folder / "events.jsonl", losses, label):
        if string(row.get("kind")) is None or moment_ns(row.get("time_ns")) is None:
            losses.add("bad_lines", label)
            continue
        rows.append({**row, "duration_ns": length_ns(row.get("duration_ns")), "step": integer(row.get("step"))})
    return rows


def _traces(folder: Path, journal: list[Row], losses: Losses) -> list[TraceRef]:
    """The traces of a rank, not opened: our own windows, then those that the user's profiler wrote."""
    traces = [TraceRef(path, path.name.removesuffix(".gz"), "stepscope") for path in _own_traces(folder)]
    adopted = {trace.name for trace in traces}
    user = [row["path"] for row in journal if row["kind"] == "user_trace" and isinstance(row.get("path"), str)]
    paths = [text for text in dict.fromkeys(user) if Path(text).name.removesuffix(".gz") not in adopted]
    losses.add("user_traces_left_out", folder.name, len(paths) - MAX_USER_TRACES)
    for text in paths[:MAX_USER_TRACES]:
        if _adoptable(Path(text)):
            traces.append(TraceRef(Path(text), text, "user"))
        else:
            losses.add("user_traces_left_out", f"{folder.name}: {text}")
    return traces


def _own_traces(folder: Path) -> list[Path]:
    """Trace files of a rank; the plain file where both exist, as the packed one is then not finished."""
    paths: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if _TRACE.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            paths.setdefault(path.name.removesuffix(".gz"), path)
    return list(paths.values())


def _adoptable(path: Path) -> bool:
    try:
        return (
            path.name.endswith((".json", ".json.gz")) and path.is_file() and path.stat().st_size <= MAX_USER_TRACE_BYTES
        )
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False
