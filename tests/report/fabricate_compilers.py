"""A made-up view of compilers: a compiled training beside an evaluation whose every step compiles again."""

from __future__ import annotations

from typing import Any

from stepscope.model import Place
from stepscope.model.compilers import (
    Change,
    CompilerCause,
    CompilerFacts,
    CompilerMetric,
    CompilerPoint,
    CompilerSteps,
    CompilersView,
    CompilerWarning,
    CompileStorm,
    EagerAfterLimit,
)
from tests.records import replace

ARTICLE = "CompileTime too frequent: 16 counts during 15 steps"


def cause(file: str, **changes: Any) -> CompilerCause:
    """A dimension that grows in every step."""
    grown = [Change(step, str(8 * step), str(8 * step + 8)) for step in range(1, 9)]
    found = CompilerCause(
        id="torch.compile:recompile:mean:shape",
        backend="torch.compile",
        kind="recompile",
        cause="shape",
        text="tensor 'x' size mismatch at index 0. expected 8, actual 16",
        function="mean",
        place=Place(file, 7, "mean"),
        definition=Place(file, 6, "mean"),
        call=Place(file, 12, "loss_of"),
        hint="mark_dynamic",
        operator=None,
        subject="x.size(0)",
        count=11,
        total_ms=2300.0,
        longest_ms=410.0,
        steps=tuple(range(1, 12)),
        step_count=11,
        first_step=1,
        last_step=11,
        changes=tuple(grown),
        cache_entries=8,
        limit=8,
        ranks=(0,),
        kinds=("eval",),
        in_main_steps_ms=2300.0,
        source="CompilationMetrics, torch 2.13.0",
    )
    return replace(found, **changes)


def causes(file: str) -> tuple[CompilerCause, ...]:
    """One of each kind."""
    bare = {"changes": (), "subject": None, "hint": None, "cache_entries": None, "limit": None, "operator": None}
    return (
        cause(file),
        cause(file, id="first", kind="compile", cause="", subject=None, changes=(), count=2, total_ms=1800.0, text=""),
        cause(
            file,
            id="limit",
            kind="limit_hit",
            cause="int_attribute",
            subject="s.calls",
            place=Place(file, 14),
            count=1,
            changes=(Change(12, "7", None),),
            total_ms=30.0,
            step_count=1,
            first_step=12,
            last_step=12,
        ),
        cause(
            file, **bare | {"operator": "print"}, id="print", kind="graph_break", cause="print", count=2, text="print"
        ),
        cause(
            file,
            **bare | {"operator": "aten::_local_scalar_dense"},
            id="item",
            kind="transfer",
            cause="item",
            place=Place(file, 13),
            count=30,
            total_ms=4.5,
        ),
        cause(file, **bare | {"operator": "aten::median"}, id="median", kind="fallback", cause="unlowered", count=15),
        cause(
            file,
            **bare | {"operator": "aten::nonzero"},
            id="nz",
            kind="fallback",
            cause="data_dependent_shape",
            count=9,
        ),
        cause(
            file,
            **bare,
            id="odd",
            kind="recompile",
            cause="unknown",
            text="a wording of the future",
            place=None,
            count=3,
        ),
    )


def facts(**changes: Any) -> CompilerFacts:
    """torch.compile with eleven recompiles."""
    found = CompilerFacts(
        backend="torch.compile",
        versions=("torch 2.13.0",),
        ranks=(0,),
        source="CompilationMetrics",
        compiles=17,
        recompiles=14,
        limit_hits=1,
        failures=0,
        graph_breaks=2,
        transfers=30,
        fallbacks=0,
        compile_ms=4130.0,
        in_steps_ms=4100.0,
        longest_ms=1200.0,
        marked_steps=None,
        step_estimate_ms=None,
        unknown=3,
    )
    return replace(found, **changes)


def steps(kind: str = "eval", **changes: Any) -> CompilerSteps:
    """Fifteen steps of which twelve compiled."""
    found = CompilerSteps(
        backend="torch.compile",
        kind=kind,
        steps=15,
        compiling_steps=12,
        compile_ms=2330.0,
        wall_ms=2480.0,
        share=0.94,
        late_compile_ms=410.0,
        late_wall_ms=500.0,
        late_share=0.82,
        compiles=13,
        recompiles=12,
        transfers=30,
        breaks=0,
        mean_compiling_ms=201.0,
        mean_quiet_ms=9.5,
    )
    return replace(found, **changes)


def view(file: str, **changes: Any) -> CompilersView:
    """Train steps that compiled once, eval steps that compile again and again."""
    train = steps(
        "train",
        steps=512,
        compiling_steps=1,
        compile_ms=1800.0,
        share=0.054,
        late_compile_ms=0.0,
        late_share=0.0,
        mean_compiling_ms=1860.0,
        mean_quiet_ms=61.3,
    )
    found = CompilersView(
        backends=(facts(),),
        causes=causes(file),
        steps=(train, steps()),
        points=tuple(
            CompilerPoint(step, "eval", 200.0 + step, 190.0 + step, 1, 1 if step else 0, 0, 2) for step in range(12)
        ),
        metrics=(),
        warnings=(),
        limits=(EagerAfterLimit("limit", 12, 52.0, 12, 61.0, 30),),
        storms=(CompileStorm("torch.compile", 17, 40, False, 0, None, None, None, 410.0, 0.1),),
        notes=("what compilers did in profiler windows is left out",),
    )
    return replace(found, **changes)


def xla_view(file: str) -> CompilersView:
    """A report of torch_xla alone: no steps but those it counts itself."""
    return CompilersView(
        backends=(
            facts(
                backend="torch_xla",
                versions=("torch_xla 2.9.0",),
                compiles=16,
                recompiles=None,
                limit_hits=0,
                graph_breaks=None,
                compile_ms=5089.084,
                in_steps_ms=None,
                longest_ms=408.067,
                marked_steps=15,
                step_estimate_ms=351.8,
                unknown=0,
            ),
        ),
        causes=(
            cause(
                file,
                id="sync",
                backend="torch_xla",
                kind="compile",
                cause="user_sync",
                subject=None,
                changes=(),
                count=15,
                step_count=0,
                first_step=None,
                last_step=None,
                cache_entries=None,
                limit=None,
            ),
        ),
        steps=(
            steps(
                "train",
                backend="torch_xla",
                compiling_steps=None,
                compile_ms=5089.084,
                wall_ms=5277.0,
                share=0.96,
                late_compile_ms=None,
                late_wall_ms=None,
                late_share=None,
                mean_compiling_ms=None,
                mean_quiet_ms=None,
                estimated=True,
            ),
        ),
        points=(),
        metrics=(
            CompilerMetric(
                "CompileTime", "metric", "ms", 16, 5089.084, 3.03291, 965.67, ((1.0, 134.847), (50.0, 336.64)), 0
            ),
            CompilerMetric("InboundData", "metric", "bytes", 30, 165_160.0, 5.7, 1024.0, ((50.0, 4096.0),), 0),
            CompilerMetric("MarkStep", "counter", "count", None, 15.0, None, None, (), 0),
        ),
        warnings=(
            CompilerWarning("too_frequent", ARTICLE, "torch_xla", "CompileTime", 16, 15, True, 5, "bad.debug.log"),
            CompilerWarning(
                "too_frequent",
                "TransferFromDeviceTime too frequent: 30 counts during 15 steps",
                "torch_xla",
                "TransferFromDeviceTime",
                30,
                15,
                False,
                0,
                "report",
            ),
        ),
    )
