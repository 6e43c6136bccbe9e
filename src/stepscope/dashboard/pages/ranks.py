"""The page of ranks: who holds the others up, hosts or ranks along the run, and how far their clocks can be trusted.

A thousand ranks are shown by host or by stage; the ranks of one host stand behind a choice, so that neither the page
nor a file grows with their number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from msgspec.structs import asdict

from stepscope.analyze.ranks import maps
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.model.ranks import RankMap, RanksVerdict, Straggler
from stepscope.report import words

ROWS = 130  # of a map: a thousand ranks lie on so many hosts
EMBEDDED_COLUMNS = 60
HOSTS, STAGES, LATE = "", "stages", "late"
RECORD = (
    "stepscope reduce RUN on each host (srun --ntasks-per-node=1 stepscope reduce RUN) reduces a run of many ranks "
    "where it lies; stepscope analyze then judges all of them."
)
FACTS = (
    "Ranks judged: ranks; Ranks of the job: world_size; Steps: steps; Steps of windows: windowed_steps; "
    "Mean step: step_ms; Smallest effect that would show: least_ms"
)
_LATE = blocks.columns(
    "What: what; Cause: cause; Costs: cost_ms ms bar; Works longer by: excess_ms ms; Comes last in: share_of_steps "
    "share; Compared with: peers; Cause known by: cause_source; Line: place",
    cause=lambda row: words.term(row["cause"]),
)
_BEHIND = blocks.columns(
    "Host: host; Ranks: ranks count; Longest of its ranks: most_ms ms bar signed; Rank: rank; Mean: mean_ms ms signed"
)
_CLOCK = blocks.columns(
    "Host: host; From step: window count; Ahead by (us): offset_us number signed; Known to (us): bound_us number; "
    "Faster by (ppm): rate_ppm number signed; Collectives: calls count; Note: reason"
)


class MapRow(NamedTuple):
    """A row of a map: the mean or the longest of some ranks."""

    name: str
    members: Sequence[int]  # positions


def empty(context: PageContext) -> bool:
    """Whether ranks were not judged by reduced tables."""
    return context.base.many_ranks is None


def build(context: PageContext) -> list[Block]:
    """The blocks of the page."""
    verdict = context.base.many_ranks
    if verdict is None or context.base.reduced is None:
        few = len(context.base.analysis.run.ranks) > 1
        why = (
            "All ranks were read in full: the page Steps has them side by side."
            if few
            else "One rank was recorded, or the run was not reduced."
        )
        return [blocks.empty("Ranks were not judged by reduced tables", why, RECORD)]
    reduced = context.base.reduced
    made = [
        blocks.text(blocks.sentence(verdict.reason), "warning" if verdict.stragglers else "plain"),
        blocks.figures(blocks.measures(verdict, FACTS)),
        *_said(verdict),
        *_stragglers(context, verdict),
    ]
    columns = EMBEDDED_COLUMNS if context.embedded else maps.COLUMNS
    found = traced.kept(context.base, ("rank_maps", columns), lambda: maps.rank_maps(reduced, columns))
    made += _maps(context, verdict, found)
    if found:
        made += _hosts(context, found[-1])
    rows = [asdict(clock) for clock in verdict.clocks]
    made += blocks.rows_table(context, "clocks", "Clocks of hosts, against the first one's", "HostClock", _CLOCK, rows)
    return made


def _said(verdict: RanksVerdict) -> Iterator[Block]:
    yield blocks.text(blocks.sentence(f"layout: {verdict.layout}"), "note")
    if verdict.missing:
        text = f"Nothing was recorded of {words.things(len(verdict.missing), 'rank')}: {_numbers(verdict.missing)}."
        yield blocks.text(text, "warning")


def _numbers(ranks: Sequence[int], most: int = 16) -> str:
    return ", ".join(map(str, ranks[:most])) + (" …" if len(ranks) > most else "")


def _what(late: Straggler) -> str:
    if late.kind == "stage":
        return f"stage {late.stage}"
    if late.kind in ("host", "link") and late.hosts:
        return f"{late.kind}: {late.hosts[0]}"
    if late.kind == "link":
        return f"link of group {late.group}"
    if late.kind == "rank":
        return f"rank {_numbers(late.ranks, 4)}"
    return "another rank in each step" if late.kind == "rotating" else "all ranks together"


def _stragglers(context: PageContext, verdict: RanksVerdict) -> list[Block]:
    rows = [{**asdict(late), "what": _what(late), "place": _place(late)} for late in verdict.stragglers]
    return blocks.rows_table(context, "late", "Who holds the others up", "Straggler", _LATE, rows)


def _place(late: Straggler) -> dict[str, object] | None:
    return asdict(late.place) if late.place is not None else None


def _maps(context: PageContext, verdict: RanksVerdict, found: Sequence[RankMap]) -> Iterator[Block]:
    if not found:
        return
    first = found[0]
    options = [(HOSTS, "by host")]
    if first.stages is not None and len(set(first.stages)) > 1:
        options.append((STAGES, "by pipeline stage"))
    if verdict.suspects:
        options.append((LATE, "the late ranks and their peers"))
    hosts = list(dict.fromkeys(first.hosts))
    options += [(f"host:{host}", f"the ranks of {host}") for host in hosts]
    chosen = context.choice("by", [key for key, _ in options])
    if not context.embedded:
        yield from traced.choice(context, "Rows", "by", chosen, options)
    views = [chosen] if not context.embedded else [key for key, _ in options if key in (HOSTS, STAGES, LATE)]
    for view in views:
        for number, one in enumerate(found):
            yield _map(f"map-{view.partition(':')[0] or 'hosts'}-{number}", one, _rows(one, verdict, view))


def _rows(one: RankMap, verdict: RanksVerdict, view: str) -> list[MapRow]:
    if view == STAGES and one.stages is not None:
        return _grouped(one.stages, lambda stage: f"stage {stage}")
    if view == LATE:
        wanted = set(verdict.suspects)
        return [MapRow(f"rank {rank}", [row]) for row, rank in enumerate(one.ranks) if rank in wanted]
    if view != HOSTS:
        host = view.partition(":")[2]
        rows = [row for row, name in enumerate(one.hosts) if name == host]
        return [MapRow(f"rank {one.ranks[row]}", [row]) for row in rows]
    return _grouped(one.hosts, str)


def _grouped(keys: Sequence[object], name: Callable[[object], str]) -> list[MapRow]:
    members: dict[object, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    return [MapRow(name(key), rows) for key, rows in sorted(members.items(), key=lambda item: _natural(name(item[0])))]


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """node2 before node10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,9})", name))


