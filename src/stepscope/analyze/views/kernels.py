"""Kernels: calls, durations, launch configuration, delay of the launch, who launched them, and what their names say.

Grouped by name, or by launch: name, operator, blocks of the grid, threads of a block, registers and shared memory.
`plugin_kernels` gives the rows of the TensorBoard plugin's table.

`short_names`: a C++ kernel keeps its function's name; what else is needed comes from its template arguments, in steps
of detail until no two kernels of a table share a name. Profilers demangle what they can, so names still mangled are
those a demangler gives up on (new types, too many arguments). Those are read identifier by identifier, in one pass,
which works for any of them and cannot be made to run away by a crafted name. Names of generated kernels (Triton,
cuBLAS, Tensile) are kept, without their tails of tuning parameters.

`uses_tensor_cores`: no trace says which instructions a kernel ran. Libraries that write matrix kernels put the
instruction, or a family that is only ever built on it, into the kernel's name; `kernel_names.json` has those marks by
family, with where the name comes from. A kernel written by hand that bears none of them counts as using none. What is
0 % here may still be arithmetic in 16 bits, and what counts here may keep the cores busy for a part of its time only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.engine import attribution
from stepscope.engine.device_work import GRAPH, LINKED, in_state, work
from stepscope.engine.spans import Base, Span, Texts
from stepscope.model.trace import SpanRef
from stepscope.model.views import KernelRow
from stepscope.tables.arrays import NONE, Bools, Int64, by_code, unique

NAME, LAUNCH = "name", "launch"
_CONFIGURATION = {  # of a launch, by the column of `events`
    "grid": "blocks",
    "block": "threads",
    "registers": "registers",
    "shared_memory_bytes": "shared_memory_bytes",
}


def table(
    base: Base, *, span: SpanRef | None = None, by: str = NAME, device: int | None = None
) -> tuple[KernelRow, ...]:
    """Rows of one span, or of all together, the most total time first.

    Args:
        by: "name", or "launch" for name, operator and launch configuration.
        device: only kernels of this device.
    """
    keys = ["name"] if by == NAME else ["name", "operator", *_CONFIGURATION]
    figures, operators, places = [], [], []
    for item in base.chosen(span):
        kernels = _kernels(item)
        if device is not None:
            kernels = kernels.filter(pl.col("device") == device)
        if kernels.height:
            groups = kernels.select(keys).unique(maintain_order=True).with_columns(group=pl.int_range(pl.len()))
            kernels = kernels.join(groups, on=keys, how="left", nulls_equal=True, maintain_order="left")
            callers = kernels.group_by(*keys, caller="operator").agg(pl.col("total_ns").sum())
            figures.append(_named(item, _sums(kernels, keys)))
            operators.append(_named(item, callers))
            of = (kernels[name].to_numpy() for name in ("group", "origin", "total_ns"))
            sums = attribution.place_sums(base, item, *of)
            places.append(_named(item, sums.join(groups, on="group").drop("group")))
    if not figures:
        return ()
    callers = (
        pl.concat(operators)
        .filter(pl.col("caller").is_not_null())
        .group_by(*keys, "caller")
        .agg(pl.col("total_ns").sum())
        .sort("total_ns", "caller", descending=[True, False])
        .unique(keys, keep="first", maintain_order=True)
        .drop("total_ns")
    )
    joined = (
        _sums(pl.concat(figures), keys)
        .join(callers, on=keys, how="left", nulls_equal=True)
        .join(attribution.heaviest(pl.concat(places), keys), on=keys, how="left", nulls_equal=True)
        .sort("total_ns", *keys, descending=[True, *(False for _ in keys)])
    )
    everything = int(joined["total_ns"].sum())
    names = joined["name"].unique(maintain_order=True).to_list()
    short = dict(zip(names, short_names(names), strict=True))
    cores = dict(zip(names, uses_tensor_cores(names), strict=True))
    return tuple(
        _row(row, short[row["name"]], cores[row["name"]], everything, by) for row in joined.iter_rows(named=True)
    )


def plugin_kernels(rows: Sequence[KernelRow]) -> list[dict[str, Any]]:
    """The rows under the names, in the units (µs, %) and with the rounding of the plugin's kernel table."""
    return [
        {
            "Name": row.name,
            "Tensor Cores Used": "Yes" if row.tensor_cores else "No",
            "Calls": row.calls,
            "Total Duration (us)": round(row.total_ns / 1000),
            "Mean Duration (us)": round(row.mean_ns / 1000),
            "Max Duration (us)": round(row.max_ns / 1000),
            "Min Duration (us)": round(row.min_ns / 1000),
            **({} if row.blocks_per_sm is None else {"Mean Blocks Per SM": round(row.blocks_per_sm, 2)}),
            **({} if row.occupancy_pct is None else {"Mean Est. Achieved Occupancy (%)": round(row.occupancy_pct, 2)}),
        }
        for row in rows
    ]


