"""One way to read a file of sampled stacks, timed like the others: `python stacks_read.py MODE RESULT FILE`.

lines     the file's lines, decoded and thrown away: what reading text takes at least
read      our reader alone: every stack with its frames as numbers, thrown away
build     the file to complete tables, as every command on stacks makes them
again     a straightforward Python program: every line is parsed anew, a regular expression for every frame, and an
          object for every frame of all stacks kept in lists, as itwinai does

A mode imports what it needs before it is timed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gauge import measure

Work = Callable[[], dict[str, Any]]

_FRAME = re.compile(r"(.*) \((.*):(-?\d+)\)")


@dataclass
class StackFrame:
    """A frame of one stack."""

    name: str
    path: str
    line: int
    samples: int


def lines(path: Path) -> Work:
    """Decode and split."""

    def work() -> dict[str, Any]:
        count = 0
        with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            for _ in file:
                count += 1
        return {"stacks": count}

    return work


def read(path: Path) -> Work:
    """Take every stack."""
    from stepscope.read.raw import FrameNames, Losses
    from stepscope.read.sampled_files import open_stacks

    def work() -> dict[str, Any]:
        names, losses = FrameNames(), Losses()
        stacks = samples = 0
        for stack in open_stacks(path).read(names, losses):
            stacks += 1
            samples += stack.samples
        return {"stacks": stacks, "samples": samples, "skipped": losses.counts["skipped_samples"]}

    return work


def build(path: Path) -> Work:
    """Make all tables."""
    from stepscope import tables
    from stepscope.read.sampled_files import read_stack_files

    def work() -> dict[str, Any]:
        built = tables.build(read_stack_files([path]))
        skipped = int(built.segments["skipped_samples"].sum())
        samples = int(built.segments["samples"].sum())
        return {"stacks": built.stacks.height, "samples": samples, "skipped": skipped, "nodes": built.nodes.height}

    return work


def again(path: Path) -> Work:
    """Parse every frame of every line, and keep them."""

    def work() -> dict[str, Any]:
        stacks: list[list[StackFrame]] = []
        with path.open(encoding="utf-8") as file:
            for line in file:
                text, _, count = line.rstrip("\n").rpartition(" ")
                samples = int(count)
                frames: list[StackFrame] = []
                for piece in text.split(";"):
                    match = _FRAME.fullmatch(piece)
                    if match:
                        frames.append(StackFrame(match[1], match[2], int(match[3]), samples))
                stacks.append(frames)
        return {"stacks": len(stacks), "samples": sum(stack[0].samples for stack in stacks)}

    return work


MODES: dict[str, Callable[[Path], Work]] = {"lines": lines, "read": read, "build": build, "again": again}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("out")
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    measure(MODES[args.mode](args.file), args.out)


if __name__ == "__main__":
    main()
