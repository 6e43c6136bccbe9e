"""The page of ranks: who holds the others up, hosts or ranks along the run, and how far their clocks can be trusted.

A thousand ranks are shown by host or by stage; the ranks of one host stand behind a choice, so that neither the page
nor a file grows with their number. Ranks that were all read in full are shown side by side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from msgspec.structs import asdict

from stepscope.analyze.ranks import maps
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.model.machine import RanksFacts
from stepscope.model.ranks import RankMap, RanksVerdict, Straggler
from stepscope.report import sentences, words

ROWS = 130  # of a map: a thousand ranks lie on so many hosts
EMBEDDED_COLUMNS = 60
EMBEDDED_CELLS = 130_000  # of all hosts' ranks in a file: a thousand ranks have 120,000 in two maps, some 300 KB
PARAM = "by"
HOSTS, STAGES, LATE, HOST = "", "stages", "late", "host-"
RECORD = (
    "A run of several ranks: one launcher on each node. stepscope reduce RUN on each node (srun --ntasks-per-node=1 "
    "stepscope reduce RUN) reduces one of many ranks where it lies."
)
FACTS = (
    "Ranks judged: ranks; Ranks of the job: world_size; Steady steps: steps; Steps of windows: windowed_steps; "
    "Mean step: step_ms; Smallest effect that would show: least_ms"
)
IN_FULL = (
    "Steps side by side: steps; Works longest: slowest number; Longer than the others: excess_ms; "
    "The others wait: waited_ms; Longest of all in: slowest_share"
)
_LATE = blocks.columns(
    "What: what; Cause: cause; Costs a step: cost_ms ms bar; Works longer by: excess_ms ms; "
    "Comes last in: share_of_steps share; Line: place; Cause known by: cause_source",
    cause=lambda row: words.term(row["cause"]),
)
_BEHIND = blocks.columns(
    "Host: host; Ranks: ranks count; Longest of its ranks: most_ms ms bar signed; Rank: rank number; "
    "Mean of its ranks: mean_ms ms signed",
    help={
        "most_ms": "How much longer the rank works than its peers, in a mean step of the whole run.",
        "mean_ms": "The same as the mean over the ranks of the host.",
    },
)
_CLOCK = blocks.columns(
    "Host: host; From step: window number; Ahead by (µs): offset_us number signed; Known to ± (µs): bound_us number; "
    "Faster by (ppm): rate_ppm number signed; Collectives: calls count; Note: reason"
)
_WORK = blocks.columns(
    "Rank: rank number; Host: host; Mean step: wall_ms ms; Own work: own_ms ms bar; "
    "In phases of the exchange: exchange_ms ms; Samples a step: samples number"
)


class MapRow(NamedTuple):
    """A row of a map: the mean or the longest of some ranks."""

    name: str
    members: Sequence[int]  # positions


def empty(context: PageContext) -> bool:
    """Whether there are no ranks side by side."""
    return context.base.many_ranks is None and context.base.analysis.ranks is None


def build(context: PageContext) -> list[Block]:
    """The blocks of the page."""
    verdict = context.base.many_ranks
    if verdict is not None:
        return list(_many(context, verdict))
    facts = context.base.analysis.ranks
    return [_why_empty(context)] if facts is None else list(_few(context, facts))


def choices(context: PageContext) -> Iterator[tuple[Mapping[str, str], list[Block]]]:
    """Of a file, what the choice of rows shows beside the first one, as far as there is room."""
    verdict, found = context.base.many_ranks, _maps_of(context)
    if verdict is None or not found:
        return
    for key, _ in _options(context, verdict, found)[1:]:
        yield {PARAM: key}, list(_view(context, verdict, found, key))


def _why_empty(context: PageContext) -> Block:
    ranks = context.base.analysis.run.ranks
    if len(ranks) > 1:
        why = f"Too few steps that count are known of all {len(ranks)} ranks; the page Steps shows each of them."
        return blocks.empty("Ranks cannot be laid side by side", why, RECORD)
    return blocks.empty(
        "One rank alone", "Nothing stands beside the only rank of this run; see the page Steps.", RECORD
    )


def _few(context: PageContext, facts: RanksFacts) -> Iterator[Block]:
    """Ranks that were all read in full."""
    source = facts.exchange_source
    waiting = ", ".join(map(words.term, facts.exchange))
    yield blocks.figures(blocks.measures(facts, IN_FULL))
    text = f"All ranks were read in full. They wait for each other in: {waiting} ({source}); the rest is own work."
    yield blocks.text(text, "note", blocks.link("Findings say whether that is a loss", "findings"))
    host_of = {rank.rank: rank.host for rank in context.base.tables.ranks}
    rows = [{**asdict(work), "host": host_of.get(work.rank)} for work in facts.ranks]
    yield from (
        _map(f"map-{number}", one, _by_rank(one, range(len(one.ranks)))) for number, one in enumerate(_maps_of(context))
    )
    yield from blocks.rows_table(context, "ranks", "Ranks side by side", "RankWork", _WORK, rows)


def _many(context: PageContext, verdict: RanksVerdict) -> Iterator[Block]:
    found = _maps_of(context)
    options = _options(context, verdict, found)
    chosen = context.choice(PARAM, [key for key, _ in options])
    for number, text in enumerate(sentences.many_ranks(context.base.report(source=context.source))):
        tone = "warning" if verdict.stragglers else "plain"
        yield blocks.text(blocks.sentence(text), "note" if number else tone)
    yield blocks.text(blocks.sentence(f"layout: {verdict.layout}"), "note")
    yield blocks.figures(blocks.measures(verdict, FACTS))
    yield from _stragglers(context, verdict)
    yield from _view(context, verdict, found, chosen)
    if found:
        yield from _hosts(context, found[0])
    rows = [asdict(clock) for clock in verdict.clocks]
    title = "Clocks of hosts, against that of the first"
    yield from blocks.rows_table(context, "clocks", title, "HostClock", _CLOCK, rows)
    if not rows:
        yield blocks.text("Clocks of hosts were not compared: no windows in which they met in collectives.", "note")


def _maps_of(context: PageContext) -> tuple[RankMap, ...]:
    columns = EMBEDDED_COLUMNS if context.embedded else maps.COLUMNS
    made: tuple[RankMap, ...] = traced.kept(
        context.base, ("rank_maps", columns), lambda: context.base.rank_maps(columns)
    )
    return made


def _options(context: PageContext, verdict: RanksVerdict, found: Sequence[RankMap]) -> list[tuple[str, str]]:
    """(value, label) of the rows that can be chosen; of a file, hosts as far as there is room, the latest first."""
    if not found:
        return [(HOSTS, "by host")]
    first = found[0]
    options = [(HOSTS, "by host")]
    if first.stages is not None and len(set(first.stages)) > 1:
        options.append((STAGES, "by pipeline stage"))
    if verdict.suspects:
        options.append((LATE, "the late ranks and their peers"))
    hosts = [(f"{HOST}{number}", row) for number, row in enumerate(_by_host(first))]
    if context.embedded:
        left, kept = EMBEDDED_CELLS, set()
        for key, row in sorted(hosts, key=lambda each: -_longest(first, each[1].members)[0]):
            left -= sum(len(row.members) * len(one.steps) for one in found)
            if left >= 0:
                kept.add(key)
        hosts = [(key, row) for key, row in hosts if key in kept]
    return [*options, *((key, f"the ranks of {row.name}") for key, row in hosts)]


def _view(context: PageContext, verdict: RanksVerdict, found: Sequence[RankMap], chosen: str) -> Iterator[Block]:
    """The choice of rows and the maps of what is chosen."""
    options = _options(context, verdict, found)
    if found and len(options) > 1:
        yield blocks.choice("Rows", PARAM, chosen, options)
    for number, one in enumerate(found):
        yield _map(f"map-{number}", one, _rows(one, verdict, chosen), verdict.least_ms)
    shown = sum(one.startswith(HOST) for one, _ in options)
    if found and context.embedded and shown < len(set(found[0].hosts)):
        text = f"This file has the ranks of {words.things(shown, 'host')}; `stepscope view RUN` shows those of all."
        yield blocks.text(text, "note")


def _what(late: Straggler) -> str:
    if late.kind == "stage":
        return f"stage {late.stage}"
    if late.kind in ("host", "link") and late.hosts:
        return f"{late.kind}: {late.hosts[0]}"
    if late.kind == "link":
        return f"link of group {late.group}"
    if late.kind == "rank":
        more = f" and {len(late.ranks) - 4} more" if len(late.ranks) > 4 else ""
        return f"rank {', '.join(map(str, late.ranks[:4]))}{more}"
    return "another rank in each step" if late.kind == "rotating" else "all ranks together"


def _stragglers(context: PageContext, verdict: RanksVerdict) -> list[Block]:
    rows = [{**asdict(late), "what": _what(late), "place": _place(late)} for late in verdict.stragglers]
    notes = [f"Compared with {peers}." for peers in dict.fromkeys(late.peers for late in verdict.stragglers)]
    return blocks.rows_table(context, "late", "What holds the others up", "Straggler", _LATE, rows, notes=notes)


def _place(late: Straggler) -> dict[str, object] | None:
    return asdict(late.place) if late.place is not None else None


def _rows(one: RankMap, verdict: RanksVerdict, view: str) -> list[MapRow]:
    if view == STAGES and one.stages is not None:
        return _grouped(one.stages, lambda stage: f"stage {stage}")
    if view == LATE:
        wanted = set(verdict.suspects)
        return _by_rank(one, [row for row, rank in enumerate(one.ranks) if rank in wanted])
    hosts = _by_host(one)
    if view.startswith(HOST):
        return _by_rank(one, hosts[int(view.removeprefix(HOST))].members)
    return hosts


def _by_rank(one: RankMap, members: Sequence[int]) -> list[MapRow]:
    return [MapRow(f"rank {one.ranks[row]}", [row]) for row in members]


def _by_host(one: RankMap) -> list[MapRow]:
    return _grouped(one.hosts, str)


def _grouped(keys: Sequence[object], name: Callable[[object], str]) -> list[MapRow]:
    members: dict[object, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    return [MapRow(name(key), rows) for key, rows in sorted(members.items(), key=lambda item: _natural(name(item[0])))]


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """node2 before node10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,9})", name))


