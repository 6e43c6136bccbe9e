"""Collectives: calls, sizes, bandwidth, how much of their time nothing else hides, and who of several ranks waits for
whom.

On a device a call is a kernel. What it carried stands in the arguments of the kernel or of `record_param_comms` around
its launch; in older traces only the shapes and types of the operators around the launch tell. Backends that work on the
host (gloo) write a range for each call, with the shapes and types of its inputs.

What the devices compute hides communication; in a trace without work of a device, what the host's operators compute. A
moment in which several collectives run is exposed once: it belongs to the one that began first, kernels before what ran
on the host. So the exposed time of all kernels is the length of the set that `analyze.device` calls exposed.

Clocks of different hosts are not compared. A collective ends on all ranks at nearly the same moment, and the rank that
came last waits for nobody: the shortest of its durations is what the transfer took, the rest of each is waiting.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.views.kernels import judged
from stepscope.engine import collective_names as words
from stepscope.engine import intervals
from stepscope.engine.device_work import COMMUNICATION, FILL, KERNEL, Work, work
from stepscope.engine.intervals import Intervals
from stepscope.engine.journal import json_object, parse_json
from stepscope.engine.scene import trace_steps
from stepscope.engine.spans import Base, Span
from stepscope.model.counted import things
from stepscope.model.views import CollectiveOverWorkers, CollectiveRow, Distributed, WorkerShare
from stepscope.tables import arrays, categories
from stepscope.tables.arrays import NONE, Bools, Int32, Int64, Numbers, own_starts

NO_COLLECTIVES = "no trace holds a collective: one process alone, or none ran while recording"
ONLY_CALLED = (
    "collectives were called, but no work of a device was recorded for them: a group of one rank, or record with "
    "ProfilerActivity.CUDA"
)
_NS_PER_S = 1e9


def collectives(base: Base) -> tuple[CollectiveRow, ...]:
    """A row for each kind, group, data type and size of message in each trace, by trace and falling time."""
    rows: list[CollectiveRow] = []
    for span in base.spans:
        found = calls(span, work(span))
        compute = computation(span, work(span)) if len(found) else intervals.EMPTY
        overlapped = intervals.covered(compute, found.start_ns, found.end_ns)
        exposed = exposures(found, compute)
        own = []
        for code, message in enumerate(found.messages):
            mine, group = found.message == code, message.group
            lengths = found.lengths[mine]
            count, total_ns = len(lengths), int(lengths.sum())
            total_bytes = message.bytes * count if message.bytes is not None else None
            algorithm = total_bytes * _NS_PER_S / total_ns if total_bytes and total_ns else None
            factor = words.bus_factor(message.kind, group.size) if group is not None and group.size else None
            row = CollectiveRow(
                span=span.ref,
                name=message.kind,
                library=message.library,
                group=group.name if group is not None else None,
                group_size=group.size if group is not None else None,
                dtype=message.dtype,
                message_bytes=message.bytes,
                calls=count,
                total_bytes=total_bytes,
                total_ns=total_ns,
                mean_ns=total_ns / count,
                min_ns=int(lengths.min()),
                max_ns=int(lengths.max()),
                overlapped_ns=int(overlapped[mine].sum()),
                exposed_ns=int(exposed[mine].sum()),
                algorithm_bytes_per_s=algorithm,
                bus_bytes_per_s=algorithm * factor if algorithm is not None and factor is not None else None,
            )
            own.append(row)
        rows += sorted(own, key=lambda row: (-row.total_ns, row.name, row.message_bytes or 0))
    return tuple(rows)


def why_absent(base: Base) -> str | None:
    """Why `collectives` gives no row; None where it gives some."""
    if any(len(calls(span, work(span))) for span in base.spans):
        return None
    called = any(on_host(span, words.is_collective_call).any() for span in base.spans)
    return ONLY_CALLED if called else NO_COLLECTIVES


def computation(span: Span, work: Work) -> Intervals:
    """When something was computed: kernels and fills of the devices, or operators of the host without a device."""
    if len(work):
        return work.covered(KERNEL, FILL)
    called = on_host(span, words.is_collective_call)
    operators = span.is_operator
    if called.any():  # neither what lies in the call of a collective nor what holds one computes
        inside = arrays.self_or_ancestor(span.parent, called) >= 0
        operators = operators & ~inside & ~arrays.ancestors(span.parent, np.flatnonzero(called))
    return span.times(operators)


def exposures(found: Calls, compute: Intervals) -> Int64:
    """Of each call the time in which neither anything was computed nor an earlier collective ran, ns."""
    result = np.zeros(len(found), np.int64)
    busy = compute
    for own in (found.on_device, ~found.on_device):
        rows = np.flatnonzero(own)
        rows = rows[np.argsort(found.start_ns[rows], kind="stable")]
        starts, ends = found.start_ns[rows], found.end_ns[rows]
        begins = own_starts(starts, ends)
        ends = np.maximum(ends, begins)
        result[rows] = ends - begins - intervals.covered(busy, begins, ends)
        busy = intervals.merge(busy, intervals.union(starts, ends))
    return result


MAX_WAY = 12  # slices from a launch outwards in which its collective is looked for
MAX_MEMBERS = 1 << 20  # of a group; more is damage
_LISTED_CHARS = 32  # of the ranks of a group in its name
_OF_GROUP = ("Process Group", "Group size", "Global rank")  # beginnings of the arguments that name a group
_NO_DESCRIPTION = ("", "undefined")
_SEQUENCE = r'"Seq":(-?\d{1,18})'
_SEQUENCE_PART = r',"Seq":-?\d{1,18}|"Seq":-?\d{1,18},?'


class Group(Struct, frozen=True):
    """A process group. `key` tells groups apart on all ranks: names repeat, in groups of other ranks."""

    key: str
    name: str
    size: int | None
    ranks: tuple[int, ...] | None
    description: str = ""  # as the framework words it, else the library's name of it


class Message(Struct, frozen=True):
    """What calls have in common. `bytes` is the larger of the rank's input and output."""

    kind: str
    library: str | None
    group: Group | None
    dtype: str | None
    bytes: int | None


