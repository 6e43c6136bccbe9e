"""The deepest functions by sampled time: a row per innermost frame, with the frame of a library that led there.

A stack counts once, for its innermost frame, so recursion counts nothing twice and the rows add up to what was
selected. Nothing is dropped: top-level code, native frames and stacks without any frame are rows of their own kind, and
waiting is never merged with working.

Which stacks a view is made of is chosen first, with how many samples were left out, by reason. Launchers (torchrun,
srun) and helper processes (resource tracker, fork server) train nothing, and a thread that is parked in a wait says
nothing of the run: with waiting sampled, such threads are three of four samples. Everything else is kept unless the
reader asks for a part of it.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec import Struct, field

from stepscope.analyze.context import Context
from stepscope.engine import intervals
from stepscope.engine.call_tree import at, rows_of
from stepscope.engine.samples import mean_step_ms, steps_of_means
from stepscope.engine.user_code import INSTALLED, UserCode
from stepscope.errors import UsageError
from stepscope.model.counted import things
from stepscope.model.sampled import HotspotRow, Hotspots, SampledProcess
from stepscope.read.raw import Frame
from stepscope.tables.arrays import NONE
from stepscope.tables.schema import Tables

PROCESSES = ("main", "workers", "all")
PARKED = "parked threads"


class StackSelection(Struct, frozen=True):
    """What the reader asked for. `process`: "main" (ranks), "workers" (loader workers) or "all".

    `phase` keeps main threads of ranks in that phase only, as no other thread stands in one. `parked` keeps threads
    other than the main one that are in a known wait. Where the file does not tell threads apart all of them stay.
    """

    phase: str | None = None
    rank: int | None = None
    process: str = "all"
    parked: bool = False


class Chosen(Struct, frozen=True):
    """`rows` of the table `stacks`, in its order; `left_out` gives the samples of all other rows by reason."""

    rows: pl.DataFrame
    left_out: dict[str, int]


def choose(tables: Tables, selection: StackSelection) -> Chosen:
    """The stacks of `selection`.

    Every sample is in `rows` or under exactly one reason of `left_out`, which holds no zeros.
    """
    reasons = _reasons(tables.stacks, selection)
    first = pl.coalesce(pl.when(holds).then(pl.lit(name)) for name, holds in reasons.items())
    labelled = tables.stacks.with_columns(reason=first)
    counts = dict(labelled.group_by("reason").agg(pl.col("samples").sum()).iter_rows())
    return Chosen(
        rows=labelled.filter(pl.col("reason").is_null()).drop("reason"),
        left_out={name: counts[name] for name in reasons if counts.get(name)},
    )


def check(tables: Tables, selection: StackSelection) -> None:
    """Raise `UsageError` for a rank, phase or kind of process of which there is no sample, naming those there are."""
    if selection.process not in PROCESSES:
        raise UsageError(f"--process {selection.process}: unknown; use {', '.join(PROCESSES)}")
    for option, wanted, what, none in (
        ("rank", selection.rank, "ranks", "no samples of it"),
        ("phase", selection.phase, "phases", "no samples in it"),
    ):
        known = tables.stacks[option].drop_nulls().unique().sort().to_list()
        if wanted is not None and wanted not in known:
            shown = ", ".join(map(str, known[:20])) + (" …" if len(known) > 20 else "")
            there = f"{what} with samples: {shown}" if known else f"no {what} are known here, leave the option out"
            raise UsageError(f"--{option} {wanted}: {none}; {there}")


def main_roles(stacks: pl.DataFrame) -> tuple[str, ...]:
    """Roles that count as the main process: where no rank was told apart, whatever is no launcher, helper or worker."""
    return ("rank",) if (stacks["role"] == "rank").any() else ("rank", "other")


def _reasons(stacks: pl.DataFrame, selection: StackSelection) -> dict[str, pl.Expr]:
    """When a row is left out, by reason; the first reason that holds is the one that counts."""
    role = pl.col("role").fill_null("other")
    wanted = {"main": main_roles(stacks), "workers": ("loader_worker",)}.get(selection.process)
    found = {"launchers": role == "launcher", "helper processes": role == "helper"}
    if selection.rank is not None:
        found["other ranks"] = pl.col("rank").ne_missing(selection.rank)
    if wanted is not None:
        found["other processes"] = ~role.is_in(wanted)
    if selection.phase is not None:
        found["other phases"] = pl.col("phase").ne_missing(selection.phase)
    if not selection.parked:
        # a file without threads holds one sum for all of them, which is not taken apart by guessing
        other_thread = pl.col("thread").is_not_null() & ~pl.col("main_thread").fill_null(True)
        found[PARKED] = other_thread & pl.col("waiting").fill_null(False)
    return found


MOSTLY_WAITING = 0.5  # of a thread's samples: then it is a thread that serves others and waits for them
BUSY = 0.5  # at most so much waiting in the thread that others are held against, or both may be hidden alike
SAMPLED_ALL = 0.6  # of a busy thread's samples: waiting threads are sampled like working ones
SAMPLED_MOST = 0.35  # the same over all such threads of a file together, some of which start late or end early
SAMPLED_FEW = 0.2  # below that waiting threads are left out: six times what was seen
ENOUGH = 50  # samples of the busiest thread: with fewer, a share says nothing
MERGED = 2.0  # threads that the file does not tell apart are several, so their sum must be more

RECORDED, INFERRED = "recorded", "inferred"
_IN_FILE = ["host", "file", "pid"]


class IdleMode(NamedTuple):
    """`idle`: whether waiting threads were sampled; None where nothing tells. `source`: "recorded" or "inferred"."""

    idle: bool | None
    source: str | None


def idle_sampled(tables: Tables) -> bool | None:
    """Whether waiting threads were sampled too, in all files; False if they are missing in any, None if unknown."""
    return idle_mode(tables).idle


def idle_mode(tables: Tables) -> IdleMode:
    """The same with how it is known: from what the recorder noted, else from the threads that only ever wait."""
    known = tables.segments.select("host", "file", "idle", "unit")
    silent = known.filter(pl.col("idle").is_null() & (pl.col("unit") != "bytes"))
    answers: list[bool | None] = known["idle"].drop_nulls().unique().to_list()
    if silent.height:
        rows = tables.stacks.join(silent.select("host", "file").unique(), on=["host", "file"], how="semi")
        inferred = _by_file(rows)
        answers += [inferred.get((host, file)) for host, file in silent.select("host", "file").iter_rows()]
    if not answers:
        return IdleMode(None, None)
    idle = False if False in answers else None if None in answers else True
    return IdleMode(idle, None if idle is None else INFERRED if silent.height else RECORDED)


def _by_file(rows: pl.DataFrame) -> dict[tuple[str, str], bool]:
    """(host, file) -> the answer, where there is one."""
    # by thread, or by main thread and others where none is named
    merged = pl.col("thread").is_null()
    of_role = pl.when(pl.col("main_thread").fill_null(True)).then(pl.lit("main")).otherwise(pl.lit("others"))
    threads = (
        rows.with_columns(key=pl.when(merged).then(of_role).otherwise("thread"), merged=merged)
        .group_by(*_IN_FILE, "key", "merged", maintain_order=True)
        .agg(pl.col("samples").sum(), waiting=pl.col("samples").filter(pl.col("waiting").fill_null(False)).sum())
    )
    busiest = (
        threads.sort("samples", "key", descending=[True, False])
        .group_by(_IN_FILE, maintain_order=True)
        .agg(
            most=pl.col("samples").first(),
            most_waiting=pl.col("waiting").first(),
            busiest_thread=pl.col("key").first(),
        )
        .filter(pl.col("most") >= ENOUGH)
    )
    waiting = threads.filter(pl.col("waiting") >= MOSTLY_WAITING * pl.col("samples")).join(
        busiest, on=_IN_FILE, nulls_equal=True
    )
    waiting = waiting.filter(pl.col("key") != pl.col("busiest_thread")).with_columns(
        share=pl.col("samples") / pl.col("most") / pl.when("merged").then(MERGED).otherwise(1.0),
        against_busy=pl.col("most_waiting") <= BUSY * pl.col("most"),
    )
    files = waiting.group_by("host", "file").agg(
        all_together=(pl.col("share") * pl.col("most")).sum() / pl.col("most").sum(),
        highest=pl.col("share").filter("against_busy").max().fill_null(0.0),
    )
    sure = (pl.col("all_together") >= SAMPLED_MOST) | (pl.col("highest") >= SAMPLED_ALL)
    told = files.filter(sure | (pl.col("all_together") <= SAMPLED_FEW)).select("host", "file", sure.alias("sampled"))
    return {(host, file): sampled for host, file, sampled in told.iter_rows()}


OWN_CODE = "your own code"
NO_FRAME = "(no Python frame)"

_LEAF = ["name", "path", "line"]
_LIBRARY = ["library_function_name", "library_function_path", "library_function_line"]
_COPIED = ["samples", "waiting", "kind", "module", "phase", "seconds", "ms_per_step"]
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


def hotspots(context: Context, options: HotspotOptions = DEFAULTS) -> Hotspots:
    """Rows of the selected stacks, most samples first, with milliseconds per step where the run's steps are known.

    Raises `UsageError` for options that mean nothing, and for a selection of which there is no sample.
    """
    tables = context.tables
    check(tables, options.selection)
    if options.by not in GROUPS:
        raise UsageError(f"--by {options.by}: unknown; use {', '.join(GROUPS)}")
    if not options.aggregate and options.by != "line":
        raise UsageError("--no-aggregate-leaf-paths shows every call path by its line; leave out --by")
    if options.library is not None and not options.library.strip("./\\ "):
        raise UsageError("--library: empty; give a module, a folder or a path, e.g. --library mypackage")
    chosen = choose(tables, options.selection)
    rows, units = (
        chosen.rows.with_columns(pl.col("waiting").fill_null(False)),
        tables.segments["unit"].drop_nulls().unique(),
    )
    # where files differ in what they count their sum means nothing
    counted = "mixed" if len(units) > 1 else str(next(iter(units), "samples"))
    known = context.sampled.ms_per_sample(context.labelled) if context.sampled is not None else {}
    labelled = _labelled(_weighted(rows, counted, context, known), context, options.library)
    found = _grouped(labelled, options)
    shown = found if options.limit is None else found.filter(pl.int_range(pl.len()).over("waiting") < options.limit)
    roles = [(name.partition("=")[2], name) for name in found.columns if name.startswith("role=")]
    selected = int(rows["samples"].sum())
    kinds = labelled.group_by("kind").agg(pl.col("samples").sum()).sort("samples", "kind", descending=[True, False])
    segments = tables.segments
    kept = int(tables.stacks["samples"].sum())
    read = max(int(segments["samples"].fill_null(0).sum()), kept)
    mode = idle_mode(tables)
    rates = segments["rate_hz"].unique().to_list()  # one that is unknown makes it unknown
    rate = rates[0] if len(rates) == 1 else None
    wall_s, wall_source = _wall(tables, rate, counted)
    processes = _processes(rows)
    skipped = int(segments["skipped_samples"].fill_null(0).sum())
    warnings = list(_warnings(tables, selected, processes, mode, counted, skipped))
    if labelled.height and labelled["library_function_name"].null_count() == labelled.height:
        warnings.append(
            f"no sampled stack runs through {options.library}: it is matched with whole parts of the path, so give a "
            "package, a module or a folder as it stands in the column path"
            if options.library is not None
            else "none of the sampled code was recognised as your own; name it with --library NAME or --source-root DIR"
        )
    means = mean_step_ms(context.labelled)
    return Hotspots(
        samples=read,
        skipped_samples=skipped,
        unit=counted,
        by=options.by,
        library=options.library or OWN_CODE,
        selected_samples=selected,
        waiting_samples=int(rows.filter("waiting")["samples"].sum()),
        left_out={**chosen.left_out, **({NOT_KEPT: read - kept} if read > kept else {})},
        rows=tuple(
            HotspotRow(
                **{name: row[name] for name in (*_LEAF, *_LIBRARY, *_COPIED)},
                proportion=row["samples"] / selected if selected else 0.0,
                roles={role: row[column] for role, column in roles if row[column]},
            )
            for row in shown.iter_rows(named=True)
        ),
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
        steps=sum(rank in known for rank in steps_of_means(context.labelled)["rank"]),
        mean_step_ms=sum(means[rank] for rank in known) / len(known) if known else None,
        warnings=tuple(warnings),
    )


def _weighted(rows: pl.DataFrame, unit: str, context: Context, known: Mapping[int, float]) -> pl.DataFrame:
    """The selected stacks, one row per node, role, phase and state, with samples, seconds and ms per step.

    `known`: what a sample of each rank's main thread in steady steps is of its mean step; all others have no ms.
    """
    second = {"samples": 1.0 / pl.when(pl.col("rate_hz") > 0).then(pl.col("rate_hz")), "us": pl.lit(1e-6)}
    in_steps = pl.lit(False)
    if known and context.sampled is not None:
        steady, in_phase = context.sampled.in_steady_steps(rows)
        in_steps = (pl.col("role") == "rank") & pl.col("main_thread").fill_null(False) & pl.Series(steady & in_phase)
    of_mean = {rank: ms / len(known) for rank, ms in known.items()}
    per_sample = pl.col("rank").replace_strict(of_mean, default=None, return_dtype=pl.Float64)
    weighted = rows.with_columns(
        pl.col("role").fill_null("other"),
        pl.when(pl.col("role") == "rank").then(pl.col("phase")).alias("phase"),
        seconds=pl.col("samples") * second.get(unit, pl.lit(None, dtype=pl.Float64)),
        ms_per_step=pl.col("samples") * pl.when(in_steps).then(per_sample),
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


def _labelled(samples: pl.DataFrame, context: Context, library: str | None) -> pl.DataFrame:
    """`samples` with the innermost frame, its module, the library's frame that led there, and the kind."""
    tree, code = context.calls, context.code
    native = [is_native(frame) for frame in tree.frames]
    compiled = {frame.file for frame, is_one in zip(tree.frames, native, strict=True) if is_one}
    matches = None if library is None else library_matcher(library, code)
    module, marked = {}, {}
    for file in dict.fromkeys(frame.file for frame in tree.frames):
        module[file] = (
            posixpath.basename(file) if file in compiled else module_of(file, code, context.tables.run.user_roots)
        )
        marked[file] = matches(file) if matches else file not in compiled and code.resolve(file) is not None
    of_frame = {
        "name": pl.Series([frame.function for frame in tree.frames], dtype=pl.String),
        "path": pl.Series([frame.file for frame in tree.frames], dtype=pl.String),
        "line": pl.Series([frame.line for frame in tree.frames], dtype=pl.Int64),
        "module": pl.Series([module[frame.file] for frame in tree.frames], dtype=pl.String),
        "native": pl.Series(native, dtype=pl.Boolean),
    }
    node = rows_of(samples["node"])
    mine = tree.innermost(tree.by_node(np.array([marked[frame.file] for frame in tree.frames], bool)))
    leaf, led = (pl.Series(at(tree.frame, nodes, NONE)) for nodes in (node, at(mine, node, NONE)))
    leaf, led = leaf.set(leaf < 0, None), led.set(led < 0, None)
    found = samples.with_columns(
        *(values.gather(leaf).alias(name) for name, values in of_frame.items()),
        *(of_frame[name].gather(led).alias(f"library_function_{name}") for name in _LEAF),
    )
    return found.with_columns(
        pl.col("name").fill_null(NO_FRAME),
        pl.col("path", "module").fill_null(""),
        kind=pl.coalesce(
            pl.when(pl.col("node").is_null()).then(pl.lit("none")),
            pl.when("native").then(pl.lit("native")),
            "stage",
            pl.when(pl.col("name") == MODULE).then(pl.lit("module")),
            pl.lit("python"),
        ),
    )