def _map(id: str, one: RankMap, rows: Sequence[MapRow], least_ms: float | None = None) -> Block:
    """A map whose colours begin at "as long as the peers"; what is less than `least_ms` stays pale."""
    left_out = len(rows) - ROWS
    if left_out > 0:  # those that stand out at all
        rows = sorted(
            sorted(rows, key=lambda row: -(_summit(one, [row])[0] or 0.0))[:ROWS], key=lambda row: _natural(row.name)
        )
    several = any(len(row.members) > 1 for row in rows)
    what = "the one of its ranks that works longest" if several else "the rank"
    most_ms, row, step = _summit(one, rows)
    said = f" The most is {words.milliseconds(most_ms)}: {row}, from step {step} on." if most_ms is not None else ""
    return blocks.chart(
        id,
        one.title,
        "heat",
        sentence=f"How much longer {what} works than its peers, in ms a step, along the run. From {one.source}.{said}",
        x=("step", "number", one.steps),
        y=("ms a step beyond the peers", "ms"),
        series=[blocks.series(row.name, "ms", [_most(one, row, at) for at in range(len(one.steps))]) for row in rows],
        y_min=0,
        y_max=least_ms,
        help=blocks.meaning("RankMap", "excess_ms"),
        notes=[f"{words.things(left_out, 'row')} in which less happens are left out."] if left_out > 0 else (),
    )


