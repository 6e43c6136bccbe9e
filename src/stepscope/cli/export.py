"""`stepscope export`: traces, cut and merged, as one Chrome trace for a viewer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from stepscope.cli import say
from stepscope.cli.options import Force, Steps, argument, option, parse_steps


def export(
    paths: Annotated[list[Path], argument("PATH...", "Traces, folders of traces, or the folder of a run.")],
    out: Annotated[Path, option("--out -o FILE", "The file to write; packed if it ends in .gz.")],
    steps: Steps = None,
    time_range: Annotated[
        str | None, option("--range START:END", "Only this time since the trace's start: 100ms:1.5s.")
    ] = None,
    rank: Annotated[list[int] | None, option("--rank N", "Only this rank; repeatable.")] = None,
    categories: Annotated[
        list[str] | None, option("--categories NAMES", "Only slices of these categories: kernel,cpu_op.")
    ] = None,
    force: Force = False,
) -> None:
    """Cut traces and merge ranks into one file that Perfetto opens.

    Events that overlap a cut's border are kept whole. Names and durations stay what they are, to the nanosecond; of
    the traces' metadata only what is known to be harmless is copied.
    """
    from stepscope import export as layer
    from stepscope.report.escape import plain

    cut = layer.Cut(
        steps=parse_steps(steps),
        range_ns=layer.parse_range(time_range) if time_range is not None else None,
        ranks=tuple(rank or ()),
        categories=layer.parse_categories(categories),
    )
    with _progress() as report:
        done = layer.export(paths, out, cut, force=force, progress=report)
    for problem in done.problems:
        say(problem)
    ranks = f", {done.ranks} ranks" if done.ranks > 1 else ""
    lost = f"; {done.lost:,} could not be read" if done.lost else ""
    size = f"{done.bytes / 10**6:.1f} MB, {done.slices:,} slices{ranks}{lost}"
    print(f"Wrote {plain(done.path)} ({size})", file=sys.stderr)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """Shows the share done on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from stepscope.report import outputs

    with outputs.console(sys.stderr).status("exporting …") as status:
        yield lambda share: status.update(f"exporting … {share:.0%}")
