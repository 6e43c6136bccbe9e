"""Views of compilers made by hand: what `analyze` would say of runs whose losses are known to the millisecond.

`judged` puts such a view into the analysis of twenty plain steps. Every builder has usual values; a test names what it
is about.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Analysis, Diagnosis, Finding, Place
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
from tests.builders import make_tables, step_rows
from tests.records import blank, replace

TORCH, XLA = "torch.compile", "torch_xla"
TRAIN = "/home/user/project/train.py"
BEGIN = Place(TRAIN, 11, "forward")
CALL = Place(TRAIN, 52, "main")


def line(number: int, function: str = "forward") -> Place:
    return Place(TRAIN, number, function)


def cause(kind: str = "recompile", word: str = "shape", **given: Any) -> CompilerCause:
    usual: dict[str, Any] = {
        "id": f"{kind}-{word}-{given.get('function', 'forward')}-{getattr(given.get('place'), 'line', 0)}",
        "backend": TORCH,
        "text": "",
        "function": "forward",
        "definition": BEGIN,
        "call": CALL,
        "count": 1,
        "total_ms": 100.0,
        "steps": (),
        "step_count": 0,
        "changes": (),
        "ranks": (0,),
        "kinds": ("train",),
        "source": "CompilationMetrics, torch 2.13.0",
    }
    made = {**usual, **given}
    if made["steps"] and "first_step" not in given:
        made |= {"first_step": min(made["steps"]), "last_step": max(made["steps"]), "step_count": len(made["steps"])}
    made.setdefault("in_main_steps_ms", made["total_ms"])
    return blank(CompilerCause, kind=kind, cause=word, **made)


def growth(*sizes: int, first_step: int = 1) -> tuple[Change, ...]:
    pairs = pairwise(sizes)
    return tuple(Change(first_step + i, str(old), str(new)) for i, (old, new) in enumerate(pairs))


def facts(backend: str = TORCH, **given: Any) -> CompilerFacts:
    torch = backend == TORCH
    usual: dict[str, Any] = {
        "versions": ("2.13.0",),
        "ranks": (0,),
        "source": "CompilationMetrics" if torch else "metrics report",
        "compiles": 1,
        "recompiles": 0 if torch else None,
        "graph_breaks": 0 if torch else None,
        "limit_hits": 0,
        "failures": 0,
        "fallbacks": 0,
        "unknown": 0,
        "transfers": None if torch else 0,
        "compile_ms": 500.0,
        "in_steps_ms": 500.0,
        "longest_ms": 400.0,
    }
    return blank(CompilerFacts, backend=backend, **{**usual, **given})


def steps(count: int = 20, wall_ms: float | None = 2_000.0, backend: str = TORCH, **given: Any) -> CompilerSteps:
    counts = dict.fromkeys(("compiles", "recompiles", "transfers", "breaks"), 0)
    usual = {"kind": "train", "compiling_steps": 1, "compile_ms": 0.0, "late_compile_ms": 0.0, "estimated": False}
    return blank(CompilerSteps, backend=backend, steps=count, wall_ms=wall_ms, **{**counts, **usual, **given})


def storm(backend: str = TORCH, **given: Any) -> CompileStorm:
    usual = {"compiles": 1, "steps": 20, "whole_run": False, "windows": 0, "kind": "train"}
    return blank(CompileStorm, backend=backend, **{**usual, "late_ms": 0.0, "late_share": 0.0, **given})


def metric(name: str, samples: int, total_ms: float, longest_ms: float = 1.0) -> CompilerMetric:
    return CompilerMetric(name, "metric", "ms", samples, total_ms, None, None, ((50.0, 0.1), (99.0, longest_ms)))


def warning(text: str, rule: str, metric_name: str, count: int | None = None, of: int | None = None) -> CompilerWarning:
    return CompilerWarning(rule, f"pt-xla-profiler: {text}", XLA, metric_name, count, of, True, 4, "xla.debug.log")


def point(step: int, transfers: int = 0) -> CompilerPoint:
    return CompilerPoint(step, "train", 10.0, 0.0, 0, 0, 0, transfers)


def view(
    *causes: CompilerCause,
    backend: str = TORCH,
    about: CompilerFacts | None = None,
    of_steps: tuple[CompilerSteps, ...] | None = None,
    storms: tuple[CompileStorm, ...] = (),
    limits: tuple[EagerAfterLimit, ...] = (),
    metrics: tuple[CompilerMetric, ...] = (),
    warnings: tuple[CompilerWarning, ...] = (),
    points: tuple[CompilerPoint, ...] = (),
) -> CompilersView:
    return CompilersView(
        backends=(about or facts(backend),),
        causes=causes,
        steps=(steps(backend=backend),) if of_steps is None else of_steps,
        points=points,
        metrics=metrics,
        warnings=warnings,
        limits=limits,
        storms=storms,
    )


def analysis(compilers: CompilersView | None) -> Analysis:
    return replace(analyze(make_tables(steps=step_rows(20))), compilers=compilers)


def judged(compilers: CompilersView | None) -> Diagnosis:
    return diagnose(analysis(compilers))


def found(compilers: CompilersView | None) -> list[Finding]:
    return list(judged(compilers).findings)


def only(compilers: CompilersView, rule: str) -> Finding:
    findings = found(compilers)
    assert [finding.rule for finding in findings] == [rule]
    return findings[0]
