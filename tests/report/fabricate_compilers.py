"""What compilers did to a made-up run: the facts of `facts.json`, of files in a folder."""

from __future__ import annotations

from typing import Any

from stepscope.model.compilers import CompilerCause, CompilerFacts, CompilerSteps, CompilersView
from tests.records import replace
from tests.report.fabricate import kept

ARTICLE = "CompileTime too frequent: 16 counts during 15 steps"


def cause(file: str, **changes: Any) -> CompilerCause:
    """A dimension that grows in every step."""
    return replace(kept("cause", CompilerCause, file), **changes)


def facts(**changes: Any) -> CompilerFacts:
    """torch.compile with eleven recompiles."""
    return replace(kept("compiler", CompilerFacts), **changes)


def steps(kind: str = "eval", **changes: Any) -> CompilerSteps:
    """Fifteen steps of which twelve compiled."""
    return replace(kept("compiling", CompilerSteps), kind=kind, **changes)


def view(file: str) -> CompilersView:
    """Train steps that compiled once, eval steps that compile again and again, and a cause of each kind."""
    return kept("compilers", CompilersView, file)


def xla_view(file: str) -> CompilersView:
    """A report of torch_xla alone: no steps but those it counts itself."""
    return kept("xla", CompilersView, file)
