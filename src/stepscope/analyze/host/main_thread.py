"""What holds the main thread that is no training: Python, file I/O, collections of garbage, regions, tools that log.

**Python.** A sample is torch's when torch is below the user's line, and Python's when its innermost frame is in the
standard library, in a library that knows no tensors, or below a tensor that is written out as text. Elsewhere the
sampler cannot tell `x @ w` from arithmetic in Python, as C calls have no frame; the window can: it knows which part of
the innermost function's own time passed inside torch operators, and that part is taken off. What no window saw stays
unknown: it counts where the whole call could be spared, or where it is no part of the usual step, and is said. Where
the user's line only leads to training the place is the library's, and the line is where it was entered; what a
library's modules do is their operators' work. Data wait and file I/O are left out.

**File I/O**, blocking, inside training steps, from three sources, best first: `torch.save` calls the journal timed,
built-in I/O functions the window timed, and sampled stacks that stand in an I/O function or on a line whose text makes
such a call. A line named by a better source is not counted again. Reading done below the loader belongs to the input,
and I/O between steps is no step cost.

**Regions** are ranges that the user named: `stepscope.region` from the journal, `record_function` and NVTX ranges from
the window. Tools that log are known by their files.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.host.loops import stacks_in
from stepscope.analyze.host.sampled_time import PLACE_COLUMNS, Calls, entry_of, place_of
from stepscope.engine.call_tree import UserPaths, rows_of
from stepscope.engine.call_tree import at as at_nodes
from stepscope.engine.host_calls import BUILTIN, LIBRARY, OPERATOR, USER, Function, ProfiledCalls
from stepscope.engine.journal import event_data, events_in_steps
from stepscope.engine.journal import place_of as place_of_event
from stepscope.engine.samples import bare, short
from stepscope.engine.source_lines import Lines
from stepscope.engine.step_labels import LabelledSteps
from stepscope.engine.user_code import UserCode, is_torch, knows_no_tensors, python_frame
from stepscope.model import IoFacts, LoopFacts, Place, PythonFacts
from stepscope.model.counted import things
from stepscope.model.machine import HookFacts, PauseFacts, PauseLine
from stepscope.model.metrics import ANOMALY, HOOKS, LoggingCost
from stepscope.tables.arrays import NONE, Bools
from stepscope.tables.categories import ANNOTATION
from stepscope.tables.phases import OPTIMIZER, OTHER, in_file
from stepscope.tables.schema import Tables

MAX_IO_FACTS = 20
ENOUGH_SAMPLES = 100  # in steady steps, to bound what a window timed
_WINDOW = "built-in I/O functions timed"
# Built-in functions as torch.profiler names them.
_BUILTIN_IO = re.compile(
    r"^<built-in method (write|writelines|flush|read|readline|readlines|readinto|close|truncate|__exit__) of _io\."
    r"|^<built-in function (open|io_open|print|fsync|fdatasync|sync|replace|rename|copy_file_range|sendfile)>"
)
_NETWORK = re.compile(r"(^|/)(socket|ssl)\.py\(\d+\): ")  # what a stream calls that is no file
# Functions that do nothing but bring data to or from a file: everything below them is I/O cost.
_WRAPPERS = [
    *("save", "torch.save", "dump", "savez", "savez_compressed", "savetxt", "to_csv", "to_parquet", "to_json"),
    *("to_pickle", "write_text", "write_bytes", "read_text", "read_bytes", "imwrite", "imsave"),
    *("save_image", "save_file", "save_pretrained", "save_checkpoint", "copyfile", "copy2", "copytree", "move"),
    *("make_archive", "writerow", "writerows", "loadtxt", "read_csv", "read_parquet", "add_image", "emit"),
]
_IO_FILES = (
    r"(^|/)(pathlib(/\w+)?|shutil|gzip|bz2|lzma|zipfile|tarfile|csv|tempfile|logging/__init__|logging/handlers|"
    r"torch/serialization|safetensors/torch|PIL/ImageFile|PIL/\w+ImagePlugin|numpy/lib/(_?npyio\w*|_?format\w*))\.py$"
)
_TENSORS = "save_file"  # of safetensors, which no event times
_IO_TEXT = re.compile(
    r"\.(write|writelines|flush|fsync|read|readline|readlines|save|dump|to_csv|to_parquet|savetxt|savez|imwrite|"
    r"write_text|write_bytes|read_text|read_bytes|writerow|writerows)\(|\b(open|fsync|fdatasync|print|copyfile|copytree)\("
)


def file_io(
    context: Context, window: ProfiledCalls | None, mean_ms: float | None, calls: Calls | None
) -> tuple[IoFacts, ...] | None:
    """None when neither stacks nor a window could have seen any; costliest first."""
    found = _saves(context.tables, context.labelled)
    traced = window is not None and window.has_functions
    if mean_ms is None or (context.sampled is None and not traced and not found):
        return None
    rows = sampled_io(calls.rows, context.lines) if calls is not None else None
    sampled = _from_samples(rows, calls) if rows is not None and calls is not None else []
    for fact in [*_from_window(window, context.lines, calls), *sampled]:
        known = next((i for i, other in enumerate(found) if _same(fact, other)), None)
        if known is None:
            found.append(fact)
        elif fact.entry is not None and found[known].entry is None:  # a save, of which the recorder knew the entry
            found[known] = replace(found[known], place=fact.place, entry=fact.entry)
    found.sort(key=lambda fact: -fact.ms_per_step)
    found = found[:MAX_IO_FACTS]
    return tuple(found if calls is None or rows is None else _with_calls(found, rows, calls))


def _with_calls(found: list[IoFacts], rows: pl.DataFrame, calls: Calls) -> Iterator[IoFacts]:
    """The facts with the calls that hold them.

    The window has few steps: its times of a call are not believed beyond what steady samples allow.
    """
    numbers = [calls.number(fact.place) for fact in found]
    timed: dict[int | None, float] = defaultdict(float)
    for fact, number in zip(found, numbers, strict=True):
        timed[number] += fact.ms_per_step if _WINDOW in fact.source else 0.0
    for fact, number in zip(found, numbers, strict=True):
        whole = calls.share(number, rows["row"])
        if whole is None:
            yield fact
            continue
        inside = calls.time.share(rows.filter(pl.col("call") == number))
        bounded = calls.time.samples >= ENOUGH_SAMPLES and 0 < inside.at_most_ms < timed[number]
        factor = inside.ms / timed[number] if bounded and _WINDOW in fact.source else 1.0
        yield replace(
            fact,
            ms_per_step=fact.ms_per_step * factor,
            call=calls.place(number),
            call_ms_per_step=whole.ms,
            call_at_most_ms_per_step=whole.at_most_ms,
        )


def sampled_io(rows: pl.DataFrame, lines: Lines) -> pl.DataFrame:
    """The rows of `Calls.rows` whose main thread stands in file I/O outside the loader, with `operation`.

    Below a line that only leads to training it is the library's own function that does it, or safetensors'.
    """
    rows = rows.filter((pl.col("phase") != "data_wait") & pl.col("user_file").is_not_null())
    below, leaf = short(pl.col("below_function")), short(pl.col("leaf_function"))
    on_disk, by_library = (pl.col(f"{end}_file").fill_null("").str.contains(_IO_FILES) for end in ("leaf", "below"))
    alone = pl.col("below_function").is_null()
    rows = rows.with_columns(
        operation=pl.when(pl.col("library_file").is_not_null())
        .then(pl.when(on_disk).then(pl.when(leaf == _TENSORS).then(leaf).otherwise(short(pl.col("library_function")))))
        .when(below.is_in([*_WRAPPERS, "print"]) | ((on_disk | by_library) & ~alone))
        .then(below)
    )
    by_text = lines_with(rows.filter(pl.col("operation").is_null() & alone), lines, _IO_TEXT)
    rows = rows.join(by_text, on=["user_file", "user_line"], how="left", maintain_order="left")
    rows = rows.with_columns(operation=pl.when(alone).then("by_text").otherwise("operation"))
    return rows.filter(pl.col("operation").is_not_null()).drop("by_text")


def lines_with(rows: pl.DataFrame, lines: Lines, pattern: re.Pattern[str]) -> pl.DataFrame:
    """(user_file, user_line, by_text) of the lines of these rows whose text has the pattern; the text is its group."""
    places = rows.select("user_file", "user_line").unique()
    found = [(row, pattern.search(lines.text(*row) or "")) for row in places.rows()]
    told = [(*row, next(filter(None, match.groups()), None)) for row, match in found if match]
    return pl.DataFrame(told, schema={**places.schema, "by_text": pl.String}, orient="row")


def _same(fact: IoFacts, other: IoFacts) -> bool:
    """Whether two sources speak of the same I/O: the same line, or the same call of the same function."""
    if fact.entry is not None and other.operation == "torch.save":
        return "save" in fact.operation != _TENSORS and other.place == fact.entry
    if fact.place.file != other.place.file:
        return False
    if fact.place.line == other.place.line:
        return True
    names = {
        (each.operation.rsplit(".", 1)[-1], (each.place.function or "").rsplit(".", 1)[-1]) for each in (fact, other)
    }
    return len(names) == 1


def _saves(tables: Tables, labelled: LabelledSteps) -> list[IoFacts]:
    """`torch.save` calls that began inside a steady training step, by line."""
    steady = labelled.steady("train").filter(pl.col("start_ns").is_not_null())
    if steady.is_empty():
        return []
    grouped: dict[Place, list[tuple[int, str]]] = {}
    for row, data, _ in events_in_steps(tables, "save", steady):
        place = place_of_event(data)
        if place is not None:
            grouped.setdefault(place, []).append((row["duration_ns"], str(data.get("path") or "")))
    return [
        IoFacts(
            operation="torch.save",
            place=place,
            calls_per_step=len(calls) / steady.height,
            ms_per_step=sum(duration for duration, _ in calls) / steady.height / 1e6,
            source="events.jsonl, torch.save timed in steady steps",
            measured=True,
            count=len(calls),
            detail=calls[-1][1] or None,
        )
        for place, calls in grouped.items()
    ]


def _from_window(window: ProfiledCalls | None, lines: Lines, calls: Calls | None) -> list[IoFacts]:
    """Built-in I/O functions the window timed, by the user's function and the call that leads to them.

    What a library does below a line that only leads to training is left to the samples, which know its place.
    """
    if window is None or not window.step_times_known:
        return []
    led = set(calls.entries().iter_rows()) if calls is not None else set()
    timed: dict[tuple[Function, str], list[int]] = {}  # calls, ns
    for part in window.parts:
        among = (part.what == BUILTIN) & ~part.in_loader & (part.caller >= 0) & part.inside
        own = np.flatnonzero(part.named(lambda name: _BUILTIN_IO.search(name) is not None, among))
        own = own[~np.isin(own, part.parent[part.named(lambda name: _NETWORK.search(name) is not None)])]
        counted = set()
        for row, via, caller in zip(own.tolist(), part.via[own].tolist(), part.caller[own].tolist(), strict=True):
            function, label = part.function_at(caller), part.label(via)
            call = via if label in _WRAPPERS else row
            if call in counted or (function.file, bare(function.name), label) in led:
                continue
            counted.add(call)
            sums = timed.setdefault((function, label), [0, 0])
            sums[0], sums[1] = sums[0] + 1, sums[1] + int(part.duration_ns[call])
    found = []
    for (function, label), (count, ns) in timed.items():
        site = lines.call_site(function.file, function.name, function.line, label, loop=False)
        fact = IoFacts(
            operation=label,
            place=Place(function.file, site.line if site else function.line, function.name),
            calls_per_step=count / window.steps,
            ms_per_step=ns / window.steps / 1e6,
            source=f"{window.source}, {_WINDOW} in {things(window.steps, 'window step')}",
            measured=True,
            count=count,
        )
        found.append(fact)
    return sorted(found, key=lambda fact: (-fact.ms_per_step, fact.place.file, fact.place.line or 0))[:MAX_IO_FACTS]


def _from_samples(rows: pl.DataFrame, calls: Calls) -> list[IoFacts]:
    total = calls.time.samples
    grouped = (
        calls.time.with_ms(rows)
        .group_by(*PLACE_COLUMNS, "operation", maintain_order=True)
        .agg(ms=pl.col("ms").sum(), n=pl.col("samples").sum(), leaf=pl.col("leaf_function").first())
        .sort(["ms", "user_file", "user_line"], descending=[True, False, False])
        .head(MAX_IO_FACTS)
    )
    return [
        IoFacts(
            operation=row["operation"],
            place=place_of(row),
            entry=entry_of(row),
            calls_per_step=None,
            ms_per_step=row["ms"],
            source=f"sampled stacks, {row['n']} of {total} samples in steps",
            measured=False,
            count=row["n"],
            detail=row["leaf"],
        )
        for row in grouped.iter_rows(named=True)
    ]


MAX_FACTS = 60
_SLEEPS = re.compile(r"\b(sleep)\(")  # a call of C, which no frame shows


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
    asleep = lines_with(rows.filter(pl.col("below_function").is_null()), context.lines, _SLEEPS)
    rows = rows.join(asleep, on=["user_file", "user_line"], how="left", maintain_order="left").with_columns(
        waiting=pl.col("waiting") | (pl.col("by_text").is_not_null() & pl.col("below_function").is_null())
    )
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
    as_text = short(pl.col("below_function")).is_in(["__repr__", "__format__"]) & pl.col("below_file").str.ends_with(
        "torch/_tensor.py"
    )
    of_model = pl.col("in_module") | (pl.col("library_file").is_not_null() & (pl.col("phase") == OPTIMIZER))
    known = (
        pl.when(as_text.fill_null(False))
        .then(1.0)
        .when(~on_top & (torch | of_model))
        .then(0.0)
        .when(~on_top & pl.col("plain").fill_null(False))
        .then(1.0)
        .otherwise(pl.col("fraction"))
    )
    # Outside models, functions that the window could name and never met: it saw whole steps, so they are no part of the
    # usual one, such as a rollout between two rounds of updates.
    complete = window is not None and window.has_functions and window.step_times_known
    unmet = pl.lit(complete) & pl.col("file").is_not_null() & (pl.col("phase") == OTHER) & ~pl.col("in_module")
    rows = rows.with_columns(known=known)
    rows = rows.with_columns(unknown=pl.col("known").is_null() & ((~on_top & ~pl.col("own")) | unmet))
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


_MODULES = "torch/nn/modules/module.py"
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
        ANOMALY: r"torch/fx/traceback\.py",
        "Lightning's loggers": r"\w*lightning/(\w+/)?(loggers|trainer/connectors/logger_connector)/",
    }.items()
}


_DETECTS = re.compile(r"\b(?:set_)?detect_anomaly\(")
_TRACERS = re.compile(r"\bset(trace|profile)(_all_threads)?\(|\bProfile\(\)|\b(cProfile|profile)\.run(ctx)?\(")


def python_hook(context: Context) -> HookFacts | None:
    name = next((rank.hook for rank in context.tables.ranks if rank.hook), None)
    return HookFacts(name, only_line(context, _TRACERS)) if name else None


def only_line(context: Context, pattern: re.Pattern[str]) -> Place | None:
    """The one line of the user's files that has it, comments left out; None where several have."""
    found = [
        Place(file, number)
        for file, text in context.sources.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line) and not line.lstrip().startswith("#")
    ]
    return found[0] if len(found) == 1 else None


