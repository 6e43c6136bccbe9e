"""Findings that stand on a poor trace say so and lose confidence."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Finding, ReadingFacts
from tests.analyze.scenes import loader_tables, loop_tables
from tests.diagnose import compiler_views
from tests.diagnose.compiler_views import storm, view
from tests.records import replace

SOUND = ReadingFacts(1, 10_000, 0, 0, 0, 0, 500, 0.999, {"correlation": 0.999}, 0.0, 0.001, 0.0)


def first(rule: str, tables: Any, **reading: Any) -> Finding:
    analysis = replace(analyze(tables), reading=replace(SOUND, **reading))
    return next(finding for finding in diagnose(analysis).findings if finding.rule == rule)


@pytest.mark.parametrize(
    ("reading", "levels", "said"),
    [
        ({}, 0, ""),
        ({"lost": 50}, 0, ""),
        ({"link_rate": None}, 0, ""),
        ({"lost": 500}, 1, "5% of the trace's events could not be read."),
        ({"link_rate": 0.62}, 1, "Only 62% of the device time could be linked to operators."),
        ({"link_rate": 0.62, "lost": 500}, 2, "5% of the trace's"),
    ],
)
def test_a_loop_seen_in_a_poor_trace(reading: dict[str, Any], levels: int, said: str) -> None:
    order = ("low", "medium", "high")
    sound = first("host.per_item_loop", loop_tables())
    found = first("host.per_item_loop", loop_tables(), **reading)

    assert found.confidence == order[max(0, order.index(sound.confidence) - levels)]
    assert found.caveat.startswith(said)
    assert found.caveat.endswith(sound.caveat)
    assert (found.caveat == sound.caveat) is (levels == 0)


def test_what_stands_on_the_journal_keeps_its_confidence() -> None:
    sound = first("input.loader_bound", loader_tables())
    assert first("input.loader_bound", loader_tables(), lost=9_000, link_rate=0.1) == sound


@pytest.mark.parametrize(
    ("source", "reading", "lowered"),
    [
        ("trace: Torch-Compiled Region", {"lost": 500}, True),
        ("trace: Torch-Compiled Region", {"link_rate": 0.5}, False),  # device time is no part of compile spans
        ("CompilationMetrics", {"lost": 500}, False),
    ],
)
def test_compile_spans_of_a_poor_trace(source: str, reading: dict[str, Any], lowered: bool) -> None:
    about = compiler_views.facts(recompiles=None, graph_breaks=None, source=source, compile_ms=1_990.0)
    made = view(
        about=about, of_steps=(compiler_views.steps(40, 20_000.0),), storms=(storm(late_ms=1_500.0, late_share=0.08),)
    )
    (sound,), (found,) = (
        diagnose(replace(compiler_views.analysis(made), reading=replace(SOUND, **more))).findings
        for more in ({}, reading)
    )
    assert (sound.confidence, found.confidence) == ("medium", "low" if lowered else "medium")
    assert (found.caveat == sound.caveat) is not lowered
