"""One trace to Parquet: its slices are written as they come, then repaired, nested and linked as a whole.

What is kept of a trace in memory at once is a few numbers per slice; texts and arguments are on disk by then, unless
they are asked for. Ids are rows of the trace; `trace_entry` moves them when several traces become one table.

Of a large trace only the slices around the steps that are asked for are taken: the file is read twice instead of being
held whole. The first pass decodes only the annotations of steps. The second is the usual one, and lets go what is far
from the steps. What is kept is decided exactly by `trace_entry.load`, as for any trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct
from msgspec.structs import asdict, replace

from stepscope import __version__
from stepscope.errors import UnreadableInputError
from stepscope.files import INDEX, LAYOUT, open_regular
from stepscope.model.counted import short
from stepscope.read.kineto import KinetoTrace, TraceAhead
from stepscope.read.streams import GZIP
from stepscope.read.trace import MISSING, Text, TraceChunk, TraceSummary
from stepscope.tables import categories, links, trace_entry
from stepscope.tables.arrays import (
    Bools,
    Int32,
    Int64,
    Numbers,
    by_code,
    decode,
    flags,
    return_freed_memory,
    unique,
    with_ids,
)
from stepscope.tables.categories import STEP
from stepscope.tables.journal import Steps, chosen, trace_steps
from stepscope.tables.links import by_value, nest
from stepscope.tables.trace_entry import (
    LINKS,
    MARKS,
    MEMORY,
    TREE,
    Columns,
    PartWriter,
    StoredTrace,
    TextCodes,
    TraceIndex,
)

# All of a trace takes about its unpacked size while its slices are nested and linked; real traces pack to a thirteenth.
LARGE_BYTES = 2**30
_PACKED = 13
# A device works off what the host has launched before. So many steps are taken on both sides: who launched what runs in
# the first one, and what the last one launched. A queue holds about 1,000 launches, which are some 2 MB of a trace;
# launches of CUDA graphs are followed by many kernels each.
_BEHIND_STEPS = 3
_BEHIND_BYTES = 100 * 10**6  # unpacked; where steps are small, as many as take this


class StepRange(Struct, frozen=True):
    """Stretches of time of a trace, disjoint and in order: ns since its base."""

    starts: Int64
    ends: Int64

    def only(self, chunk: TraceChunk) -> TraceChunk:
        """What touches the stretches, and all annotations of steps, as they tell the steps' numbers."""
        slices = chunk.slices
        is_step = by_code(np.array([*(name.startswith(STEP) for name in slices.name.values), False]), slices.name.codes)
        near = self._touched(slices.start_ns, slices.start_ns + slices.duration_ns) | is_step
        return TraceChunk(
            _rows(slices, near),
            _rows(chunk.flows, self._touched(chunk.flows.time_ns, chunk.flows.time_ns)),
            _rows(chunk.memory, self._touched(chunk.memory.time_ns, chunk.memory.time_ns)),
        )

    def holds(self, marks: pl.DataFrame, wanted: Steps, base_ns: int) -> bool:
        """Whether the wanted ones of the steps that the second pass found lie in it; damage may hide them from one."""
        return all(
            bool(np.any((self.starts <= start) & (start + row["wall_ns"] <= self.ends)))
            for row in chosen(trace_steps(marks), wanted)
            for start in (row["start_ns"] - base_ns,)
        )

    def _touched(self, starts: Int64, ends: Int64) -> Bools:
        following = np.searchsorted(self.ends, starts)  # the first stretch that does not end before
        begun = np.append(self.starts, np.iinfo(np.int64).max)[following] <= ends
        return np.asarray(begun, np.bool_)


def _rows(columns: Any, kept: Bools) -> Any:
    return replace(columns, **{name: _cut_column(column, kept) for name, column in asdict(columns).items()})


def _cut_column(column: Text | npt.NDArray[Any], kept: Bools) -> Text | npt.NDArray[Any]:
    if isinstance(column, Text):
        return Text(column.values, column.codes[kept])
    if column.strides == (0,):  # one value stands for all rows
        return np.broadcast_to(column[:1], (int(kept.sum()),))
    return column[kept]


def is_large(path: Path) -> bool:
    """Whether all of a trace at once is too much; raises OSError."""
    return _unpacked_bytes(path) >= LARGE_BYTES


