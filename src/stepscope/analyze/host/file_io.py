"""Blocking file I/O of the main thread inside training steps.

Three sources, best first: `torch.save` calls the journal timed, built-in I/O functions the window timed, and sampled
stacks that stand in an I/O function or on a line whose text makes such a call. A line named by a better source is not
counted again. Reading done below the loader belongs to the input, and I/O between steps is no step cost.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import polars as pl
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.host.removable_calls import PLACE_COLUMNS, Calls, entry_of, place_of
from stepscope.engine.host_calls import BUILTIN, Function, ProfiledCalls
from stepscope.engine.journal import events_in_steps
from stepscope.engine.journal import place_of as place_of_event
from stepscope.engine.samples import bare, short
from stepscope.engine.source_lines import Lines
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import IoFacts, Place
from stepscope.model.counted import things
from stepscope.tables.schema import Tables

MAX_FACTS = 20
ENOUGH_SAMPLES = 100  # in steady steps, to bound what a window timed
_WINDOW = "built-in I/O functions timed"
# Built-in functions as torch.profiler names them.
_BUILTIN_IO = re.compile(
    r"^<built-in method (write|writelines|flush|read|readline|readlines|readinto|close|truncate|__exit__) of _io\."
    r"|^<built-in function (open|io_open|print|fsync|fdatasync|sync|replace|rename|copy_file_range|sendfile)>"
)
# Functions that do nothing but bring data to or from a file: everything below them is I/O cost.
_WRAPPERS = [
    *("save", "torch.save", "dump", "savez", "savez_compressed", "savetxt", "to_csv", "to_parquet", "to_json"),
    *("to_pickle", "write_text", "write_bytes", "read_text", "read_bytes", "imwrite", "imsave", "savefig"),
    *("save_image", "save_file", "save_pretrained", "save_checkpoint", "copyfile", "copy2", "copytree", "move"),
    *("make_archive", "writerow", "writerows", "loadtxt", "read_csv", "read_parquet", "add_image", "emit"),
]
_IO_FILES = (
    r"(^|/)(pathlib(/\w+)?|shutil|gzip|bz2|lzma|zipfile|tarfile|csv|tempfile|logging/__init__|logging/handlers|"
    r"torch/serialization|PIL/ImageFile|PIL/\w+ImagePlugin|numpy/lib/(_?npyio\w*|_?format\w*))\.py$"
)
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
    found = found[:MAX_FACTS]
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

    Below a line that only leads to training it is the library's own function that does it.
    """
    rows = rows.filter((pl.col("phase") != "data_wait") & pl.col("user_file").is_not_null())
    below = short(pl.col("below_function"))
    on_disk, by_library = (pl.col(f"{end}_file").fill_null("").str.contains(_IO_FILES) for end in ("leaf", "below"))
    alone = pl.col("below_function").is_null()
    rows = rows.with_columns(
        operation=pl.when(pl.col("library_file").is_not_null())
        .then(pl.when(on_disk).then(short(pl.col("library_function"))))
        .when(below.is_in([*_WRAPPERS, "print"]) | ((on_disk | by_library) & ~alone))
        .then(below)
    )
    silent = rows.filter(pl.col("operation").is_null() & alone).select("user_file", "user_line").unique()
    matches = [(row, _IO_TEXT.search(lines.text(*row) or "")) for row in silent.rows()]
    by_text = pl.DataFrame(
        [(*row, match[1] or match[2]) for row, match in matches if match],
        schema={**silent.schema, "by_text": pl.String},
        orient="row",
    )
    rows = rows.join(by_text, on=["user_file", "user_line"], how="left", maintain_order="left")
    rows = rows.with_columns(operation=pl.when(alone).then("by_text").otherwise("operation"))
    return rows.filter(pl.col("operation").is_not_null()).drop("by_text")


def _same(fact: IoFacts, other: IoFacts) -> bool:
    """Whether two sources speak of the same I/O: the same line, or the same call of the same function."""
    if fact.entry is not None and other.operation == "torch.save":
        return "save" in fact.operation and other.place == fact.entry
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
    return sorted(found, key=lambda fact: (-fact.ms_per_step, fact.place.file, fact.place.line or 0))[:MAX_FACTS]


def _from_samples(rows: pl.DataFrame, calls: Calls) -> list[IoFacts]:
    total = calls.time.samples
    grouped = (
        calls.time.with_ms(rows)
        .group_by(*PLACE_COLUMNS, "operation", maintain_order=True)
        .agg(ms=pl.col("ms").sum(), n=pl.col("samples").sum(), leaf=pl.col("leaf_function").first())
        .sort(["ms", "user_file", "user_line"], descending=[True, False, False])
        .head(MAX_FACTS)
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