def _grouped(labelled: pl.DataFrame, options: HotspotOptions) -> pl.DataFrame:
    """The columns of `HotspotRow`, most samples first; roles, kinds and phases as columns of their own.

    What differs among the stacks of a row is null.
    """
    of_leaf, of_library = GROUPS[options.by] if options.aggregate else (("node",), ())
    keys = ["waiting", *of_leaf, *(f"library_function_{name}" for name in of_library)]
    equal = (
        pl.when(pl.col(name).n_unique() == 1).then(pl.col(name).first()).alias(name)
        for name in (*_LEAF, *_LIBRARY)
        if name not in keys
    )
    first = [name for name in ("module", "node") if name not in keys]
    # sums of samples by every value of the columns that a row tells shares or the largest of
    values = {name: labelled[name].drop_nulls().unique().sort().to_list() for name in ("role", "kind", "phase")}
    shares = [
        pl.when(pl.col(name) == value).then(pl.col("samples")).otherwise(0).sum().alias(f"{name}={value}")
        for name, own in values.items()
        for value in own
    ]
    grouped = labelled.group_by(keys, maintain_order=True).agg(pl.col(first).first(), *_sums(), *equal, *shares)
    for name in ("kind", "phase"):  # the value with most samples, the first by name of equal ones
        most = pl.max_horizontal(pl.lit(0), *(f"{name}={value}" for value in values[name]))
        at_most = [
            pl.when((pl.col(f"{name}={value}") == most) & (most > 0)).then(pl.lit(value)) for value in values[name]
        ]
        grouped = grouped.with_columns(pl.coalesce(*at_most, pl.lit(None, pl.String)).alias(name))
    order = ["path", "line", "name", "module", "waiting", *_LIBRARY, "node"]
    return grouped.sort(["samples", *order], descending=[True, *(False for _ in order)], nulls_last=True)


