"""What sampled stacks say beyond hot lines, on the terminal: waiting taken apart, slow steps, ranks, stages.

Each part is a heading and a few lines, and is left out where there is nothing worth a look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope.report import words
from stepscope.report.escape import one_line, plain
from stepscope.report.places import Shortener
from stepscope.report.terminal_parts import Glyphs

RANKS = 2  # whose waits are shown, the longest first
PARTS = 5  # of a wait
SMALLEST_WAIT = 0.05  # of the loop: a shorter wait is not worth lines
SMALLEST_PART = 0.03  # of a wait
SLOW_LINES = 4
RANK_LINES = 3
SMALLEST_STAGE = 0.01
_INDENT = " " * 2

# kinds of parts of a wait; where a line is known, it follows
KINDS = {
    "worker_busy": "a worker makes batches",
    "worker_start": "workers start",
    "workers_idle": "workers are idle",
    "transfer": "a batch moves between processes",
    "pinning": "a batch is pinned",
    "loading_here": "the main process loads itself",
    "unknown": "no sample of the workers",
}
STAGES = {
    "import": "imports",
    "compile": "compiling",
    "startup": "before the first step",
    "warmup": "warm-up",
    "steady": "steady steps",
    "other": "everything else",
}


def sampled_blocks(
    view: Mapping[str, Any] | None,
    shorten: Shortener,
    glyphs: Glyphs,
    *,
    warn: bool = True,
    told: bool = False,
    measured: bool = False,
) -> Iterator[RenderableType]:
    """The blocks of the view `sampled` (`SampledViews` as plain values).

    Args:
        warn: whether to say here that waiting was not sampled; False where it is said elsewhere.
        measured: whether the phases of a step are known from measurement, which is better than samples of them.
        told: whether a finding has named the lines of a main process that loads everything itself.
    """
    if not view:
        return
    waits = [wait for wait in view["waits"] if not (told and _is_alone(wait))]
    for rows in (
        [*_waits(waits, shorten, glyphs, warn=warn)],
        [*_slow_steps(view["slow_steps"], shorten)],
        [*_rank_lines(view["rank_lines"], shorten)],
        [*_stages(view, phases=not measured)],
    ):
        if rows:
            yield Group(*rows)


def _waits(waits: list[dict[str, Any]], shorten: Shortener, glyphs: Glyphs, *, warn: bool) -> Iterator[RenderableType]:
    unseen = [wait for wait in waits if wait["idle_sampled"] is False]
    if unseen and warn:
        text = "waiting threads were not sampled, so how long the loader is waited for cannot be said"
        yield Text.assemble((f"{glyphs.warning} ", "yellow"), text)
    seen = [wait for wait in waits if wait["idle_sampled"] is not False and (wait["wait_share"] or 0) >= SMALLEST_WAIT]
    seen.sort(key=lambda wait: -wait["wait_share"])
    for wait in seen[:RANKS]:
        step = "" if wait["wait_ms_per_step"] is None else f", {words.milliseconds(wait['wait_ms_per_step'])} a step"
        whose = f"rank {wait['rank']}'s loop" if len(waits) > 1 else "the loop"
        yield Text.assemble(
            ("In the loader", "bold"),
            f": {words.percent(wait['wait_share'])} of {whose}{step}",
            (f" ({words.count(wait['samples'])} samples)", "dim"),
        )
        parts = [part for part in wait["parts"][:PARTS] if part["share"] >= SMALLEST_PART]
        yield from (_line(f"{words.percent(part['share']):>7}  {_part(part, shorten)}") for part in parts)
        if not wait["simultaneous"] and not _is_alone(wait):
            yield Text("what workers did in the whole period stands for what they did during waits", style="dim")
    if len(seen) > RANKS:
        yield Text(f"{words.count(len(seen) - RANKS)} more ranks wait for their loaders", style="dim")


def _is_alone(wait: dict[str, Any]) -> bool:
    """Whether the main process does all the loading itself: no worker is in the wait."""
    return all(part["kind"] == "loading_here" for part in wait["parts"])


def _part(part: dict[str, Any], shorten: Shortener) -> str:
    kind = KINDS.get(part["kind"], words.term(part["kind"]))
    if part["place"]:
        return f"{kind} at {_place(part['place'], shorten)}"
    if part["lines"] > 1:
        return f"{kind} at {words.count(part['lines'])} more lines"
    return f"{kind} in {plain(part['leaf'], 80)}" if part["leaf"] else kind


def _slow_steps(view: dict[str, Any] | None, shorten: Shortener) -> Iterator[RenderableType]:
    if not view:
        return
    yield Text.assemble(
        ("Slow steps", "bold"),
        f": {words.count(view['slow_steps'])} above {words.milliseconds(view['threshold_ms'])} take "
        f"{words.milliseconds(view['slow_mean_ms'])}, {words.count(view['typical_steps'])} typical ones "
        f"{words.milliseconds(view['typical_mean_ms'])}",
    )
    for line in view["lines"][:SLOW_LINES]:
        note = ", in slow steps only" if line["only_slow"] else ""
        where = f"{_place(line['place'], shorten)}, {words.term(line['phase'])}{note}"
        yield _line(f"{'+' + words.milliseconds(line['extra_ms_per_step']):>10}  {where}")
    if not view["lines"]:
        yield Text("no single line makes them slow", style="dim")


def _rank_lines(view: dict[str, Any] | None, shorten: Shortener) -> Iterator[RenderableType]:
    if not view or not (view["lines"] or view["straggler"] is not None):
        return
    yield Text.assemble(("Where ranks differ", "bold"), f": {one_line(view['verdict'], 300)}")
    show = words.milliseconds if view["unit"] == "ms per step" else words.percent
    for line in view["lines"][:RANK_LINES]:
        values = line["by_rank"].values()
        waits = ", waiting" if line["waiting"] else ""
        phase = f", {words.term(line['phase'])}" if line["phase"] else ""
        spread = f"{show(max(values))} on rank {line['most']}, down to {show(min(values))}"
        yield _line(f"{_INDENT}{_place(line['place'], shorten)}{phase}{waits}: {spread}")


def _stages(view: Mapping[str, Any], *, phases: bool) -> Iterator[RenderableType]:
    stages = [
        f"{STAGES.get(stage['stage'], words.term(stage['stage']))} {words.percent(stage['share'])}"
        for stage in view["stages"]
        if stage["share"] >= SMALLEST_STAGE
    ]
    parts = [
        f"{words.term(phase)} {words.percent(share)}"
        for phase, share in view["phases"].items()
        if phases and share >= SMALLEST_STAGE
    ]
    if len(stages) > 1:
        yield Text(f"Sampled in the main process: {', '.join(stages)}", style="dim")
    if parts:
        yield Text(f"Sampled in the loop, by what stands on the stack: {', '.join(parts)}", style="dim")


def _place(place: dict[str, Any], shorten: Shortener) -> str:
    function = f"  {plain(place['function'], 60)}" if place["function"] else ""
    return shorten(place["file"], place["line"]) + function


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
