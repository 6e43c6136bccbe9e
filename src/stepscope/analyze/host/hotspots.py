"""The deepest functions by sampled time: a row per innermost frame, with the frame of a library that led there.

A stack counts once, for its innermost frame, so recursion counts nothing twice and the rows add up to what was
selected. Nothing is dropped: top-level code, native frames and stacks without any frame are rows of their own kind, and
waiting is never merged with working.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field

from stepscope.analyze.context import Context
from stepscope.analyze.host import stack_selection
from stepscope.analyze.host.stack_selection import Chosen, IdleMode, StackSelection, check, choose
from stepscope.engine import intervals
from stepscope.engine.call_tree import CallTree
from stepscope.engine.samples import Samples, mean_step_ms, steps_of_means
from stepscope.engine.user_code import UserCode
from stepscope.errors import UsageError
from stepscope.model.sampled import HotspotRow, Hotspots, SampledProcess
from stepscope.read.raw import Frame
from stepscope.tables.arrays import NONE
from stepscope.tables.schema import Tables

OWN_CODE = "your own code"
NO_FRAME = "(no Python frame)"

_LEAF = ["name", "path", "line"]
_LIBRARY = ["library_function_name", "library_function_path", "library_function_line"]
# What tells rows apart, of the innermost frame and of the library's; beside it, whether it waits.
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "line": (("name", "path", "line"), ("name", "path", "line")),
    "function": (("name", "path"), ("name", "path")),
    "file": (("path",), ()),
    "module": (("module",), ()),
}


class HotspotOptions(Struct, frozen=True):
    """What is asked for. `library` None is the user's own code.

    `by`: a key of `GROUPS`. With `aggregate` False every call path is a row, as long as `by` is "line". `limit`: the
    most rows of working and of waiting that are made; None is all.
    """

    library: str | None = None
    by: str = "line"
    aggregate: bool = True
    limit: int | None = None
    selection: StackSelection = field(default_factory=StackSelection)


DEFAULTS = HotspotOptions()


def of_run(context: Context, options: HotspotOptions = DEFAULTS) -> Hotspots:
    """The hotspots of a run, with milliseconds per step where its steps are known; raises like `hotspots`."""
    check(context.tables, options.selection)
    return hotspots(context.tables, context.calls, context.code, options, _ms_per_sample(context))


def hotspots(
    tables: Tables,
    tree: CallTree,
    code: UserCode,
    options: HotspotOptions = DEFAULTS,
    weights: MsPerSample | None = None,
) -> Hotspots:
    """Rows of the selected stacks, most samples first. `weights` says what a sample is in milliseconds per step.

    Raises `UsageError` for options that mean nothing, and for a selection of which there is no sample.
    """
    _check(options)
    chosen = choose(tables, options.selection)
    counted = _unit(tables)
    samples = _weighted(chosen, counted, weights)
    attributes = _frame_attributes(tree, code, options.library, tables.run.user_roots)
    labelled = _labelled(samples, tree, attributes)
    found = _grouped(labelled, attributes, options)
    shown = found if options.limit is None else found.filter(pl.int_range(pl.len()).over("waiting") < options.limit)
    roles = [(name.partition("=")[2], name) for name in found.columns if name.startswith("role=")]
    selected = int(chosen.rows["samples"].sum())
    kinds = labelled.group_by("kind").agg(pl.col("samples").sum()).sort("samples", "kind", descending=[True, False])
    segments = tables.segments
    kept = int(tables.stacks["samples"].sum())
    read = max(int(segments["samples"].fill_null(0).sum()), kept)
    mode = stack_selection.idle_mode(tables)
    rates = segments["rate_hz"].unique().to_list()  # one that is unknown makes it unknown
    rate = rates[0] if len(rates) == 1 else None
    wall_s, wall_source = _wall(tables, rate, counted)
    processes = _processes(chosen.rows)
    skipped = int(segments["skipped_samples"].fill_null(0).sum())
    warnings = _warnings(tables, selected, processes, mode, counted, skipped)
    nobody = labelled.height > 0 and (labelled["library"] == attributes.height - 1).all()
    return Hotspots(
        samples=read,
        skipped_samples=skipped,
        unit=counted,
        by=options.by,
        library=options.library or OWN_CODE,
        selected_samples=selected,
        waiting_samples=int(chosen.rows.filter(pl.col("waiting").fill_null(False))["samples"].sum()),
        left_out={**chosen.left_out, **({NOT_KEPT: read - kept} if read > kept else {})},
        rows=tuple(_row(row, selected, roles) for row in shown.iter_rows(named=True)),
        working_rows=found.filter(~pl.col("waiting")).height,
        waiting_rows=found.filter("waiting").height,
        kinds={str(kind): int(count) for kind, count in kinds.iter_rows()},
        processes=processes,
        files=segments.select("host", "file").n_unique(),
        formats=tuple(sorted(segments["format"].drop_nulls().unique().to_list())),
        idle=mode.idle,
        idle_source=mode.source,
        rate_hz=rate,
        wall_s=wall_s,
        wall_source=wall_source,
        steps=weights.steps if weights else 0,
        mean_step_ms=weights.mean_ms if weights else None,
        warnings=(*warnings, *([_library_warning(options.library)] if nobody else ())),
    )


def _check(options: HotspotOptions) -> None:
    if options.by not in GROUPS:
        raise UsageError(f"--by {options.by}: unknown; use {', '.join(GROUPS)}")
    if not options.aggregate and options.by != "line":
        raise UsageError("--no-aggregate-leaf-paths shows every call path by its line; leave out --by")
    if options.library is not None and not options.library.strip("./\\ "):
        raise UsageError("--library: empty; give a module, a folder or a path, e.g. --library mypackage")


def _weighted(chosen: Chosen, unit: str, weights: MsPerSample | None) -> pl.DataFrame:
    """The selected stacks, one row per node, role, phase and state, with samples, seconds and ms per step."""
    rows = chosen.rows
    second = {"samples": 1.0 / pl.when(pl.col("rate_hz") > 0).then(pl.col("rate_hz")), "us": pl.lit(1e-6)}
    per_sample = weights.of(rows) if weights is not None else pl.Series([None] * rows.height, dtype=pl.Float64)
    weighted = rows.with_columns(
        pl.col("role").fill_null("other"),
        pl.when(pl.col("role") == "rank").then(pl.col("phase")).alias("phase"),
        pl.col("waiting").fill_null(False),
        seconds=pl.col("samples") * second.get(unit, pl.lit(None, dtype=pl.Float64)),
        ms_per_step=pl.col("samples") * per_sample,
    )
    return weighted.group_by("node", "role", "phase", "stage", "waiting", maintain_order=True).agg(*_sums())


def _sums() -> list[pl.Expr]:
    """Samples and times of a group: seconds need all of them, and no time is null, not 0."""
    timed, stepped = pl.col("seconds").is_not_null().all(), pl.col("ms_per_step").is_not_null().any()
    return [
        pl.col("samples").sum(),
        pl.when(timed).then(pl.col("seconds").sum()).alias("seconds"),
        pl.when(stepped).then(pl.col("ms_per_step").sum()).alias("ms_per_step"),
    ]


def _frame_attributes(tree: CallTree, code: UserCode, library: str | None, roots: tuple[str, ...]) -> pl.DataFrame:
    """(name, path, line, native, module, marked) by frame number, and a last row for stacks without frames."""
    native = [is_native(frame) for frame in tree.frames]
    compiled = {frame.file for frame, is_one in zip(tree.frames, native, strict=True) if is_one}
    matches = None if library is None else library_matcher(library, code)
    of_file = {
        file: (
            posixpath.basename(file) if file in compiled else module_of(file, code, roots),
            matches(file) if matches else file not in compiled and code.resolve(file) is not None,
        )
        for file in dict.fromkeys(frame.file for frame in tree.frames)
    }
    rows = [
        (frame.function, frame.file, frame.line, is_one, *of_file[frame.file])
        for frame, is_one in zip(tree.frames, native, strict=True)
    ]
    schema = {"name": pl.String, "path": pl.String, "line": pl.Int64}
    more = {"native": pl.Boolean, "module": pl.String, "marked": pl.Boolean}
    return pl.DataFrame([*rows, (NO_FRAME, "", None, False, "", False)], schema={**schema, **more}, orient="row")


def _labelled(samples: pl.DataFrame, tree: CallTree, frames: pl.DataFrame) -> pl.DataFrame:
    """`samples` with the numbers of the innermost frame (`leaf`) and the library's (`library`), and the kind."""
    nobody = frames.height - 1
    node = samples["node"].fill_null(NONE).to_numpy().astype(np.int64)
    leaf = np.append(tree.frame, nobody).astype(np.int64)[node]  # node -1 is the last one
    library_node = np.append(tree.innermost(frames["marked"].to_numpy()[tree.frame]), NONE).astype(np.int64)[node]
    library = np.where(library_node >= 0, np.append(tree.frame, nobody).astype(np.int64)[library_node], nobody)
    kind = (
        pl.when(pl.col("node").is_null())
        .then(pl.lit("none"))
        .when(frames["native"].gather(leaf))
        .then(pl.lit("native"))
        .when(pl.col("stage").is_not_null())
        .then(pl.col("stage"))
        .when((frames["name"] == MODULE).gather(leaf))
        .then(pl.lit("module"))
        .otherwise(pl.lit("python"))
    )
    return samples.with_columns(kind=kind, leaf=pl.Series(leaf), library=pl.Series(library))


