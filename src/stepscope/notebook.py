"""In a notebook: `%load_ext stepscope`, then `%%stepscope` on top of a cell that trains, and `stepscope.display(run)`.

The magic runs the cell as it would run without it, records it as `stepscope.profile` does, and shows the findings below
it. Steps are found as under `stepscope run`, so the cell needs no change. Nothing runs beside a kernel: stacks are
taken by a thread of it while the cell runs, and by none before and after.
"""

from __future__ import annotations

import argparse
import ast
import json
import linecache
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepscope import api
from stepscope.errors import EnvironmentRefusal, StepscopeError
from stepscope.read.run_folder import CELLS, CELLS_INDEX

MAGIC = "stepscope"
MOST_CELLS = 300
MOST_CHARACTERS = 500_000  # of a cell
SAMPLED = "recorded in a notebook's kernel, which takes its own stacks"
_OLDER_S = 2.0


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext stepscope`: gives the shell the cell magic `%%stepscope`."""

    def magic(line: str, cell: str) -> None:
        _record(shell, line, cell)

    magic.__doc__ = _parser().format_help()
    shell.register_magic_function(magic, magic_kind="cell", magic_name=MAGIC)


def unload_ipython_extension(shell: Any) -> None:
    shell.magics_manager.magics["cell"].pop(MAGIC, None)


def display(run: api.Run | str | os.PathLike[str], *, source: bool = True) -> None:
    """Show the findings of a run: inline in a notebook, as text elsewhere. `source=False` quotes no source text.

    `run` is what `open_run` gives or takes. Raises what `open_run` raises.
    """
    opened = run if isinstance(run, api.Run) else api.open_run(run)
    page = opened.folder / "report.html" if opened.recorded else None
    _publish(opened, source=source, page=page if page is not None and page.exists() else None)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in the notebook's own way, which is one line."""

    def error(self, message: str) -> Any:
        from IPython.core.error import UsageError

        raise UsageError(f"%%{MAGIC}: {message}; %%{MAGIC}? shows the options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"%%{MAGIC}",
        add_help=False,
        allow_abbrev=False,
        description="Run the cell, record its training steps and show why they are slow.",
    )
    parser.add_argument("--out", metavar="DIR", help="the run folder; below stepscope-runs by default")
    parser.add_argument("--name", help="a name for the run")
    parser.add_argument("--no-source", action="store_true", help="quote no line of source text")
    parser.add_argument("--no-report", action="store_true", help="write no report.html and report.json into the run")
    return parser


def _record(shell: Any, line: str, text: str) -> None:
    """Run a cell and show what came of it, also where the cell raised or was interrupted."""
    from stepscope.record.profile import disabled
    from stepscope.record.profile_run import ProfiledRun

    parser = _parser()
    try:
        options = parser.parse_args(shlex.split(line))
    except ValueError as error:
        parser.error(str(error))
    began = time.time() - _OLDER_S
    if disabled():
        _execute(shell, line, text, None, began)
        return
    out = options.out or os.path.join("stepscope-runs", time.strftime("%Y%m%d-%H%M%S-notebook"))
    name = options.name or f"notebook, cell {_number(shell)}"
    run = ProfiledRun(traced=False, out=out, name=name, marked=False, sampled=SAMPLED)
    try:
        _execute(shell, line, text, run.folder, began)
    finally:
        run.end()
        _show_recorded(shell, run.folder, run.problem, options, began)


def _show_recorded(
    shell: Any, folder: str | None, problem: str | None, options: argparse.Namespace, began: float
) -> None:
    """Never raises what stepscope raises: the cell has run, and its own outcome is what counts."""
    from stepscope.cli import say
    from stepscope.cli.options import ignored_rules, prices

    if folder is None:
        say(f"nothing was recorded ({problem or 'for no known reason'})")
        return
    try:
        _keep_cells(shell, Path(folder), began)
        run = api.open_run(folder, options=api.ReadOptions(ignored=ignored_rules(), prices=prices()))
        source = not options.no_source
        page = None if options.no_report else _write_report(run, source=source)
        _publish(run, source=source, page=page)
    except StepscopeError as error:
        say(f"no findings ({error}); the recording is in {folder}")


def _write_report(run: api.Run, *, source: bool) -> Path | None:
    from stepscope.dashboard import single
    from stepscope.report import outputs

    try:
        return outputs.write(run.report(source=source), run.folder, single.renderer(run, source=source))[1]
    except EnvironmentRefusal:
        return None


def _publish(run: api.Run, *, source: bool, page: Path | None) -> None:
    """Into the notebook where there is one, else onto stdout."""
    from stepscope.dashboard import single, terminal

    report = run.report(source=source)
    inside = page is not None and page.is_relative_to(Path.cwd())
    shown = str(page.relative_to(Path.cwd()) if inside else page) if page is not None else None
    loaded = sys.modules.get("IPython")
    if loaded is None or loaded.get_ipython() is None:
        terminal.show_report(report, page=shown)
        return
    from IPython.display import display as show

    show({"text/html": single.fragment(report, page=shown), "text/plain": single.text(report)}, raw=True)


def _execute(shell: Any, line: str, text: str, folder: str | None, began: float) -> None:
    """Run a cell in the notebook's names; a last expression is shown, as it is without the magic.

    Lines count as they do in the notebook, with the magic's as 1. The text of the cell is kept in the run folder, so
    that findings can quote its lines.
    """
    above = len(text) - len(text.lstrip())  # empty lines on top, which the shell takes away
    source = f"# %%{MAGIC} {line}".rstrip() + "\n" * (1 + text.count("\n", 0, above)) + shell.transform_cell(text)
    number = _number(shell)
    kept = Path(folder) / CELLS / f"cell_{number}.py" if folder is not None else None
    file = str(kept) if kept is not None and _keep(kept, source, began) else f"<cell {number}>"
    tree = shell.transform_ast(shell.compile.ast_parse(source, file))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    parts: list[tuple[ast.Module | ast.Interactive, str]] = [(tree, "exec")]
    if last is not None:
        parts.append((ast.Interactive([last]), "single"))
    for part, mode in parts:
        # the shell's flags and not those of this module, whose annotations are strings
        code = compile(part, file, mode, flags=shell.compile.flags, dont_inherit=True)
        exec(code, shell.user_global_ns, shell.user_ns)


def _keep_cells(shell: Any, folder: Path, began: float) -> None:
    """Keep the text of other cells that were run before, for models and data sets are defined there."""
    index = {}
    for name, number, text in _compiled_cells(shell):
        file = f"cell_{number}.py"
        if _keep(folder / CELLS / file, text, began):
            index[name] = file
    if index:
        _keep(folder / CELLS / CELLS_INDEX, json.dumps(index, indent=1), began)


def _compiled_cells(shell: Any) -> Iterator[tuple[str, int, str]]:
    """(name of its code, number, text) of each cell that the kernel holds; of equal cells the last number."""
    known = re.compile(rf"/ipykernel_{os.getpid()}/[^/]+\.py$")
    numbers = {text.rstrip(): number for number, text in enumerate(shell.history_manager.input_hist_parsed)}
    kept = 0
    for name, entry in list(linecache.cache.items()):
        if not known.search(name) or len(entry) != 4 or kept >= MOST_CELLS:
            continue
        text = "".join(entry[2])
        number = numbers.get(text.rstrip())
        if number is not None and number != _number(shell):
            kept += 1
            yield name, number, text


def _keep(path: Path, text: str, began: float) -> bool:
    """Write a cell's text as of before the run; a folder that cannot be written costs the quotation alone."""
    if len(text) > MOST_CHARACTERS:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.utime(path, (began, began))  # or it would count as edited since
    except OSError:
        return False
    return True


def _number(shell: Any) -> int:
    """The number that the notebook gives the cell under way; versions differ in when they count `execution_count`."""
    return len(shell.history_manager.input_hist_parsed) - 1
