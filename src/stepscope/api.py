"""Open a recorded run, or traces or stacks that others recorded; ask for tables, facts, findings and the report.

    run = stepscope.open_run("stepscope-runs/20260101-120000-train")
    run = stepscope.open_run("logs/worker0.pt.trace.json.gz", "logs/worker1.pt.trace.json.gz")
    run.diagnosis.findings[0].where

Each stage is computed on first use and kept. Heavy imports happen then, so that `import stepscope.api` is cheap.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from stepscope.errors import UnreadableInputError, UsageError, readable
from stepscope.model import Analysis, Diagnosis, ProfiledFacts, Report
from stepscope.model.machine import NO_PRICES, Prices
from stepscope.schema import REDUCED, REDUCED_INDEX, RUN_PART

if TYPE_CHECKING:
    from stepscope.analyze import CodeOptions
    from stepscope.analyze.context import Context
    from stepscope.analyze.host.hotspots import HotspotOptions
    from stepscope.analyze.pictures.sampled_flame import FlameOptions
    from stepscope.analyze.pictures.timeline import Timeline
    from stepscope.analyze.views.select import Rows, Selection
    from stepscope.analyze.views.trace_diff import DiffSide
    from stepscope.engine.step_labels import LabelledSteps
    from stepscope.model.memory import MemoryRecording
    from stepscope.model.ranks import HangVerdict, RankMap, RanksRead, RanksVerdict
    from stepscope.model.sampled import FlameGraph, Hotspots
    from stepscope.model.views import Diff
    from stepscope.read.hang_recording import HangRecording
    from stepscope.read.raw import RawRun
    from stepscope.tables.reduced import Reduced
    from stepscope.tables.schema import Tables

READABLE = (
    "a run folder that `stepscope run` or `stepscope.profile` wrote, traces of torch.profiler, files of sampled "
    "stacks, event files of TensorBoard, reports or logs of torch_xla, dumps of PyTorch's flight recorder, reports of "
    "`ncclras -f json`, or a folder of them; or a trace of operators"
)
# of a run, of its folder `reduced`, and of one host of it: the last two may be copied away alone
REDUCED_FILES = (f"{REDUCED}/host-*/{REDUCED_INDEX}", f"host-*/{REDUCED_INDEX}", REDUCED_INDEX)
OWN_FILES = ("manifest.json", "rank.json", "steps.jsonl", "events.jsonl", "agents.jsonl", "system.jsonl")
TRACES = (".json", ".json.gz")
OPERATOR_TRACE = ".parquet"  # of a trace of operators, tables/operator_trace.py
EVENT_FILE = ".tfevents."  # in the name of each that TensorBoard takes
MAX_SUGGESTED = 3  # run folders named when a folder of runs was given
MAX_LOOKED_AT = 1_000  # files of a folder that may be a rank's of ours, or of a log folder
MAX_SOURCE_FILES = 20_000  # looked at below all source roots together

Progress = Callable[[str, int, int], None]


class ReadOptions(Struct, frozen=True):
    """How to read traces, and which code in them is the user's.

    Attributes:
        tables: folder to keep tables in, by content, so that a second reading is quick; the user's cache by default.
        cache: False keeps no tables.
        ranks: ranks to look at in a run of many that was reduced, beside those that the verdict points at.
        steps: first and last step to read, both included; all of them by default.
        source_roots: folders of the user's code.
        maps: (old, new) beginnings of paths, for traces recorded on another machine.
        libraries: names of path components, or beginnings of paths, that are not the user's code.
        workers: processes that read traces side by side; as many as there are cores by default.
        progress: called with a trace's name, the bytes read of it and its size, now and then.
        ignored: rules not to judge, each with the reason, which the report quotes.
        prices: of energy and GPUs, by which the report says what the run cost.
        keep: False writes no Parquet files to RUN/tables, or of traces to DIR/tables. Never written to RUN/tables are
            tables of chosen `steps` alone.
    """

    tables: Path | None = None
    cache: bool = True
    ranks: tuple[int, ...] = ()
    steps: tuple[int, int] | None = None
    source_roots: tuple[Path, ...] = ()
    maps: tuple[tuple[str, str], ...] = ()
    libraries: tuple[str, ...] = ()
    workers: int | None = None
    progress: Progress | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)
    keep: bool = True
    prices: Prices = NO_PRICES


DEFAULTS = ReadOptions()


class Run:
    """One recorded run, or the traces of one. Make it with `open_run`."""

    def __init__(
        self,
        paths: tuple[Path, ...],
        options: ReadOptions = DEFAULTS,
        *,
        recorded: bool = True,
        beside: tuple[Path, ...] = (),
    ) -> None:
        self.paths = paths
        self.options = options
        self.beside = beside  # files and folders that may hold dumps of a hang of a recorded run
        self.recorded = recorded  # False: traces of others, beside which nothing is written
        self._reports: dict[bool, Report] = {}

    def __repr__(self) -> str:
        return f"Run({', '.join(repr(str(path)) for path in self.paths)})"

    @property
    def folder(self) -> Path:
        """The run folder; of traces, the folder that holds them all."""
        if self.recorded:
            return self.paths[0]
        parents = [path if path.is_dir() else path.parent for path in self.paths]
        return Path(os.path.commonpath([str(parent) for parent in parents]))

    @cached_property
    def tables(self) -> Tables:
        """The run's typed columns; also written to RUN/tables, or to DIR/tables of traces, unless `options` say no."""
        from stepscope import tables
        from stepscope.files import default_folder
        from stepscope.tables.build import write
        from stepscope.tables.cache import BuildOptions

        given = self.options
        cache = given.tables or (default_folder() if given.cache else None)
        options = BuildOptions(cache=cache, workers=given.workers, progress=given.progress, steps=given.steps)
        with readable(self.folder, "check its permissions"):
            raw = self._raw()
        built = tables.build(raw, options)
        beside = self.folder if given.steps is None else None
        target = beside if self.recorded else given.tables
        if given.keep and target is not None and os.access(target, os.W_OK):
            with contextlib.suppress(OSError):  # a full disk: the tables can always be derived again
                write(built, target)
        return built

    def _raw(self) -> RawRun:
        """What lies in the paths, read as far as must be known before tables are made."""
        from stepscope.read import read_run, read_third_party
        from stepscope.read.raw import Losses, RawRun
        from stepscope.tables import reduced

        if self.reduced is not None:
            return reduced.read_in_full(self.folder, self.reduced, self._chosen)
        if self.recorded:
            return read_run(self.folder)
        recordings, others = self._inputs
        if not others and (recordings or self._hangs[0] is not None):
            return RawRun(folder=self.folder, hosts=(), ranks=(), losses=Losses())
        return read_third_party(others)

    @cached_property
    def _loaded(self) -> tuple[Reduced | None, str]:
        """All reduced tables of the run, and why there are none where they are damaged and not needed."""
        from stepscope.read.run_folder import ranks_in
        from stepscope.tables import reduced

        if not self.recorded:
            return _operator_trace(self.paths), ""
        alone = (self.folder / REDUCED_INDEX).is_file()
        folder = self.folder if alone else reduced.reduced_folder(self.folder)
        if folder is None:
            return None, ""
        try:
            return reduced.load(folder), ""
        except UnreadableInputError as error:
            if ranks_in(self.folder):
                return None, f"{error}; all ranks that lie here were read instead"
            raise

    @cached_property
    def reduced(self) -> Reduced | None:
        """The reduced tables by which ranks are judged: where there are too many to read, or some lie elsewhere."""
        from stepscope.tables import reduced

        found = self._loaded[0]
        return None if found is None or reduced.all_are_read(self.folder, found) else found

    @cached_property
    def many_ranks(self) -> RanksVerdict | None:
        """Who holds the others up, by reduced tables; None where all ranks are read in full."""
        from stepscope.analyze.ranks import judge

        return None if self.reduced is None else judge(self.reduced)

    @property
    def _chosen(self) -> tuple[int, ...]:
        """Of a run that is judged by reduced tables, the ranks that are looked at."""
        from stepscope.tables import reduced

        assert self.reduced is not None and self.many_ranks is not None  # noqa: PT018
        blamed: tuple[int, ...] = ()
        if self._hangs[0] is not None:
            from stepscope.analyze.hangs import blamed_ranks

            blamed = blamed_ranks(self._hangs[0])
        return reduced.chosen_ranks(self.reduced, self.many_ranks.suspects, (*self.options.ranks, *blamed))

    @cached_property
    def ranks_read(self) -> RanksRead | None:
        """What all that is said beside the verdict on many ranks stands on; None where all are read in full."""
        from stepscope.tables import reduced

        return None if self.reduced is None else reduced.stands_on(self.folder, self.reduced, self._chosen)

    @cached_property
    def rank_maps(self) -> tuple[RankMap, ...]:
        """How much longer each rank works than its peers, along the run; empty where ranks cannot be compared."""
        from stepscope.analyze.ranks import own_work

        if self.reduced is not None:
            return own_work.rank_maps(self.reduced)
        return own_work.map_of_steps(self._context, self.analysis.ranks)

    @cached_property
    def _traces_alone(self) -> bool:
        """Whether all paths are files that begin as traces do; nothing else is looked for in them."""
        from stepscope.read.kineto import begins_as_trace

        return not self.recorded and all(map(begins_as_trace, self.paths))

    @cached_property
    def _inputs(self) -> tuple[tuple[MemoryRecording, ...], tuple[Path, ...]]:
        """Recordings of memory among the paths, and the other paths."""
        if self.recorded or self._traces_alone:
            return (), self.paths
        from stepscope.read.memory_recordings import read_recordings

        return read_recordings(self._hangs[1])

    @cached_property
    def _hangs(self) -> tuple[HangRecording | None, tuple[Path, ...]]:
        """What flight recorders and NCCL's RAS left in and beside the run, or among the paths; and the other paths."""
        if self._traces_alone:
            return None, self.paths
        from stepscope.read import hang_recording

        if not self.recorded:
            return hang_recording.read_hangs(self.paths)
        with readable(self.folder, "check its permissions"):
            files = [*hang_recording.hang_files_of_run(self.folder), *hang_recording.hang_files_in(self.beside)]
        return (hang_recording.read_hang_files(files) if files else None), self.paths

    @cached_property
    def hang(self) -> HangVerdict | None:
        """Who does not come to which call, by dumps of flight recorders and NCCL's RAS; None where there are none."""
        if self._hangs[0] is None:
            return None
        from stepscope.analyze.hangs import judge

        return judge(self._hangs[0], self._context, self.tables.run.world_size)

    @property
    def recordings(self) -> tuple[MemoryRecording, ...]:
        """Memory snapshots and timelines among the paths."""
        return self._inputs[0]

    def load(self) -> None:
        """Read everything now, and not when it is first asked for."""
        self.tables  # noqa: B018

    @cached_property
    def _context(self) -> Context:
        """What the analyses share. The user's own files are read, where they are still there, to name exact lines."""
        from stepscope.analyze import user_files
        from stepscope.analyze.context import Context
        from stepscope.model import SourceFiles
        from stepscope.report.source import SourceReader

        code = _code(self.options, self.folder if self.recorded else None)
        run = self.tables.run
        files = SourceFiles(code.source_roots, run.source_hashes, run.user_roots)
        reader = SourceReader(files, recorded_ns=run.started_ns)
        texts = {file: reader.text(file) for file in user_files(self.tables, code)}
        return Context(self.tables, {file: text for file, text in texts.items() if text is not None}, code)

    @cached_property
    def analysis(self) -> Analysis:
        """All facts of the run, its views included."""
        from stepscope.analyze import Facts
        from stepscope.analyze.ranks import rank_notes

        notes = rank_notes(self.ranks_read, self._loaded[1])
        known = {"many_ranks": self.many_ranks, "ranks_read": self.ranks_read, "hang": self.hang}
        return Facts(self._context, self.recordings, self.options.prices, notes, **known)

    @property
    def labelled(self) -> LabelledSteps:
        """Every step with the reason why it counts or not: what all figures of a step stand on."""
        return self._context.labelled

    @property
    def profiled(self) -> ProfiledFacts | None:
        """The steps that all views of traces are of, and how long steady ones take; None where a trace names none."""
        return self._context.profiled

    def table(self, name: str, selection: Selection | None = None) -> Rows:
        """The rows of one view in full; names of tables are the keys of `stepscope.analyze.views.select.TABLES`.

        Raises `UsageError` for a name, worker, span or grouping that there is not.
        """
        from stepscope.analyze.views import select

        if name not in select.TABLES:
            raise UsageError(f"{name}: no such table; there are {', '.join(select.TABLES)}")
        compilers = self.analysis.compilers if name in select.COMPILER_TABLES else None
        energy = self.analysis.energy if name == select.ENERGY else None
        hang = self.hang if name in select.HANG_TABLES else None
        source = select.Source(self._context, self.recordings, compilers, energy, hang)
        return select.rows(source, name, selection or select.Selection())

    def hotspots(self, options: HotspotOptions | None = None) -> Hotspots:
        """The deepest functions by sampled time; raises `UsageError` where no sample is of what was asked for."""
        from stepscope.analyze.host import hotspots

        return hotspots.hotspots(self._context, options or hotspots.DEFAULTS)

    def flame_graph(self, options: FlameOptions | None = None) -> FlameGraph:
        """Sampled stacks, and the operators and kernels of windows, as trees; raises `UsageError` as `hotspots`."""
        from stepscope.analyze.pictures import sampled_flame

        return sampled_flame.flame_graph(self._context, options)

    def flame_diff(self, other: Run, options: FlameOptions | None = None) -> FlameGraph:
        """This run's sampled stacks against `other`'s; raises `UsageError` where their units or modes differ."""
        from stepscope.analyze.pictures import sampled_flame

        return sampled_flame.flame_diff(self._context, other._context, options)

    def flame_rank_diff(self, rank: int, options: FlameOptions | None = None) -> FlameGraph:
        """The sampled stacks of one rank against the mean of the others."""
        from stepscope.analyze.pictures import sampled_flame

        return sampled_flame.flame_rank_diff(self._context, rank, options)

    @cached_property
    def timeline(self) -> Timeline:
        """Every step, slice and sampled stack by track and time, ready to be cut into windows."""
        from stepscope.analyze.pictures import timeline

        return timeline.timeline(self._context)

    def diff(self, other: Run, *, selection: Selection | None = None, against: Selection | None = None) -> Diff:
        """This run and `other` side by side; a selection names one span of either."""
        from stepscope.analyze.views import trace_diff

        return trace_diff.diff(self.diff_side(selection), other.diff_side(against))

    def diff_side(self, selection: Selection | None = None) -> DiffSide:
        """What is laid against another run, of all spans or the one that `selection` names; raises `UsageError`."""
        from stepscope.analyze.views import select, trace_diff

        source = select.Source(self._context)
        ref = source.only(selection or select.Selection())
        label = f"{self.folder.name}/{ref.label}" if ref is not None else self.folder.name
        return trace_diff.side(source.base, ref, label)

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The findings, in order of cost, and the rules that could not be judged."""
        from stepscope.diagnose import diagnose

        return diagnose(self.analysis, ignored=self.options.ignored)

    def report(self, *, source: bool = True) -> Report:
        """The document that the terminal, JSON and HTML show; `source=False` quotes no line of source text."""
        from stepscope.report import document, experiment_report, replays
        from stepscope.report.escape import plain_mapping

        if source not in self._reports:
            experiment = experiment_report.view(self.folder) if self.recorded else None
            replayed = tuple(map(plain_mapping, replays.kept(self.folder))) if self.recorded else ()
            self._reports[source] = document.build(
                self.analysis, self.diagnosis, source=source, experiment=experiment, replays=replayed
            )
        return self._reports[source]

    def showing(self, report: Report) -> Run:
        """The same run, all of it, with `report` for its report: one that holds an experiment, or quotes no source."""
        self.diagnosis  # noqa: B018 - made here once, and not again in every copy
        shown = copy.copy(self)
        shown._reports = {True: report, False: report}
        return shown


def open_run(*paths: str | os.PathLike[str], options: ReadOptions = DEFAULTS) -> Run:
    """Open a run folder, traces of torch.profiler, files of sampled stacks, reports of torch_xla, or dumps of a hang.

    Args:
        paths: one run folder, or a folder with one in it; or trace files (.json, .json.gz) and folders of them; or
            files of stacks (py-spy raw or speedscope, speedscope of other tools, collapsed stacks) and folders of them;
            or dumps of flight recorders and reports of `ncclras -f json`, also beside a run folder.
        options: how to read them, and which code in them is yours.

    Raises `UnreadableInputError` if one of `paths` cannot be what is asked for; what is inside is read when it is first
    asked for, which raises the same error if not a single event or step can be read.
    """
    if not paths:
        raise UsageError(f"nothing to open; name {READABLE}")
    found = [Path(path) for path in paths]
    for path in found:
        if not path.exists():
            raise UnreadableInputError(f"{path}: no such file or folder; name {READABLE}")
    try:
        found = [_run_of(path) for path in found]
        recorded = [path for path in found if path.is_dir() and is_run_folder(path)]
        runs = [] if recorded else _runs_in(found)
    except OSError as error:
        raise UnreadableInputError(f"{error.filename}: {error.strerror}; name {READABLE}") from None
    if recorded and len(found) > 1:
        beside = tuple(path.resolve() for path in found if path not in recorded)
        if len(recorded) > 1 or not all(_holds_dumps(path) for path in beside):
            raise UsageError(f"{recorded[0]}: a run folder; open it alone, or with dumps of a hang")
        return Run((recorded[0].resolve(),), options, recorded=True, beside=beside)
    if len(runs) == 1:
        return Run((runs[0].resolve(),), options, recorded=True, beside=(found[0].resolve(),))
    if runs:
        named = ", ".join(str(path) for path in runs[-MAX_SUGGESTED:])
        raise UnreadableInputError(f"{found[0]}: holds {len(runs)} runs, name one of them, e.g. {named}")
    return Run(tuple(path.resolve() for path in found), options, recorded=bool(recorded))


def is_run_folder(folder: Path) -> bool:
    """True when `folder` holds a part that a recorder of ours writes; folders of ranks with traces alone do not."""
    if not folder.is_dir():
        return False
    if any(next(folder.glob(files), None) is not None for files in REDUCED_FILES):
        return True
    parts = [part for part in folder.iterdir() if RUN_PART.fullmatch(part.name) and part.is_dir()]
    if not parts:
        return False
    names = [child.name for part in parts for child in part.iterdir()]
    if any(name in OWN_FILES for name in names):
        return True
    below = (file for part in parts for file in islice(part.rglob("*"), MAX_LOOKED_AT))
    return not any(file.name.endswith(TRACES) or EVENT_FILE in file.name or _holds_dumps(file) for file in below)


def _holds_dumps(path: Path) -> bool:
    """Whether a file is a dump of a hang, or a folder holds one."""
    from stepscope.read.hang_recording import hang_files_in

    return any(hang_files_in((path,)))


def _run_of(path: Path) -> Path:
    """The run that a folder `reduced` is a part of; the path itself where it is none, or was copied away alone."""
    beside = path.absolute().parent
    inside = path.absolute().name == REDUCED and any(RUN_PART.fullmatch(child.name) for child in beside.iterdir())
    return beside if inside else path


def _runs_in(paths: list[Path]) -> list[Path]:
    """The run folders directly below the one folder given, or below the `runs` of an experiment."""
    if len(paths) != 1 or not paths[0].is_dir():
        return []
    return run_folders(paths[0], paths[0] / "runs")


def run_folders(*places: Path) -> list[Path]:
    """The run folders directly in these folders, which may not be there."""
    children = (child for place in places if place.is_dir() for child in place.iterdir())
    return sorted(child for child in children if child.is_dir() and is_run_folder(child))


def _operator_trace(paths: tuple[Path, ...]) -> Reduced | None:
    """A trace of operators as reduced tables, where the one path is such a file."""
    if len(paths) != 1 or paths[0].suffix != OPERATOR_TRACE:
        return None
    from stepscope.tables.operator_trace import is_operator_trace, read_operator_trace

    return read_operator_trace(paths[0]) if is_operator_trace(paths[0]) else None


def _code(options: ReadOptions, run: Path | None) -> CodeOptions:
    """The options on the user's code, with the cells of the notebook that `run` was recorded in, if it was.

    With them the source files below the roots; environments and hidden folders are left out.
    """
    from stepscope.analyze import CodeOptions
    from stepscope.read.run_folder import cells

    notebook, maps = (None, ()) if run is None else cells(run)
    roots = options.source_roots if notebook is None else (*options.source_roots, notebook)
    names = dict.fromkeys(name for root in roots for name in (str(root.absolute()), str(root)))
    files = tuple(islice((file for root in roots for file in _sources(root)), MAX_SOURCE_FILES))
    return CodeOptions(tuple(names), (*options.maps, *maps), options.libraries, files)


def _sources(root: Path) -> Iterator[str]:
    for folder, children, names in os.walk(root.absolute()):
        children[:] = [name for name in sorted(children) if name[:1] != "." and name not in ("site-packages", "venv")]
        yield from (os.path.join(folder, name) for name in sorted(names) if name.endswith(".py"))