class Calls(Struct, frozen=True):
    """The calls of a trace; `message` are numbers in `messages`."""

    start_ns: Int64
    end_ns: Int64
    on_device: Bools
    message: Int32
    messages: tuple[Message, ...]
    sequence: Int64  # "Seq" of the call in its group, -1 where it is not written down
    step: Int64  # the step it was launched in, -1 outside

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def lengths(self) -> Int64:
        return self.end_ns - self.start_ns


def calls(span: Span, work: Work) -> Calls:
    """All collectives of the trace: kernels first, then those that ran on the host."""
    kernels = np.flatnonzero(work.kind == COMMUNICATION)
    host = np.flatnonzero(on_host(span, words.runs_on_host))
    rows = np.concatenate([work.rows[kernels], host])
    if not len(rows):
        return Calls(rows, rows, np.zeros(0, bool), np.zeros(0, np.int32), (), rows, rows)
    told = span.series("collective").is_not_null().to_numpy()
    # where a call's arguments, its backend's range and its operator stand, -1 for none: a range of the host is its own
    arguments = np.where(told[rows], rows, NONE)
    backend, operator = np.where(np.arange(len(rows)) < len(kernels), NONE, rows), np.full(len(rows), NONE, np.int64)
    at = np.concatenate([work.launch[kernels], np.full(len(host), NONE, np.int64)])
    is_backend = [words.is_backend_range(name) for name in span.names.values]
    says_more = [  # operators of collectives that say more than that one is on its way
        words.is_collective_call(name) and not backend and words.kind_of(name) is not None
        for name, backend in zip(span.names.values, is_backend, strict=True)
    ]
    backend_named, kind_named = (np.append(span.names.pick(flags), False) for flags in (is_backend, says_more))
    for _ in range(MAX_WAY):  # from the launch outwards; the innermost of each sort
        inside = at >= 0
        if not inside.any():
            break
        for target, flags in ((arguments, told), (backend, backend_named), (operator, kind_named)):
            new = inside & flags[at] & (target < 0)
            target[new] = at[new]
        at = np.where(inside, span.parent[np.maximum(at, 0)], NONE)
    # calls with the same texts are described once
    text = _text(span, "collective", arguments)
    frame = pl.DataFrame(
        {
            "name": _text(span, "name", rows),
            "arguments": text.str.replace(_SEQUENCE_PART, ""),
            "range": _text(span, "name", backend),
            "range_dims": _text(span, "shapes", backend),
            "range_types": _text(span, "types", backend),
            "operator": _text(span, "name", operator),
            "dims": _text(span, "shapes", operator),
            "types": _text(span, "types", operator),
        }
    )
    number = frame.select(pl.struct(pl.all()).rank("dense")).to_series().to_numpy().astype(np.int64) - 1
    firsts = np.unique(number, return_index=True)[1]
    groups: dict[str, Group | None] = {}
    messages: Numbers[Message] = Numbers()
    codes = [messages[_message(span, row, groups)] for row in frame[firsts].iter_rows(named=True)]
    return Calls(
        start_ns=span.start_ns[rows],
        end_ns=span.ends(rows),
        on_device=np.arange(len(rows)) < len(kernels),
        message=np.asarray(codes, np.int32)[number],
        messages=tuple(messages),
        sequence=text.str.extract(_SEQUENCE).cast(pl.Int64, strict=False).fill_null(NONE).to_numpy(),
        step=span.step_numbers[rows],
    )


