"""torch-tb-profiler loads one trace: `python tb_plugin.py TRACE RESULT`. Runs in the peers' environment.

What its RunLoader does for each worker file before the first page can be shown: parse, trees, steps, operator and
kernel tables, advice, page data. In this process, without the copy back from a child that the plugin adds.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from typing import Any

from gauge import measure
from torch_tb_profiler.profiler.data import DistributedRunProfileData, RunProfileData
from torch_tb_profiler.profiler.run_generator import RunGenerator


def load(path: str) -> dict[str, Any]:
    """One trace as one worker's file."""
    with tempfile.TemporaryDirectory() as cache:
        data = RunProfileData.parse("worker0", None, path, cache)
        RunGenerator("worker0", None, data).generate_run_profile()
        DistributedRunProfileData(data)
    return {"events": len(data.events)}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    measure(lambda: load(sys.argv[1]), sys.argv[2])
