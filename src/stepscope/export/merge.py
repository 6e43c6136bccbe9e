"""From sources to the file: one clock, one numbering, metadata events first, then every event that stays.

The second pass, for a cut: which entries stay. One byte per entry of the source is all it leaves behind.

- A slice stays whole when it overlaps the window, however little; it is never clipped.
- A cut to steps also keeps device work that was launched in them and ran later, and leaves out the annotations of
  other steps.
- An instant or a counter stays when it lies in the window.
- An arrow stays when slices that stay begin at both its ends. (Kineto writes each end at the start of its slice.)

Clocks of the hosts in a merged export: by how much each source is moved, and why one stays where it is.

A source is moved as a whole, so that durations stay those that were measured and slices stay inside each other: by what
its host's clock is ahead in the middle of it. How far that is off at its edges counts to the bound.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import os
import re
import secrets
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.errors import EnvironmentRefusal, UnreadableInputError, UsageError
from stepscope.export.entry import (
    DECODING_ERRORS,
    FLOWS,
    Entry,
    Track,
    arguments,
    as_json,
    encoded,
    renumbered_arguments,
    safe,
    safe_value,
)
from stepscope.export.survey import (
    MEMORY,
    NO_GROUP,
    Labels,
    Progress,
    Rank,
    Source,
    clock_offset_ns,
    correlation_of,
    find,
    numbers,
    step_of,
    survey,
)
from stepscope.model.counted import short

if TYPE_CHECKING:
    from stepscope.engine.clocks import Clocks, Members
    from stepscope.tables.arrays import Int64

MOST_BOUND_NS = 1_000_000  # waits that matter are longer; a move that may be off by more would only seem exact
LEAST_MOVE_NS = 20_000  # less does not show, and ends of ranks of one host differ by up to that

Steps = Callable[[Source], dict[int, tuple[int, int]]]


class HostMove(Struct, frozen=True):
    """What was done with the sources of a host, or of a rank whose host nothing tells.

    `moved_ns`: what is taken from the times of each that was moved, `bound_ns`: how far that can be off, at most.
    `reason`: why some, or all, were not.
    """

    host: str
    ranks: tuple[int, ...]
    reference: str
    moved_ns: tuple[int, ...] = ()
    bound_ns: int | None = None
    reason: str = ""

    @property
    def sentence(self) -> str:
        named = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {numbers(list(self.ranks))}"
        who = self.host if self.host == named else f"{self.host} ({named})"
        if self.bound_ns is None:
            return f"{who}: left on its own clock, beside that of {self.reference}: {self.reason}"
        least, most = (-ahead / 1e6 for ahead in (max(self.moved_ns), min(self.moved_ns)))
        by = f"{least:+.3f}" if least == most else f"{least:+.3f} to {most:+.3f}"
        text = f"{who}: moved by {by} ms onto the clock of {self.reference}, to ±{self.bound_ns / 1e3:.1f} us"
        return f"{text}; a part was not: {self.reason}" if self.reason else text


def hosts_of(sources: Sequence[Source]) -> dict[str, list[Source]]:
    """Sources by host; a rank whose host nothing tells has a clock of its own."""
    found: dict[str, list[Source]] = {}
    for source in sources:
        found.setdefault(source.rank.host or source.rank.label, []).append(source)
    return found


def move(sources: Sequence[Source], steps_of: Steps) -> tuple[HostMove, ...]:
    """Set `ahead_ns` of sources on other hosts than that of the lowest rank, where their collectives tell it well."""
    by_host = hosts_of(sources)
    if len(by_host) < 2:
        return ()
    from stepscope.engine.clocks import estimate

    hosts = sorted(by_host, key=lambda host: min(source.rank.number for source in by_host[host]))
    members = _members(sources, [hosts.index(source.rank.host or source.rank.label) for source in sources], steps_of)
    clocks = estimate(members, hosts)
    chosen = Counter(clocks.reference.values()).most_common(1)
    to = chosen[0][0] if chosen else 0
    return tuple(
        _moved(host, number, by_host[host], clocks, hosts[to]) for number, host in enumerate(hosts) if number != to
    )


def _moved(host: str, number: int, sources: Sequence[Source], clocks: Clocks, reference: str) -> HostMove:
    moved, bounds, reasons = [], [], []
    for source in sources:
        first, last = source.base_ns + source.first_ns, source.base_ns + source.last_ns
        pieces = [
            piece
            for piece in clocks.pieces
            if piece.host == number and piece.start_ns <= last and piece.end_ns >= first
        ]
        if not pieces:
            reasons.append("no collective in it could be matched with one of another host")
            continue
        # a rate that was told in a few milliseconds says nothing of the rest
        middle = min(max((first + last) // 2, pieces[0].start_ns), pieces[0].end_ns)
        offset, bound = clocks.ahead(number, np.array([first, middle, last], np.int64))
        ahead = float(offset[1])
        off = float(np.max(bound + np.abs(offset - ahead)))
        if len(pieces) > 1:
            reasons.append("; ".join(dict.fromkeys(piece.reason for piece in pieces[1:])) or "its clock broke")
        elif clocks.hosts[clocks.reference[pieces[0].window]] != reference or np.isnan(ahead):
            reasons.append(pieces[0].reason or f"no collective connects it with {reference}")
        elif not off <= MOST_BOUND_NS:
            reasons.append(f"its clock is known to ±{short(off / 1e6)} ms only. {pieces[0].reason}".rstrip(". "))
        elif abs(ahead) <= max(off, LEAST_MOVE_NS):
            reasons.append(
                f"its clock is ahead by {ahead / 1e3:+.1f} us, less than the ±{off / 1e3:.1f} us it is known to"
            )
        else:
            source.ahead_ns = round(ahead)
            moved.append(source.ahead_ns)
            bounds.append(int(np.ceil(off)))
    ranks = tuple(sorted({source.rank.number for source in sources}))
    reason = "; ".join(dict.fromkeys(reasons))
    return HostMove(host, ranks, reference, tuple(moved), max(bounds, default=None), reason)


_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("owner", "host", "rank", "step", "sequence", "start_ns", "end_ns", "bytes"), pl.Int64),
    "kind": pl.String,
    "group": pl.String,
    "on_device": pl.Boolean,
}


def _members(sources: Sequence[Source], hosts: Sequence[int], steps_of: Steps) -> Members:
    """The collectives of all sources, matched by group and number, else by step, kind and place among these."""
    from stepscope.engine.clocks import Members

    parts = [pl.DataFrame(schema=_COLUMNS)]
    for owner, (source, host) in enumerate(zip(sources, hosts, strict=True)):
        rows = source.collectives.rows if source.collectives is not None else []
        if rows:
            start, end, kind, group, sequence, size, correlation, on_device = zip(*rows, strict=True)
            starts = np.array(start, np.int64)
            step = _steps(source, starts, np.array(correlation, np.int64), steps_of(source))
            whose = {"owner": owner, "host": host, "rank": source.rank.number, "step": step, "sequence": sequence}
            when = {"start_ns": starts + source.base_ns, "end_ns": np.array(end, np.int64) + source.base_ns}
            what = {"bytes": size, "kind": kind, "group": group, "on_device": on_device}
            parts.append(pl.DataFrame(whose | when | what, schema=_COLUMNS))
    table = pl.concat(parts)
    if table["group"].n_unique() > 1:  # whose a call without a group is, nothing tells where there are several
        table = table.filter(pl.col("group") != NO_GROUP)
    # the library's number, which several kernels of one call share; else the place among those of a kind in the step
    told, own = pl.col("sequence") >= 0, ("call", "owner")
    at = pl.when(told).then("sequence").otherwise("step")
    table = (
        table.with_columns(call=pl.struct("group", "kind", told=told, at=at).hash(seed=1))
        .sort("call", "owner", "start_ns", maintain_order=True)
        .with_columns(place=pl.int_range(pl.len()).over(own), count=pl.len().over(own))
        # a source that has more or fewer of them than another has other ones: which, nothing tells
        .filter(pl.col("count").min().over("call") == pl.col("count").max().over("call"))
        .with_columns(call=pl.struct("call", "place").hash(seed=1))
    )
    kinds = table["kind"].unique().sort().to_list()
    table = table.with_columns(pl.col("call", "kind", "group").rank("dense").cast(pl.Int64) - 1)
    columns = {name: table[name].to_numpy() for name in Members.__struct_fields__ if name in table.columns}
    window = _windows(columns["call"], table["owner"].to_numpy(), columns["start_ns"], len(sources))
    return Members(**columns, window=window, kinds=tuple(kinds))


def _steps(source: Source, start: Int64, correlation: Int64, steps: dict[int, tuple[int, int]]) -> Int64:
    """The step in which each was launched, or began where no launch is known; -1 outside."""
    moments = start.copy()
    launched, ids = (np.array(part, np.int64) for part in source.launches)
    if len(ids):
        order = np.argsort(ids, kind="stable")
        at = np.minimum(np.searchsorted(ids[order], correlation), len(ids) - 1)
        known = (ids[order][at] == correlation) & (correlation > 0)
        moments[known] = launched[order][at][known]
    numbers = np.array(sorted(steps, key=lambda number: steps[number]), np.int64)
    if not len(numbers):
        return np.full(len(start), -1, np.int64)
    begins = np.array([steps[number][0] for number in numbers.tolist()], np.int64)
    place = np.searchsorted(begins, moments, side="right") - 1
    return np.where(place >= 0, numbers[np.maximum(place, 0)], -1)


def _windows(call: Int64, owner: Int64, start_ns: Int64, sources: int) -> Int64:
    """A window's number for each collective, in order of time: sources that share collectives are of one."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    size = sources + int(call.max(initial=-1)) + 1
    graph = coo_matrix((np.ones(len(call)), (owner, sources + call)), shape=(size, size))
    part = connected_components(graph, directed=False)[1][owner].astype(np.int64)
    begins = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(begins, part, start_ns)
    found: Int64 = np.argsort(np.argsort(begins, kind="stable"), kind="stable")[part].astype(np.int64)
    return found


