"""Which ranks do the same work: their places in replicas, pipeline stages and tensor slots, and their hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.engine.collective_names import POINT_TO_POINT
from stepscope.tables.arrays import Int64
from stepscope.tables.reduced import Group, Reduced

# Words of a group's description, as Megatron, DeepSpeed, torch's DeviceMesh and NeMo write them.
_WORDS = {
    **dict.fromkeys(("tp", "tensor"), "tp"),
    **dict.fromkeys(("pp", "pipeline", "pipe"), "pp"),
    **dict.fromkeys(("dp", "ddp", "data", "fsdp", "replicate", "shard"), "dp"),
    **dict.fromkeys(("cp", "context", "ep", "expert", "embedding", "sp", "dsp", "usp"), "other"),
}


class Layout(Struct, frozen=True):
    """Arrays by position of a rank; -1 where nothing tells its place. `peers`: a number for those that work alike."""

    ranks: Int64  # ascending
    hosts: tuple[str, ...]
    host: Int64  # position in `hosts`
    dp: Int64
    pp: Int64
    tp: Int64
    peers: Int64
    text: str
    peers_text: str
    groups: dict[str, Group]

    @property
    def stages(self) -> int:
        return int(self.pp.max(initial=-1)) + 1

    @property
    def slots(self) -> int:
        return int(self.tp.max(initial=-1)) + 1

    @property
    def waits_inside(self) -> bool:
        """Whether ranks wait for neighbours inside their phases, so that phases tell nothing of their own work."""
        return self.stages > 1 or self.slots > 1

    def peer_groups(self) -> list[Int64]:
        """Positions of each set of ranks that work alike."""
        order = np.argsort(self.peers, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(self.peers[order])) + 1) if len(order) else []

    def at(self, ranks: Sequence[int] | Int64) -> Int64:
        """Positions of ranks' numbers, -1 of those that are not there."""
        wanted = np.asarray(ranks, np.int64)
        if not len(self.ranks):
            return np.full(len(wanted), -1, np.int64)
        row = np.minimum(np.searchsorted(self.ranks, wanted), len(self.ranks) - 1)
        return np.where(self.ranks[row] == wanted, row, -1)

    def members(self, group: Group) -> Int64:
        """Positions of those of a group that were recorded, ascending."""
        members = self.at(sorted(set(group.ranks)))
        return members[members >= 0]

    @property
    def workers(self) -> Int64:
        """By position of a rank: replica * stages + stage, where places are known; each by itself where they are not.

        A worker is a stage of a replica: the ranks of its tensor slots compute together.
        """
        if (self.dp < 0).any():
            return np.arange(len(self.ranks))
        replica = np.unique(self.dp, return_inverse=True)[1].reshape(-1).astype(np.int64)
        return replica * max(self.stages, 1) + np.maximum(self.pp, 0)

    def groups_of_slots(self) -> list[str]:
        """Groups whose recorded members are tensor slots of one worker; of one member alone the group's name tells."""
        workers, found = self.workers, []
        for group in self.groups.values():
            here = self.members(group)
            sure = len(here) > 1 or len(set(group.ranks)) == 1 or axis_of(group.description) == "tp"
            if sure and len(np.unique(workers[here])) == 1:
                found.append(group.id)
        return found


