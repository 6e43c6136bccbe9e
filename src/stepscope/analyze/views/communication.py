"""Collectives of one rank: calls, sizes, bandwidth, and how much of their time nothing else hides.

On a device a call is a kernel. What it carried stands in the arguments of the kernel or of `record_param_comms` around
its launch; in older traces only the shapes and types of the operators around the launch tell. Backends that work on the
host (gloo) write a range for each call, with the shapes and types of its inputs.

What the devices compute hides communication; in a trace without work of a device, what the host's operators compute. A
moment in which several collectives run is exposed once: it belongs to the one that began first, kernels before what ran
on the host. So the exposed time of all kernels is the length of the set that `analyze.device` calls exposed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.views.kernels import judged
from stepscope.engine import collective_names as words
from stepscope.engine import intervals, slice_tree
from stepscope.engine.device_work import COMMUNICATION, FILL, KERNEL, Work, work
from stepscope.engine.intervals import Intervals
from stepscope.engine.spans import Base, Span
from stepscope.model.views import CollectiveRow
from stepscope.tables import categories
from stepscope.tables.arrays import NONE, Bools, Int32, Int64, own_starts

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
        rows += sorted(_rows(span), key=lambda row: (-row.total_ns, row.name, row.message_bytes or 0))
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
    operators = span.is_operator & ~_of_collectives(span)
    return intervals.union(span.start_ns[operators], span.ends(operators))


def _of_collectives(span: Span) -> Bools:
    """Host slices that call a collective, lie in such a call, or hold one: none of them computes."""
    flags = on_host(span, words.is_collective_call)
    if not flags.any():
        return flags
    inside = slice_tree.self_or_ancestor(span.parent, flags) >= 0
    return inside | slice_tree.ancestors(span.parent, np.flatnonzero(flags))


def _rows(span: Span) -> Iterator[CollectiveRow]:
    done = work(span)
    found = calls(span, done)
    if not len(found):
        return
    compute = computation(span, done)
    lengths = found.end_ns - found.start_ns
    overlapped = intervals.covered(compute, found.start_ns, found.end_ns)
    exposed = exposures(found, compute)
    for code, message in enumerate(found.messages):
        own = found.message == code
        yield _row(span, message, lengths[own], int(overlapped[own].sum()), int(exposed[own].sum()))


def exposures(found: Calls, compute: Intervals) -> Int64:
    """Of each call the time in which neither anything was computed nor an earlier collective ran, ns."""
    result = np.zeros(len(found), np.int64)
    busy = compute
    for own in (found.on_device, ~found.on_device):
        rows = np.flatnonzero(own)
        rows = rows[np.argsort(found.start_ns[rows], kind="stable")]
        starts, ends = found.start_ns[rows], found.end_ns[rows]
        if not len(rows):
            continue
        begins = own_starts(starts, ends)
        ends = np.maximum(ends, begins)
        result[rows] = ends - begins - intervals.covered(busy, begins, ends)
        busy = intervals.merge(busy, intervals.union(starts, ends))
    return result


def _row(span: Span, message: Message, lengths: Int64, overlapped_ns: int, exposed_ns: int) -> CollectiveRow:
    count, total_ns = len(lengths), int(lengths.sum())
    group = message.group
    algorithm = bus = None
    if message.bytes and total_ns:
        algorithm = message.bytes * count * _NS_PER_S / total_ns
        factor = words.bus_factor(message.kind, group.size) if group is not None and group.size else None
        bus = algorithm * factor if factor is not None else None
    return CollectiveRow(
        span=span.ref,
        name=message.kind,
        library=message.library,
        group=group.name if group is not None else None,
        group_size=group.size if group is not None else None,
        dtype=message.dtype,
        message_bytes=message.bytes,
        calls=count,
        total_bytes=message.bytes * count if message.bytes is not None else None,
        total_ns=total_ns,
        mean_ns=total_ns / count,
        min_ns=int(lengths.min()),
        max_ns=int(lengths.max()),
        overlapped_ns=overlapped_ns,
        exposed_ns=exposed_ns,
        algorithm_bytes_per_s=algorithm,
        bus_bytes_per_s=bus,
    )


MAX_WAY = 12  # slices from a launch outwards in which its collective is looked for
_LISTED_CHARS = 32  # of the ranks of a group in its name
_NO_DESCRIPTION = ("", "undefined")
_SEQUENCE = r'"Seq":(-?\d{1,18})'
_SEQUENCE_PART = r',"Seq":-?\d{1,18}|"Seq":-?\d{1,18},?'


class Group(Struct, frozen=True):
    """A process group. `key` tells groups apart on all ranks: names repeat, in groups of other ranks."""

    key: str
    name: str
    size: int | None
    ranks: tuple[int, ...] | None


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


_EMPTY = np.empty(0, np.int64)
_NOTHING = Calls(_EMPTY, _EMPTY, np.empty(0, bool), np.empty(0, np.int32), (), _EMPTY, _EMPTY)


class _Sources(Struct, frozen=True):
    """Rows that tell of each call, -1 for none: arguments, the backend's range, the operator around it."""

    arguments: Int64
    backend: Int64
    operator: Int64