_DEVICE = frozenset(("kernel", "memcpy", "memset", "mtia_ccp_events"))


class Window(Struct, frozen=True):
    """What is asked of one source; times in ns as its file counts them, `end_ns` is outside.

    `of_steps` says that device work launched in the window belongs to it. `steps` (first, last) are the numbers whose
    annotations stay, `categories` (case folded) the only ones whose slices are wanted; both None for all.
    """

    start_ns: int
    end_ns: int
    of_steps: bool = False
    steps: tuple[int, int] | None = None
    categories: frozenset[str] | None = None

    def asks_for(self, category: Any) -> bool:
        return self.categories is None or (isinstance(category, str) and category.casefold() in self.categories)

    def keeps_slice(self, entry: Entry, start: int, end: int, launched: frozenset[int]) -> bool:
        """Whether a slice stays; `launched` are the correlation ids of what was launched in the window."""
        if not self.asks_for(entry.cat):
            return False
        if self.steps is not None:
            number = step_of(entry)
            if number is not None:
                return self.steps[0] <= number <= self.steps[1]
        # one without length counts where it stands
        if start < self.end_ns and (end > self.start_ns or start == end == self.start_ns):
            return True
        on_device = isinstance(entry.cat, str) and entry.cat.lower().removeprefix("gpu_") in _DEVICE
        return self.of_steps and start >= self.end_ns and on_device and correlation_of(entry) in launched

    def keeps_moment(self, entry: Entry, time: int) -> bool:
        asked = self.asks_for(entry.cat) or (entry.name == MEMORY and self.asks_for("memory"))
        return self.start_ns <= time < self.end_ns and asked


