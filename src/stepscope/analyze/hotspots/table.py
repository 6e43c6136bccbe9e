"""The deepest functions by sampled time: a row per innermost frame, with the frame of a library that led there.

A stack counts once, for its innermost frame, so recursion counts nothing twice and the rows add up to what was
selected. Nothing is dropped: top-level code, native frames and stacks without any frame are rows of their own kind, and
waiting is never merged with working.
"""

from __future__ import annotations

import posixpath
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field

from stepscope.analyze.context import Context
from stepscope.analyze.hotspots import facts as sources
from stepscope.analyze.hotspots.frames import MODULE, is_native, library_matcher, module
from stepscope.analyze.hotspots.worth import StepWorth, step_worth
from stepscope.analyze.sampled.selection import Chosen, StackSelection, check, choose
from stepscope.engine.call_tree import CallTree
from stepscope.engine.user_code import UserCode
from stepscope.errors import UsageError
from stepscope.model.sampled import HotspotRow, Hotspots
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
    return hotspots(context.tables, context.calls, context.code, options, step_worth(context))


def hotspots(
    tables: Tables,
    tree: CallTree,
    code: UserCode,
    options: HotspotOptions = DEFAULTS,
    worth: StepWorth | None = None,
) -> Hotspots:
    """Rows of the selected stacks, most samples first. `worth` says what a sample is in milliseconds per step.

    Raises `UsageError` for options that mean nothing, and for a selection of which there is no sample.
    """
    _check(options)
    chosen = choose(tables, options.selection)
    unit = sources.unit(tables)
    samples = _weighted(chosen, unit, worth)
    attributes = _frames(tree, code, options.library, tables.run.user_roots)
    labelled = _labelled(samples, tree, attributes)
    found = _grouped(labelled, attributes, options)
    roles = [(name.partition("=")[2], name) for name in found.columns if name.startswith("role=")]
    selected = int(chosen.rows["samples"].sum())
    kinds = labelled.group_by("kind").agg(pl.col("samples").sum()).sort("samples", "kind", descending=[True, False])
    facts = sources.facts(tables, chosen, unit)
    return Hotspots(
        samples=facts.samples,
        skipped_samples=facts.skipped_samples,
        unit=unit,
        by=options.by,
        library=options.library or OWN_CODE,
        selected_samples=selected,
        waiting_samples=int(chosen.rows.filter(pl.col("waiting").fill_null(False))["samples"].sum()),
        left_out=facts.left_out,
        rows=tuple(_row(row, selected, roles) for row in _first(found, options.limit).iter_rows(named=True)),
        working_rows=found.filter(~pl.col("waiting")).height,
        waiting_rows=found.filter("waiting").height,
        kinds={str(kind): int(count) for kind, count in kinds.iter_rows()},
        processes=facts.processes,
        files=facts.files,
        formats=facts.formats,
        idle=facts.mode.idle,
        idle_source=facts.mode.source,
        rate_hz=facts.rate_hz,
        wall_s=facts.wall_s,
        wall_source=facts.wall_source,
        steps=worth.steps if worth else 0,
        mean_step_ms=worth.mean_ms if worth else None,
        warnings=(*facts.warnings, *_library_warning(labelled, attributes.height - 1, options.library)),
    )


def _check(options: HotspotOptions) -> None:
    if options.by not in GROUPS:
        raise UsageError(f"--by {options.by}: unknown; use {', '.join(GROUPS)}")
    if not options.aggregate and options.by != "line":
        raise UsageError("--no-aggregate-leaf-paths shows every call path by its line; leave out --by")
    if options.library is not None and not options.library.strip("./\\ "):
        raise UsageError("--library: empty; give a module, a folder or a path, e.g. --library mypackage")


def _weighted(chosen: Chosen, unit: str, worth: StepWorth | None) -> pl.DataFrame:
    """The selected stacks, one row per node, role, phase and state, with samples, seconds and ms per step."""
    rows = chosen.rows
    second = {"samples": 1.0 / pl.when(pl.col("rate_hz") > 0).then(pl.col("rate_hz")), "us": pl.lit(1e-6)}
    per_sample = worth.of(rows) if worth is not None else pl.Series([None] * rows.height, dtype=pl.Float64)
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


def _frames(tree: CallTree, code: UserCode, library: str | None, roots: tuple[str, ...]) -> pl.DataFrame:
    """(name, path, line, native, module, marked) by frame number, and a last row for stacks without frames."""
    native = [is_native(frame) for frame in tree.frames]
    files = list(dict.fromkeys(frame.file for frame in tree.frames))
    compiled = {frame.file for frame, is_one in zip(tree.frames, native, strict=True) if is_one}
    module_of = {file: posixpath.basename(file) if file in compiled else module(file, code, roots) for file in files}
    if library is None:
        marked = {file for file in files if file not in compiled and code.resolve(file) is not None}
    else:
        marked = set(filter(library_matcher(library, code), files))
    rows = [
        (frame.function, frame.file, frame.line, is_one, module_of[frame.file], frame.file in marked)
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
    codes = {name: _codes(frames, [name]) for name in _LEAF}
    leaf, library = labelled["leaf"].to_numpy(), labelled["library"].to_numpy()
    same = [
        (pl.col(f"{end}:{name}").min() == pl.col(f"{end}:{name}").max()).alias(f"{end}:{name}")
        for end in ("leaf", "library")
        for name in _LEAF
    ]
    coded = {f"leaf:{name}": pl.Series(codes[name][leaf]) for name in _LEAF}
    coded |= {f"library:{name}": pl.Series(codes[name][library]) for name in _LEAF}
    rows = labelled.with_columns(row=_row_numbers(labelled, frames, options), **coded)
    grouped = rows.group_by("row", maintain_order=True).agg(
        pl.col("leaf", "library", "waiting", "node").first(), *_sums(), *same, *_shares(labelled)
    )
    ends = {"leaf": frames[grouped["leaf"]], "library": frames[grouped["library"]]}
    named = grouped.with_columns(
        pl.when(f"{end}:{name}").then(found[name]).alias(f"{prefix}{name}")
        for prefix, end, found in (("", "leaf", ends["leaf"]), ("library_function_", "library", ends["library"]))
        for name in _LEAF
    )
    nobody = pl.col("library") == frames.height - 1
    named = named.with_columns(
        *(pl.when(~nobody).then(pl.col(name)).alias(name) for name in _LIBRARY),
        module=ends["leaf"]["module"],
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


def _first(found: pl.DataFrame, limit: int | None) -> pl.DataFrame:
    if limit is None:
        return found
    return found.filter(pl.int_range(pl.len()).over("waiting") < limit)


def _row(row: dict[str, Any], selected: int, roles: list[tuple[str, str]]) -> HotspotRow:
    return HotspotRow(
        **{name: row[name] for name in (*_LEAF, *_LIBRARY)},
        samples=row["samples"],
        proportion=row["samples"] / selected if selected else 0.0,
        waiting=row["waiting"],
        kind=row["kind"],
        module=row["module"],
        phase=row["phase"],
        seconds=row["seconds"],
        ms_per_step=row["ms_per_step"],
        roles={role: row[column] for role, column in roles if row[column]},
    )


def _library_warning(labelled: pl.DataFrame, nobody: int, library: str | None) -> list[str]:
    if (labelled["library"] != nobody).any() or labelled.is_empty():
        return []
    if library is not None:
        return [
            f"no sampled stack runs through {library}: it is matched with whole parts of the path, so give a package, "
            "a module or a folder as it stands in the column path"
        ]
    return ["none of the sampled code was recognised as your own; name it with --library NAME or --source-root DIR"]