def _map(id: str, one: RankMap, rows: Sequence[MapRow]) -> Block:
    left_out = len(rows) - ROWS
    if left_out > 0:  # those that stand out at all
        rows = sorted(
            rows, key=lambda row: -max((_most(one, row, at) or 0.0 for at in range(len(one.steps))), default=0)
        )
        rows = sorted(rows[:ROWS], key=lambda row: row.members[0])
    several = any(len(row.members) > 1 for row in rows)
    what = "the one of its ranks that works longest" if several else "the rank"
    return blocks.chart(
        id,
        one.title,
        "heat",
        sentence=f"How much longer {what} works than its peers, in milliseconds a step, along the run: {one.source}.",
        x=("step", "number", one.steps),
        y=("ms a step beyond the peers", "ms"),
        series=[blocks.series(row.name, "ms", [_most(one, row, at) for at in range(len(one.steps))]) for row in rows],
        notes=[f"{words.things(left_out, 'row')} in which less happens are left out"] if left_out > 0 else (),
    )


def _most(one: RankMap, row: MapRow, at: int) -> float | None:
    return max(_known([one.excess_ms[member][at] for member in row.members]), default=None)


def _hosts(context: PageContext, one: RankMap) -> list[Block]:
    """Every host with the one of its ranks that works longest, over the whole run."""
    rows: list[dict[str, Any]] = []
    for name, members in _grouped(one.hosts, str):
        known = [(fmean(cells), one.ranks[row]) for row in members if (cells := _known(one.excess_ms[row]))]
        if known:
            most_ms, rank = max(known)
            mean_ms = fmean(value for value, _ in known)
            rows.append({"host": name, "ranks": len(members), "most_ms": most_ms, "rank": rank, "mean_ms": mean_ms})
    rows.sort(key=itemgetter("most_ms"), reverse=True)
    title = f"Hosts, by {one.title[0].lower()}{one.title[1:]}"
    return blocks.rows_table(context, "hosts", title, "RankMap", _BEHIND, rows, sorted_by="longest first")


def _known(cells: Sequence[float | None]) -> list[float]:
    return [cell for cell in cells if cell is not None]
