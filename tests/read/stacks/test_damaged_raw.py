"""Raw files with random damage: nothing raises, and no legible count is lost."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.read.stacks.pyspy_raw import PySpyRaw
from tests.read.stack_text import parse, read_all

FRAMES = st.sampled_from(
    [
        "<module> (train.py:3)",
        "main (train.py:40)",
        "f; g (/tmp/a;b.py:2)",
        "0x7f02 (?)",
        "h (a.py)",
        "bare",
        "é (ü.py:1)",
    ]
)
COMMANDS = st.sampled_from(["python train.py", "python -c import a; b(1)", 'sh "quoted"; x'])


@st.composite
def stack_texts(draw: st.DrawFn, dialect: str) -> str:
    """A record without its count."""
    parts: list[str] = []
    if "s" in dialect:
        pids = draw(st.lists(st.integers(1, 99999), min_size=1, max_size=3))
        parts += [f'process {pid}:"{draw(COMMANDS)}"' for pid in pids]
    if "t" in dialect:
        name = draw(st.sampled_from(["", ": MainThread", ": Thread-1 (_serve)", ": a; b"]))
        parts.append(f"thread ({draw(st.sampled_from(['12', '0x7f']))}){name}")
    parts += draw(st.lists(FRAMES, max_size=5))
    return ";".join(parts)


@st.composite
def files(draw: st.DrawFn) -> tuple[list[str], int]:
    """Lines of a file, of which no two neighbours were damaged, and the sum of their counts."""
    dialect = draw(st.sampled_from(["", "s", "t", "st"]))
    lines: list[str] = []
    total = 0
    damaged = True  # the first line tells the dialect of a short file
    for _ in range(draw(st.integers(1, 8))):
        text = draw(stack_texts(dialect))
        damaged = not damaged and draw(st.booleans())
        if damaged and text:
            position = draw(st.integers(0, len(text) - 1))
            length = draw(st.integers(0, 12))
            text = text[:position] + draw(st.text('abc 1;:"()\\x00é\r', max_size=6)) + text[position + length :]
        count = draw(st.integers(0, 10**15 - 1))
        total += count
        lines.append(f"{text} {count}")
    return lines, total


@given(files())
def test_every_legible_count_is_kept_or_counted_as_skipped(file: tuple[list[str], int]):
    lines, total = file
    parsed = parse(lines)
    assert sum(stack.samples for stack in parsed.stacks) + parsed.skipped_samples == total
    assert len(parsed.stacks) + parsed.skipped_records <= len(lines)


@given(files(), st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_damaged_bytes_never_raise(file: tuple[list[str], int], data: st.DataObject):
    content = bytearray("\n".join(file[0]).encode("utf-8", "surrogateescape") + b"\n")
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(content)))
        length = data.draw(st.integers(0, 40))
        content[position : position + length] = data.draw(st.binary(max_size=8))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(content)
        parsed = read_all(PySpyRaw(path))
    assert all(stack.samples >= 0 for stack in parsed.stacks)
    repr(parsed.stacks).encode()  # storable text


@given(st.lists(st.text('process 1:";thread (2) f.py\n7', max_size=40), max_size=30))
def test_lines_of_nothing_but_grammar_never_raise(lines: list[str]):
    parsed = parse("\n".join(lines).split("\n"))
    assert bool(parsed.stacks) or bool(parsed.skipped_records) or not any(line for line in lines if line.strip())
