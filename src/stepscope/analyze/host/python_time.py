"""Python on the critical path: lines whose time on the main thread is Python, not torch.

A sample is torch's when torch is below the user's line, and Python's when its innermost frame is in the standard
library or in a library that knows no tensors. Elsewhere the sampler cannot tell `x @ w` from arithmetic in Python, as C
calls have no frame; the window can: it knows which part of the innermost function's own time passed inside torch
operators, and that part is taken off. What no window saw stays unknown: it counts where the whole call could be spared,
and is said.
Where the user's line only leads to training the place is the library's, and the line is where it was entered; what a
library's modules do is their operators' work. Data wait and file I/O have facts of their own.

Below: pauses of the garbage collector, ranges that the user named (`stepscope.region` from the journal,
`record_function` and NVTX ranges from the window), and what tools that log take, which are known by their files.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.host.file_io import sampled_io
from stepscope.analyze.host.loops import stacks_in
from stepscope.analyze.host.removable_calls import PLACE_COLUMNS, Calls, entry_of, place_of
from stepscope.engine.call_tree import at as at_nodes
from stepscope.engine.call_tree import rows_of
from stepscope.engine.host_calls import BUILTIN, LIBRARY, OPERATOR, USER, ProfiledCalls
from stepscope.engine.journal import event_data, events_in_steps
from stepscope.engine.journal import place_of as place_of_event
from stepscope.engine.samples import bare, short
from stepscope.engine.step_labels import LabelledSteps
from stepscope.engine.user_code import UserCode, is_torch, knows_no_tensors, python_frame
from stepscope.model import LoopFacts, Place, PythonFacts
from stepscope.model.machine import PauseFacts, PauseLine
from stepscope.model.metrics import LoggingCost
from stepscope.tables.arrays import NONE
from stepscope.tables.categories import ANNOTATION
from stepscope.tables.phases import OPTIMIZER
from stepscope.tables.schema import Tables

MAX_FACTS = 60


def python_facts(
    context: Context, window: ProfiledCalls | None, loops: tuple[LoopFacts, ...] | None, calls: Calls | None
) -> tuple[PythonFacts, ...] | None:
    """None without stacks in steady steps; costliest first."""
    samples = context.sampled
    if samples is None or calls is None:
        return None
    everything, mean_ms = calls.time.with_ms(calls.rows), calls.time.mean_ms
    rows = everything.filter((pl.col("phase") != "data_wait") & pl.col("user_file").is_not_null())
    rows = rows.join(sampled_io(everything, context.lines).select("row"), on="row", how="anti")
    rows = _weigh(rows, window, samples.code, calls.own).filter(pl.col("weight") > 0)
    inside = [pl.DataFrame(schema={"row": pl.UInt32, "loop": pl.Int64})]
    for index, loop in enumerate(loops or ()):
        own = stacks_in(samples, loop).cast(pl.UInt32).alias("row")
        inside.append(pl.DataFrame([own]).with_columns(loop=pl.lit(index, pl.Int64)))
    rows = rows.join(pl.concat(inside).group_by("row").agg(pl.col("loop").min()), on="row", how="left")
    key = [*PLACE_COLUMNS, "phase", "loop", "call"]
    of_call = _of_calls(rows, calls)
    grouped = (
        rows.group_by(key, maintain_order=True)
        .agg(
            n=pl.col("samples").sum(),
            ms=(pl.col("ms") * pl.col("weight")).sum(),
            unknown=(pl.col("ms") * pl.col("weight")).filter(pl.col("unknown")).sum(),
            waiting=pl.col("samples").filter(pl.col("waiting")).sum(),
            fraction=pl.col("fraction").first(),
            leaf=pl.col("leaf_function").filter(pl.col("below_function").is_not_null()).mode().sort().first(),
        )
        .sort(["ms", *key], descending=[True, *[False] * len(key)])
        .head(MAX_FACTS)
    )
    source = "sampled stacks" if window is None else f"sampled stacks and {window.source}"
    return tuple(
        PythonFacts(
            place=place_of(row),
            entry=entry_of(row),
            phase=row["phase"],
            ms_per_step=row["ms"],
            share=row["ms"] / mean_ms,
            samples=row["n"],
            waiting_share=row["waiting"] / row["n"],
            python_fraction=row["fraction"],
            library_leaf=row["leaf"],
            source=source,
            unknown_ms_per_step=row["unknown"],
            inside_loop=(loops or ())[row["loop"]].place if row["loop"] is not None else None,
            **of_call.get(row["call"], {}),
        )
        for row in grouped.iter_rows(named=True)
    )


def _of_calls(rows: pl.DataFrame, calls: Calls) -> dict[int, dict[str, Any]]:
    """The fields of the facts that are the same for all lines of a call."""
    found: dict[int, dict[str, Any]] = {}
    for (number,), own in rows.filter(pl.col("call").is_not_null()).partition_by("call", as_dict=True).items():
        blamed, whole = calls.time.share(own), calls.share(number, own["row"])
        found[number] = {
            "call": calls.place(number),
            "call_ms_per_step": whole.ms if whole is not None else None,
            "call_at_most_ms_per_step": whole.at_most_ms if whole is not None else None,
            "sampling": blamed.at_most_ms / blamed.ms if blamed.ms > 0 else 1.0,
        }
    return found


def _weigh(rows: pl.DataFrame, window: ProfiledCalls | None, code: UserCode, own: tuple[bool, ...]) -> pl.DataFrame:
    """Adds `weight`, the part of each sample that counts, null where nothing can tell; `fraction` and `unknown`.

    `own`: of calls, whether they are lines of the loop or of a module, which cannot be spared as a whole.
    """
    # the files of functions as stacks and traces both name them, by their name here
    names = rows["leaf_file"].unique().drop_nulls().to_list()
    files = {file: code.resolve(file) or code.library(file) for file in names}
    rows = rows.with_columns(
        pl.col("leaf_file").replace_strict(files, default=None, return_dtype=pl.String).alias("file"),
        short(pl.col("leaf_function")).alias("name"),
        pl.col("leaf_file").is_in([file for file in names if knows_no_tensors(file)]).alias("plain"),
        pl.col("call").replace_strict(dict(enumerate(own)), default=True, return_dtype=pl.Boolean).alias("own"),
    ).join(_python_fractions(window, code), on=["file", "name"], how="left")
    on_top = pl.col("below_function").is_null()
    torch = is_torch(pl.col("below_file").fill_null("")) | is_torch(pl.col("leaf_file").fill_null(""))
    of_model = pl.col("in_module") | (pl.col("library_file").is_not_null() & (pl.col("phase") == OPTIMIZER))
    known = (
        pl.when(~on_top & (torch | of_model))
        .then(0.0)
        .when(~on_top & pl.col("plain").fill_null(False))
        .then(1.0)
        .otherwise(pl.col("fraction"))
    )
    rows = rows.with_columns(known=known).with_columns(unknown=pl.col("known").is_null() & ~on_top & ~pl.col("own"))
    return rows.with_columns(pl.when("unknown").then(1.0).otherwise("known").alias("weight"))


def _python_fractions(window: ProfiledCalls | None, code: UserCode) -> pl.DataFrame:
    """(file, name, fraction): the part of a function's own time in the window that no torch operator takes.

    Own time is what a sampler shows with the function on top: its lines and the built-in functions they call. A
    built-in function around an operator is torch's.
    """
    times: dict[tuple[str, str], list[int]] = {}  # Python's, and all
    for part in window.parts if window is not None else ():
        own_ns, here = np.maximum(part.self_ns, 0), ~part.in_loader
        functions = here & ((part.what == USER) | (part.what == LIBRARY))
        operators = here & (part.what == OPERATOR) & ~part.in_operator
        around = np.zeros(len(part) + 1, bool)
        around[part.parent[operators]] = True  # the last entry for none
        builtins = here & (part.what == BUILTIN)
        python = np.where(functions | (builtins & ~around[:-1]), own_ns, 0)
        torch = np.where(operators, part.duration_ns, np.where(builtins & around[:-1], own_ns, 0))
        of = np.where(functions, np.arange(len(part)), part.function)  # the function that the time is of
        counted = (of >= 0) & functions[of] & (part.codes[of] >= 0)
        columns = {"code": part.codes[of[counted]], "python": python[counted], "all": (python + torch)[counted]}
        for number, in_python, whole in pl.DataFrame(columns).group_by("code", maintain_order=True).sum().iter_rows():
            frame = python_frame(part.span.names.values[number])
            file = (code.resolve(frame.file) or code.library(frame.file)) if frame else None
            if frame is not None and file is not None:
                sums = times.setdefault((file, bare(frame.function)), [0, 0])
                sums[0], sums[1] = sums[0] + in_python, sums[1] + whole
    rows = [(*key, python / whole) for key, (python, whole) in times.items() if whole > 0]
    return pl.DataFrame(rows, schema={"file": pl.String, "name": pl.String, "fraction": pl.Float64}, orient="row")


FULL = 2  # generation of a collection that looks at every object


def gc_pauses(tables: Tables, labelled: LabelledSteps) -> PauseFacts | None:
    """None without steady training steps whose time is known; a count of 0 where none was struck."""
    steady = labelled.steady().filter(pl.col("start_ns").is_not_null()).sort("start_ns")
    if steady.is_empty():
        return None
    ns: list[int] = []  # what of each collection lies in the step it began in
    lines: dict[Place, list[int]] = {}
    steps, collected, full = set(), [], 0
    for row, data, (step, end_ns) in events_in_steps(tables, "gc", steady):
        if row["duration_ns"] <= 0:
            continue
        ns.append(min(row["duration_ns"], end_ns - row["time_ns"]))
        steps.add((row["process"], step))
        full += data.get("generation") == FULL
        if isinstance(data.get("collected"), int):
            collected.append(data["collected"])
        place = place_of_event(data)
        if place is not None:
            lines.setdefault(place, []).append(ns[-1])
    per_step = 1e6 * steady.height
    found = [PauseLine(place, len(own), sum(own) / per_step) for place, own in lines.items()]
    return PauseFacts(
        count=len(ns),
        full=full,
        collected=sum(collected) if collected else None,
        steps=steady.height,
        steps_struck=len(steps),
        ms_per_step=sum(ns) / per_step,
        longest_ms=max(ns, default=0) / 1e6,
        lines=tuple(sorted(found, key=lambda line: (-line.ms_per_step, line.place.file, line.place.line or 0))),
    )


_OWN_TO_TORCH = re.compile(
    r"^(ProfilerStep|Optimizer\.|enumerate\(DataLoader\)|## |Torch-Compiled|TorchDynamo|DistributedDataParallel\."
    r"|nn\.Module|PyTorch Profiler)"
)


def regions(context: Context, window: ProfiledCalls | None) -> tuple[dict[str, Any], ...]:
    """{"name", "calls", "calls_per_step", "ms_per_step", "source"}, costliest first; per steady (or window) step."""
    steady = context.labelled.steady()
    inside = set(steady.select("process", "step").iter_rows())
    steps = {"events.jsonl": steady.height}
    calls: Counter[tuple[str, str]] = Counter()  # by source and name
    times: Counter[tuple[str, str]] = Counter()
    for row, data in event_data(context.tables, "region"):
        if row["duration_ns"] is not None and (row["process"], row["step"]) in inside:
            key, count = ("events.jsonl", str(data.get("name", "?"))), data.get("count", 1)
            calls[key] += count if isinstance(count, int) else 1
            times[key] += row["duration_ns"]
    if window is not None:
        steps[window.source] = window.steps
        for part in window.parts:
            ranges = part.span.categories.where([ANNOTATION, "gpu_user_annotation"])[part.rows]
            among = ranges & ~part.in_loader & part.inside
            own = np.flatnonzero(part.named(lambda name: _OWN_TO_TORCH.match(name) is None, among))
            for position, ns in zip(own.tolist(), part.duration_ns[own].tolist(), strict=True):
                calls[window.source, part.name(position)] += 1
                times[window.source, part.name(position)] += ns
    found = [
        {
            "name": name,
            "calls": count,
            "calls_per_step": count / steps[source],
            "ms_per_step": times[source, name] / steps[source] / 1e6,
            "source": source,
        }
        for (source, name), count in calls.items()
    ]
    return tuple(sorted(found, key=lambda region: (-region["ms_per_step"], region["name"])))


# tool -> its files; the first that fits. What is called through another tool is that one's.
TOOLS: dict[str, re.Pattern[str]] = {
    name: re.compile(rf"(^|/)({files})")
    for name, files in {
        "wandb.watch": r"wandb/(integration/torch|sdk/lib)?/?\w*wandb_torch\.py",
        "W&B": r"wandb/",
        "TensorBoard": r"torch/utils/tensorboard/|tensorboardX/|tensorboard/",
        "MLflow": r"mlflow/",
        "Trackio": r"trackio/",
        "Comet": r"comet_ml/",
        "ClearML": r"clearml/",
        "SwanLab": r"swanlab/",
        "Neptune": r"neptune(_scale)?/",
        "Aim": r"aim/sdk/",
        "Lightning's ThroughputMonitor": r"\w*lightning/(\w+/)*throughput\w*\.py",
        "Lightning's loggers": r"\w*lightning/(\w+/)?(loggers|trainer/connectors/logger_connector)/",
    }.items()
}


def logging_costs(context: Context, calls: Calls | None) -> tuple[LoggingCost, ...] | None:
    """What logging takes of the main thread: one for each tool and the user's line that it is called from, costliest
    first; None without stacks in steady steps.

    A tool that reads numbers of a device waits for all work queued on it, so its cost is mostly waiting.
    """
    samples = context.sampled
    if samples is None or calls is None:
        return None
    tree, names = samples.calls, list(TOOLS)
    of_frame = np.full(len(tree.frames), NONE)  # the number of the tool, none of the user's own file and of others
    for at, frame in enumerate(tree.frames):
        tool = next((tool for tool, name in enumerate(names) if TOOLS[name].search(frame.file)), NONE)
        of_frame[at] = tool if tool < 0 or context.code.resolve(frame.file) is None else NONE
    if not (of_frame >= 0).any():
        return ()
    entered = at_nodes(tree.outermost(tree.by_node(of_frame >= 0)), rows_of(calls.rows["node"]), NONE)
    tool_of = np.where(entered >= 0, of_frame[tree.frame[np.maximum(entered, 0)]], NONE)
    rows = calls.rows.with_columns(tool=pl.Series(tool_of), entered=pl.Series(entered)).filter(pl.col("tool") >= 0)
    found = []
    for own in rows.partition_by("tool", "user_file", "user_line", "user_function"):
        first, share, count = own.row(0, named=True), calls.time.share(own), int(own["samples"].sum())
        line = (first["user_file"], first["user_line"], first["user_function"])
        top = own.group_by("entered").agg(pl.col("samples").sum()).sort("samples", "entered", descending=[True, False])
        cost = LoggingCost(
            tool=names[first["tool"]],
            function=tree.frames[tree.frame[top["entered"][0]]].function,
            place=Place(*line) if line[0] else None,
            ms_per_step=share.ms,
            at_most_ms_per_step=share.at_most_ms,
            samples=count,
            waiting_share=int(own.filter(pl.col("waiting"))["samples"].sum()) / count,
        )
        found.append(cost)
    return tuple(sorted(found, key=lambda one: (-one.ms_per_step, one.tool)))
