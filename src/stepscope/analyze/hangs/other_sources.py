"""What else is known of ranks that hang: NCCL's RAS, sampled stacks, processes and devices of the run's recording.

Each says what it knows in words of its own, rank by rank; the verdict lays them beside what the flight recorders say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import polars as pl
from msgspec import Struct

from stepscope.analyze.context import Context
from stepscope.engine.call_tree import UserPaths
from stepscope.model.findings import Place
from stepscope.read.hang_recording import Communicator, HangRecording, RasRank
from stepscope.tables.reduced import ranges
from stepscope.tables.schema import Tables

GONE_BEFORE_NS = 5 * 10**9  # a process that ended as long before the last reading of its host did not end with the run
LAST_NS = 30 * 10**9  # readings of a device that tell what it did at last
BUSY_PCT = 90.0  # a kernel of a collective that waits keeps a GPU "busy", work that ends has pauses
IDLE_PCT = 5.0
MOST_NAMED = 120  # characters of ranks in a sentence or a cell
_DISTRIBUTED = "torch/distributed/"


class Standing(Struct, frozen=True):
    """Where the main thread of a rank stood in its last sample; `waits` where that is inside a collective call."""

    place: Place | None
    function: str
    waits: bool


class RasView(Struct, frozen=True):
    """What RAS says. `said` by rank, where there is anything odd; `behind` made fewer calls than others.

    `equal` are sets of ranks of communicators in which all have made as many.
    """

    said: Mapping[int, str] = {}
    gone: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    behind: frozenset[int] = frozenset()
    equal: tuple[frozenset[int], ...] = ()
    world_size: int | None = None
    still: bool | None = None  # whether no count has grown from the first report to the last; None with one report


def ras(recording: HangRecording) -> RasView:
    """The newest report in words. Ranks of small communicators are found in the largest by host, process and device."""
    communicators = recording.ras[-1].communicators if recording.ras else ()
    if not communicators:
        return RasView()
    world = max(communicators, key=lambda one: one.size)
    numbers = {(one.host, one.pid, one.device): one.rank for one in world.ranks}
    said: dict[int, list[str]] = {}
    sets: dict[str, set[int]] = {"gone": set(), "silent": set(), "behind": set(), "": set()}
    equal: list[frozenset[int]] = []
    for communicator in communicators:
        counted, slower = set[int](), _behind(communicator)
        for one in communicator.ranks:
            rank = numbers.get((one.host, one.pid, one.device))
            if rank is None:
                continue
            if one.counts:
                counted.add(rank)
            for text, kind in (*_odd(one), *((text, "behind") for text in slower.get(one.rank, ()))):
                said.setdefault(rank, []).append(text)
                sets[kind].add(rank)
        if not slower and len(counted) > 1:
            equal.append(frozenset(counted))
    still = None
    if len(recording.ras) > 1:  # whether no rank has made more calls in the last report than in the first
        first, last = (
            {(each.hash, one.rank): one.counts for each in report.communicators for one in each.ranks if one.counts}
            for report in (recording.ras[0], recording.ras[-1])
        )
        still = all(last[key] == counts for key, counts in first.items() if key in last)
    gone, silent, behind = (frozenset(sets[name]) for name in ("gone", "silent", "behind"))
    words = {rank: "; ".join(dict.fromkeys(some)) for rank, some in said.items()}
    return RasView(words, gone, silent, behind, tuple(equal), world.size, still)


def _odd(one: RasRank) -> list[tuple[str, str]]:
    """What is odd about a rank, in words, and the set that it puts the rank in."""
    found = []
    if one.dead:
        found.append(("considered dead", "gone"))
    elif one.unresponsive or one.counts is None:
        found.append(("does not answer" if one.unresponsive else "no answer in time", "silent"))
    if one.error:
        found.append((f"error {one.error} of NCCL", ""))
    if one.ending:
        found.append(("ends its communicator", ""))
    return found


def _behind(communicator: Communicator) -> dict[int, list[str]]:
    """Ranks of a communicator that have made fewer calls of a kind than most, or than the others where two differ."""
    found: dict[int, list[str]] = {}
    counts = {one.rank: one.counts for one in communicator.ranks if one.counts}
    for name in sorted({name for each in counts.values() for name in each}):
        most = max(each.get(name, 0) for each in counts.values())
        for rank, each in counts.items():
            if each.get(name, 0) < most:
                found.setdefault(rank, [f"{each.get(name, 0):,} calls of {name}, others {most:,}"])
    return found


# ------------------------------------------------------------------------------------------------- the run's recording


def standing(context: Context, ranks: Collection[int]) -> dict[int, Standing]:
    """Where the main threads of these ranks stood at last, of those that were sampled."""
    tables = context.tables
    of_rank = {info.process: info.rank for info in tables.ranks if info.rank in ranks}
    if not of_rank or tables.stacks.is_empty():
        return {}
    main = (pl.col("role") == "rank") & pl.col("main_thread") & pl.col("process").is_in(list(of_rank))
    timed = tables.stretches.filter(main & pl.col("node").is_not_null()).sort("end_ns", maintain_order=True)
    last = timed.group_by("process", maintain_order=True).last().select("process", "node", "end_ns")
    sampled = tables.stacks.filter(main & pl.col("node").is_not_null()).sort("end_ns", "samples", maintain_order=True)
    rough = sampled.group_by("process", maintain_order=True).last().select("process", "node", "end_ns")
    rough = rough.join(last.select("process"), on="process", how="anti")
    users = UserPaths(context.calls, context.code)
    found: dict[int, Standing] = {}
    for process, node in pl.concat([last, rough]).select("process", "node").rows():
        path = context.calls.path(node)
        user = int(users.innermost[node])
        place = None
        if user >= 0:
            frame = context.calls.frames[int(context.calls.frame[user])]
            file = context.code.resolve(frame.file)
            place = Place(file, frame.line, frame.function) if file is not None else None
        waits = any(_DISTRIBUTED in frame.file for frame in path)
        found[of_rank[process]] = Standing(place, path[-1].function, waits)
    return found


class Ending(Struct, frozen=True):
    """How the process of a rank was at last: `gone` where it ended before the others did."""

    gone: bool
    said: str


def endings(tables: Tables, ranks: Collection[int]) -> dict[int, Ending]:
    """What processes and devices of these ranks did at last, in words."""
    found: dict[int, Ending] = {}
    ends = dict(tables.processes.drop_nulls("process").select("process", "end_ns").rows())
    latest = tables.system["time_ns"].max() if tables.system.height else None
    load = _device_load(tables)
    for info in tables.ranks:
        if info.rank not in ranks:
            continue
        said = []
        ended = ends.get(info.process)
        gone = isinstance(ended, int) and isinstance(latest, int) and ended < latest - GONE_BEFORE_NS
        if gone:
            said.append(f"process {info.pid} ended {(latest - ended) / 1e9:.0f} s before the last reading")  # type: ignore[operator]
        util = load.get((info.host, info.pid))
        if util is not None:
            word = "idle" if util <= IDLE_PCT else "busy" if util >= BUSY_PCT else "partly busy"
            said.append(f"its device was {word} at last ({util:.0f} %)")
        if said:
            found[info.rank] = Ending(gone, "; ".join(said))
    return found


def _device_load(tables: Tables) -> dict[tuple[str, int], float]:
    """Mean utilisation of the device that a process holds memory of, in the last seconds, by (host, pid)."""
    system = tables.system
    if system.is_empty() or not system["device"].drop_nulls().len():
        return {}
    latest = system["time_ns"].max()
    recent = system.filter(pl.col("time_ns") >= latest - LAST_NS)  # type: ignore[operator]
    util = recent.filter(pl.col("metric") == "gpu_util_pct").group_by("host", "device").agg(pl.col("value").mean())
    held = recent.filter(pl.col("pid").is_not_null() & pl.col("device").is_not_null()).select("host", "pid", "device")
    rows = held.unique().join(util, on=["host", "device"]).select("host", "pid", "value").rows()
    counts = Counter((host, pid) for host, pid, _ in rows)
    return {(host, pid): value for host, pid, value in rows if counts[host, pid] == 1}


def named(ranks: Collection[int]) -> str:
    """Numbers of ranks with neighbours folded, "0-6, 8"; of many pieces the first."""
    text = ranges(sorted(set(ranks)))
    return text if len(text) <= MOST_NAMED else f"{text[:MOST_NAMED].rpartition(', ')[0]} …"