def _kernels(span: Span) -> pl.DataFrame:
    """One row per kernel, those of collectives too: name and operator (codes of names), configuration, what `_sums`
    adds up, and `origin`, where to look up the user's line.

    Blocks and occupancy are weighted by the duration in µs; blocks as the plugin does, with 0 for what is missing.
    """
    found = work(span)
    wanted = found.is_kernel
    rows = found.rows[wanted]
    operator = np.where(in_state(span, found, LINKED), found.operator, NONE)[wanted]
    launch = np.where(in_state(span, found, GRAPH), NONE, found.launch)[wanted]  # a graph's is no kernel's own
    origin = np.where(found.launch >= 0, found.launch, found.operator)[wanted]
    names = span.names.codes
    duration = pl.Series(found.end_ns[wanted] - found.start_ns[wanted])
    occupancy = span.series("occupancy_percent").gather(rows)
    delay = pl.Series(found.start_ns[wanted] - span.start_ns[np.maximum(launch, 0)])
    return pl.DataFrame(
        {
            "name": names[rows],
            "operator": np.where(operator >= 0, names[operator], NONE).astype(np.int32),
            "calls": np.ones(len(rows), np.int64),
            **dict.fromkeys(("total_ns", "min_ns", "max_ns"), duration),
            "device": found.device[wanted],
            **{name: span.series(column).gather(rows) for name, column in _CONFIGURATION.items()},
            "blocks": span.series("blocks_per_sm").gather(rows) * (duration / 1000),
            "occupied": occupancy * (duration / 1000),
            "known_us": (duration / 1000).set(occupancy.is_null(), 0.0),
            "delay_ns": delay.set(pl.Series(launch < 0), None),
            "launches": (launch >= 0).astype(np.int64),
            "origin": origin,
        }
    ).with_columns(pl.when(pl.col(name) != NONE).then(name).alias(name) for name in ("operator", "device"))


def _named(span: Span, frame: pl.DataFrame) -> pl.DataFrame:
    names = pl.Series([*span.names.values, ""], dtype=pl.String)  # the last for NONE
    columns = [name for name in ("name", "operator", "caller") if name in frame.columns]
    return frame.with_columns(names.gather(frame[name]).alias(name) for name in columns)


def _sums(rows: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    return rows.group_by(keys).agg(
        pl.col("calls", "total_ns", "launches", "known_us").sum(),
        pl.col("min_ns").min(),
        pl.col("max_ns").max(),
        *(known_sum(name) for name in ("blocks", "occupied", "delay_ns")),
        device=pl.when(pl.col("device").n_unique() == 1).then(pl.col("device").first()),
    )


def known_sum(name: str) -> pl.Expr:
    """The sum of what is known; null where nothing is."""
    return pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name)


def _row(row: dict[str, Any], short: str, cores: bool, everything: int, by: str) -> KernelRow:
    place, exact = attribution.place_of_row(row) if row["file"] is not None else (None, False)
    total = row["total_ns"]
    weights = {"blocks": total / 1000 or 1.0, "occupied": row["known_us"] or 1.0}  # 0 of kernels that take no time
    blocks, occupied = (None if row[name] is None else row[name] / us for name, us in weights.items())
    return KernelRow(
        name=row["name"],
        short_name=short,
        operator=row["caller"],
        **{name: row[name] if by == LAUNCH else None for name in _CONFIGURATION},
        calls=row["calls"],
        total_ns=total,
        mean_ns=total / row["calls"],
        min_ns=row["min_ns"],
        max_ns=row["max_ns"],
        share=total / everything if everything else 0.0,
        blocks_per_sm=blocks,
        occupancy_pct=occupied,
        tensor_cores=cores,
        launch_delay_ns=row["delay_ns"] / row["launches"] if row["launches"] else None,
        device=row["device"],
        place=place,
        place_exact=exact,
    )


