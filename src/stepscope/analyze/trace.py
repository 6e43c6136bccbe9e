"""The profiler windows made ready for questions: every host slice with the user's function that caused it.

A slice's `caller` is the nearest Python function of the user's around it. `direct` says that only transparent slices
(built-in functions, annotations) lie between: the user's own line made this call. Slices below the loader's `__next__`
are marked, because their cost belongs to the input. Everything is done level by level on arrays, so a window of a
million slices takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from stepscope.engine.slice_names import PYTHON_NAME, callee_name
from stepscope.engine.step_labels import LabelledSteps
from stepscope.engine.user_code import UserCode, is_torch
from stepscope.model import PHASES
from stepscope.tables.schema import Tables

# What a slice is to the question "who called?".
TRANSPARENT, OPERATOR, USER, TORCH, LIBRARY, BUILTIN, OWN = range(7)
_LOADER_NEXT = r"torch/utils/data/dataloader\.py\(\d+\): __next__|^enumerate\(DataLoader\)"
_MAX_DEPTH = 100_000
MAX_SLICES = 250_000  # looked at; about half a kilobyte of memory each
MIN_STEPS = 3  # looked at even where they hold more
_COLUMNS = (
    *("id", "parent", "process", "track", "category", "name", "start_ns", "duration_ns", "self_ns"),
    *("step", "sequence", "shapes"),
)
# The recorder's own functions are no part of the run; through its wrapper around torch's functions the caller shows.
_OWN = r"(^|/)stepscope/record/"
_OWN_WRAPPER = r"(^|/)stepscope/record/agent/probes/wrapper_importlib_bootstrap\.py"
_OLD_OPERATORS = ("Operator", "operator")  # traces of 2021 and 2022, which called annotations so too
ANNOTATIONS = r"^(ProfilerStep#|enumerate\(DataLoader\)#|Optimizer\.)"


@dataclass(frozen=True)
class Window:
    """`all_slices`: host slices with `row`, `what`, `label` (a name for people), `above`, `caller`, `via`, `direct`,
    `function`, `in_loader`, `in_operator`, where `above`, `caller`, `via` and `function` are rows: the enclosing slice,
    the user's function around it, what that function called, and whatever Python function made the call; `inside`
    marks those of complete window steps. `functions` gives `name`, `file`, `line` and `function` of the user's
    functions. `steps`: how many complete steps, all processes together.

    `ratio` scales a figure of the window to the steady run, by phase and for the whole step ("wall"); `phase_ms` are
    the two means it comes from, (window, steady).
    """

    all_slices: pl.DataFrame
    functions: pl.DataFrame
    steps: int
    ratio: dict[str, float]
    phase_ms: dict[str, tuple[float, float]]
    source: str
    step_times_known: bool
    has_functions: bool  # Python functions were recorded: without them no line made a call

    @property
    def slices(self) -> pl.LazyFrame:
        """The slices of complete window steps, not copied before they are asked for."""
        return self.all_slices.lazy().filter("inside")

    def callers(self) -> pl.DataFrame:
        """(caller, caller_file, caller_line, caller_function) of the user's functions; the line is the definition's."""
        return (
            self.all_slices.lazy()
            .filter(pl.col("what") == USER)
            .select(pl.col("row").alias("caller"), "name")
            .join(self.functions.lazy(), on="name")
            .select(
                "caller",
                pl.col("file").alias("caller_file"),
                pl.col("line").alias("caller_line"),
                pl.col("function").alias("caller_function"),
            )
            .collect()
        )

    @property
    def low_confidence(self) -> bool:
        """Too few steps for a mean, or nothing to compare the window with."""
        return self.steps < 2 or "wall" not in self.ratio


def prepare(tables: Tables, code: UserCode, labelled: LabelledSteps) -> Window | None:
    """None without a trace that holds host slices."""
    if not tables.events["category"].is_in(["cpu_op", "python_function", *_OLD_OPERATORS]).any():
        return None
    steps = labelled.frame.filter(pl.col("in_window").fill_null(False))
    chosen, all_steps = _chosen(tables, steps)
    host, traces = _host(tables, chosen)
    if not host["category"].is_in(["cpu_op", "python_function"]).any():
        return None
    has_functions = bool((host["category"] == "python_function").any())
    host = _with_steps(host).with_row_index("row").with_columns(pl.col("row").cast(pl.Int32))
    host, functions = _named(host, code)
    host = _linked(host)
    used = host.filter(pl.col("step").is_not_null() & pl.col("category").is_in(["cpu_op", "python_function"]))
    seen = used.select("process", "step").unique()
    if steps.height:  # only steps the journal calls in-window are complete in the trace
        complete = seen.join(steps.select("process", "step"), on=["process", "step"], how="semi")
        seen = complete if complete.height else seen
    if chosen is not None:
        seen = seen.join(chosen, on=["process", "step"], how="semi")
    keys = ["process", "step"]
    if seen.is_empty():
        inside = pl.Series("inside", [True], dtype=pl.Boolean).new_from_index(0, host.height)
    else:
        marked = host.select(keys).join(seen.with_columns(inside=True), on=keys, how="left", maintain_order="left")
        inside = marked["inside"].fill_null(False)
    phase_ms = _phase_ms(labelled, seen)
    return Window(
        all_slices=host.with_columns(inside.alias("inside")),
        functions=functions,
        steps=max(seen.height, 1),
        ratio={name: steady / window for name, (window, steady) in phase_ms.items()},
        phase_ms=phase_ms,
        source=_source(traces, seen.height, all_steps),
        step_times_known=seen.height > 0,
        has_functions=has_functions,
    )


def _chosen(tables: Tables, steps: pl.DataFrame) -> tuple[pl.DataFrame | None, int | None]:
    """(process, step) of the first window steps that hold at most `MAX_SLICES` host slices, and how many there are.

    (None, None) where all of them do: a mean per step does not need every step, and memory would grow with the trace.
    """
    if tables.events.height <= MAX_SLICES:
        return None, None
    sizes = (
        tables.events.lazy()
        .filter(pl.col("stream").is_null() & pl.col("step").is_not_null())
        .group_by("process", "step")
        .agg(n=pl.len(), first_ns=pl.col("start_ns").min())
        .collect()
    )
    if steps.height:
        sizes = sizes.join(steps.select("process", "step"), on=["process", "step"], how="semi")
    sizes = sizes.sort("first_ns").with_row_index("at")
    chosen = sizes.filter((pl.col("n").cum_sum() <= MAX_SLICES) | (pl.col("at") < MIN_STEPS))
    if chosen.height == sizes.height:
        return None, None
    return chosen.select("process", "step"), sizes.height


def _host(tables: Tables, chosen: pl.DataFrame | None) -> tuple[pl.DataFrame, list[str]]:
    """The host slices of the chosen steps, and what runs around them, with the columns asked for; and their traces.

    Of all slices of a large trace no copy is made, and no column that holds one value is written out.
    """
    events = tables.events
    wanted = events["stream"].is_null() & events["duration_ns"].is_not_null()
    if chosen is not None:
        wanted = wanted & _in_or_around(events, chosen)
    host = events.select(_COLUMNS).filter(wanted)
    traces = events.select("trace").filter(wanted).unique().drop_nulls()["trace"].sort().to_list()
    old = pl.col("category").is_in(_OLD_OPERATORS)
    if not host.select(old.any()).item():
        return host, traces
    annotation = pl.when(pl.col("name").str.contains(ANNOTATIONS)).then(pl.lit("user_annotation"))
    category = pl.when(old).then(annotation.otherwise(pl.lit("cpu_op"))).otherwise("category")
    return host.with_columns(category.alias("category")), traces


def _in_or_around(events: pl.DataFrame, chosen: pl.DataFrame) -> pl.Series:
    """Whether each slice lies in a chosen step of its process, or began before the first of them and still runs."""
    start, step = events["start_ns"], events["step"]
    found: pl.Series = pl.Series([False], dtype=pl.Boolean).new_from_index(0, events.height)
    for (process,), part in chosen.partition_by("process", as_dict=True).items():
        own = events.select(pl.col("process") == process).to_series()
        first, last = int(part["step"].min()), int(part["step"].max())  # type: ignore[arg-type]
        between = (step >= first) & (step <= last)
        if last - first + 1 > part["step"].n_unique():
            between = between & step.is_in(part["step"].implode())
        inside = own & between.fill_null(False)
        earlier = own & (start < start.filter(inside).min())
        running = (
            start.filter(earlier) + events["duration_ns"].filter(earlier).fill_null(0) > start.filter(inside).min()
        )
        around = np.zeros(events.height, bool)
        around[earlier.arg_true().filter(running).to_numpy()] = True
        found = found | inside | pl.Series(around)
    return found


def _with_steps(host: pl.DataFrame) -> pl.DataFrame:
    """A foreign trace has no journal: its own `ProfilerStep#N` annotations then name the steps."""
    if host["step"].is_not_null().any():
        return host
    marks = (
        host.filter(pl.col("name").str.starts_with("ProfilerStep#") & (pl.col("category") == "user_annotation"))
        .select(
            "process",
            pl.col("start_ns").alias("mark_ns"),
            (pl.col("start_ns") + pl.col("duration_ns")).alias("mark_end_ns"),
            pl.col("name").str.extract(r"#(\d{1,18})$").cast(pl.Int64).alias("mark"),
        )
        .sort("mark_ns")
    )
    if marks.is_empty():
        return host
    joined = host.sort("start_ns").join_asof(
        marks, left_on="start_ns", right_on="mark_ns", by="process", check_sortedness=False
    )
    inside = pl.col("start_ns") < pl.col("mark_end_ns")
    return joined.with_columns(pl.when(inside).then(pl.col("mark")).alias("step")).drop(
        "mark", "mark_ns", "mark_end_ns"
    )


def _named(host: pl.DataFrame, code: UserCode) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Adds `what` and `label`; and (name, file, line, function) of the user's functions, the line the definition's."""
    names = host.filter(pl.col("category") == "python_function").select("name").unique()
    names = names.with_columns(
        pl.col("name").str.extract(PYTHON_NAME, 1).alias("raw_file"),
        pl.col("name").str.extract(PYTHON_NAME, 2).cast(pl.Int64, strict=False).alias("line"),
        pl.col("name").str.extract(PYTHON_NAME, 3).alias("function"),
    )
    mapping = code.mapping(names["raw_file"])
    names = names.with_columns(
        pl.col("raw_file").replace_strict(mapping, default=None, return_dtype=pl.String).alias("user_file")
    )
    names = names.with_columns(
        pl.when(pl.col("name").str.contains(_OWN_WRAPPER))
        .then(pl.lit(TRANSPARENT))
        .when(pl.col("name").str.contains(_OWN))
        .then(pl.lit(OWN))
        .when(pl.col("user_file").is_not_null())
        .then(pl.lit(USER))
        .when(pl.col("name").str.starts_with("<built-in"))
        .then(pl.lit(BUILTIN))
        .when(is_torch(pl.col("raw_file")) | pl.col("name").str.starts_with("nn.Module: "))
        .then(pl.lit(TORCH))
        .otherwise(pl.lit(LIBRARY))
        .alias("what"),
    )
    whats = dict(names.select("name", "what").iter_rows())
    host = host.with_columns(
        pl.when(pl.col("category") == "python_function")
        .then(pl.col("name").replace_strict(whats, default=LIBRARY, return_dtype=pl.Int8))
        .when(pl.col("category") == "cpu_op")
        .then(pl.lit(OPERATOR, pl.Int8))
        .otherwise(pl.lit(TRANSPARENT, pl.Int8))
        .alias("what"),
    )
    labels = {name: callee_name(name) for name in host["name"].unique().drop_nulls().to_list()}
    label = pl.col("name").replace_strict(labels, default="?", return_dtype=pl.String).alias("label")
    users = names.filter(pl.col("what") == USER).select("name", "line", "function", file="user_file")
    return host.with_columns(label), users