def on_host(span: Span, test: Callable[[str], bool]) -> Bools:
    """Operators and ranges of the host with a name that passes; only names that occur among them are looked at."""
    found = span.categories.where(categories.OPERATORS | {categories.ANNOTATION})
    found[found] = judged(span.names, np.flatnonzero(found), lambda names: [test(name) for name in names])
    return found


def _text(span: Span, column: str, rows: Int64) -> pl.Series:
    """A text column at these rows, null for row -1."""
    values = span.events[column].gather(np.maximum(rows, 0))
    return values.set(pl.Series(rows < 0), None).alias(column)


def _message(span: Span, row: Mapping[str, str | None], groups: dict[str, Group | None]) -> Message:
    """What a call carried; `groups` holds those of the trace that were met, by the arguments that name them."""
    arguments = json_object(row["arguments"])
    texts = [_string(arguments.get("Collective name")), row["range"], row["operator"], row["name"]]
    kinds = (words.kind_of(text) for text in texts if text)
    kind = next((kind for kind in kinds if kind is not None), words.UNKNOWN)
    named = {key: value for key, value in arguments.items() if key.startswith(_OF_GROUP)}
    text = json.dumps(named, sort_keys=True)
    if text not in groups:
        groups[text] = _group(span, named)
    group = groups[text]
    dtype, size = _string(arguments.get("dtype")), None
    known = words.type_of(dtype) if dtype else None
    if known is not None:  # PyTorch's name of the type; else as it stands there
        counts = [_count(arguments.get(key)) for key in ("In msg nelems", "Out msg nelems")]
        there = [count for count in counts if count is not None and count <= words.MAX_ELEMENTS]
        dtype, size = known[0], max(there) * known[1] if there else None
    if size is None:  # by the tensors that the operator was called with and those of the backend's range, its inputs
        inputs = words.tensor_bytes(parse_json(row["range_dims"]), parse_json(row["range_types"]))
        tensors = words.tensor_bytes(parse_json(row["dims"]), parse_json(row["types"]))
        typed = [(kind_of, own) for kind_of, own in (*inputs, *tensors) if kind_of is not None]
        dtype = typed[0][0] if typed else dtype
        total = sum(own for kind_of, own in inputs if kind_of is not None)
        largest = max((own for kind_of, own in tensors if kind_of is not None), default=0)
        if typed and not (kind == words.ALL_GATHER and largest <= total):
            size = max(total, largest)
        elif typed and group is not None and group.size:  # only the input is known; every rank's is as large
            size = total * group.size
    libraries = (words.library_of(text) for text in (row["name"], row["range"]) if text)
    return Message(kind, next((name for name in libraries if name), None), group, dtype, size)


