"""What several analyses of one run share, made when it is first asked for: labelled steps, samples, lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeVar, cast

from stepscope.engine import samples, scene, spans, step_labels
from stepscope.engine.call_tree import CallTree, call_tree
from stepscope.engine.samples import Samples
from stepscope.engine.source_lines import Lines
from stepscope.engine.spans import Base, Span
from stepscope.engine.step_labels import LabelledSteps
from stepscope.engine.user_code import NO_OPTIONS, CodeOptions, UserCode, user_code
from stepscope.model import ProfiledFacts
from stepscope.tables.schema import Tables

_Made = TypeVar("_Made")


def _made(make: Callable[[Context], _Made]) -> _Made:
    """What `make` makes of a run once something asks for it."""
    return cast("_Made", cached_property(make))


class Context:
    """One run under analysis. `sources` is text of the user's files by absolute path, where at hand."""

    def __init__(
        self, tables: Tables, sources: Mapping[str, str] | None = None, options: CodeOptions = NO_OPTIONS
    ) -> None:
        self.tables = tables
        self.sources = sources or {}
        self.options = options

    # tells the user's files from others
    code: UserCode = _made(lambda context: user_code(context.tables, context.sources, context.options))
    # the traces one by one
    spans: tuple[Span, ...] = _made(lambda context: spans.spans(context.tables))
    # the tree of sampled call paths
    calls: CallTree = _made(lambda context: call_tree(context.tables))
    # the sampled stacks, None without any
    sampled: Samples | None = _made(
        lambda context: samples.prepare(context.tables, context.code, context.labelled, context.calls)
    )
    # exact lines of calls, from samples and source text
    lines: Lines = _made(lambda context: Lines(context.sampled, context.sources))
    # the traces as the views start from them
    base: Base = _made(lambda context: Base(context.tables, context.spans, context.code, context.lines))

    @cached_property
    def labelled(self) -> LabelledSteps:
        """The steps with what makes each of them unusual."""
        recorded = bool(self.tables.manifests) or self.tables.journal.height > 0
        return step_labels.label(self.tables, scene.cut(self.spans, recorded=recorded))

    @cached_property
    def profiled(self) -> ProfiledFacts | None:
        """The steps that the views of traces are of, beside the steady ones of a recorded run."""
        walls = scene.walls_ns(self.spans)
        if not len(walls):
            return None
        outside = None if "train" in self.labelled.fallback else self.labelled.steady()["wall_ns"].mean()
        steady_ms = outside / 1e6 if isinstance(outside, float) else None
        return ProfiledFacts(len(walls), float(walls.mean()) / 1e6, steady_ms)