def _is_hook(users: UserPaths) -> Bools:
    """Whether a node is the user's function that a module calls at another line than a forward pass."""
    tree = users.tree
    above = np.where(tree.parent >= 0, tree.frame[tree.parent], NONE)
    called = np.array([*(in_file(frame.file, _MODULES) for frame in tree.frames), False], bool)[above]
    forward = tree.by_node(np.array([bare(frame.function) == "forward" for frame in tree.frames], bool))
    found: Bools = called & users.user & ~np.isin(above, above[called & forward])
    return found


def logging_costs(context: Context, calls: Calls | None) -> tuple[LoggingCost, ...] | None:
    """What logging takes of the main thread: one for each tool and the user's line that it is called from, costliest
    first; None without stacks in steady steps.

    A tool that reads numbers of a device waits for all work queued on it, so its cost is mostly waiting. Anomaly
    detection is one as well: it keeps the stack of every operator. Its line is the one that switches it on.
    """
    samples = context.sampled
    if samples is None or calls is None:
        return None
    tree, names = samples.calls, [*TOOLS, HOOKS]
    of_frame = np.full(len(tree.frames), NONE)  # the number of the tool, none of the user's own file and of others
    for at, frame in enumerate(tree.frames):
        tool = next((tool for tool, files in enumerate(TOOLS.values()) if files.search(frame.file)), NONE)
        of_frame[at] = tool if tool < 0 or context.code.resolve(frame.file) is None else NONE
    of_node = np.where(_is_hook(UserPaths(tree, context.code)), len(TOOLS), tree.by_node(of_frame))
    if not (of_node >= 0).any():
        return ()
    entered = at_nodes(tree.outermost(of_node >= 0), rows_of(calls.rows["node"]), NONE)
    tool_of = np.where(entered >= 0, of_node[np.maximum(entered, 0)], NONE)
    rows = calls.rows.with_columns(tool=pl.Series(tool_of), entered=pl.Series(entered)).filter(pl.col("tool") >= 0)
    switch = only_line(context, _DETECTS)
    if switch is not None:  # else it is told at the lines that run the operators
        columns = ("user_file", "user_line", "user_function")
        rows = rows.with_columns(
            pl.when(pl.col("tool") == names.index(ANOMALY)).then(pl.lit(value)).otherwise(column).alias(column)
            for column, value in zip(columns, (switch.file, switch.line, ""), strict=True)
        )
    found = []
    for own in rows.partition_by("tool", "user_file", "user_line", "user_function"):
        first, share, count = own.row(0, named=True), calls.time.share(own), int(own["samples"].sum())
        line = (first["user_file"], first["user_line"], first["user_function"])
        top = own.group_by("entered").agg(pl.col("samples").sum()).sort("samples", "entered", descending=[True, False])
        cost = LoggingCost(
            tool=names[first["tool"]],
            function=tree.frames[tree.frame[top["entered"][0]]].function,
            place=Place(*line[:2], line[2] or None) if line[0] else None,
            ms_per_step=share.ms,
            at_most_ms_per_step=share.at_most_ms,
            samples=count,
            waiting_share=int(own.filter(pl.col("waiting"))["samples"].sum()) / count,
        )
        found.append(cost)
    return tuple(sorted(found, key=lambda one: (-one.ms_per_step, one.tool)))