class _Known(Struct, frozen=True):
    """What is known of names, as `kernel_names.json` has it; patterns by the family they stand for.

    `carriers` only carry another kernel: the first template argument is the name. `types` and `frames` are template
    arguments that do not say what is computed.

    A name that holds one of `without` is looked at no further; every mark holds one of `hints`, in lower case, for
    names are long, and most have none. `operators` of native_functions.yaml end in a matrix product, `derivatives` are
    the same of derivatives.yaml; `plugin` are the marks of the TensorBoard plugin.
    """

    carriers: frozenset[str]
    types: frozenset[str]
    frames: frozenset[str]
    without: dict[str, tuple[str, ...]]
    marks: dict[str, tuple[str, ...]]
    hints: tuple[str, ...]
    plugin: tuple[str, ...]
    operators: tuple[str, ...]
    derivatives: tuple[str, ...]


_KNOWN = msgspec.json.decode(Path(__file__).with_name("kernel_names.json").read_bytes(), type=_Known)

LEVELS = 5  # of detail
_LONGEST = 100  # characters of a short name; what would take more gets a number instead
_SHORTENED = 20_000  # characters of a name that are looked at
_PLAIN = 1_000  # of a name without arguments
_IDENTIFIER = re.compile(r"[A-Za-z_$][\w$]*$")
_NAMESPACES = re.compile(r"(?:\(anonymous namespace\)::|<unnamed>::|(?<!\w)[A-Za-z_]\w*::)+")
_WORD = re.compile(r"(?<!\w)[A-Za-z_]\w*")
_PAIRS = {")": "(", ">": "<", "]": "[", "}": "{"}

# Kernels that only say how they go over their data: what they compute is in a template argument.
_GENERIC = re.compile(r"elementwise|reduce_kernel|multi_tensor_apply|gpu_kernel|for_each|transform_kernel|trampoline")
# Plain names with a tail of tuning parameters: what is kept in front of it.
_TAILS = (
    # Tensile: layouts and types, then the tile
    re.compile(r"(?P<a>(?:Custom_)?Cijk_[A-Za-z]+_[A-Za-z]+_[A-Z0-9]+)(?:_.*)?(?P<b>_MT\d+x\d+x\d+).*"),
    # xmma: up to the tile
    re.compile(r"(?P<a>\w*xmma_\w*?)_tilesize(?P<b>\d+x\d+x\d+)\w*"),
    # TensorRT-LLM: types, then the tile
    re.compile(r"(?P<a>(?:bmm|gemm)_\w+?)(?P<b>_t\d+x\d+x\d+(?:u\d+)?)_\w+"),
)
_BEGINNING = re.compile(r"_Z[NLKVr]*")
_LENGTH = re.compile(r"[1-9]\d{0,3}")
_LITERAL = re.compile(r"L([a-z])(n?\d{1,18})E")
_NESTED = re.compile(r"N[KVr]*(?:St|S[0-9A-Z]*_)?")
_NO_NAME = re.compile(r"DF\d+[b_x]|[ST]\d*_")  # types with a number in them, and references back


def short_names(names: Sequence[str]) -> list[str]:
    """A short name for each of these different names, no two alike."""
    result = [_at_level(name, 0) for name in names]
    for level in range(1, LEVELS):
        counts = Counter(result)
        for number, short in enumerate(result):
            if counts[short] > 1:
                result[number] = _at_level(names[number], level)
    # what is still alike, cut at the same place, gets a number
    counts, seen, taken = Counter(result), Counter[str](), set(result)
    for at, name in enumerate(result):
        seen[name] += 1
        number, short = seen[name], name
        while counts[name] > 1 and (short == name or short in taken):
            short = f"{name} #{number}"
            number += 1
        taken.add(short)
        result[at] = short
    return result