def select(source: Source, window: Window, progress: Progress) -> bool:
    """Judge every entry of a source: sets what is `kept` of it. Whether anything is."""
    kept = bytearray()
    starts, correlations = (np.array(part, np.int64) for part in source.launches)
    launched = frozenset(correlations[(starts >= window.start_ns) & (starts < window.end_ns)].tolist())
    slices = array("q")  # where the ones that stay begin
    index, arrow, place, is_start = array("q"), array("q"), array("q"), bytearray()  # of the ends of arrows
    source.tracks = set()
    for entry, start, duration in source.read(progress):
        kept.append(0)
        if entry.ph == "X":
            if window.keeps_slice(entry, start, start + duration, launched):
                kept[-1] = 1
                source.tracks.add(entry.track)
                slices.append(hash((entry.track, start)))
        elif entry.ph in FLOWS:
            category = entry.cat if isinstance(entry.cat, str) else ""
            index.append(len(kept) - 1)
            arrow.append(hash((category, entry.name, bytes(entry.id).strip(b'"'))))
            place.append(hash((entry.track, start)))
            is_start.append(entry.ph == "s")
        elif entry.ph != "M" and window.keeps_moment(entry, start):
            kept[-1] = 1
            source.tracks.add(entry.track)
    # arrows with both ends where a slice that stays begins
    placed, opens, ids = np.isin(np.array(place, np.int64), slices), np.array(is_start, bool), np.array(arrow, np.int64)
    whole = np.intersect1d(ids[placed & opens], ids[placed & ~opens])
    for at in np.array(index, np.int64)[placed & np.isin(ids, whole)].tolist():
        kept[at] = 1
    source.kept, source.slices = kept, len(slices)
    return any(kept)


