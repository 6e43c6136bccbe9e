"""Files that torch_xla wrote, and folders of them, as the run that they tell of: a rank each, without steps' times.

The ordinal that ends the name of a metrics file is its rank; everything else is of rank 0, which alone prints
analyses. Files that contradict each other are of different runs, and are refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stepscope.errors import UnreadableInputError
from stepscope.read.raw import Losses, RawRank, RawRun
from stepscope.read.xla.content import Content, read_content
from stepscope.read.xla.detect import is_xla_file
from stepscope.read.xla.journal import Sources, changes_of, events
from stepscope.read.xla.report import contradict, highest
from stepscope.read.xla.sections import change_of
from stepscope.read.xla.walk import files_in

_NOTHING = "no report or debug log of torch_xla in it; give a file of XLA_METRICS_FILE, a saved met.metrics_report() " \
    "or the output of a run with PT_XLA_DEBUG=1"  # fmt: skip


def read_xla_files(paths: Sequence[Path]) -> RawRun:
    """Files and folders of torch_xla's text, together one run.

    Counts `foreign_files` of folders. Raises UnreadableInputError for a given file that holds none of it, when nothing
    can be read, and when the files cannot be of one run.
    """
    if not paths:
        raise UnreadableInputError("no path given; give a report or debug log of torch_xla, or a folder of them")
    losses = Losses()
    root = Path(os.path.commonpath([str((path if path.is_dir() else path.parent).absolute()) for path in paths]))
    contents: dict[str, Content] = {}
    for path in paths:
        for file in files_in(path):
            label = Path(os.path.relpath(file.absolute(), root)).as_posix()
            if os.path.realpath(file) in contents or not _is_ours(file, label, path.is_dir(), losses):
                continue
            content = read_content(file, label, losses)
            if content:
                contents[os.path.realpath(file)] = content
            elif not path.is_dir():
                raise UnreadableInputError(f"{file}: {_NOTHING}")
    if not contents:
        raise UnreadableInputError(f"{paths[0]}: {_NOTHING}")
    by_rank: dict[int, list[Content]] = {}
    for content in contents.values():
        by_rank.setdefault(content.rank, []).append(content)
    ranks = tuple(_rank(number, by_rank[number]) for number in sorted(by_rank))
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


def _rank(number: int, contents: list[Content]) -> RawRank:
    return RawRank(
        name=f"rank-{number}",
        rank=number,
        info={"rank": number, "device": "xla"},
        steps=(),
        journal=tuple(events(_sources(contents))),
        traces=(),
    )


def _sources(contents: list[Content]) -> Sources:
    """Which file gives what; raises UnreadableInputError where they cannot be of one run."""
    stepped = _only([content for content in contents if content.sections.count], "logs of XLA_METRICS_FILE")
    debug = _only([content for content in contents if content.analyses.compiles], "debug logs")
    debug = debug or next((content for content in contents if content.analyses), None)
    reports = [content for content in contents if content.sections.count or content.report]
    for place, one in enumerate(reports):
        for other in reports[place + 1 :]:
            if contradict(one.totals(), other.totals()):
                raise _several(one, other, "their counts contradict each other")
    whole = highest([content.totals() for content in reports])
    sections = tuple(stepped.sections.changes()) if stepped is not None else ()
    given = [content.label for content in reports if content is not stepped]
    if stepped is not None and not _has_more(stepped, reports):
        given = []
    source = ", ".join([f"{stepped.label} (XLA_METRICS_FILE)"] if stepped is not None else [])
    if given:
        source += ("; " if source else "") + f"{_shortened(given)} (metrics report)"
    return Sources(
        changes=changes_of(sections, change_of(whole)),
        source=source,
        report=whole,
        last_step=stepped.sections.last_step if stepped is not None else None,
        analyses=debug.analyses if debug is not None else None,
        log=f"{debug.label} (PT_XLA_DEBUG)" if debug is not None else "",
    )


def _has_more(stepped: Content, reports: list[Content]) -> bool:
    """Whether a report counts what the log with steps does not."""
    known = stepped.sections.report().figures()
    return any(figure > known.get(name, 0) for content in reports for name, figure in content.report.figures().items())


def _only(contents: list[Content], what: str) -> Content | None:
    if len(contents) > 1:
        raise _several(contents[0], contents[1], f"they are both {what}")
    return contents[0] if contents else None


def _several(one: Content, other: Content, why: str) -> UnreadableInputError:
    return UnreadableInputError(
        f"{one.path} and {other.path} are of different runs, as {why}; give the files of one run at a time"
    )


def _shortened(labels: list[str]) -> str:
    return labels[-1] if len(labels) == 1 else f"{labels[-1]} and {len(labels) - 1} more"
