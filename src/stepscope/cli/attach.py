"""`stepscope attach`: sample a running job for a while, then show where its time goes."""

from __future__ import annotations

import sys
from typing import Annotated

from stepscope.cli import say
from stepscope.cli.options import CsvFile, Force, JsonFile, Rate, Rows, RunFolder, argument, option
from stepscope.record.host.options import DEFAULT_RATE_HZ

_ENDINGS = {"interrupt": ", ended by Ctrl-C", "job": ", until the job ended"}


def attach(
    pid: Annotated[int, argument("PID", "The training process, or the launcher of all ranks.")],
    seconds: Annotated[float, option("--seconds N", "How long to sample.")] = 30.0,
    rate: Rate = DEFAULT_RATE_HZ,
    out: RunFolder = None,
    native: Annotated[
        bool, option("--native", "C and C++ frames too; stops the job for a moment at each sample.")
    ] = False,
    rows: Rows = None,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    force: Force = False,
) -> None:
    """Sample a running job with all its workers, and show its hotspots.

    The job is only read: nothing is injected into it, and it is not stopped (but for --native). Everything below PID is
    sampled too, so name the training process for one rank with its loader workers, or torchrun for all ranks of this
    host. Ctrl-C ends the sampling early and still reports; the end of the job does too.

    The recording is a run folder, for `stepscope hotspots`, `stepscope flamegraph` and `stepscope analyze`. It holds no
    steps: only `stepscope run` sees those. Where the right to attach is missing, the error says which.
    """
    from stepscope.cli.hotspots import Wanted, parse_rows
    from stepscope.record.host.attach import AttachOptions
    from stepscope.record.host.attach import attach as sample
    from stepscope.report import outputs
    from stepscope.report.escape import one_line

    outputs.check_files({"--json": json_file, "--csv": csv_file}, force=force)
    wanted = Wanted(parse_rows(rows), json_file, csv_file)
    options = AttachOptions(pid=pid, seconds=seconds, rate_hz=rate, out=out, native=native)
    with outputs.reading("sampling") as shown:

        def progress(passed: float, total: float) -> None:
            if shown is not None:
                shown(f"process {pid}", round(passed * 1000), round(total * 1000))

        attached = sample(options, progress)
    how = _ENDINGS.get(attached.ended, "")
    print(f"Sampled process {pid} for {attached.seconds:.1f} s{how}: {one_line(str(attached.run))}", file=sys.stderr)
    if attached.problem is not None:
        say(attached.problem)
    from stepscope import api
    from stepscope.analyze.host.hotspots import HotspotOptions

    with outputs.reading("reading") as reading:
        run = api.open_run(attached.run, options=api.ReadOptions(progress=reading))
        found = run.hotspots(HotspotOptions())
    wanted.put(run, found)
