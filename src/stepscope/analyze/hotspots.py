"""The deepest functions by sampled time: a row per innermost frame, with the frame of a library that led there.

A stack counts once, for its innermost frame, so recursion counts nothing twice and the rows add up to what was
selected. Nothing is dropped: top-level code, native frames and stacks without any frame are rows of their own kind, and
waiting is never merged with working.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze import hotspot_facts
from stepscope.analyze.call_tree import NONE, CallTree
from stepscope.analyze.context import Context
from stepscope.analyze.hotspot_frames import MODULE, is_native, library_matcher, modules
from stepscope.analyze.hotspot_steps import StepWorth, step_worth
from stepscope.analyze.places import UserCode
from stepscope.analyze.stack_selection import Chosen, StackSelection, check, choose
from stepscope.errors import UsageError
from stepscope.model.views.hotspots import HotspotRow, Hotspots
from stepscope.tables.schema import Tables

OWN_CODE = "your own code"
NO_FRAME = "(no Python frame)"

_LEAF = ["name", "path", "line"]
_LIBRARY = ["library_function_name", "library_function_path", "library_function_line"]
# What tells rows apart, beside waiting and the call path where each path is a row.
GROUPS: dict[str, tuple[str, ...]] = {
    "line": (*_LEAF, *_LIBRARY),
    "function": ("name", "path", "library_function_name", "library_function_path"),
    "file": ("path",),
    "module": ("module",),
}


@dataclass(frozen=True)
class HotspotOptions:
    """What is asked for. `library` None is the user's own code.

    `by`: a key of `GROUPS`. With `aggregate` False every call path is a row, as long as `by` is "line".
    """

    library: str | None = None
    by: str = "line"
    aggregate: bool = True
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
    unit = hotspot_facts.unit(tables)
    samples = _weighted(chosen, unit, worth)
    attributes = _frames(tree, code, options.library, tables.run.user_roots)
    labelled = _labelled(samples, tree, attributes)
    found = _grouped(labelled, options)
    selected = int(chosen.rows["samples"].sum())
    kinds = labelled.group_by("kind").agg(pl.col("samples").sum()).sort("samples", "kind", descending=[True, False])
    facts = hotspot_facts.facts(tables, chosen, unit)
    return Hotspots(
        samples=facts.samples,
        skipped_samples=facts.skipped_samples,
        unit=unit,
        by=options.by,
        library=options.library or OWN_CODE,
        selected_samples=selected,
        waiting_samples=int(chosen.rows.filter(pl.col("waiting").fill_null(False))["samples"].sum()),
        left_out=facts.left_out,
        rows=tuple(_row(row, selected) for row in found.iter_rows(named=True)),
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
        warnings=(*facts.warnings, *_library_warning(labelled, options.library)),
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
    phase = pl.when(pl.col("role") == "rank").then(pl.col("phase"))
    weighted = rows.with_columns(
        pl.col("role").fill_null("other"),
        phase.alias("phase"),
        pl.col("waiting").fill_null(False),
        seconds=pl.col("samples") * second.get(unit, pl.lit(None, dtype=pl.Float64)),
        ms_per_step=pl.col("samples") * per_sample,
    )
    return weighted.group_by("node", "role", "phase", "stage", "waiting", maintain_order=True).agg(
        pl.col("samples").sum(),
        _seconds(),
        _sum_of_known("ms_per_step"),
    )


def _sum_of_known(name: str) -> pl.Expr:
    """The sum of what is known; null where nothing is, and not 0."""
    return pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name)


def _frames(tree: CallTree, code: UserCode, library: str | None, roots: tuple[str, ...]) -> pl.DataFrame:
    """(name, path, line, native, module, marked) by frame number, and a last row for stacks without frames."""
    files = list(dict.fromkeys(frame.file for frame in tree.frames))
    module_of = dict(zip(files, modules(files, code, roots), strict=True))
    if library is None:
        own = code.mapping(pl.Series(files, dtype=pl.String))
        marked = {file for file in files if own.get(file) is not None}
    else:
        matches = library_matcher(library, code)
        marked = {file for file in files if matches(file)}
    rows = [
        (frame.function, frame.file, frame.line, is_native(frame), module_of[frame.file], frame.file in marked)
        for frame in tree.frames
    ]
    schema = {"name": pl.String, "path": pl.String, "line": pl.Int64}
    more = {"native": pl.Boolean, "module": pl.String, "marked": pl.Boolean}
    return pl.DataFrame([*rows, (NO_FRAME, "", None, False, "", False)], schema={**schema, **more}, orient="row")


def _labelled(samples: pl.DataFrame, tree: CallTree, frames: pl.DataFrame) -> pl.DataFrame:
    """`samples` with the innermost frame, the library's frame and the kind of every row."""
    nobody = frames.height - 1
    node = samples["node"].fill_null(NONE).to_numpy().astype(np.int64)
    frame_of = np.append(tree.frame, nobody).astype(np.int64)  # node -1 has no frame
    library_node = np.append(tree.innermost(frames["marked"].to_numpy()[tree.frame]), NONE).astype(np.int64)
    leaf = frames[frame_of[node]].drop("marked")
    library = library_node[node]
    there = pl.Series(library >= 0)
    above = frames[frame_of[library]].select(
        pl.when(there).then(pl.col(name)).alias(f"library_function_{name}") for name in _LEAF
    )
    kind = (
        pl.when(pl.col("node").is_null())
        .then(pl.lit("none"))
        .when("native")
        .then(pl.lit("native"))
        .when(pl.col("stage").is_not_null())
        .then(pl.col("stage"))
        .when(pl.col("name") == MODULE)
        .then(pl.lit("module"))
        .otherwise(pl.lit("python"))
    )
    return pl.concat([samples, leaf, above], how="horizontal").with_columns(kind=kind)