def _unpacked_bytes(path: Path) -> int:
    """About how large a trace is; raises OSError."""
    with open_regular(path, follow=True) as file:
        packed = file.read(len(GZIP)) == GZIP
    return path.stat().st_size * (_PACKED if packed else 1)


def step_range(path: Path, wanted: Steps, progress: Callable[[int, int], None] | None) -> StepRange | None:
    """Where the wanted steps lie, by a pass over the file; None where it tells of none of them.

    Raises UnreadableInputError and OSError.
    """
    source = KinetoTrace(path, progress=progress, only=STEP.encode())
    frames = []
    for chunk in source.chunks():
        slices = chunk.slices
        columns = {what: decode((text := getattr(slices, what)).values, text.codes) for what in _TEXTS}
        frames.append(pl.DataFrame({**columns, "start_ns": slices.start_ns, "duration_ns": slices.duration_ns}))
    steps = trace_steps(pl.concat(frames)) if frames else []
    rows = chosen(steps, wanted)
    if not rows:
        return None
    behind = max(_BEHIND_STEPS, _BEHIND_BYTES * len(steps) // max(1, _unpacked_bytes(path)))
    starts, walls = (np.array([row[name] for row in rows], np.int64) for name in ("start_ns", "wall_ns"))
    ends = starts + (1 + behind) * walls
    starts = starts - behind * walls
    apart = np.flatnonzero(starts[1:] > np.maximum.accumulate(ends)[:-1]) + 1
    return StepRange(starts[[0, *apart]], np.maximum.reduceat(ends, [0, *apart]))


LONGEST_NS = 7 * 24 * 3600 * 10**9  # of a slice
# Slices that must begin and end inside another before its end is taken for late, and for how much of it.
_PROOFS = 2
_LATE_NS = 10_000_000
_LOOKED_AT = 64  # slices behind a suspect
_MAX_START_NS = 2**62

LAUNCH_ARROWS = ("ac2g", "async")  # the second is what writers of 2021 called it
FORWARD_ARROWS = ("fwdbwd",)
_TEXTS = ("category", "name", "track")
_SPARSE = ("correlation", "external_id", "sequence", "forward_thread")
_MEMORY_NUMBERS = ("time_ns", "address", "bytes", "device_type", "device", "allocated_bytes", "reserved_bytes")
_MEMORY_KEPT = ("bytes", "allocated_bytes", "reserved_bytes", "address")
# Of slices, as many as must stand in a trace twice before it is taken for joined: of real ones 0.9 % do at most, empty
# ones that a clock of microseconds tells apart no more; and as many of kinds that are not known, before it is said.
_TWICE, _UNKNOWN = 0.05, 0.1
# Operators of real traces take 1,000 ns on average or more, kernels 1,700; in milliseconds or seconds a thousandth of
# it. That of a few says nothing.
_SHORTEST_NS, _FEW = 100, 50
# Of launched kernels and copies none begins before its launch in a real trace: this many by so much is another clock.
_EARLY, _CLOCKS_APART_NS = 0.2, 10_000
_NAMED = 3
# c10::DeviceType
_DEVICES = {0: "cpu", 1: "cuda", 6: "hip", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuse1"}


def ingest(
    source: KinetoTrace | TraceAhead,
    target: Path | None,
    settle: Callable[[bool], None] | None = None,
    only: StepRange | None = None,
) -> StoredTrace:
    """Take in `source` and write it to the empty folder `target`; raises UnreadableInputError and OSError.

    Without `settle` the slices are handed on as files of `target`. With it, or without a target, they are handed on in
    memory, and nothing waits for the files: once they are there, `settle` is called on a thread, with whether all are.
    Of the trace's slices those near `only` are taken.
    """
    keep = settle is not None or target is None
    frames: dict[str, pl.DataFrame] = {}
    with PartWriter(target, keep=keep) as writer:
        taken = _take(source, writer, only)
        return_freed_memory(taken.slices.count)
        base_ns, texts = taken.summary.base_ns, taken.texts
        doubts = [*_kinds(taken, source.path), *_one_process(taken, writer, source.path)]
        nesting, is_device, repaired = _nested(taken)
        if (kept := _once(taken, nesting.alike)) is not None:
            twice = f"{len(kept) - kept.sum():,} of its slices stand in it twice"
            doubts.append(f"{twice}, as of files that were joined, and count once")
            taken.only(kept, writer)
            nesting, is_device, repaired = _nested(taken)
        track, start, duration = map(taken.slices.dense, ("track", "start_ns", "duration_ns"))
        frames[MEMORY] = writer.write(_memory_frame(taken.memory.given(), texts["track"], base_ns), MEMORY)
        is_mark = taken.each(lambda text: text.startswith((categories.STEP, categories.OPTIMIZER)), "name")
        # the slices that mark a step, in the order of the trace
        marks = {what: decode(texts[what].values, taken.slices.dense(what)[is_mark]) for what in _TEXTS}
        marked = {**marks, "start_ns": start[is_mark] + base_ns, "duration_ns": duration[is_mark]}
        frames[MARKS] = writer.write(pl.DataFrame(marked), MARKS)
        is_runtime, is_operator = taken.each(categories.is_runtime), taken.each(categories.OPERATORS.__contains__)
        graph_launch = is_runtime & taken.each(categories.is_graph_launch, "name")
        waits = is_runtime & taken.each(lambda text: text.endswith("DeviceSynchronize"), "name")
        taken.slices.forget("category", "name", "start_ns", "duration_ns")
        slices = links.Slices(
            track, start, duration, nesting.parent, nesting.frame, is_device, is_runtime, is_operator,
            graph_launch, taken.slices.sparse("correlation"), taken.slices.sparse("external_id"),
        )  # fmt: skip
        numbered = _numbered(taken, track, start, is_operator)
        linked, forward_of = links.link(slices, _arrows(taken, LAUNCH_ARROWS), numbered, _arrows(taken, FORWARD_ARROWS))
        doubts += _clocks(linked, slices, np.flatnonzero(waits))
        frames[LINKS] = writer.write(linked, LINKS)
        clipped = nesting.clipped
        summary, device = taken.summary, categories.device_kind(texts["category"].values)
        del taken, is_device, track, slices, numbered, linked  # a large trace is in memory once, not twice
        del is_mark, is_runtime, is_operator, graph_launch
        start += base_ns
        tree = {"start_ns": start, "duration_ns": duration, "self_ns": nesting.self_ns, "depth": nesting.depth}
        tree |= {"parent": nesting.parent, "frame": nesting.frame, "forward": forward_of}
        frames[TREE] = writer.write(with_ids(tree, "parent", "frame", "forward"), TREE)
        del tree, start, duration, nesting, forward_of
        writer.wait()  # how many files there are is known when the last slices are done
        quality = summary.quality
        index = TraceIndex(
            LAYOUT, __version__, summary.world_size, quality.events, frames[TREE].height, quality.salvaged,
            quality.lost, quality.unsupported, clipped, repaired, (*quality.problems, *doubts), summary.metadata,
            summary.threads, files=writer.files, device=device,
        )  # fmt: skip
        if target is not None and settle is not None:
            writer.then(partial(_settled, settle, target, index))
        if target is None or settle is not None:
            return StoredTrace(index, **frames, parts=writer.kept)
    (target / INDEX).write_bytes(msgspec.json.encode(index))
    return StoredTrace(index, **frames, parts=trace_entry.slice_files(target, index))


def _settled(settle: Callable[[bool], None], target: Path, index: TraceIndex, whole: bool) -> None:
    try:
        if whole:
            (target / INDEX).write_bytes(msgspec.json.encode(index))
    except OSError:
        whole = False
    settle(whole)


class _Taken(Struct, frozen=True):
    """What is kept of all chunks; the rest went to the writer of the parts."""

    slices: Columns
    flows: Columns
    memory: Columns
    texts: dict[str, TextCodes]
    summary: TraceSummary

    def each(self, said: Callable[[str], bool], what: str = "category") -> Bools:
        """What is said of a text of each slice; False for a missing one."""
        return by_code(np.array([*map(said, self.texts[what].values), False], bool), self.slices.dense(what))

    def only(self, kept: Bools, writer: PartWriter) -> None:
        """Leave out all other slices, and allocations of tracks that are left without any or that stand in it twice."""
        tracks = np.isin(self.memory.dense("track"), unique(self.slices.dense("track")[kept]))
        self.slices.only(kept)
        writer.only(kept)
        columns = [self.memory.dense(name) for name in ("bytes", "address", "time_ns", "track")]
        self.memory.only(tracks & ~flags(len(tracks), _repeated(columns)))


def _repeated(columns: list[Any]) -> Int64:
    """The rows that say what another one before says."""
    order = np.lexsort(columns)
    return order[1:][np.all([column[order][1:] == column[order][:-1] for column in columns], axis=0)]


def _nested(taken: _Taken) -> tuple[links.Nesting, Bools, int]:
    """Repair and nest slices: also which are a device's, and how many were repaired."""
    track, start, duration = map(taken.slices.dense, ("track", "start_ns", "duration_ns"))
    is_device = taken.each(categories.DEVICE.__contains__)
    repaired = repair(track, start, duration, is_device=is_device)
    precedence = np.array([*map(categories.precedence, taken.texts["category"].values), 0], np.int8)
    nesting = nest(
        track, start, duration,
        is_function=taken.each(categories.FUNCTION.__eq__), is_annotation=taken.each(categories.ANNOTATION.__eq__),
        precedence=precedence[taken.slices.dense("category")],
    )  # fmt: skip
    return nesting, is_device, repaired


def _kinds(taken: _Taken, path: Path) -> Iterator[str]:
    """What is to be said of categories; raises UnreadableInputError where their times cannot be microseconds."""
    kinds, codes = ["none", *taken.texts["category"].values], taken.slices.dense("category") + 1
    counts, times = np.bincount(codes, minlength=len(kinds)), np.bincount(codes, taken.slices.dense("duration_ns"))
    worked = [
        code for code in np.flatnonzero(counts).tolist() if kinds[code] in categories.DEVICE | categories.OPERATORS
    ]
    count = counts[worked].sum()
    if count >= _FEW and (mean := times[worked].sum() / count) < _SHORTEST_NS:
        why = f"its operators and kernels would take {mean:.2g} ns on average: ts and dur of a trace count microseconds"
        raise UnreadableInputError(f"{path}: {why}")
    unknown = [code for code in np.flatnonzero(counts).tolist() if not categories.is_known(kinds[code])]
    if (foreign := counts[unknown].sum()) > _UNKNOWN * counts.sum():
        slices = f"{foreign:,} of its {counts.sum():,} slices" if foreign < counts.sum() else "all of its slices"
        named = ", ".join(kinds[code] for code in unknown[:_NAMED])
        said = f"{slices} are of kinds that torch.profiler does not write ({named})"
        if foreign == counts.sum() >= _FEW:
            raise UnreadableInputError(f"{path}: {said}: another tool wrote it")
        yield f"{said}, and count in no figure"


def _one_process(taken: _Taken, writer: PartWriter, path: Path) -> Iterator[str]:
    """Keep the process with most operators; raises UnreadableInputError where launches of several are alike."""
    pids = [track.partition("/")[0] for track in taken.texts["track"].values]
    track, is_operator = taken.slices.dense("track"), taken.each(categories.OPERATORS.__contains__)
    operators = np.bincount(track[is_operator], minlength=len(pids)).tolist()
    found: Counter[str] = Counter()
    for pid, count in zip(pids, operators, strict=True):
        found[pid] += count
    found = Counter({pid: count for pid, count in found.items() if count >= _FEW})
    if len(found) < 2:
        return
    own = found.most_common(1)[0][0]
    of_others = np.array([pid in found and pid != own for pid in pids])[track]
    rows, values = taken.slices.sparse("correlation")
    launches, work = taken.each(categories.is_runtime)[rows], taken.each(categories.DEVICE.__contains__)[rows]
    theirs, ours = (work & np.isin(values, values[launches & (of_others[rows] == of)]) for of in (True, False))
    if (theirs & ours).any():
        why = "and launches of them have the same numbers, so that nothing tells whose work devices did"
        raise UnreadableInputError(f"{path}: it holds {len(found)} processes, {why}; give the trace of each rank")
    of_others[rows[theirs]] = True
    of_others |= np.isin(track, np.setdiff1d(track[rows[theirs]], track[rows[ours]]))
    taken.only(~of_others, writer)
    yield f"it holds {len(found)} processes, as merged ranks do: only process {own} was read; give the single traces"


def _once(taken: _Taken, alike: Int64) -> Bools | None:
    """Which slices to keep where so many stand in the trace twice that it was joined of several, else None."""
    columns = [taken.slices.dense(name)[alike] for name in ("name", "category", "duration_ns", "start_ns", "track")]
    twice, count = alike[_repeated(columns)], taken.slices.count
    return ~flags(count, twice) if len(twice) > max(_FEW, _TWICE * count) else None


def _clocks(linked: pl.DataFrame, slices: links.Slices, waits: Int64) -> Iterator[str]:
    """Whether device work begins before its launch, or goes on when a call is over that waits (`waits`) for it."""
    known = linked.filter(pl.col("launch").is_not_null())
    work, launch = known["event"].to_numpy(), slices.start_ns[known["launch"].to_numpy()]
    early = launch - slices.start_ns[work]
    early = early[early > _CLOCKS_APART_NS]
    said = f"{len(early):,} of its {len(work):,} kernels and copies begin before the calls that launched them"
    apart_ns = float(np.median(early)) if len(early) > max(_FEW, _EARLY * len(work)) else 0
    if not apart_ns and len(waits) and len(work):
        last = waits[slices.start_ns[waits].argmax()]
        over = slices.start_ns[last] + slices.duration_ns[last]
        mine = work[launch < slices.start_ns[last]]
        ends = slices.start_ns[mine] + slices.duration_ns[mine] - over
        late_ns = min((float(ends[at].max()) for at in by_value(slices.track[mine])), default=0)
        apart_ns = late_ns if late_ns > _LATE_NS else 0
        said = "its devices go on with what was launched when the call is over that waited for it"
    if apart_ns:
        yield f"{said}, by {short(apart_ns / 1e6)} ms: the clocks of device and host disagree, so no idle time is sure"


def _take(source: KinetoTrace | TraceAhead, writer: PartWriter, only: StepRange | None) -> _Taken:
    slices, flows = Columns(dict.fromkeys(_TEXTS, np.int32)), Columns({"track": np.int32, "finish": np.bool_})
    memory = Columns({"track": np.int32})
    texts = {name: TextCodes() for name in (*_TEXTS, "flow_kind")}
    track = texts["track"]
    for whole in source.chunks():
        chunk = whole if only is None else only.only(whole)
        writer.add(chunk.slices)
        dense: dict[str, Any]
        if len(chunk.slices):
            dense = {name: texts[name].add(getattr(chunk.slices, name)) for name in _TEXTS}
            dense |= {"start_ns": chunk.slices.start_ns, "duration_ns": chunk.slices.duration_ns}
            slices.append(dense, {name: getattr(chunk.slices, name) for name in _SPARSE})
        if len(chunk.flows):
            dense = {"kind": texts["flow_kind"].add(chunk.flows.kind), "track": track.add(chunk.flows.track)}
            flows.append(dense | {name: getattr(chunk.flows, name) for name in ("id", "finish", "time_ns")}, {})
        if len(chunk.memory):
            dense = {name: getattr(chunk.memory, name) for name in _MEMORY_NUMBERS}
            memory.append({**dense, "track": track.add(chunk.memory.track)}, {})
    writer.finish()
    return _Taken(slices, flows, memory, texts, source.summary())


def _arrows(taken: _Taken, kinds: tuple[str, ...]) -> links.Arrows:
    """Pairs of ends with the same id; where one came several times, the last."""
    codes = [code for code, kind in enumerate(taken.texts["flow_kind"].values) if kind in kinds]
    mine = np.isin(taken.flows.dense("kind"), codes)
    ids, finish, track, time = (taken.flows.dense(name)[mine] for name in ("id", "finish", "track", "time_ns"))
    heads, tails = np.flatnonzero(finish), np.flatnonzero(~finish)
    last = links.last_until((ids[tails], np.zeros_like(tails)), (ids[heads], np.zeros_like(heads)))
    start, end = tails[last[last >= 0]], heads[last >= 0]
    return (track[start], time[start]), (track[end], time[end])


def _numbered(taken: _Taken, track: Int32, start: Int64, is_operator: Bools) -> links.Numbered:
    rows, sequence = taken.slices.sparse("sequence")
    mine = is_operator[rows]
    rows, sequence = rows[mine], sequence[mine]
    thread, numbers = links.value_at(taken.slices.sparse("forward_thread"), rows), Numbers[str]()
    process = np.array([*(numbers[name.rpartition("/")[0]] for name in taken.texts["track"].values), 0], np.int64)
    return links.Numbered(rows, process[track[rows]], track[rows], start[rows], sequence, thread)


def _memory_frame(rows: Columns, tracks: TextCodes, base_ns: int) -> pl.DataFrame:
    columns: dict[str, Int64] = {name: rows.dense(name) for name in _MEMORY_NUMBERS}
    frame = pl.DataFrame(
        {
            "device": _devices(columns["device_type"], columns["device"]),
            "time_ns": columns["time_ns"] + base_ns,
            **{name: columns[name] for name in _MEMORY_KEPT},
            "track": decode(tracks.values, rows.dense("track")),
        }
    )
    return frame.with_columns(pl.when(pl.col(name) != MISSING).then(pl.col(name)).alias(name) for name in _MEMORY_KEPT)


def _devices(kinds: Int64, numbers: Int64) -> pl.Series:
    codes = np.zeros(len(kinds), np.int32)
    names: list[str | None] = []
    for kind in unique(kinds).tolist():
        of_kind = np.flatnonzero(kinds == kind)
        found, place = np.unique(numbers[of_kind], return_inverse=True)
        codes[of_kind] = place + len(names)
        names += [_device(kind, number) for number in found.tolist()]
    return decode(names, codes)


def _device(kind: int, number: int) -> str | None:
    if kind == MISSING:
        return None
    name = _DEVICES.get(kind, f"device-{kind}")
    return name if kind == 0 or number < 0 else f"{name}:{number}"


def repair(track: npt.NDArray[np.integer], start_ns: Int64, duration_ns: Int64, *, is_device: Bools) -> int:
    """Correct durations that cannot be true in place, and return how many there were.

    Negative ones become 0, those over a week (an overflow) end where the next slice of their track begins. A device
    slice whose end was reported late is cut to where the next one of its stream begins: a stream is serial, so what
    began and ended inside another proves its end wrong. One neighbour proves nothing: kernels may begin while the last
    one drains.
    """
    np.clip(start_ns, -_MAX_START_NS, _MAX_START_NS, out=start_ns)
    negative = duration_ns < 0
    endless = duration_ns > LONGEST_NS
    repaired = int(negative.sum()) + int(endless.sum())
    duration_ns[negative] = 0
    if endless.any():
        _end_at_next(track, start_ns, duration_ns, endless)
    rows = np.flatnonzero(is_device)
    return repaired + sum(_late_ends(rows[stream], start_ns, duration_ns) for stream in by_value(track[rows]))


def _end_at_next(track: npt.NDArray[np.integer], start_ns: Int64, duration_ns: Int64, wrong: Bools) -> None:
    for rows in by_value(track):
        if not wrong[rows].any():
            continue
        starts = unique(start_ns[rows])
        mine = rows[wrong[rows]]
        after = np.searchsorted(starts, start_ns[mine], side="right")
        ends = np.append(starts, 0)[after]
        duration_ns[mine] = np.where(after < len(starts), ends - start_ns[mine], 0)


def _late_ends(rows: Int64, start_ns: Int64, duration_ns: Int64) -> int:
    rows = rows[np.argsort(start_ns[rows], kind="stable")]
    starts = start_ns[rows]
    ends = starts + duration_ns[rows]
    suspects = np.flatnonzero(ends[:-1] - starts[1:] > _LATE_NS)
    repaired = 0
    for i in suspects.tolist():
        last = min(int(np.searchsorted(starts, ends[i])), i + 1 + _LOOKED_AT)
        inside = np.flatnonzero((ends[i + 1 : last] <= ends[i]) & (starts[i + 1 : last] > starts[i]))
        if len(inside) >= _PROOFS:
            duration_ns[rows[i]] = starts[i + 1 + inside[0]] - starts[i]
            repaired += 1
    return repaired