def calls(span: Span, work: Work) -> Calls:
    """All collectives of the trace: kernels first, then those that ran on the host."""
    kernels = np.flatnonzero(work.kind == COMMUNICATION)
    launched = work.rows[kernels]
    host = np.flatnonzero(on_host(span, words.runs_on_host))
    rows = np.concatenate([launched, host])
    if not len(rows):
        return _NOTHING
    told = span.series("collective").is_not_null().to_numpy()
    found = _around(span, launched, work.launch[kernels], told)
    nothing = np.full(len(host), NONE, np.int64)
    sources = _Sources(
        np.concatenate([found.arguments, np.where(told[host], host, NONE)]),
        np.concatenate([found.backend, host]),
        np.concatenate([found.operator, nothing]),
    )
    message, messages, sequence = _described(span, rows, sources)
    return Calls(
        start_ns=span.start_ns[rows],
        end_ns=span.ends(rows),
        on_device=np.arange(len(rows)) < len(launched),
        message=message,
        messages=messages,
        sequence=sequence,
        step=span.step_numbers[rows],
    )


def on_host(span: Span, test: Callable[[str], bool]) -> Bools:
    """Operators and ranges of the host with a name that passes; only names that occur among them are looked at."""
    calls = span.categories.where(categories.OPERATORS | {categories.ANNOTATION})
    names = span.names
    used = np.zeros(len(names.values) + 1, bool)
    used[names.codes[calls]] = True
    used[NONE] = False
    for code in np.flatnonzero(used):
        used[code] = test(names.values[code])
    return calls & used[names.codes]


def _around(span: Span, kernels: Int64, launches: Int64, told: Bools) -> _Sources:
    """What lies around the launches, from the inside out; the innermost of each sort. `told`: rows with arguments."""
    arguments = np.where(told[kernels], kernels, NONE)
    backend, operator = (np.full(len(kernels), NONE, np.int64) for _ in range(2))
    at = launches
    for _ in range(MAX_WAY):
        inside = at >= 0
        if not inside.any():
            break
        for target, flags in (
            (arguments, inside & told[at]),
            (backend, judged(span.names, at, lambda names: [words.is_backend_range(name) for name in names])),
            (operator, judged(span.names, at, lambda names: [_is_operator(name) for name in names])),
        ):
            new = flags & (target < 0)
            target[new] = at[new]
        at = np.where(inside, span.parent[np.maximum(at, 0)], NONE)
    return _Sources(arguments, backend, operator)


def _is_operator(name: str) -> bool:
    """Operators of collectives that say more than that one is on its way."""
    return words.is_collective_call(name) and not words.is_backend_range(name) and words.kind_of(name) is not None


# --------------------------------------------------------------------------------------------------- descriptions


def _described(span: Span, rows: Int64, sources: _Sources) -> tuple[Int32, tuple[Message, ...], Int64]:
    """For each call its message and its number in the group. Calls with the same texts are described once."""
    arguments = _text(span, "collective", sources.arguments)
    sequence = arguments.str.extract(_SEQUENCE).cast(pl.Int64, strict=False).fill_null(NONE).to_numpy()
    frame = pl.DataFrame(
        {
            "name": _text(span, "name", rows),
            "arguments": arguments.str.replace(_SEQUENCE_PART, ""),
            "range": _text(span, "name", sources.backend),
            "range_dims": _text(span, "shapes", sources.backend),
            "range_types": _text(span, "types", sources.backend),
            "operator": _text(span, "name", sources.operator),
            "dims": _text(span, "shapes", sources.operator),
            "types": _text(span, "types", sources.operator),
        }
    )
    number = frame.select(pl.struct(pl.all()).rank("dense")).to_series().to_numpy().astype(np.int64) - 1
    firsts = np.full(int(number.max()) + 1, NONE, np.int64)
    firsts[number[::-1]] = np.arange(len(number))[::-1]
    groups = Groups(span)
    distinct: dict[Message, int] = {}
    messages = [_message(row, groups) for row in frame[firsts].iter_rows(named=True)]
    codes = np.asarray([distinct.setdefault(message, len(distinct)) for message in messages], np.int32)
    return codes[number], tuple(distinct), sequence


def _text(span: Span, column: str, rows: Int64) -> pl.Series:
    """A text column at these rows, null for row -1."""
    values = span.events[column].gather(np.maximum(rows, 0))
    return values.set(pl.Series(rows < 0), None).alias(column)