def _grouped(labelled: pl.DataFrame, frames: pl.DataFrame, options: HotspotOptions) -> pl.DataFrame:
    """The columns of `HotspotRow`, most samples first; roles, kinds and phases as columns of their own."""
    ends = {"leaf": "", "library": "library_function_"}
    codes = {name: _codes(frames, [name]) for name in _LEAF}
    coded = {f"{end}:{name}": pl.Series(codes[name][labelled[end].to_numpy()]) for end in ends for name in _LEAF}
    same = [(pl.col(column).min() == pl.col(column).max()).alias(column) for column in coded]
    rows = labelled.with_columns(row=_row_numbers(labelled, frames, options), **coded)
    grouped = rows.group_by("row", maintain_order=True).agg(
        pl.col("leaf", "library", "waiting", "node").first(), *_sums(), *same, *_shares(labelled)
    )
    frame_of = {end: frames[grouped[end]] for end in ends}
    named = grouped.with_columns(
        pl.when(f"{end}:{name}").then(frame_of[end][name]).alias(f"{prefix}{name}")
        for end, prefix in ends.items()
        for name in _LEAF
    )
    nobody = pl.col("library") == frames.height - 1
    named = named.with_columns(
        *(pl.when(~nobody).then(pl.col(name)).alias(name) for name in _LIBRARY),
        module=frame_of["leaf"]["module"],
        kind=_largest(grouped, "kind"),
        phase=_largest(grouped, "phase"),
    )
    order = ["path", "line", "name", "module", "waiting", *_LIBRARY, "node"]
    ordered: pl.DataFrame = named.sort(["samples", *order], descending=[True, *(False for _ in order)], nulls_last=True)
    return ordered