_TIME = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(ms|s|us)?")
_UNITS_NS = {"us": 1000, "ms": 10**6, "s": 10**9}
FOREVER_NS = 2**63 - 1


class Cut(Struct, frozen=True):
    """`steps` are the first and the last wanted, `range_ns` a start and an end since the trace's start; None is all."""

    steps: tuple[int, int] | None = None
    range_ns: tuple[int, int] | None = None
    ranks: tuple[int, ...] = ()
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps is not None and self.range_ns is not None:
            raise UsageError("--steps and --range exclude each other; give one")

    @property
    def whole(self) -> bool:
        return self.steps is None and self.range_ns is None and not self.categories


def parse_range(text: str) -> tuple[int, int]:
    """`START:END` in ns; each side has its own unit (us, ms, s) or the other side's, either may be left out."""
    sides = [side.strip() for side in text.partition(":")[::2]]
    matches = [_TIME.fullmatch(side) for side in sides]
    malformed = ":" not in text or any(side and not match for side, match in zip(sides, matches, strict=True))
    units = [match[2] for match in matches if match and match[2]]
    if malformed or not units:
        raise UsageError(f"--range {text}: not a range of time; write --range 100ms:250ms or --range 1.5s:2s")
    start_ns, end_ns = (
        int(Decimal(match[1]) * _UNITS_NS[match[2] or units[0]]) if match else missing
        for match, missing in zip(matches, (0, FOREVER_NS), strict=True)
    )
    if end_ns <= start_ns:
        raise UsageError(f"--range {text}: ends before it begins; write the earlier time first")
    return start_ns, end_ns


def parse_categories(texts: list[str] | None) -> tuple[str, ...]:
    """Names of categories from options that hold one or several, separated by commas."""
    names = tuple(name.strip() for text in texts or () for name in text.split(","))
    if not all(names):
        raise UsageError("--categories: an empty name; write --categories kernel,cuda_runtime")
    return names


_ONE_RANK_ONLY = frozenset(("distributedInfo",))
_MAX_CACHED = 50_000  # names and categories as JSON


class Exported(Struct, frozen=True):
    """What was written; `problems` are sentences about what could not be taken along, `moves` of hosts' clocks."""

    path: Path
    bytes: int
    slices: int
    ranks: int
    lost: int
    problems: tuple[str, ...]
    moves: tuple[HostMove, ...] = ()