def _linked(host: pl.DataFrame) -> pl.DataFrame:
    """Adds `caller`, `direct`, `in_loader`, `in_operator`, walking the tree from the roots down; ours are left out."""
    count = host.height
    parent = _parent_rows(host)
    what = host["what"].to_numpy()
    caller = np.full(count, -1, np.int32)
    via = np.full(count, -1, np.int32)
    function = np.full(count, -1, np.int32)
    direct = np.zeros(count, bool)
    in_loader = host["name"].fill_null("").str.contains(_LOADER_NEXT).to_numpy().copy()
    in_operator = np.zeros(count, bool)
    own = what == OWN
    for level in _levels(parent):
        above = parent[level]
        user = what[above] == USER
        passes = (what[above] == TRANSPARENT) | (what[above] == BUILTIN)
        caller[level] = np.where(user, above, caller[above])
        direct[level] = user | (passes & direct[above])
        function[level] = np.where(passes, function[above], np.where(what[above] == OPERATOR, -1, above))
        via[level] = np.where(user, level, via[above])
        in_loader[level] |= in_loader[above]
        in_operator[level] = (what[above] == OPERATOR) | in_operator[above]
        own[level] |= own[above]
    linked = host.drop("id", "parent").with_columns(
        pl.Series("caller", caller).replace(-1, None),
        pl.Series("via", via).replace(-1, None),
        pl.Series("function", function).replace(-1, None),
        pl.Series("above", parent).replace(-1, None),
        pl.Series("direct", direct),
        pl.Series("in_loader", in_loader),
        pl.Series("in_operator", in_operator),
    )
    return linked.filter(pl.Series(~own)) if own.any() else linked