def _grouped(labelled: pl.DataFrame, options: HotspotOptions) -> pl.DataFrame:
    keys = [*GROUPS[options.by], "waiting", *(() if options.aggregate else ("node",))]
    shown = [name for name in (*_LEAF, *_LIBRARY) if name not in keys]
    one = [pl.when(pl.col(name).n_unique() == 1).then(pl.col(name).first()).alias(name) for name in shown]
    sums = [pl.col("samples").sum(), _seconds(), _sum_of_known("ms_per_step")]
    grouped = labelled.group_by(keys, maintain_order=True).agg(*one, *sums)
    for name in ("kind", "phase", *(() if "module" in keys else ("module",))):
        grouped = grouped.join(
            _most(labelled, keys, name), on=keys, how="left", nulls_equal=True, maintain_order="left"
        )
    roles = (
        labelled.group_by([*keys, "role"])
        .agg(pl.col("samples").sum())
        .sort("samples", "role", descending=[True, False])
        .group_by(keys, maintain_order=True)
        .agg(roles=pl.struct("role", "samples"))
    )
    grouped = grouped.join(roles, on=keys, how="left", nulls_equal=True, maintain_order="left")
    order = ["path", "line", "name", "module", "waiting", *_LIBRARY, *(() if options.aggregate else ("node",))]
    ordered: pl.DataFrame = grouped.sort(
        ["samples", *order], descending=[True, *(False for _ in order)], nulls_last=True
    )
    return ordered


def _seconds() -> pl.Expr:
    return pl.when(pl.col("seconds").is_not_null().all()).then(pl.col("seconds").sum()).alias("seconds")


def _most(labelled: pl.DataFrame, keys: list[str], name: str) -> pl.DataFrame:
    """The value of column `name` that holds most samples of each group; null only where all are."""
    return (
        labelled.group_by([*keys, name])
        .agg(pl.col("samples").sum())
        .filter(pl.col(name).is_not_null())
        .sort("samples", name, descending=[True, False])
        .group_by(keys, maintain_order=True)
        .agg(pl.col(name).first())
    )


def _row(row: dict[str, Any], selected: int) -> HotspotRow:
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
        roles={part["role"]: part["samples"] for part in row["roles"]},
    )


def _library_warning(labelled: pl.DataFrame, library: str | None) -> list[str]:
    if not labelled.height or labelled["library_function_name"].drop_nulls().len():
        return []
    if library is not None:
        return [
            f"no sampled stack runs through {library}: it is matched with whole parts of the path, so give a package, "
            "a module or a folder as it stands in the column path"
        ]
    return ["none of the sampled code was recognised as your own; name it with --library NAME or --source-root DIR"]
