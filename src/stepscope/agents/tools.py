"""What an agent can ask for: a struct for each tool, whose fields are its arguments, with its description."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from msgspec import Meta, Struct

from stepscope.agents.jobs import CANCELLED, Job, OpenRuns, is_search
from stepscope.errors import UsageError
from stepscope.report import brief, words
from stepscope.report.brief import Page, answer

Row = dict[str, Any]
RunName: TypeAlias = Annotated[str, Meta(description="Name or id of a run, as list_runs shows it.")]
FindingId: TypeAlias = Annotated[str, Meta(description="Id of a finding, as findings shows it.")]
Words: TypeAlias = Annotated[list[str], Meta(description="The command word by word; no shell reads it.")]
Folder: TypeAlias = Annotated[str, Meta(description="Where it runs: a folder below the server's.")]
Seconds: TypeAlias = Annotated[float | None, Meta(description="End it after so long; the server's limit by default.")]

IN_LIST = ("id", "name", "kind", "state", "duration_s", "steps", "mean_ms", "first_finding", "knobs", "note")
ALL = "*"
AROUND, MOST_AROUND = 10, 200  # lines before and after a place
UNQUOTED = "it is gone, is no Python source, or neither is as recorded nor lies in the server's working directory"
MOST_WAIT_S = 600.0
TAIL_LINES = 20
COMPARED = ("label", "paths", "figures", "notes")
CHANGE = ("kind", "name", "status", "baseline", "candidate", "difference", "unit", "file", "line", "rule", "code")
VERDICT = ("name", "verdict", "text", "effect", "pairs", "ceiling", "finding", "applied", "change", "flags")
RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_RELATION = re.compile(r"(>=|<=|>|<|=)\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)")


class Tool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question; `starts` says that it does something beside reading."""

    starts: ClassVar[bool] = False
    max_bytes: Annotated[int, Meta(description="How large the answer may be.")] = brief.USUAL_BYTES

    def answer(self, runs: OpenRuns) -> bytes:
        """Raises `StepscopeError`."""
        raise NotImplementedError


class Listing(Tool, frozen=True, kw_only=True):
    offset: Annotated[int, Meta(description="Rows to pass over.")] = 0
    limit: Annotated[int | None, Meta(description="The most rows.")] = None

    @property
    def page(self) -> Page:
        return Page(self.offset, self.limit, self.max_bytes)


class ListRuns(Listing, frozen=True, kw_only=True):
    """Recorded runs, experiments and traces below the server's folder, newest first."""

    search: Annotated[str, Meta(description="Words that name, path, command, tags or knobs hold.")] = ""

    def answer(self, runs: OpenRuns) -> bytes:
        from stepscope.dashboard.server.catalog import entry

        self.page.check()
        places = runs.places(self.search)
        rows: list[Row] = []
        for number, place in enumerate(places):
            row: Row = {"id": place.key}
            if self.offset <= number < self.offset + self.max_bytes // 20:  # more fit in no answer
                told = entry(place)
                row = {key: told[key] for key in IN_LIST if told[key] not in (None, [])}
                if told["started_ns"]:
                    row["started"] = words.moment(told["started_ns"], "%Y-%m-%dT%H:%M:%S+00:00")
            rows.append(row)
        return answer({"folder": str(runs.root)}, "runs", rows, self.page)


class Findings(Listing, frozen=True, kw_only=True):
    """What a run loses time to, largest cost first: cost in ms per step and share of the step, an upper bound of the
    gain, line and code, the fix, what would prove the finding wrong, and the command that proves the fix. Risks, which
    have no cost, come last."""

    run: RunName
    finding: Annotated[str | None, Meta(description="Only the finding of this id.")] = None
    detail: Annotated[bool, Meta(description="With all evidence, places and knobs.")] = False

    def answer(self, runs: OpenRuns) -> bytes:
        with runs.run(self.run) as (run,):
            report = run.report(source=runs.source)
            return brief.findings(report, self.page, only=self.finding, detail=self.detail)


