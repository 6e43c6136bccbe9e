"""The terminal report: what an engineer reads, in one screen, and nothing a hostile name can do to it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stepscope.dashboard import summary, terminal
from stepscope.model import Abstention, Diagnosis, Place, Report
from stepscope.report import words
from stepscope.report.document import build
from tests.records import replace
from tests.report.fabricate import analysis, diagnosis, finding, run_facts

HOSTILE = "<script>x</script>\x1b[2J\x1b]0;t\x07[bold red]b[/]\u202eevil\u2066\x9b31m\r\nfake: 0 ms"


def shown(
    report: Report, *, width: int = 80, encoding: str = "utf-8", coloured: bool = False, piped: bool = False
) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    colours: Any = "standard" if coloured else None
    console = Console(file=stream, width=width, force_terminal=not piped, color_system=colours)
    terminal.render(report, console)
    stream.flush()
    return raw.getvalue().decode(encoding)


def words_of(text: str) -> str:
    """The text with line breaks and indents taken out, so that wrapping does not matter."""
    return " ".join(text.split())


def test_an_ascii_terminal_gets_ascii_drawings(folder: Path) -> None:
    (folder / "train.py").write_text("name = 'Größe'\n" * 20)
    text = shown(build(analysis(folder), diagnosis(folder)), encoding="ascii")

    assert set(text.split("Where a step goes\n")[1].splitlines()[0]) == set("#=+-:")
    assert "7 | name = 'Gr\\xf6\\xdfe'" in text


def test_what_goes_to_a_file_is_whole(folder: Path) -> None:
    """Each statement is one line, however long; on a terminal titles, notes and reasons are whole, too."""
    file = str(folder / "train.py")
    long = "a sentence of many words " * 40
    title, fix, caveat, needs = (f"{name}: {long}".strip() for name in ("title", "fix", "caveat", "needs"))
    deep = "/".join(["folder"] * 40) + "/lib.py"
    found = finding(file, title=title, fix=fix, caveat=caveat, where=(Place(deep, 3, "f" * 200, 0.5),))
    abstained = tuple(Abstention(f"rule.{number}", f"{needs} {number}") for number in range(9))
    command = ("python", "train.py", *(f"--option-{number}=1" for number in range(40)))
    report = build(analysis(folder, run=run_facts(folder, command=command)), Diagnosis((found,), abstained))

    piped = shown(report, piped=True)
    assert "…" not in piped
    lines = piped.splitlines()
    for text in (title, fix, caveat, f"  {deep}:3  {'f' * 200}  50 % of it", f"rule.8 (needs {needs} 8)", command[-1]):
        assert any(text in line for line in lines), text
    for text in (fix, caveat, ", ".join(one.rule for one in abstained)):
        assert text in words_of(shown(report))


def test_next_commands_are_for_where_one_stands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths below the working directory are relative, a run elsewhere is gone to, a named folder gets a neighbour; the
    page has the same proof."""
    run = folder / "runs" / "a"
    run.mkdir(parents=True)
    made = analysis(folder, run=replace(run_facts(folder), folder=str(run)))
    report = build(made, Diagnosis((finding(str(folder / "train.py")),), ()))
    again = "stepscope run --out runs/a-2 -- python train.py --lr 0.1"
    proof = "stepscope experiment --try loader.workers=4 -- python train.py --lr 0.1"

    monkeypatch.chdir(folder)
    text = shown(report)
    assert f"after a change  {again}" in text
    assert f"prove a fix     {proof}" in text
    assert "stepscope analyze runs/a --html" in text
    assert proof == summary.card(report.findings[0], report, words.Shortener({}))["command"]
    (folder / "runs" / "a-2").mkdir()
    assert "--out runs/a-3 --" in shown(report)
    monkeypatch.chdir("/")
    assert f"cd {folder} && {proof}" in shown(report)