@lru_cache(maxsize=8192)
def _at_level(name: str, level: int) -> str:
    name = name[:_SHORTENED]
    parts = None if name.startswith("_Z") else _parts(name)
    for detail in range(level, -1, -1):
        text = _mangled(name, detail) if parts is None else _written(*parts, detail)
        if len(text) <= _LONGEST or detail == 0:
            break
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _parts(name: str) -> tuple[str, str, str]:
    """Function, namespaces and template arguments; of a kernel that only carries another, those of the other."""
    function, namespaces, arguments = _taken_apart(name)
    if function in _KNOWN.carriers and arguments:
        first, *others = _split(arguments)
        inner, _, deeper = _taken_apart(first)
        if inner and inner not in _KNOWN.types:
            return inner, "", ", ".join([deeper, *others] if deeper else others)
    return (function, namespaces, arguments) if function else (name, "", "")


def _written(function: str, namespaces: str, arguments: str, level: int) -> str:
    if level == 0 and not arguments:
        tails = (pattern.fullmatch(function) for pattern in (_TAILS if len(function) <= _PLAIN else ()))
        kept = next((match.groupdict().values() for match in tails if match), [function])
        return " ".join(part.strip("_") if len(kept) > 1 else part for part in kept if part)
    if level <= 1:
        telling = _telling(arguments) if _GENERIC.search(function) else None
        if level == 0 or telling is not None:
            return f"{function}<{telling}>" if telling else function
    if level <= 2:
        shown = [_argument(argument) for argument in _split(arguments)]
        return f"{function}<{', '.join(shown)}>" if shown else function
    plain = _NAMESPACES.sub("", arguments).replace(" >", ">")
    if level == 3:
        return f"{function}<{plain}>" if plain else function
    return f"{namespaces}{function}<{plain}>" if plain else f"{namespaces}{function}"


def _taken_apart(name: str) -> tuple[str, str, str]:
    """Function, its namespaces (with the last ::), and the text of its template arguments, of a C++ declaration."""
    text = name.strip().removesuffix(" const").removesuffix(" [clone .kd]").removesuffix(".kd")
    if text.endswith(")"):
        text = text[: _opening(text)].rstrip()
    arguments = ""
    if text.endswith(">"):
        start = _opening(text)
        arguments, text = text[start + 1 : -1].strip(), text[:start].rstrip()
    match = _IDENTIFIER.search(text)
    if match is None:
        return "", "", ""
    spaces = re.search(r"(?:\(anonymous namespace\)::|<unnamed>::|[A-Za-z_]\w*::)*$", text[: match.start()])
    return match[0], spaces[0] if spaces else "", arguments


def _opening(text: str) -> int:
    """Where the bracket opens that the last character closes; the end where none does."""
    closing = [text[-1]]
    for place in range(len(text) - 2, -1, -1):
        char = text[place]
        # comparisons and arrows inside parentheses are no brackets
        if char in ">" and (closing[-1] == ")" or text[place - 1] == "-"):
            continue
        if char in _PAIRS:
            closing.append(char)
        elif char == _PAIRS[closing[-1]]:
            closing.pop()
            if not closing:
                return place
    return len(text)


def _split(arguments: str) -> list[str]:
    parts, start, round_ones, others = [], 0, 0, 0
    for place, char in enumerate(arguments):
        if char in "()":
            round_ones += 1 if char == "(" else -1
        elif round_ones > 0:
            continue  # comparisons and arrows inside parentheses are no brackets
        elif char in "<[{":
            others += 1
        elif char in ">]}":
            others -= 1
        elif char == "," and others <= 0:
            parts.append(arguments[start:place].strip())
            start = place + 1
    parts.append(arguments[start:].strip())
    return [part for part in parts if part]


def _argument(text: str) -> str:
    """A template argument without namespaces and its own arguments; of a lambda the function around it."""
    if text.startswith("(") and not text.startswith("(anonymous"):
        return text.rpartition(")")[2] or text  # a value of an enumeration
    outer = _NAMESPACES.sub("", re.split(r"::\{lambda|::operator\(\)", text, maxsplit=1)[0])
    head = re.split(r"[<(]", outer, maxsplit=1)[0].strip()
    if head in _KNOWN.frames:
        return _telling(text) or head
    return head or text[:24]