NOT_KEPT = "torn or the recorder's own"
FEW_SAMPLES = 100  # a share of p then has a standard error of up to 5 percent points
OF_STACKS = ("stacks", "stacks.jsonl")  # sources of the tables' notes that concern samples

_PROCESS = ["host", "in_file", "pid", "role", "rank"]


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
        return intervals.total(sampled) / 1e9, RECORDED
    told = segments["wall_ns"].drop_nulls()
    if len(told):
        return float(told.max() or 0) / 1e9, RECORDED  # type: ignore[arg-type]
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
) -> Iterator[str]:
    if counted != "bytes" and mode.idle is None:
        yield (
            "whether waiting was sampled is unknown: if not (py-spy without --idle), time in which the program waited "
            "is missing here"
        )
    elif counted != "bytes" and not mode.idle:
        how = "" if mode.source == RECORDED else ", as threads that only wait are all but missing"
        yield (
            f"waiting was not sampled{how}: time in which the program waited (for its loader, a device, another rank) "
            "is missing here; record with --idle to see it"
        )
    if len(found) > 1:
        ranks = sum(process.role == "rank" for process in found)
        workers = sum(process.role == "loader_worker" for process in found)
        parts = [(ranks, "ranks"), (workers, "loader workers"), (len(found) - ranks - workers, "others")]
        named = ", ".join(f"{count} {name if count > 1 else name.rstrip('s')}" for count, name in parts if count)
        only = "--process main shows the ranks alone" if workers else "--rank N shows one of them"
        yield (
            f"{len(found)} processes are summed ({named}): they run beside each other, so shares are of the time of "
            f"all of them and not of the run's; {only}"
        )
        if ranks > 1 and all(process.host == "" for process in found):
            yield "the files do not name ranks: they are numbered by file and process id, which may be another order"
    if counted == "mixed":
        yield "the files count different things (samples, time, bytes), so their sums mean little; open them apart"
    elif counted == "samples" and 0 < selected < FEW_SAMPLES:
        yield f"only {things(selected, 'sample')}: shares may be off by several percent points; sample for longer"
    broken = tables.quality.counts.get("skipped_records", 0)
    if skipped:
        yield f"{things(skipped, 'sample')} could not be read and are in no row"
    elif broken:
        yield f"{things(broken, 'record')} cut off or damaged, counts too, in no row"
    if not selected:
        yield "no sample is left after selection"
    strangers = tables.quality.counts.get("foreign_files", 0)
    if strangers and (tables.segments["host"] == "").all():
        yield f"{things(strangers, 'file')} beside them without sampled stacks left out"
    yield from (note.text for note in tables.quality.notes if note.source in OF_STACKS)


MODULE = "<module>"
_NATIVE_FILE = re.compile(r"\.(so|dylib|dll|pyd)(\.[\d.]+)?$|\.(c|cc|cpp|cxx|cu|cuh|h|hpp|rs|f|f90)$|^\?$|^\[.*\]$")
_ADDRESS = re.compile(r"^0x[0-9A-Fa-f]+$")
_FROZEN = re.compile(r"^<frozen ([\w.]+)>$")


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
        return _stem(INSTALLED.sub("", file.replace("\\", "/")).lstrip("/").partition("/")[0])
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
        for name, spelling in itertools.product({file, code.resolve(file) or file}, spellings):
            parts = tuple(_components(name))
            last = len(parts) - len(spelling)
            places = (at for at in range(last + 1) if (at == 0 or not at_start) and (at == last or not at_end))
            found = any(parts[at : at + len(spelling)] == spelling for at in places)
            if found and (not at_start or name.startswith("/")):
                return True
        return False

    return matches


def _components(path: str) -> list[str]:
    parts = [part for part in path.replace("\\", "/").split("/") if part and part != "."]
    if parts:
        parts[-1] = _stem(parts[-1])
    return parts


def _stem(name: str) -> str:
    return re.sub(r"\.pyx?$", "", name)