def _row_numbers(labelled: pl.DataFrame, frames: pl.DataFrame, options: HotspotOptions) -> pl.Series:
    """A number for every stack that is the same for those of one row of the result."""
    waiting = labelled["waiting"].to_numpy().astype(np.int64)
    if not options.aggregate:
        return pl.Series(labelled["node"].fill_null(NONE).to_numpy().astype(np.int64) * 2 + waiting)
    of_leaf, of_library = (_codes(frames, list(columns)) for columns in GROUPS[options.by])
    leaf, library = of_leaf[labelled["leaf"].to_numpy()], of_library[labelled["library"].to_numpy()]
    return pl.Series((leaf * frames.height + library) * 2 + waiting)


def _codes(frames: pl.DataFrame, columns: list[str]) -> npt.NDArray[np.int64]:
    """A number for every frame that is the same for those with equal `columns`; all are 0 without any."""
    if not columns:
        return np.zeros(frames.height, np.int64)
    numbers = frames.select(pl.struct(columns).rank("dense").cast(pl.Int64).alias("code") - 1)["code"]
    return numbers.to_numpy()


def _shares(labelled: pl.DataFrame) -> list[pl.Expr]:
    """Sums of samples by every value of the columns that a row tells shares or the largest of."""
    return [
        pl.when(pl.col(column) == value).then(pl.col("samples")).otherwise(0).sum().alias(f"{column}={value}")
        for column in ("role", "kind", "phase")
        for value in labelled[column].drop_nulls().unique().sort().to_list()
    ]


