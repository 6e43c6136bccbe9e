"""`stepscope`, also as `python -m stepscope`: the command line, and what must be done before anything is imported."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable

from stepscope import workers

GARBAGE = 1_000_000  # objects more than were freed, some 100 MB at most, before cycles are looked for
LARGE_BYTES = 48 * 2**20  # of packed traces: some 600 MB unpacked
WORTH_BYTES = 2**18  # of a trace, packed or not: from there on a process that reads it is worth its start


def process() -> None:
    """Run the command line as a process; for `analyze` with a child that gets ready to read a trace."""
    if sys.argv[1:2] == ["analyze"] and spare_memory(sys.argv[2:]) >= WORTH_BYTES:
        workers.begin(_reader)
    from stepscope.cli import process

    process()


def _reader() -> Callable[..., None]:
    from stepscope.read.kineto import read_ahead

    return read_ahead


def spare_memory(words: Iterable[str]) -> int:
    """Let Polars give back at once what it frees if the files among `words` are large; 3 % of the time. Returns their
    bytes.

    What is read and made is hardly ever garbage in cycles: looked for each 700 objects, it costs a tenth of the time.
    And nothing here multiplies matrices, for which NumPy would start threads.
    """
    gc.set_threshold(GARBAGE, 20, 20)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    size = sum(os.path.getsize(word) for word in words if os.path.isfile(word))
    if size >= LARGE_BYTES:
        os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")
    return size


if __name__ == "__main__":
    process()