def _message(row: Mapping[str, str | None], groups: Groups) -> Message:
    found = _json(row["arguments"])
    arguments: dict[str, Any] = found if isinstance(found, dict) else {}
    texts = [_string(arguments.get("Collective name")), row["range"], row["operator"], row["name"]]
    kinds = (words.kind_of(text) for text in texts if text)
    kind = next((kind for kind in kinds if kind is not None), words.UNKNOWN)
    group = groups.of(arguments)
    dtype, size = _size_of_arguments(arguments)
    if size is None:
        of_operators, size = _size_of_operators(row, kind, group.size if group else None)
        dtype = of_operators or dtype
    libraries = (words.library_of(text) for text in (row["name"], row["range"]) if text)
    return Message(kind, next((name for name in libraries if name), None), group, dtype, size)


def _size_of_arguments(arguments: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """(PyTorch's name of the type, or as it stands there, bytes) by the arguments."""
    dtype = _string(arguments.get("dtype"))
    known = words.type_of(dtype) if dtype else None
    counts = [_count(arguments.get(key)) for key in ("In msg nelems", "Out msg nelems")]
    there = [count for count in counts if count is not None and count <= words.MAX_ELEMENTS]
    if known is None:
        return dtype, None
    return known[0], max(there) * known[1] if there else None


def _size_of_operators(
    row: Mapping[str, str | None], kind: str, group_size: int | None
) -> tuple[str | None, int | None]:
    """(type, bytes) by the tensors that the operator was called with and those of the backend's range, its inputs."""
    inputs = words.tensor_bytes(_json(row["range_dims"]), _json(row["range_types"]))
    tensors = words.tensor_bytes(_json(row["dims"]), _json(row["types"]))
    typed = [(dtype, size) for dtype, size in (*inputs, *tensors) if dtype is not None]
    if not typed:
        return None, None
    dtype = typed[0][0]
    total = sum(size for own, size in inputs if own is not None)
    largest = max((size for own, size in tensors if own is not None), default=0)
    if kind == words.ALL_GATHER and largest <= total:
        # only the input is known; every rank's is as large
        return dtype, total * group_size if group_size else None
    return dtype, max(total, largest)


class Groups:
    """The process groups of a trace."""

    def __init__(self, span: Span) -> None:
        info = span.metadata.get("distributedInfo")
        self._info: Mapping[str, Any] = info if isinstance(info, dict) else {}
        listed = self._info.get("pg_config")
        self._listed = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        self._known: dict[str, Group | None] = {}

    def of(self, arguments: Mapping[str, Any]) -> Group | None:
        """The group that a collective's arguments name; without any, the only one there is."""
        own = {key: value for key, value in arguments.items() if key.startswith(("Process Group", "Group size"))}
        text = json.dumps(own, sort_keys=True)
        if text not in self._known:
            self._known[text] = self._named(own) if own else self._only()
        return self._known[text]

    def _named(self, own: Mapping[str, Any]) -> Group:
        name = _string(own.get("Process Group Name"))
        listed = _json(own["Process Group Ranks"]) if isinstance(own.get("Process Group Ranks"), str) else None
        ranks = _ranks(own.get("Process Group Ranks") if listed is None else listed)
        config = [item for item in self._listed if name is not None and _string(item.get("pg_name")) == name]
        if ranks is None and len(config) == 1:
            ranks = _ranks(config[0].get("ranks"))
        size = _count(own.get("Group size")) or (len(ranks) if ranks else None)
        return _group(name, _string(own.get("Process Group Description")), size, ranks)

    def _only(self) -> Group | None:
        if len(self._listed) == 1 and self._info.get("pg_count", 1) == 1:
            only = self._listed[0]
            ranks = _ranks(only.get("ranks"))
            size = _count(only.get("pg_size")) or (len(ranks) if ranks else None)
            return _group(_string(only.get("pg_name")), _string(only.get("pg_desc")), size, ranks)
        return None


def _group(name: str | None, description: str | None, size: int | None, ranks: tuple[int, ...] | None) -> Group:
    shown = description if description and description not in _NO_DESCRIPTION else name
    members = str(list(ranks)) if ranks is not None else ""
    if len(members) > _LISTED_CHARS or not members:
        members = f"({size} ranks)" if size else ""
    label = " ".join(part for part in (shown, members) if part)
    return Group(key=json.dumps([name, ranks if ranks else size]), name=label, size=size, ranks=ranks)


def _ranks(value: object) -> tuple[int, ...] | None:
    """A list of ranks; None for one that was cut short."""
    if isinstance(value, str):
        value = _json(value)
    if not isinstance(value, list) or not value:
        return None
    ranks = [_count(item) for item in value]
    return tuple(rank for rank in ranks if rank is not None) if None not in ranks else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _json(text: object) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