def export(
    paths: Sequence[Path],
    out: Path,
    cut: Cut = Cut(),  # noqa: B008  # immutable
    *,
    force: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> Exported:
    """Write what `cut` asks for of the traces below `paths` to `out`, packed if its name ends in .gz.

    `progress` gets the share done, 0 to 1. Raises UsageError, UnreadableInputError or EnvironmentRefusal, and then
    leaves `out` as it was.
    """
    check(out, list(paths), force=force)
    sources, problems = find(list(paths), cut.ranks)
    check(out, [source.path for source in sources], force=force)
    total, begun = (2 if cut.whole else 3) * len(sources), itertools.count()

    def next_pass() -> Progress:
        """The callback of the next pass over a file: it turns progress within it into the share of all passes."""
        before = next(begun)
        return lambda consumed, size: progress((before + min(1.0, consumed / max(size, 1))) / total)

    traces = _surveyed(sources, cut, problems, next_pass)
    moves = move(traces, _steps_of)
    start_ns = min(source.zero_ns + source.first_ns for source in traces)
    kept = traces if cut.whole else _cut(traces, cut, start_ns, problems, next_pass)
    ranks = list({id(source.rank): source.rank for source in kept}.values())
    with _replacing(out, force=force) as sink:
        sink.write(_head(kept, start_ns, moves, several=len(ranks) > 1))
        separator = b"\n"
        for event in _events(kept, ranks, start_ns, next_pass):
            sink.write(separator + event)
            separator = b",\n"
        sink.write(b"\n]}\n")
    return Exported(
        path=out,
        bytes=out.stat().st_size,
        slices=sum(source.slices for source in kept),
        ranks=len(ranks),
        lost=sum(source.lost for source in traces),
        problems=tuple(problems),
        moves=moves,
    )


def _surveyed(sources: list[Source], cut: Cut, problems: list[str], next_pass: Callable[[], Progress]) -> list[Source]:
    good = []
    clocks = len(hosts_of(sources)) > 1
    for source in sources:
        try:
            wrong = survey(source, launches=cut.steps is not None, clocks=clocks, progress=next_pass())
        except UnreadableInputError as error:
            if len(sources) == 1:
                raise
            problems.append(f"left out: {error}")
            continue
        problems += [f"{source.path.name}: {problem}" for problem in wrong]
        if source.tracks:
            good.append(source)
    if not good:
        what = sources[0].path if len(sources) == 1 else "these traces"
        raise UnreadableInputError(f"{what}: nothing with a time in it; give traces that torch.profiler wrote")
    return good


def _cut(
    traces: list[Source], cut: Cut, start_ns: int, problems: list[str], next_pass: Callable[[], Progress]
) -> list[Source]:
    there = {name.casefold(): name for source in traces for name in source.categories}
    for name in cut.categories:
        if name.casefold() not in there:
            known = ", ".join(sorted(there.values())[:20])
            raise UsageError(f"--categories {name}: no event is of that category; there are {known}")
    windows = [_window(source, cut, start_ns) for source in traces]
    if cut.steps is not None and not any(windows):
        numbers = {number for source in traces for number in _steps_of(source)}
        why = "the traces mark no steps; cut by time with --range"
        if numbers:
            why = f"no such step in the traces, which hold steps {_span((min(numbers), max(numbers)))}"
        raise UsageError(f"--steps {_span(cut.steps)}: {why}")
    without = {source.path.name for source, window in zip(traces, windows, strict=True) if window is None}
    problems += [f"{name}: has none of these steps" for name in sorted(without)]
    passes = [(source, window, next_pass()) for source, window in zip(traces, windows, strict=True)]
    kept = [source for source, window, advance in passes if window is not None and select(source, window, advance)]
    if not kept:
        length_ms = (max(source.zero_ns + source.last_ns for source in traces) - start_ns) / 10**6
        raise UsageError(f"no event is in that cut; the traces end {length_ms:.3f} ms after they start")
    return kept


def _window(source: Source, cut: Cut, start_ns: int) -> Window | None:
    """What is wanted of `source`, on its own clock; None where it has none of the steps."""
    categories = frozenset(name.casefold() for name in cut.categories) or None
    if cut.steps is None:
        start, end = cut.range_ns or (0, FOREVER_NS)
        offset = start_ns - source.zero_ns
        return Window(start + offset, min(end + offset, FOREVER_NS), categories=categories)
    known = _steps_of(source)
    asked = [times for number, times in known.items() if cut.steps[0] <= number <= cut.steps[1]]
    if not asked:
        return None
    numbered = cut.steps if known is source.steps else None  # by annotations; a journal's numbers are others
    start, end = min(times[0] for times in asked), max(times[1] for times in asked)
    return Window(start, end, of_steps=True, steps=numbered, categories=categories)


def _steps_of(source: Source) -> dict[int, tuple[int, int]]:
    """Start and end of the steps in `source` on its own clock: those of its run's journal, else its annotations."""
    if not source.rank.steps:
        return source.steps
    shift = source.base_ns + clock_offset_ns(source)
    journal = {number: (start - shift, end - shift) for number, (start, end) in source.rank.steps.items()}
    return {
        number: times for number, times in journal.items() if times[0] < source.last_ns and times[1] > source.first_ns
    }


def _span(steps: tuple[int, int]) -> str:
    return f"{steps[0]}" if steps[0] == steps[1] else f"{steps[0]}:{steps[1]}"


def _head(kept: list[Source], base_ns: int, moves: tuple[HostMove, ...], *, several: bool) -> bytes:
    first, *others = (source.metadata for source in kept)
    agreed: dict[str, Any] = {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others) and not (several and key in _ONE_RANK_ONLY)
    }
    agreed["baseTimeNanoseconds"] = base_ns
    if moves:
        agreed["stepscopeClocks"] = [msgspec.to_builtins(one) for one in moves]
    return msgspec.json.encode(safe_value(agreed)).removesuffix(b"}") + b',"traceEvents":['


