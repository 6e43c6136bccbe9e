"""The pages of ranks: who holds the others up, hosts or ranks along the run, and how far their clocks can be trusted;
and of a hang, the verdict, open calls, calls that differ, and every rank with where it stands.

A thousand ranks are shown by host or by stage; the ranks of one host stand behind a choice, so that neither the page
nor a file grows with their number. Ranks that were all read in full are shown side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from msgspec.structs import asdict

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext
from stepscope.dashboard.summary import hang_rows
from stepscope.model.machine import RanksFacts
from stepscope.model.ranks import RankMap, RanksVerdict, Straggler
from stepscope.read.streams import natural
from stepscope.report import sentences, words

ROWS = 130  # of a map: a thousand ranks lie on so many hosts
EMBEDDED_CELLS = 165_000  # of all hosts' ranks in a file: a thousand ranks have 160,000 in two maps, some 400 KB
PARAM = "by"
HOSTS, STAGES, LATE, HOST = "", "stages", "late", "host-"
RECORD = (
    "A run of several ranks: one launcher on each node. stepscope reduce RUN on each node (srun --ntasks-per-node=1 "
    "stepscope reduce RUN) reduces one of many ranks where it lies."
)
RECORD_HANG = (
    "Set TORCH_FR_BUFFER_SIZE (with NCCL it is 2,000 by itself) and TORCH_FR_DUMP_TEMP_FILE before the job starts, and "
    "give the dumps of all ranks: stepscope analyze DUMPS. docs/hangs.md has more."
)


class MapRow(NamedTuple):
    """A row of a map: the mean or the longest of some ranks."""

    name: str
    members: Sequence[int]  # positions


def ranks_empty(context: PageContext) -> bool:
    return context.base.many_ranks is None and context.base.analysis.ranks is None


def ranks(context: PageContext) -> list[Block]:
    verdict = context.base.many_ranks
    if verdict is not None:
        return list(_many(context, verdict))
    facts, known = context.base.analysis.ranks, context.base.analysis.run.ranks
    if facts is not None:
        return list(_few(context, facts))
    if len(known) > 1:
        why = f"Too few steps that count are known of all {len(known)} ranks; the page Steps shows each of them."
        return [blocks.empty("Ranks cannot be laid side by side", why, RECORD)]
    why = "Nothing stands beside the only rank of this run; see the page Steps."
    return [blocks.empty("One rank alone", why, RECORD)]


def ranks_choices(context: PageContext) -> Iterator[tuple[Mapping[str, str], list[Block]]]:
    """Of a file, what the choice of rows shows beside the first one, as far as there is room."""
    verdict = context.base.many_ranks
    if verdict is None:
        return
    found = context.base.rank_maps
    for key, _ in _options(context, verdict, found)[1:]:
        yield {PARAM: key}, list(_view(context, verdict, found, key))


def _few(context: PageContext, facts: RanksFacts) -> Iterator[Block]:
    source = facts.exchange_source
    waiting = ", ".join(map(words.term, facts.exchange))
    yield blocks.figures(blocks.measures(facts, "ranks-in-full"))
    text = f"All ranks were read in full. They wait for each other in: {waiting} ({source}); the rest is own work."
    yield blocks.text(text, "note", blocks.link("Findings say whether that is a loss", "findings"))
    host_of = {rank.rank: rank.host for rank in context.base.tables.ranks}
    rows = [{**asdict(work), "host": host_of.get(work.rank)} for work in facts.ranks]
    for number, one in enumerate(context.base.rank_maps):
        yield _map(f"map-{number}", one, _by_rank(one, range(len(one.ranks))))
    yield from blocks.rows_table(context, "ranks/ranks", rows)


def _many(context: PageContext, verdict: RanksVerdict) -> Iterator[Block]:
    found = context.base.rank_maps
    options = _options(context, verdict, found)
    chosen = context.choice(PARAM, [key for key, _ in options])
    for number, text in enumerate(sentences.many_ranks(context.base.report(source=context.source))):
        tone = "warning" if verdict.stragglers else "plain"
        yield blocks.text(blocks.sentence(text), "note" if number else tone)
    yield blocks.text(blocks.sentence(f"layout: {verdict.layout}"), "note")
    yield blocks.figures(blocks.measures(verdict, "ranks"))
    late = verdict.stragglers
    rows = [{**asdict(one), "what": _what(one), "place": one.place and asdict(one.place)} for one in late]
    notes = [f"Compared with {peers}." for peers in dict.fromkeys(one.peers for one in late)]
    yield from blocks.rows_table(context, "late", rows, notes=notes)
    yield from _view(context, verdict, found, chosen)
    if found:
        yield from _hosts(context, found)
    yield from blocks.rows_table(context, "clocks", map(asdict, verdict.clocks))
    if not verdict.clocks:
        yield blocks.text("Clocks of hosts were not compared: no windows in which they met in collectives.", "note")


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
    options = _options(context, verdict, found)
    if found and len(options) > 1:
        yield blocks.choice("Rows", PARAM, chosen, options)
    for number, one in enumerate(found):
        yield _map(f"map-{number}", one, _rows(one, verdict, chosen))
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
    return [MapRow(name(key), rows) for key, rows in sorted(members.items(), key=lambda item: natural(name(item[0])))]


def _map(id: str, one: RankMap, rows: Sequence[MapRow]) -> Block:
    """A map whose colours begin at "as long as the peers"."""
    steps = range(len(one.steps))
    cells = {
        row.name: [max(_known(one.excess_ms[member][at] for member in row.members), default=None) for at in steps]
        for row in rows
    }
    left_out = len(rows) - ROWS
    if left_out > 0:  # those that stand out at all
        highest = {name: max(_known(row), default=0.0) for name, row in cells.items()}
        kept = sorted(highest, key=lambda name: -highest[name])[:ROWS]
        cells = {name: cells[name] for name in sorted(kept, key=natural)}
    what = "the one of its ranks that works longest" if any(len(row.members) > 1 for row in rows) else "the rank"
    known = [(most_ms, name, at) for name, row in cells.items() for at in steps if (most_ms := row[at]) is not None]
    said = ""
    if known:
        most_ms, name, at = max(known, key=itemgetter(0))
        said = f" The most is {words.milliseconds(most_ms)}: {name}, from step {one.steps[at]} on."
    return blocks.drawn(
        "map",
        f"How much longer {what} works than its peers, in ms a step, along the run. From {one.source}.{said}",
        one.steps,
        [(name, row, None) for name, row in cells.items()],
        id=id,
        title=one.title,
        y_max=one.notable_ms,
        notes=[f"{words.things(left_out, 'row')} in which less happens are left out."] if left_out > 0 else (),
    )


def _longest(one: RankMap, members: Sequence[int]) -> tuple[float, int | None]:
    """Of these ranks the one that works longest, over the whole run: milliseconds beyond its peers, and its number."""
    known = [(fmean(cells), one.ranks[row]) for row in members if (cells := _known(one.excess_ms[row]))]
    return max(known, default=(float("-inf"), None))


def _hosts(context: PageContext, found: Sequence[RankMap]) -> list[Block]:
    rows: list[dict[str, Any]] = []
    for name, members in _by_host(found[0]):
        rows.append({"host": name, "ranks": len(members)})
        for one in found:
            most_ms, rank = _longest(one, members)
            if rank is not None:
                rows[-1] |= {f"{one.of}_ms": most_ms, f"{one.of}_rank": rank}
    rows.sort(key=lambda row: -max(row.get("host_ms") or 0.0, row.get("device_ms") or 0.0))
    return blocks.rows_table(context, "ranks/hosts", rows)


def _known(cells: Iterable[float | None]) -> list[float]:
    return [cell for cell in cells if cell is not None]


def hang_empty(context: PageContext) -> bool:
    return context.base.hang is None


def hang(context: PageContext) -> list[Block]:
    report = context.base.report(source=context.source)
    view: Any = report.views.get("hang")
    if not view:
        why = "No dump of a flight recorder and no report of NCCL RAS was given."
        return [blocks.empty("No hang was looked for", why, RECORD_HANG)]
    tones = {"head": "warning" if view["causes"] else "plain"}
    made = [blocks.text(blocks.sentence(text), tones.get(tone, tone)) for text, tone in sentences.hang(report)]
    made.append(blocks.figures(blocks.measures(view, "hang", of="HangVerdict")))
    for name in ("causes", "calls", "mismatches", "ranks"):
        rows = hang_rows(view[name], context.shorten)
        made += blocks.rows_table(context, f"hang/{name}", rows, total=view.get(f"{name}_total"))
    return made