class Source(Tool, frozen=True, kw_only=True):
    """Source code around a place that a finding names. A file is quoted where its content is what was recorded, or
    where it lies below the server's working directory; `changed_since` says that it was edited after the run."""

    run: RunName
    finding: FindingId
    place: Annotated[int, Meta(description="Which of the finding's places, 0 the first.")] = 0
    around: Annotated[int, Meta(description="Lines before and after it.")] = AROUND

    def answer(self, runs: OpenRuns) -> bytes:
        from stepscope.report.source import SourceReader

        if not runs.source:
            raise UsageError("this server quotes no source (--no-source)")
        with runs.run(self.run) as (run,):
            where = brief.find(run.report(source=True), self.finding)["where"]
            if not 0 <= self.place < len(where):
                raise UsageError(f"place {self.place}: the finding has {len(where)} places, counted from 0 on")
            file, line = where[self.place]["file"], where[self.place]["line"]
            reader = SourceReader(run.analysis.source_files, recorded_ns=run.analysis.run.started_ns)
            found = reader.context(file, line, around=min(max(self.around, 0), MOST_AROUND))
        if found is None:
            raise UsageError(f"{file}:{line} may not be quoted: {UNQUOTED}")
        lines = found.pop("lines")
        return answer({"path": file, "line": line, **found}, "lines", lines, Page(max_bytes=self.max_bytes))


class Table(Listing, frozen=True, kw_only=True):
    """One table of a run in full, as `stepscope analyze --table` shows it: rows as lists, in the order of `columns`."""

    run: RunName
    table: Annotated[str, Meta(description="operators, kernels, steps, metrics, ...; a wrong name lists all.")]
    filter: Annotated[str | None, Meta(description="Regular expression that a text of the row matches.")] = None
    where: Annotated[
        dict[str, str] | None,
        Meta(description="Column -> regular expression, or a comparison such as '>= 1000'; all must hold."),
    ] = None
    columns: Annotated[list[str] | None, Meta(description="Which columns; ['*'] is all of them.")] = None
    sort: Annotated[str | None, Meta(description="Column to order by, largest first.")] = None
    group: Annotated[str | None, Meta(description="As --group: operators by shapes, metrics by curve, ...")] = None
    worker: str | None = None
    span: int | None = None
    device: int | None = None
    step: int | None = None

    def answer(self, runs: OpenRuns) -> bytes:
        from stepscope.analyze.views.select import Selection
        from stepscope.report.table import Choice, of_run, worth_showing

        selection = Selection(self.worker, self.span, self.device, self.step, self.group)
        with runs.run(self.run) as (run,):
            found = of_run(run, self.table.replace("_", "-"), selection, Choice(self.sort, None, self.filter))
        keys = [column.key for column in found.columns]
        shown = [key for _, key in found.shown.columns if key in keys and worth_showing(found, key)] or keys
        wanted = keys if self.columns == [ALL] else self.columns or shown
        unknown = next((key for key in (*wanted, *(self.where or ())) if keys and key not in keys), None)
        if unknown is not None:
            raise UsageError(f"{unknown}: no such column; there are {', '.join(keys)}")
        rows = list(_where(found.rows, self.where or {}))
        head: Row = {"table": found.table, "sorted_by": found.sorted_by, "notes": found.notes, "absent": found.absent}
        head |= {"columns": wanted, "more_columns": [key for key in keys if key not in wanted]}
        head = {key: value for key, value in head.items() if value}
        return answer(head, "rows", [[row.get(key) for key in wanted] for row in rows], self.page)


def _where(rows: Sequence[Row], wanted: Mapping[str, str]) -> Iterator[Row]:
    """The rows whose values are as wanted; a missing one compares with nothing."""
    tests: list[tuple[str, Callable[[Any], bool]]] = []
    for key, text in wanted.items():
        relation = _RELATION.fullmatch(text.strip())
        try:
            pattern = re.compile(text, re.IGNORECASE)
        except re.error as error:
            raise UsageError(f"where {key}: {text}: not a regular expression ({error})") from None
        tests.append((key, _holds(RELATIONS[relation[1]], float(relation[2])) if relation else _matches(pattern)))
    return (row for row in rows if all(holds(row.get(key)) for key, holds in tests))


def _holds(compare: Callable[[Any, Any], bool], bound: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (int, float)) and compare(value, bound)


def _matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: value is not None and pattern.search(str(value)) is not None


