"""What the report on a reduced run costs, part by part: verdict, report, page Ranks, single file.

    PYTHONPATH=benchmarks python -m ranks_simulated /tmp/run --hosts 125 --steps 10000     # or any reduced run
    python benchmarks/ranks_page.py /tmp/run

Seconds are of the processor, so that others on the machine do not count. Nothing is written.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from stepscope import api
from stepscope.dashboard import pages, single
from stepscope.dashboard.pages import PageContext

MOST_BYTES = 2_000_000  # of the file
MOST_AGAIN_S = 0.3  # of a page once the run is read


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    run = api.open_run(Path(sys.argv[1]), options=api.ReadOptions(cache=False, keep=False))
    context = PageContext(run, run)
    print("| part | seconds of the processor |\n|---|---|")
    timed("verdict, from cold", lambda: run.many_ranks)
    timed("report, with all its views", lambda: dict(run.report().views.items()))
    timed("page Ranks, the first time", lambda: pages.page(context, "ranks"))
    chosen = PageContext(run, run, params={"by": "host-0"})
    again = [
        timed("page Ranks, again", lambda: pages.page(context, "ranks")),
        timed("page Ranks, the ranks of a host", lambda: pages.page(chosen, "ranks")),
        timed("page Findings, again", lambda: pages.page(context, "findings")),
    ]
    files: list[str] = []
    timed("the single file", lambda: files.append(single.render(run, run.report())))
    size = len(files[0].encode())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    verdict = run.many_ranks
    ranks = verdict.ranks if verdict is not None else len(run.tables.ranks)
    print(f"\n{ranks:,} ranks; the file has {size:,} bytes; peak {peak:.2f} GB")
    return int(size > MOST_BYTES or max(again) > MOST_AGAIN_S)


def timed(what: str, do: Callable[[], object]) -> float:
    """Do it, and print and return the processor's seconds."""
    begun = time.process_time()
    do()
    took = time.process_time() - begun
    print(f"| {what} | {took:.2f} |", flush=True)
    return took


if __name__ == "__main__":
    sys.exit(main())
