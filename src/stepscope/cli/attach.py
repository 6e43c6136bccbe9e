"""`stepscope attach`: sample a running job for a while, then show where its time goes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.options import CsvFile, Force, JsonFile, Rate, Rows, RunFolder
from stepscope.record.host.options import DEFAULT_RATE_HZ

if TYPE_CHECKING:
    from stepscope.cli.hotspots import Wanted
    from stepscope.record.host.attach import Attached, AttachOptions

_ENDINGS = {"interrupt": ", ended by Ctrl-C", "job": ", until the job ended"}


def attach(
    pid: Annotated[int, typer.Argument(metavar="PID", help="The training process, or the launcher of all ranks.")],
    seconds: Annotated[float, typer.Option("--seconds", metavar="N", help="How long to sample.")] = 30.0,
    rate: Rate = DEFAULT_RATE_HZ,
    out: RunFolder = None,
    native: Annotated[
        bool, typer.Option("--native", help="C and C++ frames too; stops the job for a moment at each sample.")
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
    from stepscope.report import outputs

    outputs.check_files({"--json": json_file, "--csv": csv_file}, force=force)
    number = parse_rows(rows)
    attached = _sample(AttachOptions(pid=pid, seconds=seconds, rate_hz=rate, out=out, native=native))
    _say(attached, pid)
    _show(Wanted(paths=(attached.run,), rows=number, json_file=json_file, csv_file=csv_file))


def _sample(options: AttachOptions) -> Attached:
    from stepscope.record.host.attach import attach as sample
    from stepscope.report import outputs

    with outputs.reading("sampling") as shown:

        def progress(passed: float, total: float) -> None:
            if shown is not None:
                shown(f"process {options.pid}", round(passed * 1000), round(total * 1000))

        return sample(options, progress)


def _say(attached: Attached, pid: int) -> None:
    from stepscope.report.escape import one_line

    how = _ENDINGS.get(attached.ended, "")
    print(f"Sampled process {pid} for {attached.seconds:.1f} s{how}: {one_line(str(attached.run))}", file=sys.stderr)
    if attached.problem is not None:
        print(f"stepscope: {one_line(attached.problem)}", file=sys.stderr)


def _show(wanted: Wanted) -> None:
    from stepscope import api
    from stepscope.analyze.host.hotspots import HotspotOptions
    from stepscope.report import outputs

    with outputs.reading("reading") as progress:
        run = api.open_run(*wanted.paths, options=api.ReadOptions(progress=progress))
        found = run.hotspots(HotspotOptions())
    wanted.put(run, found)
