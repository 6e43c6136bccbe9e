"""Whether a run holds what a check asks for: recompilations, graph breaks. Only evidence fails a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stepscope.analyze.compilers.constants import TORCH_COMPILE, TORCH_XLA, WARMUP_STEPS
from stepscope.model.compilers import CompilerCause, CompilerCheck, CompilersView, CompileStorm

RECOMPILE, GRAPH_BREAK = "recompile", "graph-break"
CHECKS = (RECOMPILE, GRAPH_BREAK)


def checks(view: CompilersView | None, names: Iterable[str], *, recorded: bool = False) -> tuple[CompilerCheck, ...]:
    """One result per name, in order.

    Args:
        view: what compilers did; None where the run tells of none.
        names: of `CHECKS`.
        recorded: the run was recorded by our agent, which tells of every compilation; then a run without any has
            passed instead of not being judged.

    Raises:
        ValueError: for a name that is none of `CHECKS`.
    """
    makers: dict[str, Callable[[CompilersView, bool], CompilerCheck]] = {
        RECOMPILE: _recompile,
        GRAPH_BREAK: _graph_break,
    }
    result = []
    for name in names:
        if name not in makers:
            raise ValueError(f"no check is named {name!r}; there are {', '.join(CHECKS)}")
        result.append(_of_none(name, recorded) if view is None else makers[name](view, recorded))
    return tuple(result)


def _of_none(name: str, recorded: bool) -> CompilerCheck:
    text = "torch.compile was not used" if recorded else "nothing in this run tells of compilations"
    return CompilerCheck(name, failed=False, judged=recorded, text=text, place=None)


def _recompile(view: CompilersView, recorded: bool) -> CompilerCheck:
    """Recompilations and limit hits; of torch_xla, which does not tell them, a storm by either rule.

    A run of no more steps than warm-up cannot show a storm, so torch_xla's is not judged then.
    """
    causes = [cause for cause in view.causes if cause.kind in ("recompile", "limit_hit")]
    if causes:
        return CompilerCheck(RECOMPILE, True, True, _text(causes, "recompilation"), _worst(causes).place)
    storms = [storm for storm in view.storms if storm.backend == TORCH_XLA]
    stormy = next((storm for storm in storms if storm.whole_run or storm.windows), None)
    if stormy is not None:
        place = next((c.place for c in view.causes if c.backend == TORCH_XLA and c.kind == "compile" and c.place), None)
        return CompilerCheck(RECOMPILE, True, True, _storm_text(stormy), place)
    if any(facts.recompiles is not None for facts in view.backends):
        return CompilerCheck(RECOMPILE, False, True, "no recompilation", None)
    counted = next((storm for storm in storms if storm.steps > WARMUP_STEPS), None)
    if counted is not None:
        graphs = f"{counted.compiles} graph" + ("" if counted.compiles == 1 else "s")
        text = f"torch_xla compiled {graphs} in {counted.steps} steps: too few for a storm"
        return CompilerCheck(RECOMPILE, False, True, text, None)
    if recorded and not _used(view, TORCH_COMPILE) and not _used(view, TORCH_XLA):
        return _of_none(RECOMPILE, recorded)
    text = "no source of this run tells recompilations from first compilations"
    return CompilerCheck(RECOMPILE, False, False, text, None)


def _graph_break(view: CompilersView, recorded: bool) -> CompilerCheck:
    causes = [cause for cause in view.causes if cause.kind == "graph_break"]
    if causes:
        return CompilerCheck(GRAPH_BREAK, True, True, _text(causes, "graph break"), _worst(causes).place)
    watched = any(facts.graph_breaks is not None for facts in view.backends)
    unused = recorded and not _used(view, TORCH_COMPILE)
    text = "no graph break" if watched else "torch.compile was not used" if unused else "graph breaks were not watched"
    return CompilerCheck(GRAPH_BREAK, False, watched or unused, text, None)


def _used(view: CompilersView, backend: str) -> bool:
    return any(facts.backend == backend for facts in view.backends)


def _worst(causes: list[CompilerCause]) -> CompilerCause:
    """A limit hit speaks first, then the dearest with a place."""
    return min(causes, key=lambda cause: (cause.kind != "limit_hit", cause.place is None))


def _text(causes: list[CompilerCause], noun: str) -> str:
    """`7 recompilations, 1 at the limit of versions, the first in step 1; s.calls == 0`."""
    worst = _worst(causes)
    reason = worst.text or worst.cause
    limits = sum(cause.count for cause in causes if cause.kind == "limit_hit")
    others = sum(cause.count for cause in causes) - limits
    parts = [f"{others} {noun}{'' if others == 1 else 's'}"] if others else []
    if limits:
        parts.append(f"{limits} refused at the limit of compiled versions")
    steps = [cause.first_step for cause in causes if cause.first_step is not None]
    if steps:
        parts.append(f"the first in step {min(steps)}")
    return ", ".join(parts) + (f"; {reason}" if reason else "")


def _storm_text(storm: CompileStorm) -> str:
    if storm.whole_run:
        return f"CompileTime too frequent: {storm.compiles} counts during {storm.steps} steps"
    return f"torch_xla compiled again and again from step {storm.first_window_step} on, after warm-up"
