"""Files that torch_xla wrote, and folders of them, as the run that they tell of: a rank each, without steps' times.

The ordinal that ends the name of a metrics file is its rank; everything else is of rank 0. Of a rank each thing is told
once: by the log with steps, else by the report with the highest totals, else by the debug log, which adds causes and
lines. Where a duration is known of several compilations together, each has its share by number, and `source` says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from stepscope.errors import UnreadableInputError, readable
from stepscope.files import open_regular
from stepscope.model.findings import Place
from stepscope.read import xla_text
from stepscope.read.raw import Losses, RawRank, RawRun, Row
from stepscope.read.streams import GZIP, Limits, LineRules, common_folder, known_files, read_lines, unpacked
from stepscope.read.xla_text import MARK, Analyses, Compile

LOOKED_AT = 2**18  # bytes of the beginning, and of the end: a script prints its report last
PACKED_LOOKED_AT = 2**20  # of a packed file, whose end cannot be had without the rest
UNPACKED_LOOKED_AT = 2**23
# Logs may be long. They pack to a tenth or a thirtieth: one that packs to less than a two-hundredth is none.
LINES = LineRules(Limits(unpacked_bytes=256 * 2**30), 2**20, "bad_lines", carriage_returns=True)

_ORDINAL = re.compile(r".+\.(\d{1,6})")
# Parts of lines that nothing else writes.
_OUTPUT = re.compile(
    rb"\[MetricsData; step=|Compilation Analysis: |Execution Analysis: |pt-xla-profiler:|Unlowered Op usage summary \("
    rb"|Metric: [\w:.]{1,200}[ \t]*[\r\n]{1,2}[^\r\n]{0,100}?TotalSamples: \d"
    rb"|Counter: (?:aten::|xla::|MarkStep|UncachedCompile|CachedCompile|CreateCompileHandles|CreateXlaTensor)\w{0,100}"
    rb"[ \t]*[\r\n]{1,2}[^\r\n]{0,100}?Value: \d"
)
_NOTHING = "no report or debug log of torch_xla in it; give a file of XLA_METRICS_FILE, a saved met.metrics_report() " \
    "or the output of a run with PT_XLA_DEBUG=1"  # fmt: skip


def is_xla_file(path: Path) -> bool:
    """Whether `path` is a file that holds a report or a debug log of torch_xla, packed or not. Raises OSError."""
    return path.is_file() and any(
        _is_unquoted(text, match.start())
        for text in _parts(path)
        if b"\0" not in text[:4096]
        for match in _OUTPUT.finditer(text)
    )


def _parts(path: Path) -> list[bytes]:
    with open_regular(path, follow=True) as file:
        head = file.read(LOOKED_AT)
        if head.startswith(GZIP):
            return [unpacked(head + file.read(PACKED_LOOKED_AT - len(head)), UNPACKED_LOOKED_AT)]
        if len(head) < LOOKED_AT:
            return [head]
        file.seek(max(LOOKED_AT, path.stat().st_size - LOOKED_AT))
        return [head, file.read(LOOKED_AT)]


def _is_unquoted(text: bytes, at: int) -> bool:
    """Whether no quotation mark stands before in the line: JSON and code that hold such a line are not the log."""
    start = max(text.rfind(b"\n", max(0, at - 400), at), text.rfind(b"\r", max(0, at - 400), at)) + 1
    return at - start <= 300 and not any(mark in text[start:at] for mark in (b'"', b"'", b"`"))


class Content:
    """One file of torch_xla's text, read once: sections with steps, reports, debug lines, in any mixture.

    `report` are the highest totals of its reports outside of sections; what cannot be read is counted in `losses`.
    """

    def __init__(self, path: Path, label: str, losses: Losses) -> None:
        self.path = path
        self.label = label  # for losses and sources
        self.sections = xla_text.Sections()
        self.report = xla_text.Report()
        self.analyses = Analyses()
        self._step: int | None = None
        self._reader = xla_text.ReportReader(self._add_report)
        for lines in read_lines(path, label, losses, LINES):
            for line in lines:
                if line:
                    self._feed(line)
        self._reader.cut()
        self.analyses.end()
        losses.add("bad_lines", label, self._reader.bad_lines)
        losses.add("earlier_runs", label, self.sections.earlier_runs)

    def __bool__(self) -> bool:
        return bool(self.sections.count or self.report or self.analyses)

    @property
    def rank(self) -> int:
        """The ordinal that ends the name of a file that each process writes on its own, else 0."""
        match = _ORDINAL.fullmatch(self.path.name.removesuffix(".gz"))
        return int(match[1]) if match is not None and (self.sections.count or self.report) else 0

    def totals(self) -> xla_text.Report:
        return xla_text.highest([self.sections.report(), self.report] if self.sections.count else [self.report])

    def _feed(self, line: str) -> None:
        if MARK in line:  # most lines of a debug log
            self.analyses.feed(line)
        elif xla_text.HEAD in line and (section := xla_text.SECTION.search(line)) is not None:
            self._reader.cut()
            self._step = int(section[1])
            self._reader.in_section = True
        elif ": " not in line or not self._reader.feed(line):
            self.analyses.feed(line)

    def _add_report(self, report: xla_text.Report) -> None:
        if self._step is not None:
            self.sections.add(self._step, report)
        else:
            self.report = xla_text.highest([self.report, report])


def read_xla_files(paths: Sequence[Path]) -> RawRun:
    """Files and folders of torch_xla's text, together one run.

    Counts `foreign_files` of folders. Raises UnreadableInputError for a given file that holds none of it, when nothing
    can be read, and when the files cannot be of one run.
    """
    losses = Losses()
    by_rank: dict[int, list[Content]] = {}
    for path in paths:
        if not path.exists():
            raise UnreadableInputError(f"{path}: no such file; check the path")
    for file, label in known_files(paths, is_xla_file, losses):
        with readable(file):
            content = Content(file, label, losses) if file not in paths or is_xla_file(file) else None
        if content:
            by_rank.setdefault(content.rank, []).append(content)
        elif file in paths:
            raise UnreadableInputError(f"{file}: {_NOTHING}")
    if not by_rank:
        raise UnreadableInputError(f"{paths[0]}: {_NOTHING}")
    ranks = tuple(
        RawRank(f"rank-{number}", number, info={"rank": number, "device": "xla"}, journal=tuple(events(_sources(own))))
        for number, own in sorted(by_rank.items())
    )
    return RawRun(common_folder(paths), hosts=(), ranks=ranks, losses=losses)


def _sources(contents: list[Content]) -> Sources:
    """Which file gives what; raises UnreadableInputError where they cannot be of one run."""
    stepped = _only([content for content in contents if content.sections.count], "logs of XLA_METRICS_FILE")
    debug = _only([content for content in contents if content.analyses.compiles], "debug logs")
    debug = debug or next((content for content in contents if content.analyses), None)
    counting = [content for content in contents if content.sections.count or content.report]
    for one, other in combinations(counting, 2):
        if xla_text.contradict(one.totals(), other.totals()):
            raise _several(one, other, "their counts contradict each other")
    whole = xla_text.highest([content.totals() for content in counting])
    sections = stepped.sections if stepped is not None else xla_text.Sections()
    known = sections.report()
    # The steps, and without a step what a report of the whole run counts beyond them.
    rest = xla_text.growth(xla_text.Report(), whole, xla_text.StepChange(None))
    for change in sections.changes:
        rest.samples -= change.samples
        rest.totals -= change.totals
    changes = (*sections.changes, *([rest] if rest else []))
    named = [f"{stepped.label} (XLA_METRICS_FILE)"] if stepped is not None else []
    labels = [content.label for content in counting if content is not stepped]
    # Reports are named where they count what the log with steps does not.
    counted = (
        figure.samples > known.count(name) for content in counting for name, figure in content.report.figures.items()
    )
    if labels and (stepped is None or any(counted)):
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        named.append(f"{labels[-1]}{more} (metrics report)")
    return Sources(
        changes=changes,
        source="; ".join(named),
        report=whole,
        last_step=sections.last_step,
        analyses=debug.analyses if debug is not None else Analyses(),
        log=f"{debug.label} (PT_XLA_DEBUG)" if debug is not None else "",
    )


def _only(contents: list[Content], what: str) -> Content | None:
    if len(contents) > 1:
        raise _several(contents[0], contents[1], f"they are both {what}")
    return contents[0] if contents else None


def _several(one: Content, other: Content, why: str) -> UnreadableInputError:
    return UnreadableInputError(
        f"{one.path} and {other.path} are of different runs, as {why}; give the files of one run at a time"
    )


Key = TypeVar("Key", bound=Hashable)


def in_order(counts: Sequence[int], keys: Sequence[Key]) -> Iterator[Counter[Key]]:
    """For each of `counts`, its share of `keys`, of which there must be as many as all counts together, or more."""
    position = 0
    for count in counts:
        yield Counter(keys[position : position + count])
        position += count


def evenly(counts: Sequence[int], weights: Mapping[Key, int], rest: Key) -> Iterator[Counter[Key]]:
    """For each of `counts`, its share of the keys, each of which is had `weights` times; `rest` for what is over."""
    whole = sum(counts)
    left = Counter({key: weight for key, weight in weights.items() if weight > 0})
    left[rest] += max(0, whole - sum(left.values()))
    for count in counts:
        share = _share(count, left)
        left -= share
        yield share


def _share(count: int, left: Counter[Key]) -> Counter[Key]:
    """`count` of what is `left`, in its proportions; what rounding leaves goes to the largest remainders."""
    total = sum(left.values())
    if count <= 0 or total <= 0:
        return Counter()
    share = Counter({key: have * count // total for key, have in left.items()})
    over = count - sum(share.values())
    order = sorted(left, key=lambda key: (-(left[key] * count % total), -left[key], str(key)))
    for key in order[: max(0, over)]:
        share[key] += 1
    return +share


BACKEND = "torch_xla"
MAX_EVENTS = 400_000
_UNKNOWN = Compile(None, None, None, None, None)
_Target = tuple["str | None", "Place | None"]  # operator, place
_NOWHERE: _Target = (None, None)


class Sources(Struct, frozen=True):
    """What is known of a rank. `changes` are steps, or the whole run as one; `source` names where they are from."""

    changes: tuple[xla_text.StepChange, ...]
    source: str
    report: xla_text.Report  # the highest totals of all files
    last_step: int | None
    analyses: Analyses  # empty without a debug log
    log: str  # names the debug log

    @property
    def unlowered(self) -> set[str]:
        """Operators without lowering that were called, by any source."""
        counted = {name for change in self.changes for name in change.operators}
        return (counted | set(self.analyses.operators)) - {xla_text.SCALAR}


def events(found: Sources) -> list[Row]:
    rows: list[Row] = []
    for part in (_compiles(found), _eager(found), _transfers(found), _fallbacks(found)):
        rows.extend(part)
        if len(rows) > MAX_EVENTS:
            break
    for execution, count in found.analyses.executions.items():
        told: dict[str, Any] = {"count": count, "cause_text": execution.cause, "graph": execution.graph}
        rows.append(_event("xla_executions", found.log, **told, **_at(execution.place)))
    for text, repeats in found.analyses.warnings.values():
        rows.append(_event("xla_warning", found.log, text=text, repeats=repeats))
    return [*rows, *_counters(found)]


def _event(kind: str, source: str, step: int | None = None, duration_ns: int | None = None, **fields: Any) -> Row:
    common = {"kind": kind, "time_ns": None, "duration_ns": duration_ns, "step": step, "backend": BACKEND}
    return {**common, "step_source": "file" if step is not None else None, **fields, "source": source}


def _at(place: Place | None, *more: str) -> dict[str, Any]:
    return {name: getattr(place, name, None) for name in ("file", "line", *more)}


def _compiles(found: Sources) -> Iterator[Row]:
    analyses, log = found.analyses, found.log
    cells = [change for change in found.changes if change.samples[xla_text.COMPILE]]
    counts = [cell.samples[xla_text.COMPILE] for cell in cells]
    counted, logged = sum(counts), analyses.compiles
    if not logged:
        for cell, count in zip(cells, counts, strict=True):
            yield _compile(_UNKNOWN, count, found.source, cell.step, round(cell.totals[xla_text.COMPILE]))
        return
    exact = len(logged) >= counted
    if cells or not (analyses.steps_hold and analyses.syncs):
        logged = [replace(compile_, step=None) for compile_ in logged]
    shares = in_order(counts, logged) if exact else evenly(counts, Counter(map(Compile.kind, logged)), _UNKNOWN)
    for cell, share in zip(cells, shares, strict=True):
        lengths = _share(round(cell.totals[xla_text.COMPILE]), share)
        notes = ["causes in their order" if exact else "causes shared out evenly"]
        notes += ["time shared by number"] if share.total() > 1 else []
        for compile_, count in share.items():
            source = f"{found.source}; {log} ({', '.join(notes)})"
            yield _compile(compile_, count, source, cell.step, lengths[compile_])
    if not exact:
        return
    for compile_, count in Counter(logged[counted:]).items():
        yield _compile(compile_, count, log, compile_.step)
    # Beyond those that are kept one by one.
    left = len(logged) + analyses.more_compiles.total() - max(counted, len(logged))
    for compile_, count in analyses.more_compiles.items():
        if left > 0:
            yield _compile(compile_, min(count, left), log)
        left -= count


def _compile(
    compile_: Compile, count: int, source: str, step: int | None = None, duration_ns: int | None = None
) -> Row:
    fields: dict[str, Any] = {"count": count, "graph": compile_.graph, "cause_text": compile_.cause}
    fields |= {"inputs": compile_.inputs, "outputs": compile_.outputs}
    return _event("compile", source, step, duration_ns, **fields, **_at(compile_.place, "function"))


def _eager(found: Sources) -> Iterator[Row]:
    source = f"{xla_text.EAGER_COMPILE} of {found.source}"
    for change in found.changes:
        if count := change.samples[xla_text.EAGER_COMPILE]:
            yield _compile(_UNKNOWN, count, source, change.step, round(change.totals[xla_text.EAGER_COMPILE]))


def _transfers(found: Sources) -> Iterator[Row]:
    cells = [change for change in found.changes if change.samples[xla_text.TRANSFER]]
    if not cells:
        yield from _logged_transfers(found)
        return
    transfers = [cell.samples[xla_text.TRANSFER] for cell in cells]
    scalars = [cell.scalars for cell in cells]
    targets, spread = _targets(found)
    if targets is None:  # which operator was called at which line is not known
        shares = list(evenly(transfers, spread, _NOWHERE))
    else:
        of_scalars = {(xla_text.SCALAR, place): count for place, count in targets.items()}
        read = evenly(scalars, of_scalars, (xla_text.SCALAR, None))
        others = [count - scalar for count, scalar in zip(transfers, scalars, strict=True)]
        shares = [one + other for one, other in zip(read, evenly(others, spread, _NOWHERE), strict=True)]
    source = found.source if not (targets or spread) else f"{found.source}; lines of {found.log}"
    for cell, share in zip(cells, shares, strict=True):
        times, sizes = (_share(round(cell.totals[name]), share) for name in (xla_text.TRANSFER, xla_text.INBOUND))
        for target, count in share.items():
            size = sizes[target] if cell.totals[xla_text.INBOUND] else None
            yield _transfer(target, count, size, source, cell.step, times[target])


def _targets(found: Sources) -> tuple[Counter[Place | None] | None, Counter[_Target]]:
    """Lines of reads of single values, or None where they cannot be told from those of others; lines of the others."""
    frames = found.analyses.frames
    scalar, other = Counter[Place | None](), Counter[_Target]()
    named = [frame for frame in frames if frame.operator is not None]
    for frame in named or frames:
        if frame.operator in (None, xla_text.SCALAR):
            scalar[frame.place] += frame.count
        else:
            other[None, frame.place] += frame.count
    if named or not found.unlowered:
        return scalar, other
    other = Counter({(None, place): count for place, count in scalar.items()})
    return scalar if len(scalar) <= 1 else None, other


def _transfer(
    target: _Target, count: int, size: int | None, source: str, step: int | None = None, duration_ns: int | None = None
) -> Row:
    fields: dict[str, Any] = {"direction": "device_to_host", "operator": target[0], "count": count, "bytes": size}
    at = _at(target[1], "function")
    return _event("transfer", source, step, duration_ns, **fields, cause_text=None, **at)


def _logged_transfers(found: Sources) -> Iterator[Row]:
    """Of a debug log alone: the table of frames, or what the last warning counted."""
    analyses = found.analyses
    default = xla_text.SCALAR if not found.unlowered else None
    for frame in analyses.frames:
        yield _transfer((frame.operator or default, frame.place), frame.count, None, found.log)
    shown = sum(frame.count for frame in analyses.frames)
    warned = max(analyses.counts.get(xla_text.TRANSFER, 0), analyses.counts.get("TransferFromServerTime", 0))
    if warned > shown:
        yield _transfer(_NOWHERE, warned - shown, None, found.log)


def _fallbacks(found: Sources) -> Iterator[Row]:
    analyses = found.analyses
    lines = _fallback_lines(found)
    seen = {xla_text.SCALAR}
    for change in found.changes:
        for operator, count in change.operators.items():
            if operator != xla_text.SCALAR:
                seen.add(operator)
                at = _at(lines.get(operator))
                yield _event("fallback", found.source, change.step, operator=operator, count=count, **at)
    for operator in analyses.operators:
        if operator not in seen:
            alone = analyses.fallback_calls if len(analyses.operators) == 1 else None
            yield _event("fallback", found.log, operator=operator, count=alone, **_at(lines.get(operator)))


def _fallback_lines(found: Sources) -> dict[str, Place]:
    """The line of each operator: the one named with it, or the only one there is."""
    frames = found.analyses.frames
    named = [frame for frame in frames if frame.operator is not None]
    places = {frame.place for frame in frames}
    if not named and len(places) == 1:
        return dict.fromkeys(found.unlowered, places.pop())
    named.sort(key=lambda frame: frame.count, reverse=True)
    lines: dict[str, Place] = {}
    for frame in named:
        lines.setdefault(frame.operator or "", frame.place)
    return lines


def _counters(found: Sources) -> Iterator[Row]:
    figures = sorted(found.report.figures.items())
    if figures:
        metrics = {name: asdict(figure) for name, figure in figures if figure.unit is not None}
        counters = {name: figure.samples for name, figure in figures if figure.unit is None}
        fields: dict[str, Any] = {"metrics": metrics, "counters": counters, "renamed": found.report.renamed}
        yield _event("counters", found.source, found.last_step, **fields)
    elif steps := found.analyses.steps:
        yield _event("counters", found.log, metrics={}, counters={xla_text.STEPS: steps}, renamed={})