def _parent_rows(host: pl.DataFrame) -> np.ndarray:
    """The row of each slice's parent, -1 at a root; ids are turned into row numbers."""
    ids, wanted = host["id"].to_numpy(), host["parent"].fill_null(-1).to_numpy()
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids[order], wanted), len(ids) - 1)
    parent: np.ndarray = np.where(ids[order[at]] == wanted, order[at], -1).astype(np.int32)
    parent[parent == np.arange(len(parent))] = -1
    return parent


def _levels(parent: np.ndarray) -> list[np.ndarray]:
    """Rows below the roots, level by level; rows of a broken (cyclic) tree are in none."""
    children = np.flatnonzero(parent >= 0)
    order = children[np.argsort(parent[children], kind="stable")]
    sorted_parents = parent[order]
    level = np.flatnonzero(parent < 0)
    levels: list[np.ndarray] = []
    while len(level) and len(levels) < _MAX_DEPTH:
        first = np.searchsorted(sorted_parents, level, side="left")
        last = np.searchsorted(sorted_parents, level, side="right")
        widths = last - first
        total = int(widths.sum())
        if not total:
            break
        offsets = np.repeat(first - np.concatenate([[0], np.cumsum(widths)[:-1]]), widths)
        level = order[np.arange(total) + offsets]
        levels.append(level)
    return levels


def _phase_ms(labelled: LabelledSteps, seen: pl.DataFrame) -> dict[str, tuple[float, float]]:
    """Mean ms per step (in the window, in the steady steps outside it), for the wall time and each phase."""
    if seen.is_empty():
        return {}
    train = labelled.frame.filter(pl.col("kind") == "train")
    inside = train.join(seen, on=["process", "step"], how="semi")
    outside = train.filter((pl.col("reason") == "steady") & ~pl.col("in_window").fill_null(False))
    means: dict[str, tuple[float, float]] = {}
    for name in ("wall", *PHASES):
        window, steady = inside[f"{name}_ns"].mean(), outside[f"{name}_ns"].mean()
        if isinstance(window, float) and isinstance(steady, float) and window > 0:
            means[name] = (window / 1e6, steady / 1e6)
    return means


def _source(traces: list[str], steps: int, all_steps: int | None) -> str:
    shown = traces[0] if traces else "trace"
    shown = shown if len(traces) < 2 else f"{shown} and {len(traces) - 1} more"
    return f"{shown}, the first {steps} of {all_steps} steps" if all_steps is not None else shown
