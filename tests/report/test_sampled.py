"""The sampled views on the terminal: what is shown, what is left out, and that no name can do harm."""

from __future__ import annotations

from pathlib import Path

from stepscope.analyze.input import loader_waits
from stepscope.model import Report
from stepscope.model.sampled import (
    SampledViews,
)
from stepscope.report import words
from stepscope.report.document import build
from stepscope.report.escape import plain_mapping
from tests.on_terminal import on_terminal
from tests.records import replace, some
from tests.report.fabricate import analysis, diagnosis, kept

ROOT = "/home/user/project"


VIEWS = kept("sampled", SampledViews)
(WAIT,), SLOW, RANKS = VIEWS.waits, some(VIEWS.slow_steps), some(VIEWS.rank_lines)
EMPTY = SampledViews(stages=(), phases={}, waits=(), slow_steps=None, rank_lines=None, absent={"waits": "none"})


def shown(views: SampledViews | None, *, width: int = 100) -> str:
    """What the terminal shows of them, between the headline and what comes next."""
    report = Report(
        run={"cwd": ROOT, "user_roots": [ROOT]},
        quality={},
        steps=None,
        findings=(),
        abstained=(),
        ignored=(),
        views={"sampled": views and plain_mapping(views)},
    )
    return "".join(f"{part}\n" for part in on_terminal(report, width).split("\n\n")[1:-1])


def test_every_kind_of_part_has_words() -> None:
    assert set(loader_waits.KINDS.values()) == set(words.WAIT_PARTS)


def test_what_is_said_elsewhere_is_not_said_again(tmp_path: Path) -> None:
    own = replace(WAIT.parts[0], kind="loading_here", share=1.0)
    alone = replace(EMPTY, waits=(replace(WAIT, parts=(own,), simultaneous=False),), phases={"forward": 0.7})
    assert "the main process loads itself" in shown(alone)
    assert "what workers did" not in shown(alone)
    assert "forward 70 %" in shown(alone)
    told = [
        on_terminal(build(analysis(tmp_path, sampled=replace(alone, waits=waits)), diagnosis(tmp_path)))
        for waits in (alone.waits, (WAIT,))
    ]
    assert "the main process loads itself" not in told[0]
    assert "forward 70 %" not in told[0]
    assert "a worker makes batches" in told[1]
