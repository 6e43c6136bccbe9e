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


def test_the_report_fits_a_screen_and_says_it_all(folder: Path) -> None:
    text = shown(build(analysis(folder), diagnosis(folder)))
    lines, flat = text.splitlines(), words_of(text)

    assert len(lines) <= 45
    assert max(map(len, lines[: lines.index("", len(lines) - 5)])) <= 80  # paths and commands at the end stay whole
    assert flat.startswith(
        "pictures: 512 of 521 train steps are steady, 61.3 ms a step (median 60.1, p95 88.0), 16.3 steps/s, "
        "522 samples/s; cut by the loader's next fetch eval: 40 of 49 steps are steady, 20.1 ms a step"
    )
    assert "! 1 torn line at the end of rank-0/steps.jsonl was dropped" in lines
    assert "py-spy" not in text  # a note that is no warning
    assert "█ data wait 41.2 ms 67 %" in flat
    assert "Paid once: 4.2 s (before the first step 3.1 s" in flat
    assert "1 critical Waiting for the loader 41.2 ms a step, 67 %" in flat
    assert "  train.py:7  Pictures.__getitem__  91 % of it" in lines
    assert '      7 │ image = Image.open(self.paths[index]).convert("RGB")' in lines
    assert any(line.startswith("Most sampled ") and "train.py:7" in line for line in lines)
    assert "Fix Load in 4 worker processes" in flat
    assert "Note Each worker holds a copy" in flat
    assert "Try loader.workers=4" in flat
    assert "Gain 5 % to 7.5 % of the step expected, 8 % at most" in flat
    assert "(medium confidence)" in flat
    assert "Not judged: memory.fragmented (needs a CUDA device)" in lines
    assert "stepscope run -- python train.py --lr 0.1" in flat
    order = [flat.index(part) for part in ("61.3 ms", "torn line", "Where a step", "1 critical", "2 warning", "Next")]
    assert order == sorted(order)


def test_no_colour_codes_unless_on_a_terminal(folder: Path) -> None:
    report = build(analysis(folder), diagnosis(folder))

    assert "\x1b" not in shown(report, piped=True)
    assert "\x1b[" in shown(report, coloured=True)


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
