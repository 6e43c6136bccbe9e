"""`stepscope replay`: one operator of a recorded run alone, on devices, threads and dtypes beside each other."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.cli import say
from stepscope.cli.options import Force, JsonFile, Reading, argument, option, shortener
from stepscope.errors import UnreadableInputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.model.replay import Variant

_DEVICE = re.compile(r"cpu|cuda(?::\d{1,3})?")
_DTYPES = ("float16", "bfloat16", "float32", "float64")
MOST_VARIANTS = 24
MOST_THREADS = 1024
SECONDS = 20.0
MOST_SECONDS = 600.0


def replay(
    path: Annotated[Path, argument("RUN", "A run folder, or traces of torch.profiler with shapes.")],
    op: Annotated[str, option("--op NAME", "The operator, e.g. linalg_qr.")],
    devices: Annotated[str, option("--devices LIST", "cpu, cuda, cuda:1 …, separated by commas.")] = "cpu,cuda",
    threads: Annotated[
        str | None, option("--threads LIST", "Threads on the CPU, e.g. 1,2,4; those of the training by default.")
    ] = None,
    dtypes: Annotated[
        str | None,
        option("--dtypes LIST", f"What floating-point inputs hold: {', '.join(_DTYPES)}; as recorded by default."),
    ] = None,
    python: Annotated[str | None, option("--python FILE", "The training environment's interpreter.")] = None,
    seconds: Annotated[float, option("--seconds N", "How long to measure, all together.")] = SECONDS,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Run one operator of a run alone, and say what a call and a step of it take on each device.

    The operator is called in a process of its own, with random inputs of the shapes, strides and dtypes that the run's
    trace recorded, after a warm-up, in turns between the variants. Shown are medians with their 95 % intervals; what a
    step takes is the median times the calls in a profiled step. Data of the training is not needed, and not read: an
    operator whose time depends on values (sparse inputs, iterations until convergence) can take another time there.

    Replayed are PyTorch's own operators (aten::…), forward, without autograd. Those that change an input in place, or
    take lists of tensors, say so. The Python that has torch is this one's or the shell's; --python names another.

    The result is kept in the run folder (replay.json), and the report shows it from then on.
    """
    from stepscope import api
    from stepscope.analyze.views import operators
    from stepscope.analyze.views.select import Selection
    from stepscope.dashboard import terminal
    from stepscope.export.survey import find
    from stepscope.replay import runner
    from stepscope.report import outputs, replays
    from stepscope.report.escape import plain_mapping

    if not 1 <= seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds {seconds:g}: give 1 to {MOST_SECONDS:g}")
    outputs.check_files({"--json": json_file}, force=force)
    with outputs.reading("reading") as progress:
        run = api.open_run(path, options=Reading().options(progress))
        trained = run.tables.ranks[0] if run.tables.ranks else None
        variants = _variants(devices, threads, dtypes, trained.threads if trained is not None else None)
        rows = run.table("operators", Selection(group=operators.SHAPES))
        if not rows.rows:
            raise UnreadableInputError(f"{path}: {rows.absent or 'no trace in it'}; record one with a window")
        name = runner.named(rows.rows, op)
        traces = [source.path for source in find(list(run.paths), ())[0]]
        calls, notes = runner.calls(rows.rows, traces, name)
    known = next((manifest.get("python") for manifest in run.tables.manifests), None)
    interpreter = runner.interpreter(python, _whole(known, run.tables.run.cwd), os.environ)
    task = runner.Task(name, variants, seconds, trained.versions.get("torch") if trained is not None else None)
    with outputs.progress(f"replaying {name}"):
        found = runner.replay(task, calls, interpreter, notes)
    kept = replays.keep(run.folder, found) if run.recorded else None
    if json_file is not None:
        outputs.emit(json_file, replays.dumps((found,)))
    if json_file != outputs.STDOUT:
        shorten = shortener(run)
        terminal.show_replay(plain_mapping(found), outputs.console(sys.stdout), shorten)
    if kept is not None:
        say(f"kept in {kept}; the report shows it: stepscope analyze {run.folder}")


def _whole(python: object, cwd: str | None) -> str | None:
    """The path of the interpreter that the manifest names, as the command line gave it there."""
    return os.path.join(cwd or "", python) if isinstance(python, str) and python else None


def _variants(devices: str, threads: str | None, dtypes: str | None, trained: int | None) -> tuple[Variant, ...]:
    """Every device with every dtype, the CPU with every number of threads; raises `UsageError`."""
    from stepscope.model.replay import Variant

    named = _list("--devices", devices, lambda text: _DEVICE.fullmatch(text) is not None, "cpu, cuda or cuda:N")
    kinds: list[str | None] = [None]
    if dtypes is not None:
        kinds = [*_list("--dtypes", dtypes, lambda text: text in _DTYPES, ", ".join(_DTYPES))]
    counts = [trained if trained is not None and 1 <= trained <= MOST_THREADS else None]
    if threads is not None:
        said = f"a number from 1 to {MOST_THREADS}"
        good = _list("--threads", threads, lambda text: text.isdecimal() and 1 <= int(text[:6]) <= MOST_THREADS, said)
        counts = [int(text) for text in good]
    made = tuple(
        Variant(device, count, kind)
        for kind in kinds
        for device in named
        for count in (counts if device == "cpu" else [None])
    )
    if len(made) > MOST_VARIANTS:
        raise UsageError(f"{len(made)} variants are too many to compare; ask for {MOST_VARIANTS} at most")
    return made


def _list(option: str, text: str, is_known: Callable[[str], bool], known: str) -> list[str]:
    """The parts of a list, each once; raises `UsageError` for one that is not known."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [part for part in parts if not is_known(part)]
    if wrong or not parts:
        raise UsageError(f"{option} {wrong[0] if wrong else text!r}: give {known}, separated by commas")
    return parts