def _largest(grouped: pl.DataFrame, column: str) -> pl.Expr:
    """The value of `column` with most samples, the first by name of equal ones; null where none has any."""
    sums = [name for name in grouped.columns if name.startswith(f"{column}=")]
    if not sums:
        return pl.lit(None, dtype=pl.String)
    largest = pl.max_horizontal(sums)
    values = [pl.when((pl.col(name) == largest) & (largest > 0)).then(pl.lit(name.partition("=")[2])) for name in sums]
    return pl.coalesce(values)


def _row(row: dict[str, Any], selected: int, roles: list[tuple[str, str]]) -> HotspotRow:
    own = ("samples", "waiting", "kind", "module", "phase", "seconds", "ms_per_step")
    return HotspotRow(
        **{name: row[name] for name in (*_LEAF, *_LIBRARY, *own)},
        proportion=row["samples"] / selected if selected else 0.0,
        roles={role: row[column] for role, column in roles if row[column]},
    )


def _library_warning(library: str | None) -> str:
    if library is None:
        return "none of the sampled code was recognised as your own; name it with --library NAME or --source-root DIR"
    return (
        f"no sampled stack runs through {library}: it is matched with whole parts of the path, so give a package, "
        "a module or a folder as it stands in the column path"
    )


NOT_KEPT = "torn or the recorder's own"
FEW_SAMPLES = 100  # a share of p then has a standard error of up to 5 percent points
OF_STACKS = ("stacks", "stacks.jsonl")  # sources of the tables' notes that concern samples

_PROCESS = ["host", "in_file", "pid", "role", "rank"]


def _unit(tables: Tables) -> str:
    """What the counts are; "mixed" where files differ, so that their sum means nothing."""
    units = tables.segments["unit"].drop_nulls().unique().to_list()
    return "samples" if not units else str(units[0]) if len(units) == 1 else "mixed"


def _processes(rows: pl.DataFrame) -> tuple[SampledProcess, ...]:
    # of files that others recorded nobody knows the host, so equal process ids of two files are two processes
    named = rows.with_columns(
        pl.col("role").fill_null("other"),
        in_file=pl.when(pl.col("host").fill_null("") == "").then("file"),
    )
    found = named.group_by(_PROCESS).agg(
        threads=pl.col("thread").drop_nulls().n_unique(),
        samples=pl.col("samples").sum(),
        waiting_samples=pl.col("samples").filter(pl.col("waiting").fill_null(False)).sum(),
    )
    ordered = found.sort(["samples", "rank", *_PROCESS[:4]], descending=[True, *[False] * 5], nulls_last=True)
    return tuple(
        SampledProcess(**{**row, "host": row["host"] or "", "threads": row["threads"] or None})
        for row in ordered.drop("in_file").iter_rows(named=True)
    )


def _wall(tables: Tables, rate: float | None, counted: str) -> tuple[float | None, str | None]:
    """How long sampling lasted: of files that run side by side the longest, of segments with times their union."""
    segments = tables.segments
    timed = segments.filter(pl.col("start_ns").is_not_null() & pl.col("end_ns").is_not_null())
    if timed.height:
        sampled = intervals.union(timed["start_ns"].to_numpy(), timed["end_ns"].to_numpy())
        return intervals.total(sampled) / 1e9, stack_selection.RECORDED
    told = segments["wall_ns"].drop_nulls()
    if len(told):
        return float(told.max() or 0) / 1e9, stack_selection.RECORDED  # type: ignore[arg-type]
    second = {"samples": 1.0 / rate if rate else None, "us": 1e-6}.get(counted)
    one_thread = tables.stacks.filter(pl.col("thread").is_not_null())
    if second is None or one_thread.is_empty():
        return None, None
    busiest = one_thread.group_by("host", "file", "pid", "thread").agg(pl.col("samples").sum())["samples"].max()
    return float(busiest or 0) * second, "nominal"  # type: ignore[arg-type]


