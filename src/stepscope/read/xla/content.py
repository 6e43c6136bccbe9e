"""One file of torch_xla's text, read once: sections with steps, reports, and what a debug log says, in any mixture."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct, field

from stepscope.read.raw import Losses
from stepscope.read.xla.analyses import MARK, Analyses
from stepscope.read.xla.lines import read_lines
from stepscope.read.xla.report import Report, ReportReader, highest
from stepscope.read.xla.sections import HEAD, Sections, section_step

_ORDINAL = re.compile(r".+\.(\d{1,6})")


class Content(Struct):
    """What a file holds. `report` are the highest totals of its reports outside of sections."""

    path: Path
    label: str  # for losses and sources
    sections: Sections = field(default_factory=Sections)
    report: Report = field(default_factory=Report)
    analyses: Analyses = field(default_factory=Analyses)

    def __bool__(self) -> bool:
        return bool(self.sections.count or self.report or self.analyses)

    @property
    def rank(self) -> int:
        """The ordinal that ends the name of a file that each process writes on its own, else 0."""
        name = self.path.name.removesuffix(".gz")
        match = _ORDINAL.fullmatch(name) if self.sections.count or self.report else None
        return int(match[1]) if match is not None else 0

    def totals(self) -> Report:
        """The highest totals that the file tells."""
        return highest([self.sections.report(), self.report] if self.sections.count else [self.report])


def read_content(path: Path, label: str, losses: Losses) -> Content:
    """Read a file; what cannot be read of it is counted in `losses`."""
    content = Content(path, label)
    router = _Router(content)
    for lines in read_lines(path, label, losses):
        for line in lines:
            if line:
                router.feed(line)
    router.end()
    losses.add("bad_lines", label, router.bad_lines)
    losses.add("earlier_runs", label, content.sections.earlier_runs)
    return content


class _Router:
    """Gives each line to who can read it."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._step: int | None = None
        self._reader = ReportReader(self._done)
        self._report = Report()

    @property
    def bad_lines(self) -> int:
        return self._reader.bad_lines

    def feed(self, line: str) -> None:
        if MARK in line:  # most lines of a debug log
            self._content.analyses.feed(line)
            return
        if HEAD in line:
            step = section_step(line)
            if step is not None:
                self._finish_section()
                self._step = step
                self._reader.in_section = True
                return
        if ": " not in line or not self._reader.feed(line):
            self._content.analyses.feed(line)

    def end(self) -> None:
        self._finish_section()
        self._content.analyses.end()
        self._content.report = self._report

    def _finish_section(self) -> None:
        self._reader.cut()
        self._step = None

    def _done(self, report: Report) -> None:
        if self._step is not None:
            self._content.sections.add(self._step, report)
        else:
            self._report = highest([self._report, report])
