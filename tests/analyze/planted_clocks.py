"""Collectives of hosts whose clocks are known to be wrong, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stepscope.engine.clocks import Clocks, Members, Piece

START_NS = 1_790_000_000_000_000_000
KINDS = ("all_reduce", "all_gather", "send", "recv", "broadcast")
SMALL, LARGE = 512, 2**28


class Hosts:
    """Hosts of `per_host` ranks, in steps of a second; `call` adds what all ranks or some take part in.

    Ends of small calls deviate by 30 us for each host and call and by 10 us for each rank, 3 % are 1 to 3 ms late;
    those of large ones lie on a wave of 3 ms round the ring, whose phase is another each time.
    """

    def __init__(self, hosts: int = 4, per_host: int = 4, *, seed: int = 0, offset_ns: float = 50e6) -> None:
        self.hosts, self.rng = hosts, np.random.default_rng(seed)
        self.rank = np.arange(hosts * per_host)
        self.host = self.rank // per_host
        self.names = tuple(f"node{number}" for number in range(hosts))
        self.offset = self.rng.uniform(-offset_ns, offset_ns, hosts)
        self.rate = self.rng.uniform(-30e-6, 30e-6, hosts)
        self.steps: list[tuple[int, float, float]] = []  # host, true time and amount (ns)
        self.columns: dict[str, list[Any]] = {name: [] for name in Members.__struct_fields__ if name != "kinds"}
        self.calls = 0

    def ahead(self, host: Any, true_ns: Any) -> Any:
        """What clocks of hosts show more than the true time, which is in ns since the first step."""
        ahead = self.offset[host] + self.rate[host] * np.asarray(true_ns)
        for stepped, at_ns, by_ns in self.steps:
            ahead = ahead + np.where((np.asarray(host) == stepped) & (np.asarray(true_ns) >= at_ns), by_ns, 0.0)
        return ahead

    def call(
        self, true_ns: float, kind: str = "all_reduce", size: int = SMALL, ranks: Sequence[int] | None = None, *,
        window: int = 0, group: int = 0, work_ns: Callable[[Any], Any] | None = None, on_device: bool = True,
    ) -> None:  # fmt: skip
        """`work_ns`: of ranks, by how much later each ends than it was let go."""
        rank = self.rank if ranks is None else np.asarray(ranks)
        host, count = self.host[rank], len(rank)
        start = true_ns - self.rng.exponential(2e6, count)
        end = np.full(count, start.max() + (2e7 if size == LARGE else 3e4))
        if size == LARGE:
            end += 1.5e6 * (1 + np.sin(2 * np.pi * (host / self.hosts + self.rng.uniform())))
        else:
            end += np.abs(self.rng.normal(0, 3e4, self.hosts))[host] + np.abs(self.rng.normal(0, 1e4, count))
        end += (self.rng.random(count) < 0.03) * self.rng.uniform(1e6, 3e6, count)
        if work_ns is not None:
            end += work_ns(rank)
        self.add(rank, start, end, [kind] * count, size, window=window, group=group, on_device=on_device)

    def add(
        self, rank: Any, start: Any, end: Any, kinds: Sequence[str], size: int, *,
        window: int, group: int, on_device: bool = True,
    ) -> None:  # fmt: skip
        """One call by its true times."""
        host = self.host[rank]
        shown = {
            name: (START_NS + true + self.ahead(host, true)).astype(np.int64)
            for name, true in (("start_ns", start), ("end_ns", end))
        }
        row = {
            "host": host, "rank": rank, "window": window, "step": int(np.max(end) // 1e9), "call": self.calls,
            "group": group, "kind": [KINDS.index(kind) for kind in kinds], "bytes": size, "on_device": on_device,
            **shown,
        }  # fmt: skip
        for name, value in row.items():
            self.columns[name].append(np.broadcast_to(value, len(rank)))
        self.calls += 1

    def window(self, number: int = 0, *, steps: int = 20, at_s: float = 0.0, **more: Any) -> Hosts:
        """A step of a second holds a small all-reduce and a small all-gather of all ranks."""
        for step in range(steps):
            for place, kind in enumerate(KINDS[:2]):
                self.call((at_s + step + 0.3 + 0.3 * place) * 1e9, kind, window=number, **more)
        return self

    def members(self, keep: Callable[[dict[str, Any]], Any] | None = None) -> Members:
        """All calls; `keep` says of the columns which rows were recorded."""
        table: dict[str, Any] = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        kept = np.ones(len(table["call"]), bool) if keep is None else keep(table)
        order = self.rng.permutation(np.flatnonzero(kept))
        types = {name: bool if name == "on_device" else np.int64 for name in table}
        return Members(**{name: values[order].astype(types[name]) for name, values in table.items()}, kinds=KINDS)

    def error(self, clocks: Clocks, piece: Piece) -> float:
        """How far the offset of a piece is from the truth, ns."""
        assert piece.offset_ns is not None
        reference = clocks.reference[piece.window]
        true = piece.middle_ns - START_NS - self.offset[piece.host]
        return float(piece.offset_ns - self.ahead(piece.host, true) + self.ahead(reference, true))