def _summit(one: RankMap, rows: Sequence[MapRow]) -> tuple[float | None, str, int]:
    cells = (
        (most_ms, row.name, one.steps[at])
        for row in rows
        for at in range(len(one.steps))
        if (most_ms := _most(one, row, at)) is not None
    )
    return max(cells, key=itemgetter(0), default=(None, "", 0))


def _most(one: RankMap, row: MapRow, at: int) -> float | None:
    return max(_known([one.excess_ms[member][at] for member in row.members]), default=None)


def _longest(one: RankMap, members: Sequence[int]) -> tuple[float, int | None]:
    """Of these ranks the one that works longest, over the whole run: milliseconds beyond its peers, and its number."""
    known = [(fmean(cells), one.ranks[row]) for row in members if (cells := _known(one.excess_ms[row]))]
    return max(known, default=(float("-inf"), None))


def _hosts(context: PageContext, one: RankMap) -> list[Block]:
    """Every host with the one of its ranks that works longest, over the whole run."""
    rows: list[dict[str, Any]] = []
    for name, members in _by_host(one):
        means = [fmean(cells) for row in members if (cells := _known(one.excess_ms[row]))]
        if means:
            most_ms, rank = _longest(one, members)
            row = {"host": name, "ranks": len(members), "most_ms": most_ms, "rank": rank, "mean_ms": fmean(means)}
            rows.append(row)
    rows.sort(key=itemgetter("most_ms"), reverse=True)
    title = f"Hosts, by {one.title[0].lower()}{one.title[1:]}"
    return blocks.rows_table(context, "hosts", title, "RankMap", _BEHIND, rows, sorted_by="most_ms")


def _known(cells: Sequence[float | None]) -> list[float]:
    return [cell for cell in cells if cell is not None]