def _group(span: Span, named: Mapping[str, Any]) -> Group | None:
    """The group that a collective's arguments name; without any, the only one that the trace lists."""
    told = span.metadata.get("distributedInfo")
    info: Mapping[str, Any] = told if isinstance(told, dict) else {}
    groups = info.get("pg_config")
    listed = [item for item in groups if isinstance(item, dict)] if isinstance(groups, list) else []
    if named:
        name, description = (_string(named.get(f"Process Group {key}")) for key in ("Name", "Description"))
        ranks, size = _ranks(named.get("Process Group Ranks")), _count(named.get("Group size"))
        config = [item for item in listed if name is not None and _string(item.get("pg_name")) == name]
        if ranks is None and len(config) == 1:
            ranks = _ranks(config[0].get("ranks"))
        start, stride = (_count(named.get(f"Global rank {key}")) for key in ("start", "stride"))
        # the ranks of a group whose list was cut short, where they lie at equal distances
        if not ranks and start is not None and stride and size is not None and 1 < size <= MAX_MEMBERS >= stride:
            ranks = tuple(range(start, start + size * stride, stride))
    elif len(listed) == 1 and info.get("pg_count", 1) == 1:
        name, description = (_string(listed[0].get(key)) for key in ("pg_name", "pg_desc"))
        ranks, size = _ranks(listed[0].get("ranks")), _count(listed[0].get("pg_size"))
    else:
        return None
    size = size or (len(ranks) if ranks else None)
    members = str(list(ranks)) if ranks is not None else ""
    if len(members) > _LISTED_CHARS or not members:
        members = f"({size} ranks)" if size else ""
    shown = description if description and description not in _NO_DESCRIPTION else name
    label = " ".join(part for part in (shown, members) if part)
    return Group(json.dumps([name, ranks if ranks else size]), label, size, ranks, shown or "")


def _ranks(value: object) -> tuple[int, ...] | None:
    """A list of ranks; None for one that was cut short."""
    value = parse_json(value) if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        return None
    ranks = [_count(item) for item in value]
    return tuple(rank for rank in ranks if rank is not None) if None not in ranks else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


NO_MATCH = "no worker ran a collective while recording"
_NAMED = 8  # ranks in a note
_LEAST_ENDS = 5  # collectives whose ends tell how far workers' clocks agree

# What calls of the same collective have in common on all workers.
_MATCH = ("kind", "group", "sequence", "size", "span", "step", "nth")
_MESSAGE = {
    "kind": pl.String,
    "group": pl.String,
    "label": pl.String,
    "bytes": pl.Int64,
    "size": pl.Int64,
    "able": pl.Boolean,
}


def distributed(base: Base) -> Distributed | None:
    """The workers side by side, None where there is nothing to compare: `why_not_distributed` says why."""
    found = peers(base)
    if isinstance(found, str):
        return None
    spans = [span for own in found.workers for span in own]
    called = [calls(span, work(span)) for span in spans]
    if not any(map(len, called)):
        return None
    every, matches = _match(spans, called)
    shortest = np.full(every.height, NONE, np.int64)  # of each call's match, -1 where it has none
    matched = every.join(matches.select(*_MATCH, "shortest"), on=_MATCH).sort("row")
    shortest[matched["row"].to_numpy()] = matched["shortest"].to_numpy()
    parts = np.split(shortest, np.cumsum([len(own) for own in called])[:-1])
    missing: set[int] = set()
    if not found.guessed:
        groups = {message.group for own in called for message in own.messages if message.group is not None}
        missing = {*found.missing, *(rank for group in groups for rank in group.ranks or ())}
        missing -= {span.ref.rank for span in spans}
    return Distributed(
        workers=tuple(_share(*each) for each in zip(spans, called, parts, strict=True)),
        collectives=_collectives(matches),
        missing_ranks=tuple(sorted(missing)),
        matched=matches.height,
        unmatched=int((shortest < 0).sum()),
        notes=tuple(_notes(found, sorted(missing), spans, called, shortest, matches)),
    )


