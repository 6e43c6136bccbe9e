"""Every command line of the documents is one that the program takes; those that need little else are run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.builders import T0, step_rows
from tests.cli.calls import call
from tests.run_folders import make_run_folder, metrics_event

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
# What of the documents is made here before commands are run, as recordings.
RECORDED = (
    *("RUN", "OTHER_RUN", "BEFORE", "AFTER", "before", "after", "ci", "qr", "runs/before", "runs/after"),
    *("sets/before", "sets/after", "gate/base", "gate/head", "stepscope-runs/20260101-120000-train"),
)
STACKS = """\
process 7:"python train.py";thread (7): MainThread;<module> (train.py:9);step (mylib/net.py:3) 60
process 7:"python train.py";thread (7): MainThread;<module> (train.py:9);load (mypackage/data.py:5) 40
"""
PROGRAMS = ("analyze", "hotspots", "flamegraph", "compare", "batch", "runs")
NEEDS_MORE = (
    "--rank",
    "--phase",
    "DUMPS",
    "--step ",
    "compiles",
    "energy",
    "--fail-on recompile",
    "--library flow",
)  # than is recorded here
STOPS = {"|", "||", "&&", ";", ">", ">>", "2>", "&"}


def commands_of(text: str) -> Iterator[str]:
    """Command lines in blocks of code and between backticks."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if match := re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(stepscope [a-z].*)", line):
                yield match[1]
    yield from re.findall(r"(?<!`)`(stepscope [a-z]+[^`]*)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def words_of(line: str) -> list[str]:
    """As a shell parts them, up to what it does with the output."""
    lexer = shlex.shlex(re.sub(r"\$\([^)]*\)|\bPID\b", "1", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = list(lexer)
    end = next((at for at, word in enumerate(words) if word in STOPS), len(words))
    return words[1:end]


@cache
def lines() -> dict[str, str]:
    """Each command line, without a comment behind it, and the first document it stands in."""
    found: dict[str, str] = {}
    for path in DOCUMENTS:
        for line in commands_of(path.read_text(encoding="utf-8")):
            found.setdefault(shlex.join(words_of(line)), path.name)
    return found


def parsed(line: str) -> Any:
    """Raises the parser's error for what the program does not take."""
    from stepscope.cli import COMMANDS, load

    name, *arguments = shlex.split(line)
    return load(name, COMMANDS[name]).make_context(name, arguments)


def test_every_command_line_of_the_documents_is_one() -> None:
    from stepscope.cli import COMMANDS, PARSE_ERROR

    wrong = []
    for line, document in lines().items():
        if line in COMMANDS:  # the command as a word of a sentence
            continue
        try:
            parsed(line)
        except (PARSE_ERROR, KeyError) as error:
            said = str(getattr(error, "message", error))
            if not said or said.endswith("requires an argument."):  # a sentence about an option, without what it takes
                continue
            wrong.append(f"{document}: stepscope {line}: {said}")
    assert len(lines()) > 100
    assert wrong == []


def test_those_that_need_a_recording_alone_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.txt").write_text(STACKS)
    losses = metrics_event(("train/loss", "found", [T0 + 1, T0 + 2], [2.0, 1.0]))
    for name in RECORDED:
        folder = tmp_path / name
        make_run_folder(folder.parent, name=folder.name, stacks_raw=STACKS, events=[losses], steps=step_rows(40))
    ran: dict[tuple[str, ...], str] = {}  # one of each set of options
    for line in lines():
        name, *arguments = shlex.split(line)
        starts = name == "runs" or (arguments and (tmp_path / arguments[0]).exists())
        kind = (name, *(word for word in arguments if word.startswith("-")))
        if name not in PROGRAMS or not starts or kind in ran or any(word in f"{line} " for word in NEEDS_MORE):
            continue
        status = call(name, *arguments)
        told = capfd.readouterr().err
        # a check of one run of each cannot be judged
        assert status == (4 if "slower=" in line else 0), f"stepscope {line}: {told}"
        ran[kind] = line
    assert {name for name, *_ in ran} == set(PROGRAMS)
    assert len(ran) > 15
