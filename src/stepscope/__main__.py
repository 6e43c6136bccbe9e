"""`stepscope`, also as `python -m stepscope`: the command line, with a child that gets ready to read a trace."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from stepscope import workers

WORTH_BYTES = 2**18  # of a trace, packed or not: from there on a process that reads it is worth its start


def process() -> None:
    """Run the command line as a process. The child is begun before anything that takes long is imported."""
    if sys.argv[1:2] == ["analyze"] and any(map(_is_large, sys.argv[2:])):
        workers.begin("stepscope.read.kineto", "read_ahead")
    from stepscope.cli import process

    process()


def _is_large(word: str) -> bool:
    with suppress(OSError, ValueError):  # an option, or no path at all
        return os.stat(word).st_size >= WORTH_BYTES
    return False


if __name__ == "__main__":
    process()