def _telling(arguments: str) -> str | None:
    for match in _WORD.finditer(arguments):
        word, rest = match[0], arguments[match.end() : match.end() + 3]
        namespace = rest.startswith("::") and not arguments[match.end() + 2 :].startswith(("operator()", "{lambda"))
        if not namespace and word not in _KNOWN.types and word not in _KNOWN.frames:
            return word
    return None


def _mangled(name: str, level: int) -> str:
    """The function of a mangled name and the identifiers and numbers among its template arguments."""
    words, at = _source_names(name, _BEGINNING.match(name).end())  # type: ignore[union-attr]
    spaces = [word for word in words if not word.startswith("_GLOBAL__")]  # those are anonymous namespaces
    if not spaces:
        return name
    arguments: list[str] = []
    while at < len(name):
        literal = _LITERAL.match(name, at)
        if literal is not None:
            value = literal[2].replace("n", "-")
            arguments.append(str(value != "0").lower() if literal[1] == "b" else value)
            at = literal.end()
        elif skipped := _NO_NAME.match(name, at):
            at = skipped.end()
        elif nested := _NESTED.match(name, at):
            words, at = _source_names(name, nested.end())
            arguments += words[-1:]
        else:
            words, after = _source_names(name, at)
            arguments += words
            at = max(after, at + 1)
    function = spaces[-1]
    if function in _KNOWN.carriers:
        words = [word for word in arguments if not word.isdigit() and word not in spaces]
        if words:
            function, arguments = words[0], arguments[arguments.index(words[0]) + 1 :]
    shown = arguments[: (0, 3, 8, 16, 64)[level]]
    return f"{function}<{', '.join(shown)}>" if shown else function


def _source_names(name: str, at: int) -> tuple[list[str], int]:
    """The identifiers, each with its length in front, that follow each other from `at` on, and where they end."""
    found = []
    while at < len(name):
        if name.startswith("St", at):  # std::
            at += 2
            continue
        match = _LENGTH.match(name, at)
        end = match.end() + int(match[0]) if match is not None else 0
        if match is None or end > len(name) or not _WORD.fullmatch(name[match.end() : end]):
            break
        found.append(name[match.end() : end])
        at = end
    return found, at


_READ = 4_000  # characters of a name that are looked at
ELIGIBLE = frozenset(
    (
        *(f"aten::{name}" for name in _KNOWN.operators),
        *(f"{name}Backward{number}" for name in _KNOWN.derivatives for number in ("", "0", "1")),
        *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_backward", "FlashAttnFunc"),
        *("FlashAttnFuncBackward", "CudnnConvolutionTransposeBackward"),
    )
)


def uses_tensor_cores(names: Iterable[str]) -> list[bool]:
    return [_uses(name) for name in names]


@lru_cache(maxsize=8192)
def _uses(name: str) -> bool:
    name = name[:_READ]
    lower = name.lower()
    without, marks = _patterns()
    hinted = any(hint in lower for hint in _KNOWN.hints)
    return hinted and marks.search(name) is not None and without.search(name) is None


def plugin_tensor_cores(names: Iterable[str]) -> list[bool]:
    """The same with the marks of the TensorBoard plugin: up to Ampere, no AMD, kernels on ordinary cores included."""
    marks = re.compile("|".join(map(re.escape, _KNOWN.plugin)))
    return [marks.search(name) is not None for name in names]


def eligible(names: Sequence[str]) -> list[bool]:
    """For each operator name whether such operators can use tensor cores, given the right types and sizes."""
    return [name.removeprefix("autograd::engine::evaluate_function: ") in ELIGIBLE for name in names]


def judged(names: Texts, rows: Int64, judge: Callable[[list[str]], list[bool]]) -> Bools:
    """`judge` of the text in each of `rows`, asked once for each distinct one; False where there is none."""
    codes = np.where(rows >= 0, names.codes[rows], NONE)
    used = unique(codes[codes >= 0])
    flags = np.zeros(len(names.values) + 1, bool)
    flags[used] = judge([names.values[code] for code in used.tolist()])
    return by_code(flags, codes)


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    without, marks = (chain.from_iterable(families.values()) for families in (_KNOWN.without, _KNOWN.marks))
    return re.compile("|".join(without)), re.compile("|".join(f"(?:{mark})" for mark in marks))
