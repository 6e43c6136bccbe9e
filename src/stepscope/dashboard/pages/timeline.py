"""The page with all tracks on one axis. The first window comes with the page, the others as they are looked at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stepscope.dashboard import blocks, timeline_api
from stepscope.dashboard.blocks import Block

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext

_AT = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")
_WHY = "Neither steps nor traces nor samples with times were recorded."
_RECORD = (
    "Record the training with stepscope: steps come from its loop, operators and kernels from the window of a few "
    "steps that it traces."
)
_NO_TRACE = (
    "No trace was recorded, so there are steps but no operators or kernels. `stepscope run` traces a few steps once "
    "their time is steady; `--window` says when."
)


def build(context: PageContext) -> list[Block]:
    """The timeline of the whole run, at the steps, the span or the moments that are asked for."""
    run = context.base
    if timeline_api.is_empty(run):
        return [blocks.empty("No timeline", _WHY, _RECORD, "stepscope run -- python train.py")]
    selection = context.selection()
    made = timeline_api.block(
        run,
        worker=selection.worker,
        span=selection.span,
        steps=context.scope.steps,
        at=_moments(context.params.get("at")),
        embedded=context.embedded,
    )
    if run.tables.events.is_empty():
        return [blocks.text(_NO_TRACE, "note"), made]
    return [made]


def empty(context: PageContext) -> bool:
    """Whether there is nothing to draw."""
    return timeline_api.is_empty(context.base)


def _moments(text: str | None) -> tuple[int, int] | None:
    """`FROM:TO` in ns from the run's first instant, None for anything else."""
    match = _AT.fullmatch(text or "")
    if match is None or int(match[2]) <= int(match[1]):
        return None
    return int(match[1]), int(match[2])