def _warnings(
    tables: Tables,
    selected: int,
    found: tuple[SampledProcess, ...],
    mode: IdleMode,
    counted: str,
    skipped: int,
) -> list[str]:
    texts = [*_on_waiting(mode, counted), *_on_processes(found)]
    if counted == "mixed":
        texts.append(
            "the files count different things (samples, time, bytes), so their sums mean little; open them apart"
        )
    elif counted == "samples" and 0 < selected < FEW_SAMPLES:
        texts.append(f"only {selected} samples: shares may be off by several percent points; sample for longer")
    broken = tables.quality.counts.get("skipped_records", 0)
    if skipped:
        texts.append(f"{skipped:,} samples could not be read and are in no row")
    elif broken:
        texts.append(f"{broken:,} record(s) are cut off or damaged, their counts too, and are in no row")
    if not selected:
        texts.append("no sample is left after selection")
    strangers = tables.quality.counts.get("foreign_files", 0)
    if strangers and (tables.segments["host"] == "").all():
        texts.append(f"{strangers} file(s) beside them hold no sampled stacks and were left out")
    return [*texts, *(note.text for note in tables.quality.notes if note.source in OF_STACKS)]


def _on_waiting(mode: IdleMode, counted: str) -> list[str]:
    if counted == "bytes" or mode.idle:
        return []
    if mode.idle is None:
        return [
            "whether waiting was sampled is unknown: if not (py-spy without --idle), time in which the program waited "
            "is missing here"
        ]
    how = "" if mode.source == stack_selection.RECORDED else ", as threads that only wait are all but missing"
    return [
        f"waiting was not sampled{how}: time in which the program waited (for its loader, a device, another rank) "
        "is missing here; record with --idle to see it"
    ]


def _on_processes(found: tuple[SampledProcess, ...]) -> list[str]:
    if len(found) < 2:
        return []
    ranks = sum(process.role == "rank" for process in found)
    workers = sum(process.role == "loader_worker" for process in found)
    parts = [(ranks, "ranks"), (workers, "loader workers"), (len(found) - ranks - workers, "others")]
    named = ", ".join(f"{count} {name if count > 1 else name.rstrip('s')}" for count, name in parts if count)
    only = "--process main shows the ranks alone" if workers else "--rank N shows one of them"
    texts = [
        f"{len(found)} processes are summed ({named}): they run beside each other, so shares are of the time of all of "
        f"them and not of the run's; {only}"
    ]
    if ranks > 1 and all(process.host == "" for process in found):
        texts.append(
            "the files do not name ranks: they are numbered by file and process id, which may be another order"
        )
    return texts


MODULE = "<module>"
_NATIVE_FILE = re.compile(r"\.(so|dylib|dll|pyd)(\.[\d.]+)?$|\.(c|cc|cpp|cxx|cu|cuh|h|hpp|rs|f|f90)$|^\?$|^\[.*\]$")
_ADDRESS = re.compile(r"^0x[0-9A-Fa-f]+$")
_FROZEN = re.compile(r"^<frozen ([\w.]+)>$")
# What comes before the first package in the full name of an installed file.
_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages|lib(?:64)?/python\d+(?:\.\d+)?t?)/")


def is_native(frame: Frame) -> bool:
    """Whether a frame is of a compiled library. Cython's `.pyx` and files without an ending count as Python."""
    if _ADDRESS.match(frame.function) or _NATIVE_FILE.search(frame.file):
        return True
    # Python frames without a line (--nolineno) still name a source file or something like `<string>`
    return bool(frame.file) and frame.line is None and "." in frame.file and not frame.file.endswith((".py", ">"))


