"""What of a run goes to other tools: its curves with their steps and times, and what the report says of it.

Points are those of `analyze --table metrics`: what was found, logged and tapped, `perf/…` of the steps that timings
stand on, `sys/…` of telemetry. The axis is our own step: the one a value was read in, or else the one begun last before
it; `BEFORE` stands for none, where a tool must have a number. One run holds all processes: names of those behind the
first begin with the process. Texts may hold whatever a run folder does, and are made harmless to readers of Markdown.

CSV and Parquet: a folder with the long table of all curves, the steps, the findings, and the report.

The table `metrics` has the columns of `analyze --table metrics`, values in full precision; a missing step is an empty
field. `steps` has every step with the reason why it counts or not, those included that no `perf/…` curve stands on.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from stepscope.analyze import curves
from stepscope.analyze.views.select import NO_CURVES
from stepscope.dashboard import single
from stepscope.dashboard.server import live
from stepscope.errors import UsageError
from stepscope.report import sentences, words
from stepscope.report.escape import one_line, plain_value
from stepscope.report.outputs import write_file
from stepscope.report.table import csv_cell
from stepscope.sinks import Sent, Target
from stepscope.tables.arrays import NONE
from stepscope.tables.trace_entry import write_parquet

if TYPE_CHECKING:
    from stepscope import api
    from stepscope.model import Report
    from stepscope.tables.schema import Tables

BEFORE = -1  # of what was measured before the first step; steps begin at 0
MACHINE = "machine"  # stands for the process of what no process is of
PAGE = "report.html"
MAX_SENTENCE, MAX_COMMAND = 600, 4_000  # characters
MOST = 1_000  # values of one moment that go into one record
_TABLE = ("title", "cost", "place", "evidence", "fix")  # columns of the table in Markdown
_MARKUP = re.compile(r"([\\`*_\[\]!<>|#])")
Row = dict[str, Any]


class Exported:
    """One run as sinks take it. What is made of it is made when a sink first asks."""

    def __init__(self, run: api.Run, *, source: bool = True) -> None:
        self._run, self._source = run, source
        self.folder, self.name = run.folder, run.folder.name

    @property
    def tables(self) -> Tables:
        return self._run.tables

    @property
    def status(self) -> int | None:
        return self.tables.run.exit_status

    @cached_property
    def identity(self) -> str:
        """The same for each copy of this run, and as it grows: when and as which process its recording began."""
        told = [(row.get("started_ns"), row.get("host"), row.get("pid")) for row in self.tables.manifests]
        told += [(rank.started_ns, rank.host, rank.pid) for rank in self.tables.ranks] if not told else []
        known = [each for each in told if isinstance(each[0], int)]
        first = min(known, key=lambda each: (each[0], str(each[1:]))) if known else (self.name, self._first_ns)
        return hashlib.sha256(repr(first).encode("utf-8", "backslashreplace")).hexdigest()[:16]

    @property
    def _first_ns(self) -> int | None:
        found = (frame[name].min() for frame, name in ((self.tables.steps, "start_ns"), (self.rows, "time_ns")))
        return min((time for time in found if isinstance(time, int)), default=None)

    @property
    def started_ns(self) -> int | None:
        """When the run began; of traces and files of others their first moment."""
        return self.tables.run.started_ns or self._first_ns

    @cached_property
    def ended_ns(self) -> int | None:
        """When it ended; where that is not told the last that was measured."""
        last = self.rows["time_ns"].max()
        return self.tables.run.ended_ns or (last if isinstance(last, int) else self.started_ns)

    @property
    def goes_on(self) -> bool:
        """Whether the run is not over, as far as its folder tells."""
        return self._run.recorded and live.standing(self._run.folder).state == live.RUNNING

    @property
    def has_begun(self) -> bool:
        """Whether all processes train that are to: until then telemetry has other names, or is no process's yet."""
        return not self.tables.steps.is_empty() and len(self.tables.ranks) >= (self.tables.run.world_size or 1)

    @cached_property
    def rows(self) -> pl.DataFrame:
        """Every value as `analyze --table metrics` has it, in order of time."""
        found = curves.rows(self.tables, self._run.labelled).drop_nulls(["value", "time_ns"])
        return found.sort("time_ns", maintain_order=True)

    @cached_property
    def points(self) -> pl.DataFrame:
        """Every value once: process, name, step, time_ns and value, in order of time.

        What is of the machine is with the first process, whose steps it is laid on. A name is unique in its process.
        """
        first = next(iter(curves.processes(self.tables)), MACHINE)
        schema = {
            "process": pl.String,
            "name": pl.String,
            "step": pl.Int64,
            "time_ns": pl.Int64,
            "value": pl.Float64,
        }
        taken: set[tuple[str, str]] = set()
        parts = [pl.DataFrame(schema=schema)]
        for curve in sorted(curves.made(self.tables, self.rows), key=lambda curve: curve.process is None):
            process, name = curve.process or first, curve.name
            while (process, name) in taken:
                name += f" ({MACHINE})"
            taken.add((process, name))
            columns = {"step": curve.steps, "time_ns": curve.times_ns, "value": curve.values}
            part = pl.DataFrame(columns).select(pl.lit(process).alias("process"), pl.lit(name).alias("name"), *columns)
            parts.append(part.with_columns(pl.col("step").replace(NONE, BEFORE)))
        return pl.concat(parts).sort("time_ns", "step", maintain_order=True)

    @property
    def steps(self) -> pl.DataFrame:
        """Every step with the reason why it counts or not."""
        return self._run.labelled.frame

    @property
    def together(self) -> pl.DataFrame:
        """The same for a sink that has one run for all processes: the process stands before the name of all others."""
        first = next(iter(curves.processes(self.tables)), MACHINE)
        own = pl.when(pl.col("process") == first).then(pl.col("name"))
        return self.points.with_columns(name=own.otherwise(pl.concat_str("process", pl.lit("/"), "name")))

    @cached_property
    def report(self) -> Report:
        """The report, without source text where none may leave."""
        return self._run.report(source=self._source)

    @cached_property
    def page(self) -> bytes:
        """report.html, made anew."""
        return single.render(self._run, self.report, source=self._source).encode("utf-8")

    @cached_property
    def findings(self) -> list[Row]:
        """A row for each finding, in order of cost, and then for each risk; what a risk has not is None."""
        shorten = words.Shortener(self.report.run)
        return [
            *(_statement("finding", row, shorten) for row in self.report.findings),
            *(_statement("risk", row, shorten) for row in self.report.risks),
        ]

    @property
    def summary(self) -> dict[str, float]:
        """Figures that runs are compared by."""
        steps = self.report.steps or {}
        costs = {
            f"finding/{row['rule']}_ms_per_step": row["cost_ms_per_step"] for row in reversed(self.report.findings)
        }
        found = {"steps": steps.get("count"), "step_ms": steps.get("mean_ms"), "samples_per_s": None}
        found |= {"samples_per_s": steps.get("samples_per_second"), **costs}
        known = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
        return {"findings": len(self.report.findings), "risks": len(self.report.risks), **known}

    @property
    def notes(self) -> str:
        """The findings in Markdown."""
        report, lines = self.report, []
        if not report.findings:
            lines.append(_harmless(sentences.healthy(report) or "No finding."))
        for number, row in enumerate(self.findings, 1):
            cost = f" ({row['cost']})" if row["cost"] else ""
            place = f" At {_harmless(row['place'])}." if row["place"] else ""
            kind = "Risk: " if row["kind"] == "risk" else ""
            lines.append(f"{number}. {kind}**{_harmless(row['title'])}**{cost}.{place} {_harmless(row['fix'])}")
        unexplained = sentences.unexplained(report)
        lines += [_harmless(unexplained)] if unexplained else []
        return "\n".join(
            ["Findings of stepscope, by what they cost:" if report.findings else "By stepscope:", "", *lines]
        )

    @property
    def table(self) -> str:
        """The findings as a table in Markdown; empty where there are none."""
        rows = [[_harmless(row[key]) for key in _TABLE] for row in self.findings]
        head = [[key.capitalize() for key in _TABLE], ["---"] * len(_TABLE)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (head + rows if rows else ()))

    @property
    def config(self) -> Row:
        """What is known of how the run was made; nothing that is not."""
        run = self.report.run
        first: Mapping[str, Any] = next(iter(self.tables.manifests), {})
        given = first.get("options")
        options: Mapping[str, Any] = given if isinstance(given, dict) else {}
        told = options.get("knobs")
        knobs = told if isinstance(told, list) else []
        hardware = run.get("hardware") or {}
        gpus = hardware.get("gpus")
        git = run.get("git") or {}
        framework = run.get("framework") or {}
        found = {
            "run": self.name,
            "identity": self.identity,
            "started": _moment(self.started_ns),
            "ended": None if self.goes_on else _moment(self.ended_ns),
            "command": one_line(shlex.join(map(str, run.get("command") or ())), MAX_COMMAND),
            "knobs": {str(pair[0]): str(pair[1]) for pair in knobs if isinstance(pair, list) and len(pair) == 2},
            "seed": options.get("seed"),
            "tags": list(run.get("tags") or ()),
            "world_size": run.get("world_size"),
            "hosts": list(run.get("hosts") or ()),
            "versions": run.get("versions"),
            "framework": " ".join(str(framework[key]) for key in ("name", "version") if framework.get(key)),
            "git": {key: git[key] for key in ("commit", "branch", "dirty") if git.get(key) is not None},
            "cpu": hardware.get("cpu_model"),
            "cores": hardware.get("logical_cores"),
            "gpus": [gpu.get("name") for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else [],
            "environment": first.get("environment"),
            "exit_status": run.get("exit_status"),
        }
        made = {key: plain_value(value) for key, value in found.items()}
        return {key: value for key, value in made.items() if value not in (None, "", [], {})}

    @property
    def absent(self) -> tuple[str, ...]:
        """What this run has nothing of."""
        groups = {name.partition("/")[0] for name in self.rows["name"].unique().to_list()}
        if not groups:
            return (NO_CURVES,)
        told = {
            "no steady step to time: there are no perf/… curves": curves.PERFORMANCE in groups,
            "no telemetry was recorded: there are no sys/… curves": curves.SYSTEM in groups,
            "no metric was recorded: neither losses nor what the script logs": bool(
                groups - {curves.PERFORMANCE, curves.SYSTEM}
            ),
        }
        return tuple(text for text, there in told.items() if not there)


def _statement(kind: str, row: Row, shorten: words.Shortener) -> Row:
    place = row["where"][0] if row["where"] else None
    risk = kind == "risk"
    return {
        "kind": kind,
        **{key: row[key] for key in ("id", "rule", "category", "severity", "confidence")},
        "title": one_line(row["title"], MAX_SENTENCE),
        "cost": "" if risk else sentences.cost(row),
        **{key: None if risk else row[key] for key in ("cost_ms_per_step", "share", "gain_ceiling")},
        "place": shorten(place["file"], place["line"]) if place else "",
        "function": one_line(place["function"] or "", MAX_SENTENCE) if place else "",
        "fix": one_line(row["fix"], MAX_SENTENCE),
        "caveat": one_line(row["caveat"], MAX_SENTENCE),
        "evidence": " · ".join(": ".join(words.evidence(dict(each))) for each in row["evidence"]),
    }


def _moment(time_ns: int | None) -> str | None:
    """To the millisecond, in UTC; None for a time that no calendar has."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return (
            None
            if time_ns is None
            else datetime.fromtimestamp(time_ns / 1e9, timezone.utc).isoformat("T", "milliseconds")
        )
    return None


def _harmless(text: str) -> str:
    return _MARKUP.sub(r"\\\1", text)


def moments(points: pl.DataFrame) -> Iterator[tuple[int, int, dict[str, float]]]:
    """(time_ns, step, values by name) of each moment, in order; at most `MOST` at once, and no name twice."""
    at, found = (0, 0), dict[str, float]()
    columns = (points[column].to_list() for column in ("time_ns", "step", "name", "value"))
    for time_ns, step, name, value in zip(*columns, strict=True):
        if (time_ns, step) != at or name in found or len(found) == MOST:
            if found:
                yield *at, found
            at, found = (time_ns, step), {}
        found[name] = value
    if found:
        yield *at, found


def missing(points: pl.DataFrame, there: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """The points that are not there yet; those alike in `keys` are counted, and as many are taken for the same."""
    if there.is_empty():
        return points
    number = pl.int_range(pl.len()).over(keys).alias("nth")
    known = there.select(*keys).with_columns(number)
    return points.with_columns(number).join(known, on=[*keys, "nth"], how="anti", maintain_order="left").drop("nth")


COLUMNS = ("step", "time_ns", "since_start_ns", "name", "value", "source", "rank", "process")
ABOUT = "run.json"


def csv(run: Exported, target: Target) -> Sent:
    """Files of comma-separated values. Texts are made harmless as in every table; NaN and inf stand as such."""
    return _write(run, target, "csv", _csv_bytes)


def parquet(run: Exported, target: Target) -> Sent:
    """Files of Parquet."""
    return _write(run, target, "parquet", _parquet_bytes)


def _write(run: Exported, target: Target, kind: str, encoded: Callable[[pl.DataFrame], bytes]) -> Sent:
    folder = target.folder(kind, run.name)
    names = [*(f"{name}.{kind}" for name in ("metrics", "steps", "findings")), ABOUT, PAGE]
    there = next((name for name in names if (folder / name).exists()), None)
    if there is not None and not target.force:
        raise UsageError(f"{folder / there}: exists; add --force to overwrite it, or name another folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: a file; name a folder")
    since = (pl.col("time_ns") - (run.started_ns or 0)).alias("since_start_ns")
    schema = dict.fromkeys(_FINDING_TEXTS, pl.String) | dict.fromkeys(_FINDING_FIGURES, pl.Float64)
    parts = {
        "metrics": encoded(run.rows.with_columns(since).select(COLUMNS)),
        "steps": encoded(run.steps),
        "findings": encoded(pl.DataFrame(run.findings, schema=schema)),
    }
    for name, data in parts.items():
        write_file(folder / f"{name}.{kind}", data, make_folder=True)
    write_file(folder / ABOUT, msgspec.json.format(msgspec.json.encode(run.config | {"summary": run.summary})) + b"\n")
    write_file(folder / PAGE, run.page)
    return Sent(str(folder), run.rows.height)


_FINDING_TEXTS = (
    *("kind", "id", "rule", "category", "severity", "confidence", "title", "cost"),
    *("place", "function", "fix", "caveat", "evidence"),
)
_FINDING_FIGURES = ("cost_ms_per_step", "share", "gain_ceiling")


def _csv_bytes(frame: pl.DataFrame) -> bytes:
    texts = [name for name, kind in frame.schema.items() if kind == pl.String]
    known = {name: frame[name].unique().drop_nulls().to_list() for name in texts}
    harmless = [
        pl.col(name).replace_strict(words, [csv_cell(word) for word in words], return_dtype=pl.String)
        for name, words in known.items()
        if words
    ]
    return frame.with_columns(harmless).write_csv().encode()


def _parquet_bytes(frame: pl.DataFrame) -> bytes:
    out = io.BytesIO()
    write_parquet(frame, out)
    return out.getvalue()
