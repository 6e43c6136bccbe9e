"""Checks: only evidence fails one, and what nothing could tell is not judged."""

from __future__ import annotations

import pytest

from stepscope.analyze.compilers import CHECKS, checks
from stepscope.model import Place
from stepscope.model.compilers import CompilerCheck, CompilersView
from tests.analyze.compilers.scenes import TRAIN, compile_row, growing, view, xla_compiles, xla_counters
from tests.builders import step_rows


def check(name: str, found: CompilersView | None, recorded: bool = False) -> CompilerCheck:
    (result,) = checks(found, [name], recorded=recorded)
    assert result.name == name
    assert result.judged or not result.failed
    return result


def test_recompilations_fail_with_their_line() -> None:
    found = view(steps=step_rows(20), compiles=[compile_row(0), *growing(1, 3, file=TRAIN, line=18)])
    result = check("recompile", found)
    assert result.failed
    assert result.place == Place(TRAIN, 18)
    assert result.text.startswith("3 recompilations, the first in step 1; tensor 'x' size mismatch")
    assert "\n" not in result.text


def test_a_limit_hit_fails_and_speaks_first() -> None:
    hit = compile_row(8, kind="limit_hit", cause="int_attribute", reason="s.calls == 7", file=TRAIN, line=30, limit=8)
    result = check("recompile", view(steps=step_rows(20), compiles=[*growing(1, 1), hit]))
    limit = "1 refused at the limit of compiled versions"
    assert (result.text, result.place) == (
        f"1 recompilation, {limit}, the first in step 1; s.calls == 7",
        Place(TRAIN, 30),
    )


def test_graph_breaks_fail() -> None:
    broken = {"step": 0, "kind": "graph_break", "cause": "item", "reason": "Tensor.item()", "file": TRAIN, "line": 7}
    found = view(steps=step_rows(20), compiles=[compile_row(0), broken])
    result = check("graph-break", found)
    assert (result.failed, result.place) == (True, Place(TRAIN, 7))
    assert result.text == "1 graph break, the first in step 0; Tensor.item()"
    assert not check("recompile", found).failed


@pytest.mark.parametrize(
    ("per_step", "failed", "judged", "text"),
    [
        ([2] + [1] * 14, True, True, "CompileTime too frequent: 16 counts during 15 steps"),
        (
            [1] + [0] * 99 + [1] * 20,
            *(True, True, "torch_xla compiled again and again from step 102 on, after warm-up"),
        ),
        ([1] + [0] * 14, False, True, "torch_xla compiled 1 graph in 15 steps: too few for a storm"),
        ([1] * 5, False, False, "no source of this run tells recompilations from first compilations"),
    ],
)
def test_torch_xla_fails_by_a_storm_and_needs_enough_steps(
    per_step: list[int], failed: bool, judged: bool, text: str
) -> None:
    counters = xla_counters(per_step, step=len(per_step) - 1)
    result = check("recompile", view(compiles=xla_compiles(per_step), counters=counters))
    assert (result.failed, result.judged, result.text) == (failed, judged, text)


def test_what_no_source_tells_is_not_judged() -> None:
    spans = view(steps=step_rows(20), compiles=[compile_row(0, source="trace")])
    for name in CHECKS:
        assert not check(name, spans).judged
        assert not check(name, spans, recorded=True).judged
        assert not check(name, None).judged


def test_a_recording_without_compilations_passes() -> None:
    for name in CHECKS:
        result = check(name, None, recorded=True)
        assert (result.failed, result.judged, result.text) == (False, True, "torch.compile was not used")
    transfers = view(steps=step_rows(20), compiles=[{"step": 1, "kind": "transfer", "backend": "cuda"}])
    for name in CHECKS:
        assert check(name, transfers, recorded=True).judged
        assert not check(name, transfers).judged


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="there are recompile, graph-break"):
        checks(None, ["recompiles"])