def why_not_distributed(base: Base) -> str | None:
    """Why `distributed` gives None; None where it gives a view."""
    found = peers(base)
    if isinstance(found, str):
        return found
    return why_absent(base) and NO_MATCH


def _share(span: Span, found: Calls, shortest: Int64) -> WorkerShare:
    """The mean step; rounding goes to the rest, so that the parts sum to the step."""
    windows, compute = trace_steps(span, work(span)), computation(span, work(span))
    steps = max(len(windows), 1)
    talking = intervals.union(found.start_ns, found.end_ns)
    matched = shortest >= 0
    ends = found.end_ns[matched]
    tails = intervals.union(ends - shortest[matched], ends)
    waits = intervals.union(found.start_ns[matched], ends)

    def mean(one: Intervals) -> int:
        return int(intervals.covered(one, windows.start_ns, windows.end_ns).sum()) // steps

    wall_ns = int((windows.end_ns - windows.start_ns).sum()) // steps
    overlap_ns = mean(intervals.intersect(compute, talking))
    computation_ns = mean(intervals.subtract(compute, talking))
    communication_ns = mean(intervals.subtract(talking, compute))
    return WorkerShare(
        span=span.ref,
        steps=len(windows),
        wall_ns=wall_ns,
        computation_ns=computation_ns,
        overlap_ns=overlap_ns,
        communication_ns=communication_ns,
        other_ns=wall_ns - computation_ns - overlap_ns - communication_ns,
        synchronizing_ns=mean(intervals.subtract(waits, tails)) if matched.any() else None,
        transferring_ns=mean(tails) if matched.any() else None,
    )


