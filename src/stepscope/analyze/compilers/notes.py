"""What was not seen of compiling, and why, in sentences for the reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import polars as pl

from stepscope.analyze.compilers.constants import COMPILERS, TORCH_COMPILE, TORCH_XLA, TRACE
from stepscope.analyze.compilers.prepared import Prepared
from stepscope.model.compilers import CompilerFacts, CompilerSteps


def notes(prepared: Prepared, backends: Iterable[CompilerFacts], steps: Iterable[CompilerSteps]) -> tuple[str, ...]:
    """In the order in which a reader needs them."""
    return tuple(dict.fromkeys(_notes(prepared, tuple(backends), tuple(steps))))


def _notes(prepared: Prepared, backends: tuple[CompilerFacts, ...], steps: tuple[CompilerSteps, ...]) -> Iterator[str]:
    traced = prepared.rows.filter(pl.col("source").str.starts_with(TRACE))
    if traced.filter(pl.col("kind").is_in(["compile", "recompile"])).height:
        yield (
            "Compile spans come from profiler traces, which tell when and how long, not why; "
            "what was compiled outside the recorded steps is not in them."
        )
    if traced.filter(pl.col("kind") == "transfer").height:
        yield "Copies from a device to the host come from profiler traces: only the steps these cover have any."
    for one in backends:
        yield from _of_backend(one, prepared.of(one.backend).rows)
    if any(kind.estimated for kind in steps):
        yield (
            "No source gives the wall time of steps: it is estimated from the rates of the metrics, "
            "which stand on the last samples alone."
        )
    for backend in (one.backend for one in backends if one.backend in COMPILERS):
        kinds = [kind for kind in steps if kind.backend == backend]
        if not kinds:
            yield f"Nothing counts the steps of {backend}: how often it compiled per step is not known."


def _of_backend(one: CompilerFacts, rows: pl.DataFrame) -> Iterator[str]:
    if one.backend == TORCH_XLA and one.recompiles is None and one.compiles > 1:
        yield "torch_xla does not tell a recompilation from a first compilation: each new graph counts alike."
    if one.backend == TORCH_COMPILE:
        if one.recompiles is None and one.compiles:
            yield "This source does not tell recompilations from first compilations, nor their causes."
        if one.graph_breaks is None and one.compiles:
            yield "Graph breaks were not watched."
    unexplained = rows.filter((pl.col("kind") == "recompile") & pl.col("cause").is_null()).height
    if unexplained:
        yield (
            f"The cause of {unexplained} recompilation{'s' if unexplained > 1 else ''} was not told: "
            "older versions of torch do not."
        )
    if one.unknown:
        yield (
            f"{one.unknown} event{'s' if one.unknown > 1 else ''} of {one.backend} in a wording that is not known: "
            "counted, their cause not read."
        )
