"""What several analyses of one run share, made when it is first asked for: labelled steps, samples, lines, origins."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from stepscope.engine import origins, samples, spans, step_labels, trace_steps
from stepscope.engine.call_tree import CallTree, call_tree
from stepscope.engine.origins import Origins
from stepscope.engine.samples import Samples
from stepscope.engine.source_lines import Lines
from stepscope.engine.spans import Base, Span
from stepscope.engine.step_labels import LabelledSteps
from stepscope.engine.user_code import NO_OPTIONS, CodeOptions, UserCode, user_code
from stepscope.model import ProfiledFacts
from stepscope.tables.schema import Tables


class Context:
    """One run under analysis. `sources` is text of the user's files by absolute path, where at hand."""

    def __init__(
        self, tables: Tables, sources: Mapping[str, str] | None = None, options: CodeOptions = NO_OPTIONS
    ) -> None:
        self.tables = tables
        self.sources = sources or {}
        self.options = options

    @cached_property
    def code(self) -> UserCode:
        """Tells the user's files from others."""
        return user_code(self.tables, self.sources, self.options)

    @cached_property
    def labelled(self) -> LabelledSteps:
        """The steps with what makes each of them unusual."""
        recorded = bool(self.tables.manifests) or self.tables.journal.height > 0
        return step_labels.label(self.tables, trace_steps.cut(self.spans, recorded=recorded))

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The traces one by one."""
        return spans.spans(self.tables)

    @cached_property
    def profiled(self) -> ProfiledFacts | None:
        """The steps that the views of traces are of, beside the steady ones of a recorded run."""
        walls = trace_steps.walls_ns(self.spans)
        if not len(walls):
            return None
        outside = None if "train" in self.labelled.fallback else self.labelled.steady()["wall_ns"].mean()
        steady_ms = outside / 1e6 if isinstance(outside, float) else None
        return ProfiledFacts(len(walls), float(walls.mean()) / 1e6, steady_ms)

    @cached_property
    def calls(self) -> CallTree:
        """The tree of sampled call paths."""
        return call_tree(self.tables)

    @cached_property
    def sampled(self) -> Samples | None:
        """The sampled stacks, None without any."""
        return samples.prepare(self.tables, self.code, self.labelled, self.calls)

    @cached_property
    def lines(self) -> Lines:
        """Exact lines of calls, from samples and source text."""
        return Lines(self.sampled, self.sources)

    @cached_property
    def origins(self) -> Origins:
        """All slices of the traces as a tree in which the user's functions are marked."""
        return origins.prepare(self.tables, self.code)

    @cached_property
    def base(self) -> Base:
        """The traces as the views start from them."""
        return Base(self.tables, self.spans, self.origins, self.lines)
