"""Collectives of one source, as the first pass over it meets them: what clocks of hosts are told by."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from msgspec import Struct, field

from stepscope.engine import collective_names as words
from stepscope.export.entry import DECODING_ERRORS, Entry

MAX_CALLS = 50_000  # of a source: 3 MB; more tell a clock no better
MAX_NAMES = 20_000  # of slices; real traces have some thousand
MAX_GROUPS = 4_000
_KERNEL = frozenset(("kernel", "Kernel"))
_ON_HOST = frozenset(("user_annotation", "cpu_op"))
NO_GROUP = ""


class _Arguments(Struct, gc=False, rename=None):
    collective: Any = field(default=None, name="Collective name")
    sent: Any = field(default=None, name="In msg nelems")
    received: Any = field(default=None, name="Out msg nelems")
    dtype: Any = None
    size: Any = field(default=None, name="Group size")
    group: Any = field(default=None, name="Process Group Name")
    description: Any = field(default=None, name="Process Group Description")
    ranks: Any = field(default=None, name="Process Group Ranks")
    first: Any = field(default=None, name="Global rank start")
    stride: Any = field(default=None, name="Global rank stride")
    sequence: Any = field(default=None, name="Seq")
    correlation: Any = None


_DECODE = msgspec.json.Decoder(_Arguments).decode


class Collectives(Struct):
    """Collectives of one source; `group` and `kind` are numbers in `names`, `sequence` is -1 where none is told."""

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    kind: array[int] = field(default_factory=lambda: array("q"))
    group: array[int] = field(default_factory=lambda: array("q"))
    sequence: array[int] = field(default_factory=lambda: array("q"))
    bytes: array[int] = field(default_factory=lambda: array("q"))
    correlation: array[int] = field(default_factory=lambda: array("q"))
    on_device: array[int] = field(default_factory=lambda: array("b"))
    names: dict[str, int] = field(default_factory=dict)
    kinds: dict[tuple[str, bool], str | None] = field(default_factory=dict)  # of slices by name; None of no collective

    def look(self, entry: Entry, start: int, end: int) -> None:
        """Keep a slice that is a collective."""
        category = entry.cat
        if not isinstance(category, str) or len(self.start) >= MAX_CALLS:
            return
        on_device = category in _KERNEL
        if not on_device and category not in _ON_HOST:
            return
        name = entry.name, on_device
        if name not in self.kinds and len(self.kinds) < MAX_NAMES:
            is_one = words.is_collective_kernel(entry.name) if on_device else words.runs_on_host(entry.name)
            self.kinds[name] = words.kind_of(entry.name) or words.UNKNOWN if is_one else None
        kind = self.kinds.get(name)
        if kind is None:
            return
        try:
            told = _DECODE(entry.args)
        except DECODING_ERRORS:
            told = _Arguments()
        if isinstance(told.collective, str):
            kind = words.kind_of(told.collective) or kind
        if kind == words.UNKNOWN or kind in words.POINT_TO_POINT:
            return
        group = NO_GROUP
        if len(self.names) < MAX_GROUPS and any(one is not None for one in (told.group, told.description, told.ranks)):
            # ranks and description tell a group apart on all its members; where ranks are cut short, all that there is
            whole = isinstance(told.ranks, list) or (isinstance(told.ranks, str) and told.ranks.endswith("]"))
            rest = () if whole else (told.group, told.size, told.first, told.stride)
            group = repr((str(told.ranks), str(told.description), *map(str, rest)))[:4096]
        sequence = told.sequence if type(told.sequence) is int and 0 <= told.sequence < 2**62 else -1
        correlation = told.correlation if type(told.correlation) is int and 0 < told.correlation < 2**62 else -1
        for column, value in (
            (self.start, start), (self.end, end), (self.kind, self._number(kind)), (self.group, self._number(group)),
            (self.sequence, sequence), (self.bytes, _bytes(told)), (self.correlation, correlation),
            (self.on_device, int(on_device)),
        ):  # fmt: skip
            column.append(value)

    def _number(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))


def _bytes(told: _Arguments) -> int:
    """The larger of what a member sends and receives; -1: unknown."""
    known = words.type_of(told.dtype) if isinstance(told.dtype, str) else None
    counts = [count for count in (told.sent, told.received) if type(count) is int and 0 <= count <= words.MAX_ELEMENTS]
    return max(counts) * known[1] if known is not None and counts else -1