def module_of(file: str, code: UserCode, roots: Sequence[str]) -> str:
    """The module of a Python file: a dotted name from the user's `roots` on, the package of all other code."""
    frozen = _FROZEN.match(file)
    if frozen:
        return frozen[1].partition(".")[0]
    if not file or file.startswith("<"):
        return file
    own = code.resolve(file)
    if own is None:
        return _stem(_INSTALLED.sub("", file.replace("\\", "/")).lstrip("/").partition("/")[0])
    below = [own[len(root) :] for root in (root.rstrip("/") + "/" for root in roots) if own.startswith(root)]
    name = min(below, key=len, default=file if not file.startswith("/") else own.rpartition("/")[2])
    parts = _components(name.removeprefix("./"))
    return ".".join(parts[:-1] if parts[-1:] == ["__init__"] and len(parts) > 1 else parts)


def library_matcher(library: str, code: UserCode) -> Callable[[str], bool]:
    """Whether a file belongs to `library`, which is a name or a path.

    - A name without a slash is a whole component of the path: `flow` is in `pkg/flow/net.py` and in `flow.py`, and not
      in `workflow.py`. A dotted name is a module: `pkg.flow` is `pkg/flow/...` or `pkg/flow.py`.
    - With a slash it is the beginning of the path, or consecutive components of it. A path that samplers shortened is
      also tried in full where it is one of the user's.

    The ending `.py` may be left out in all of them; with it, only that file is meant and no folder of its name.
    """
    wanted = library.replace("\\", "/").removeprefix("./").rstrip("/")
    if "/" in wanted:
        spellings = {tuple(_components(wanted.strip("/")))}
    else:
        spellings = {(_stem(wanted),), tuple(_stem(wanted).split("."))}
    at_start, at_end = wanted.startswith("/"), wanted != _stem(wanted)

    def matches(file: str) -> bool:
        if not file or file.startswith("<"):
            return False
        names = {file, code.resolve(file) or file}
        return any(
            _contains(_components(name), spelling, at_start, at_end) and (not at_start or name.startswith("/"))
            for name in names
            for spelling in spellings
        )

    return matches


def _contains(parts: list[str], wanted: tuple[str, ...], at_start: bool, at_end: bool) -> bool:
    last = len(parts) - len(wanted)
    return any(
        tuple(parts[at : at + len(wanted)]) == wanted and (not at_start or at == 0) and (not at_end or at == last)
        for at in range(last + 1)
    )


def _components(path: str) -> list[str]:
    parts = [part for part in path.replace("\\", "/").split("/") if part and part != "."]
    if parts:
        parts[-1] = _stem(parts[-1])
    return parts


def _stem(name: str) -> str:
    return re.sub(r"\.pyx?$", "", name)


class MsPerSample(Struct, frozen=True):
    """`by_rank`: what a sample of a rank's steps is of the mean step over all ranks; their `steps` and `mean_ms`."""

    by_rank: dict[int, float]
    samples: Samples
    steps: int
    mean_ms: float

    def of(self, stacks: pl.DataFrame) -> pl.Series:
        """What a sample of each row of `stacks` is; null for all that is no main thread in a steady step."""
        steady, in_phase = self.samples.in_steady_steps(stacks)
        main = (pl.col("role") == "rank") & pl.col("main_thread").fill_null(False) & pl.Series(steady & in_phase)
        ms = pl.col("rank").replace_strict(self.by_rank, default=None, return_dtype=pl.Float64)
        return stacks.select(pl.when(main).then(ms).alias("weight"))["weight"]


def _ms_per_sample(context: Context) -> MsPerSample | None:
    """None without steps or without samples in them."""
    known = context.sampled.ms_per_sample(context.labelled) if context.sampled is not None else {}
    if not known or context.sampled is None:
        return None
    means, count = mean_step_ms(context.labelled), len(known)
    return MsPerSample(
        by_rank={rank: ms / count for rank, ms in known.items()},
        samples=context.sampled,
        steps=steps_of_means(context.labelled).filter(pl.col("rank").is_in(list(known))).height,
        mean_ms=sum(means[rank] for rank in known) / count,
    )