def _match(spans: Sequence[Span], called: Sequence[Calls]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """All calls with what tells them apart (`_MATCH`), and a row for each collective of several workers: `_MATCH`,
    label (of the group), workers, bytes, length and wait (of all), shortest, last (rank of the shortest), apart (its
    ends).

    A call is told by group and number where these are written down, else it is the j-th call of the kind in the step.
    Messages between two ranks have no match, nor have calls without a group where others have one.
    """
    grouped = any(message.group is not None for own in called for message in own.messages)
    parts = []
    for span, found in zip(spans, called, strict=True):
        rows = [
            (
                message.kind,
                message.group.key if message.group is not None else "",
                message.group.name if message.group is not None else None,
                message.bytes,
                message.bytes if message.kind in words.SAME_SIZE and message.bytes is not None else NONE,
                message.kind not in words.POINT_TO_POINT and (message.group is not None or not grouped),
            )
            for message in found.messages
        ]
        numbered = found.sequence >= 0
        part = pl.DataFrame(rows, schema=_MESSAGE, orient="row")[found.message].with_columns(
            pl.Series("begin", found.start_ns),
            pl.Series("length", found.lengths),
            pl.Series("on_host", ~found.on_device),
            pl.Series("sequence", found.sequence),
            pl.Series("span", np.where(numbered, NONE, span.ref.span)),
            pl.Series("step", np.where(numbered, NONE, found.step)),
            pl.when(pl.Series(numbered)).then(NONE).otherwise(pl.col("size")).alias("size"),
            pl.lit(span.ref.process).alias("process"),
            pl.lit(span.ref.rank).alias("rank"),
        )
        parts.append(part)
    # A kernel belongs to the step of its launch. A range of the host may begin late, in the next step on one worker and
    # not on the other: it has a step only where the workers' numbers of calls differ; else their order is better.
    kind, count = ("kind", "group", "sequence", "size", "span"), pl.col("count")
    able = (
        pl.concat(parts)
        .with_row_index("row")
        .with_columns(count=pl.len().over("process", *kind, "able"))
        .with_columns(whole=(count.min().over(*kind, "able") == count.max().over(*kind, "able")) & pl.col("on_host"))
        .with_columns(step=pl.when("whole").then(NONE).otherwise("step"))
        .sort("begin", maintain_order=True)
        .with_columns(nth=pl.when("able").then(pl.int_range(pl.len()).over("process", *kind, "step", "able")))
    )
    length, end = pl.col("length"), pl.col("begin") + pl.col("length")
    table = (
        able.filter("able")
        .group_by(_MATCH, maintain_order=True)
        .agg(
            pl.col("label").first(),
            pl.col("process").n_unique().alias("workers"),
            pl.col("bytes").max(),
            length.sum(),
            length.min().alias("shortest"),
            (length.sum() - length.min() * pl.len()).alias("wait"),
            pl.col("rank").sort_by("length", "rank").first().alias("last"),
            (end.max() - end.min()).alias("apart"),
        )
        .filter(pl.col("workers") > 1)
    )
    return able, table


def _collectives(table: pl.DataFrame) -> tuple[CollectiveOverWorkers, ...]:
    rows = []
    totals = {key: own["length"].sum() for key, own in table.group_by("kind", "group")}
    for key, own in sorted(
        table.group_by("kind", "group", maintain_order=True), key=lambda item: (-totals[item[0]], item[0][0])
    ):
        calls_of_all = int(own["workers"].sum())
        mean_ns = int(own["length"].sum()) / calls_of_all
        transferring_ns = int((own["shortest"] * own["workers"]).sum()) / calls_of_all
        waits = own.group_by("last").agg(pl.col("wait").sum()).filter(pl.col("wait") > 0)
        last = waits.sort("wait", "last", descending=[True, False])["last"]
        rows.append(
            CollectiveOverWorkers(
                name=str(key[0]),
                group=own["label"][0],
                calls=own.height,
                workers=int(own["workers"].max()),  # type: ignore[arg-type]
                total_bytes=None if own["bytes"].null_count() else int(own["bytes"].sum()),
                mean_ns=mean_ns,
                transferring_ns=transferring_ns,
                synchronizing_ns=mean_ns - transferring_ns,
                last_rank=int(last[0]) if len(last) else None,
            )
        )
    return tuple(rows)


def _notes(
    found: Peers,
    missing: list[int],
    spans: Sequence[Span],
    called: Sequence[Calls],
    shortest: Int64,
    matches: pl.DataFrame,
) -> Iterator[str]:
    if missing:
        named = ", ".join(map(str, missing[:_NAMED])) + (" …" if len(missing) > _NAMED else "")
        yield f"no trace of rank {named}: waiting for one of them counts as transfer on the others"
    if found.guessed:
        yield "the traces do not say which ranks they are of: numbers are guessed, and missing ranks are not known"
    silent = sorted({span.ref.worker for span, own in zip(spans, called, strict=True) if not len(own)})
    if silent:
        yield f"no collective in the trace of {', '.join(silent[:_NAMED])}"
    messages = [message for own in called for message in own.messages]
    if any(message.group is None for message in messages):
        yield "collectives without the name of their group are matched in their order within the step"
    if unmatched := int((shortest < 0).sum()):
        yield f"{unmatched} of {len(shortest)} calls have no match on another worker: neither wait nor transfer"
    apart = matches.filter(pl.col("kind").is_in(list(words.SAME_SIZE | {words.ALL_TO_ALL})))["apart"]
    if len(apart) >= _LEAST_ENDS:
        middle_us, most_us = float(apart.median() or 0) / 1e3, float(apart.max() or 0) / 1e3  # type: ignore[arg-type]
        yield (
            f"the workers' ends of one collective lie {middle_us:,.{int(middle_us < 10)}f} us apart at the median, "
            f"{most_us:,.{int(most_us < 10)}f} us at most: their clocks, and when they leave, differ by so much"
        )
    partial = matches.filter(pl.col("workers") < len(found.workers)).height
    groups = {message.group for message in messages}
    if partial and len(groups) == 1:
        yield f"{things(partial, 'collective')} found on some of the workers only"


MAX_RANKS = 1 << 16  # a size of the world beyond this is no size but damage
_APART_NS = 3600 * 10**9  # clocks of the hosts of one run do not differ by an hour

ALONE = "one worker alone: give traces of several ranks of the same run, or the folder with them"


class Peers(Struct, frozen=True):
    """The spans of workers of one run, by worker; `missing` are ranks that are known of and have no trace."""

    workers: tuple[tuple[Span, ...], ...]
    missing: tuple[int, ...]
    guessed: bool  # nothing says which ranks the files are of


def peers(base: Base) -> Peers | str:
    """The workers to compare, or why there are none."""
    by_process: dict[str, list[Span]] = {}
    for span in base.spans:
        by_process.setdefault(span.ref.process, []).append(span)
    recorded = bool(base.tables.manifests) or base.tables.journal.height > 0
    workers = list(by_process.values())
    if recorded:  # of ranks that were started several times, what ran last
        workers.sort(key=_begin)
        last = {spans[0].ref.rank: spans for spans in workers}
        workers = [last[rank] for rank in sorted(last)]
    if len(workers) < 2:
        return ALONE
    claims = {
        (process, trace): rank
        for process, trace, rank in base.tables.traces.select("process", "trace", "claimed_rank").iter_rows()
    }
    claimed = [claims.get((spans[0].ref.process, spans[0].ref.trace)) for spans in workers]
    reason = None if recorded else _not_one_run(workers, claimed)
    if reason is not None:
        return reason
    ranks = {spans[0].ref.rank for spans in workers}
    sizes = [info.world_size for info in base.tables.ranks] + [_world_size(spans) for spans in workers]
    size = max((size for size in sizes if size is not None), default=0)
    missing = tuple(rank for rank in range(size) if rank not in ranks) if size <= MAX_RANKS else ()
    return Peers(tuple(tuple(spans) for spans in workers), missing, guessed=not recorded and None in claimed)


def _not_one_run(workers: Sequence[list[Span]], claimed: Sequence[int | None]) -> str | None:
    folders = list(dict.fromkeys(spans[0].ref.run for spans in workers))
    repeated = [rank for rank, count in Counter(rank for rank in claimed if rank is not None).items() if count > 1]
    if len(folders) < 2:
        if repeated:
            named = _some(
                [spans[0].ref.worker for spans, rank in zip(workers, claimed, strict=True) if rank in repeated]
            )
            return f"two runs in one folder: {named} are all rank {min(repeated)}; give the files of one run"
    else:
        several = f"{len(workers)} workers of {len(folders)} folders ({_some(folders)})"
        if repeated:
            return f"{several}, of which two are rank {min(repeated)}: different runs; give one of them"
        if None in claimed:
            return f"{several}, and not all say which rank they are: give the folder of one run"
        times = sorted((_begin(spans), max(int(span.end_ns.max()) for span in spans)) for spans in workers)
        if any(after[0] - before[1] > _APART_NS for before, after in pairwise(times)):
            return f"{several}, recorded more than an hour apart: different runs; give one of them"
    sizes = {size for spans in workers if (size := _world_size(spans)) is not None}
    if len(sizes) > 1:
        return (
            f"workers of runs of different sizes ({_some([str(size) for size in sorted(sizes)])} ranks): give one run"
        )
    return None


def _world_size(spans: Sequence[Span]) -> int | None:
    told = (span.metadata.get("distributedInfo") for span in spans)
    sizes = (info.get("world_size") for info in told if isinstance(info, dict))
    return next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0), None)


def _begin(spans: Sequence[Span]) -> int:
    return min(int(span.start_ns.min()) for span in spans)  # no span is empty: they are made of rows


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