def _events(kept: list[Source], ranks: list[Rank], base_ns: int, next_pass: Callable[[], Progress]) -> Iterator[bytes]:
    numbers: dict[int, dict[Track, tuple[int, int]]] = {}
    start = BLOCK
    for rank in ranks:
        own = [source for source in kept if source.rank is rank]
        labels = {key: value for source in own for key, value in source.labels.items()}
        pids = {pid for source in own for pid in source.processes}
        processes = distinct(pids)
        if len(ranks) > 1:

            def order(pid: bytes, labels: Labels = labels) -> tuple[int, int, bytes]:
                index, value = labels.get(("process_sort_index", pid, b"")), integer(pid)
                return (index if isinstance(index, int) else LARGEST, LARGEST if value is None else value, pid)

            ordered = sorted(pids, key=order)
            processes = {pid: start + index for index, pid in enumerate(ordered)}
            start += -(-max(1, len(ordered)) // BLOCK) * BLOCK
        threads: dict[bytes, list[bytes]] = defaultdict(list)
        for pid, tid in {track for source in own for track in source.tracks}:
            threads[pid].append(tid)
        places = {
            (pid, tid): (processes[pid], number)
            for pid, tids in threads.items()
            for tid, number in distinct(tids).items()
        }
        numbers[id(rank)] = dict(sorted(places.items(), key=lambda item: item[1]))
        yield from _names(rank, labels, numbers[id(rank)], several=len(ranks) > 1)
    text = lru_cache(_MAX_CACHED)(as_json)
    for number, source in enumerate(kept):
        ids, places, stays = Ids(number, len(kept)), numbers[id(source.rank)], source.kept
        index = -1
        for index, taken in enumerate(source.read(next_pass())):
            entry, start_ns, _ = taken
            if entry.ph == "M" or start_ns < source.first_ns:
                continue
            if stays is not None and not (index < len(stays) and stays[index]):
                continue
            args = arguments(entry) if ids.unchanged else renumbered_arguments(entry, ID_ARGUMENTS, ids.number)
            identifier = ids.arrow(bytes(entry.id)) if entry.ph in FLOWS else b""
            yield encoded(taken, base_ns - source.zero_ns, places[entry.track], identifier, args, text)
        if index + 1 != source.entries:
            raise UnreadableInputError(f"{source.path}: changed while it was read; try again when it is complete")


LARGEST = 2**31 - 1
FIRST_INVENTED = 10_000_000  # above every number Linux gives to a process or thread
BLOCK = 1000
_EXACT_IN_VIEWERS = 2**53
# Arguments that name something inside one process; collectives' "Seq" is not among them, it joins ranks.
ID_ARGUMENTS = frozenset(
    (
        "correlation",
        "External id",
        "external id",
        "Sequence number",
        "Python id",
        "Python parent id",
        "Python module id",
    )
)


def integer(text: bytes) -> int | None:
    """JSON text as an integer, also one in quotes; None if it is none."""
    digits = text.strip(b'"')
    if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
        return None
    return int(digits)


def word(text: bytes) -> str:
    """JSON text of a process or thread id, without quotes, as a person would read it."""
    try:
        value: str = msgspec.json.decode(b'"%b"' % text)
    except DECODING_ERRORS:
        return "unknown"
    return safe(value, 200) or "unknown"


def distinct(texts: Iterable[bytes]) -> dict[bytes, int]:
    """A number of its own for each text: its own where it is one that viewers take, else an invented one."""
    own: dict[int, bytes] = {}
    invented = []
    for text in sorted(set(texts)):
        value = integer(text)
        if value is not None and 0 <= value <= LARGEST and value not in own:
            own[value] = text
        else:
            invented.append(text)
    free = (number for number in itertools.count(FIRST_INVENTED) if number not in own)
    return {text: value for value, text in own.items()} | dict(zip(invented, free, strict=False))


def _names(rank: Rank, labels: Labels, places: dict[Track, tuple[int, int]], *, several: bool) -> Iterator[bytes]:
    told = None
    for (pid, tid), (process, thread) in places.items():
        if process != told:
            told = process
            kinds = ("process_name", "process_labels", "process_sort_index")
            name, label, order = (labels.get((kind, pid, b"")) for kind in kinds)
            if several:
                own = f"{name or 'process'} {word(pid)}"
                name = f"{label} ({own})" if label else own
                name, order = f"{rank.label}: {word(pid) if integer(pid) is None else name}", process
            elif name is None and integer(pid) != process:
                name = word(pid)
            yield from _label("process_name", process, 0, "name", name)
            yield from _label("process_labels", process, 0, "labels", label)
            yield from _label("process_sort_index", process, 0, "sort_index", order)
        title = labels.get(("thread_name", pid, tid))
        if title is None and integer(tid) != thread:
            title = word(tid)
        yield from _label("thread_name", process, thread, "name", title)
        index = labels.get(("thread_sort_index", pid, tid))
        yield from _label("thread_sort_index", process, thread, "sort_index", index)


def _label(kind: str, pid: int, tid: int, key: str, value: str | int | None) -> Iterator[bytes]:
    if value is not None:
        yield msgspec.json.encode({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {key: value}})


class Ids:
    """Ids of arrows and arguments of one source among `count`: distinct between sources, the same ones inside each.

    An id n of source k becomes n * count + k; what would then be too large for a viewer's numbers, or is no number,
    becomes a hash below 2^52. With one source everything stays as it is.
    """

    def __init__(self, source: int, count: int) -> None:
        self._source, self._count = source, count
        self.unchanged = count == 1  # ids stay as they are

    def number(self, text: bytes) -> bytes:
        """The id written `text` in the file; zero and negative ones, which stand for none, stay."""
        value = integer(text)
        return text if value is not None and value <= 0 else self._of_all(text, value)

    def arrow(self, text: bytes) -> bytes:
        """An arrow's id; here zero is an id like others."""
        value = integer(text)
        if self.unchanged and value is not None and 0 <= value < 2**64:
            return b"%d" % value
        return self._of_all(text, value)

    def _of_all(self, text: bytes, value: int | None) -> bytes:
        if value is not None and 0 <= value * self._count + self._source < _EXACT_IN_VIEWERS:
            return b"%d" % (value * self._count + self._source)
        digest = blake2b(b"%d:%b" % (self._source, text), digest_size=8).digest()
        return b"%d" % (int.from_bytes(digest, "big") >> 12)


_BUFFER = 2**20
_LEVEL = 9  # as the profilers pack their own; at level 6 a whole trace could come out larger than its source


def check(path: Path, inputs: list[Path], *, force: bool) -> None:
    """Raise UsageError if writing `path` would lose something: a file that exists, or one we are about to read."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; name a file in it")
    if path.is_char_device() or path.is_fifo():
        raise UsageError(f"{path}: is no file; name one, or - for standard output")
    if os.path.exists(path) and any(os.path.exists(source) and path.samefile(source) for source in inputs):
        raise UsageError(f"{path}: is one of the traces to read; name another file")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: exists; add --force to overwrite it, or name another file")


@contextlib.contextmanager
def _replacing(path: Path, *, force: bool) -> Iterator[io.BufferedWriter]:
    """What is written stands at `path` once the block has ended well; raises EnvironmentRefusal.

    Its folder is made where there is none.
    """
    temporary = path.parent / f".{path.name[:200]}.{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            # exclusive: a link that someone laid in the way is not followed
            file: Any = opened.enter_context(open(temporary, "xb"))
            if path.suffix.lower() == ".gz":  # its header holds neither a name nor a time
                file = opened.enter_context(gzip.GzipFile("", "wb", _LEVEL, file, mtime=0))
            yield opened.enter_context(io.BufferedWriter(file, _BUFFER))
        check(path, [], force=force)
        os.replace(temporary, path)
    except OSError as error:
        raise EnvironmentRefusal(f"{path}: cannot be written ({error.strerror}); name another place") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
