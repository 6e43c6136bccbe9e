"""Files that torch_xla wrote, and folders of them, as the run that they tell of: a rank each, without steps' times.

The ordinal that ends the name of a metrics file is its rank; everything else is of rank 0, which alone prints
analyses. Files that contradict each other are of different runs, and are refused.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from stepscope.errors import UnreadableInputError
from stepscope.files import open_regular
from stepscope.read.raw import Losses, RawRank, RawRun
from stepscope.read.streams import GZIP, Limits, LineRules, common_folder, files_in, name_below, read_lines, unpacked
from stepscope.read.xla.debug_log import MARK, Analyses
from stepscope.read.xla.journal import Sources, changes_of, events
from stepscope.read.xla.report import HEAD, Report, ReportReader, Sections, contradict, highest, section_step

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


def holds_xla(folders: Sequence[Path]) -> bool:
    """Whether there is such a file in one of the folders; looks no further than to the first."""
    for folder in folders:
        for file in files_in(folder):
            with contextlib.suppress(OSError):
                if is_xla_file(file):
                    return True
    return False


def _parts(path: Path) -> list[bytes]:
    """The beginning and the end of a file."""
    with open_regular(path, follow=True) as file:
        head = file.read(LOOKED_AT)
        if head.startswith(GZIP):
            return [unpacked(head + file.read(PACKED_LOOKED_AT - len(head)), UNPACKED_LOOKED_AT)]
        if len(head) < LOOKED_AT:
            return [head]
        size = path.stat().st_size
        file.seek(max(LOOKED_AT, size - LOOKED_AT))
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
        self.sections = Sections()
        self.report = Report()
        self.analyses = Analyses()
        self._step: int | None = None
        self._reader = ReportReader(self._add_report)
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

    def totals(self) -> Report:
        """The highest totals that the file tells."""
        return highest([self.sections.report(), self.report] if self.sections.count else [self.report])

    def _feed(self, line: str) -> None:
        if MARK in line:  # most lines of a debug log
            self.analyses.feed(line)
        elif HEAD in line and (step := section_step(line)) is not None:
            self._reader.cut()
            self._step = step
            self._reader.in_section = True
        elif ": " not in line or not self._reader.feed(line):
            self.analyses.feed(line)

    def _add_report(self, report: Report) -> None:
        if self._step is not None:
            self.sections.add(self._step, report)
        else:
            self.report = highest([self.report, report])


def read_xla_files(paths: Sequence[Path]) -> RawRun:
    """Files and folders of torch_xla's text, together one run.

    Counts `foreign_files` of folders. Raises UnreadableInputError for a given file that holds none of it, when nothing
    can be read, and when the files cannot be of one run.
    """
    if not paths:
        raise UnreadableInputError("no path given; give a report or debug log of torch_xla, or a folder of them")
    losses = Losses()
    root = common_folder(paths)
    contents: dict[str, Content] = {}
    for path in paths:
        for file in files_in(path):
            label = name_below(root, file)
            if os.path.realpath(file) in contents or not _is_ours(file, label, path.is_dir(), losses):
                continue
            content = Content(file, label, losses)
            if content:
                contents[os.path.realpath(file)] = content
            elif not path.is_dir():
                raise UnreadableInputError(f"{file}: {_NOTHING}")
    if not contents:
        raise UnreadableInputError(f"{paths[0]}: {_NOTHING}")
    by_rank: dict[int, list[Content]] = {}
    for content in contents.values():
        by_rank.setdefault(content.rank, []).append(content)
    ranks = tuple(
        RawRank(
            name=f"rank-{number}",
            rank=number,
            info={"rank": number, "device": "xla"},
            steps=(),
            journal=tuple(events(_sources(own))),
            traces=(),
        )
        for number, own in sorted(by_rank.items())
    )
    return RawRun(folder=root, hosts=(), ranks=ranks, losses=losses)


def _is_ours(file: Path, label: str, in_folder: bool, losses: Losses) -> bool:
    """Whether to read `file`. Of a folder, what is none of ours is counted; a given file must be one of ours."""
    try:
        if is_xla_file(file):
            return True
    except OSError as error:
        if not in_folder:
            raise UnreadableInputError(
                f"{file}: {error.strerror or error}; check the path and its permissions"
            ) from error
        losses.add("unreadable_files", label)
        return False
    if not in_folder:
        raise UnreadableInputError(f"{file}: {_NOTHING if file.exists() else 'no such file; check the path'}")
    losses.add("foreign_files", label)
    return False


def _sources(contents: list[Content]) -> Sources:
    """Which file gives what; raises UnreadableInputError where they cannot be of one run."""
    stepped = _only([content for content in contents if content.sections.count], "logs of XLA_METRICS_FILE")
    debug = _only([content for content in contents if content.analyses.compiles], "debug logs")
    debug = debug or next((content for content in contents if content.analyses), None)
    reports = [content for content in contents if content.sections.count or content.report]
    for one, other in combinations(reports, 2):
        if contradict(one.totals(), other.totals()):
            raise _several(one, other, "their counts contradict each other")
    whole = highest([content.totals() for content in reports])
    sections = stepped.sections if stepped is not None else Sections()
    known = sections.report()
    named = [f"{stepped.label} (XLA_METRICS_FILE)"] if stepped is not None else []
    labels = [content.label for content in reports if content is not stepped]
    # Reports are named where they count what the log with steps does not.
    counted = (
        figure.samples > known.count(name) for content in reports for name, figure in content.report.figures.items()
    )
    if labels and (stepped is None or any(counted)):
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        named.append(f"{labels[-1]}{more} (metrics report)")
    return Sources(
        changes=changes_of(sections.changes, whole),
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