def layout_of(reduced: Reduced) -> Layout:
    known = {rank.rank: rank for host in reduced.hosts for rank in host.ranks}
    ranks = np.array(sorted(known), np.int64)
    hosts = tuple(sorted({host.host for host in reduced.hosts}))
    host_of, number = reduced.host_of, {host: row for row, host in enumerate(hosts)}
    groups = {group.id: group for host in reduced.hosts for group in host.groups}
    told = {axis: [getattr(known[rank], axis) for rank in ranks.tolist()] for axis in ("dp", "pp", "tp")}
    place = {
        axis: np.array([-1 if value is None or not 0 <= value < 2**20 else value for value in values], np.int64)
        for axis, values in told.items()
    }
    source = "recorded"
    if all((values < 0).any() for values in place.values()):
        place = _by_groups(ranks, list(groups.values()), reduced)
        source = "told by the groups' names and members"
    _whole(place)
    dp, pp, tp = place["dp"], place["pp"], place["tp"]
    peers, peers_text = _peers(dp, pp, tp)
    sizes = {axis: len(np.unique(values)) for axis, values in place.items() if len(values) and values[0] >= 0}
    if not any(size > 1 for axis, size in sizes.items() if axis != "dp"):
        text = (
            f"data parallel over {len(ranks)} ranks ({source})" if sizes else "unknown: every rank is compared with all"
        )
    else:
        parts = " x ".join(f"{axis.upper()} {sizes[axis]}" for axis in ("tp", "pp", "dp") if axis in sizes)
        text = f"{parts} ({source})"
    host = np.array([number[host_of[rank]] for rank in ranks.tolist()], np.int64)
    return Layout(ranks, hosts, host, dp, pp, tp, peers, text, peers_text, groups)


def _whole(place: dict[str, Int64]) -> None:
    """A part of the places tells no layout."""
    for values in place.values():
        if (values < 0).any():
            values[:] = -1


def axis_of(description: str) -> str | None:
    """Which part of a layout a group's description names, where it names one alone."""
    words = re.split(r"[^a-z]+", description.lower().partition("_with_")[0])
    found = {_WORDS[word] for word in words if word in _WORDS}
    return found.pop() if len(found) == 1 else None


def _by_groups(ranks: Int64, groups: Sequence[Group], reduced: Reduced) -> dict[str, Int64]:
    place = {axis: np.full(len(ranks), -1, np.int64) for axis in ("dp", "pp", "tp")}
    axes = {group.id: axis_of(group.description) for group in groups}
    if "pp" not in axes.values():
        calls = reduced.scan("collectives").filter(pl.col("kind").is_in(list(POINT_TO_POINT)))
        neighbours = calls.select(pl.col("group").unique()).collect()["group"].to_list()
        axes.update((group, "pp") for group in neighbours if group in axes and axes[group] is None)
    row = {rank: position for position, rank in enumerate(ranks.tolist())}
    # a rank that is in two groups of a kind has its place in the larger: the smaller is a part of it
    for group in sorted(groups, key=lambda group: len(group.ranks)):
        axis = axes[group.id]
        if axis in place and len(group.ranks) > 1:
            for position, rank in enumerate(sorted(set(group.ranks))):
                if rank in row:
                    place[axis][row[rank]] = position
    _whole(place)
    if (place["dp"] < 0).all() and ((place["pp"] >= 0).all() or (place["tp"] >= 0).all()):
        key = np.stack([place["pp"], place["tp"]], axis=1)
        _, kind = np.unique(key, axis=0, return_inverse=True)
        for slot in np.unique(kind):
            place["dp"][kind == slot] = np.arange(int((kind == slot).sum()))
    return place


def _peers(dp: Int64, pp: Int64, tp: Int64) -> tuple[Int64, str]:
    """With whom each is compared: those of the same stage and slot where there are such, else those of its stage."""
    if len(dp) and (pp.max() > 0 or tp.max() > 0):
        _, slot = np.unique(np.stack([pp, tp], axis=1), axis=0, return_inverse=True)
        slot = slot.reshape(-1).astype(np.int64)
        sizes = np.bincount(slot)
        if np.median(sizes) >= 2:
            parts = [name for name, of in (("pipeline stage", pp), ("tensor slot", tp)) if of.max() > 0]
            others = int(np.median(sizes)) - 1
            return slot, f"the same {' and '.join(parts)} in {others} other replica{'s' if others > 1 else ''}"
        if pp.max() > 0:
            alike = "the same pipeline stage" if np.bincount(pp).max() > 1 else "no other: each stage is there once"
            return pp.copy(), f"{alike}; there is no other replica"
        return np.zeros(len(dp), np.int64), "all other ranks: there is no other replica"
    known = len(dp) > 0 and max(dp.max(), pp.max(), tp.max()) >= 0
    return np.zeros(len(dp), np.int64), "all other ranks" if known else "all other ranks: the layout is not known"