class HotLines(Listing, frozen=True, kw_only=True):
    """Lines of your own code by the stack samples that stand in them or in what they call."""

    run: RunName
    file: Annotated[str | None, Meta(description="Only lines of this file: its name or the end of its path.")] = None
    phase: Annotated[str | None, Meta(description="data_wait, forward, backward, optimizer, other or startup.")] = None
    rank: int | None = None

    def answer(self, runs: OpenRuns) -> bytes:
        from stepscope.analyze.host.hotspots import HotspotOptions, StackSelection
        from stepscope.report.source import SourceReader

        selection = StackSelection(phase=self.phase, rank=self.rank, process="all", parked=False)
        with runs.run(self.run) as (run,):
            found = run.hotspots(HotspotOptions(selection=selection))
            facts = run.analysis
        lines: dict[tuple[Any, ...], Row] = {}
        for row in found.rows:
            path = row.library_function_path
            if path is None or (self.file and not f"/{path}".endswith("/" + self.file.lstrip("./"))):
                continue
            key = (path, row.library_function_line, row.library_function_name)
            names = dict(zip(("path", "line", "function"), key, strict=True))
            line = lines.setdefault(key, {**names, "samples": 0, "waiting": 0, "ms_per_step": None})
            line["samples"] += row.samples
            line["waiting"] += row.samples if row.waiting else 0
            if row.ms_per_step is not None:
                line["ms_per_step"] = (line["ms_per_step"] or 0.0) + row.ms_per_step
        if self.file and not lines:
            raise UsageError(f"{self.file}: no sample stands in such a file of your code; leave out file for all")
        reader = SourceReader(facts.source_files, recorded_ns=facts.run.started_ns) if runs.source else None
        rows = sorted(lines.values(), key=lambda line: -line["samples"])
        for row_ in rows[: self.offset + self.max_bytes // 20]:
            row_["share"] = row_["samples"] / found.selected_samples
            quoted = reader.context(row_["path"], row_["line"], around=0) if reader is not None else None
            row_["code"] = quoted["lines"][0].strip() if quoted and not quoted["changed_since"] else None
        head = {"samples": found.selected_samples, "unit": found.unit, "warnings": found.warnings[:3]}
        return answer(head, "lines", rows, self.page)


class Compare(Listing, frozen=True, kw_only=True):
    """Whether run b is faster than run a, and what changed: phases, functions, operators, kernels, the environment. One
    run of each side gives no verdict; an experiment does."""

    a: Annotated[str, Meta(description="The baseline, as list_runs names it.")]
    b: Annotated[str, Meta(description="What is compared with it.")]

    def answer(self, runs: OpenRuns) -> bytes:
        from stepscope import comparing
        from stepscope.report.comparison_report import comparison_document

        with runs.run(self.a, self.b) as (a, b):
            document = comparison_document(comparing.compare(a, b), source=runs.source)
        head: Row = {side: {key: document[side][key] for key in COMPARED} for side in ("baseline", "candidate")}
        for outcome in document["candidates"]:
            head["outcome"] = {key: outcome[key] for key in ("verdict", "text", "headline", "effect", "pairs")}
        head |= {"notes": document["notes"][:5], "absent": document["absent"]}
        rows = [{key: row.get(key) for key in CHANGE if row.get(key) is not None} for row in document["changes"]]
        return answer(head, "changes", rows, self.page)


class Verdict(Listing, frozen=True, kw_only=True):
    """What an experiment found: of each change the verdict (faster, slower, no_difference, undecided, void), its effect
    on the step time with an interval, and what to write into the script."""

    experiment: Annotated[str, Meta(description="Name or id of an experiment, as list_runs or job shows it.")]

    def answer(self, runs: OpenRuns) -> bytes:
        from stepscope.dashboard.server.catalog import standing
        from stepscope.report.experiment_report import NAME, experiment_document, load

        place = runs.place(self.experiment)
        if not is_search(place):
            raise UsageError(f"{place.name}: no experiment; compare lays two runs beside each other")
        if not (place.path / NAME).is_file():
            raise UsageError(f"{place.name}: no verdict yet. {standing(place).text}")
        document = experiment_document(load(place.path / NAME))
        rows = [{key: row[key] for key in VERDICT if row[key] not in (None, [])} for row in document["candidates"]]
        head = {key: document[key] for key in ("finished", "stopped", "notes", "skipped", "by_hand", "repeat")}
        return answer({key: value for key, value in head.items() if value}, "candidates", rows, self.page)


class Fix(Tool, frozen=True, kw_only=True):
    """The change that a finding names, as a unified diff where it is mechanical; nothing is written."""

    run: RunName
    finding: FindingId

    def answer(self, runs: OpenRuns) -> bytes:
        from stepscope import fix

        with runs.run(self.run) as (run,):
            made = fix.fix_of(run, fix.find(run, self.finding), roots=run.options.source_roots)
        difference = b"".join(change.difference for change in made.changes).decode("utf-8", "replace")
        head: dict[str, Any] = {"diff": difference}
        head |= {"already_done": made.done, "reason": made.reason}
        head = {key: value for key, value in head.items() if value}
        return answer(head, "notes", made.notes, Page(max_bytes=self.max_bytes))


class Started(Tool, frozen=True, kw_only=True):
    starts: ClassVar[bool] = True
    argv: Words
    cwd: Folder = "."
    max_seconds: Seconds = None

    def start(self, runs: OpenRuns, kind: str, options: Sequence[str]) -> bytes:
        if runs.jobs is None:
            raise UsageError("this server starts nothing; start it with --allow-run")
        return _told(runs.jobs.start(kind, options, self.argv, self.cwd, self.max_seconds), self.max_bytes)


class StartRun(Started, frozen=True, kw_only=True):
    """Record a training command with stepscope, the script unedited; its findings can be read at its end."""

    knobs: Annotated[list[str], Meta(description="Changes to make, e.g. 'loader.num_workers=2'.")] = []

    def answer(self, runs: OpenRuns) -> bytes:
        return self.start(runs, "run", ["--quiet", *(f"--knob={knob}" for knob in self.knobs)])


class StartExperiment(Started, frozen=True, kw_only=True):
    """Prove a fix: run the training command again and again as it is and with each change, in turns, and say with an
    interval which helps. Takes minutes."""

    tries: Annotated[list[str], Meta(description="Changes, e.g. 'loader.num_workers=2,4', one candidate per value.")]
    together: Annotated[bool, Meta(description="All tries are one candidate.")] = False
    pairs: Annotated[str | None, Meta(description="MIN:MAX pairs of runs, 5:10 by default.")] = None
    steps: Annotated[int | None, Meta(description="Measured steps of a run; chosen from the step time.")] = None

    def answer(self, runs: OpenRuns) -> bytes:
        given = {"pairs": self.pairs, "steps": self.steps}
        options = [f"--try={text}" for text in self.tries]
        options += [f"--{name}={value}" for name, value in given.items() if value is not None]
        return self.start(runs, "experiment", [*options, *(["--together"] if self.together else [])])


class WaitForJob(Tool, frozen=True, kw_only=True):
    """How a job goes, waiting for its end up to wait_seconds: its state, the last lines of its output, and the run or
    experiment that it made."""

    starts: ClassVar[bool] = True
    job: str
    wait_seconds: Annotated[float, Meta(description=f"At most {MOST_WAIT_S:g}; many clients give up after 60.")] = 0.0

    def answer(self, runs: OpenRuns) -> bytes:
        return _told(self.of(runs), self.max_bytes)

    def of(self, runs: OpenRuns) -> Job:
        """Raises `StepscopeError`."""
        if runs.jobs is None:
            raise UsageError("this server starts nothing, so there are no jobs")
        return runs.jobs.get(self.job)


class CancelJob(WaitForJob, frozen=True, kw_only=True):
    """End a job and all its processes."""

    def answer(self, runs: OpenRuns) -> bytes:
        self.of(runs).stop(CANCELLED)
        return super().answer(runs)


def _told(job: Job, max_bytes: int) -> bytes:
    made = {"made": f"{job.out.parent.name}/{job.out.name}"} if job.out.is_dir() else {}
    return answer({**job.told(), **made}, "output", job.tail()[-TAIL_LINES:], Page(max_bytes=max_bytes))


READING: dict[str, type[Tool]] = {
    "list_runs": ListRuns,
    "findings": Findings,
    "source": Source,
    "table": Table,
    "hot_lines": HotLines,
    "compare": Compare,
    "verdict": Verdict,
    "fix": Fix,
}
STARTING: dict[str, type[Tool]] = {
    "start_run": StartRun,
    "start_experiment": StartExperiment,
    "job": WaitForJob,
    "cancel_job": CancelJob,
}


def asked(tools: Mapping[str, type[Tool]], name: str, arguments: Mapping[str, Any]) -> Tool:
    """The question of a call; raises `UsageError`."""
    if name not in tools:
        raise UsageError(f"{name[:100]}: no such tool; there are {', '.join(tools)}")
    try:
        return msgspec.convert(arguments, tools[name])
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {error}") from None
