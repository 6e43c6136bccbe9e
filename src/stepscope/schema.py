"""What the recorder and its readers share: schema versions, phases, categories, columns of the step journal, knobs.

Also imported inside the user's training process: standard library only, Python 3.8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

RUN_SCHEMA = "stepscope.run/1"
RANK_SCHEMA = "stepscope.rank/1"
STEPS_SCHEMA = "stepscope.steps/1"
REPORT_SCHEMA = "stepscope.report/1"
TABLES_SCHEMA = "stepscope.tables/6"
REDUCED_SCHEMA = "stepscope.reduced/1"

# RUN/reduced/host-H/reduced.json, beside a host's reduced tables.
REDUCED, REDUCED_INDEX = "reduced", "reduced.json"

# RUN/sacct.txt: what `sacct -P` printed of the job, with these fields; others beside them are read past.
ACCOUNTING = "sacct.txt"
ACCOUNTING_FIELDS = (
    *("JobIDRaw", "Cluster", "State", "ExitCode", "DerivedExitCode", "MaxRSS", "MaxRSSNode", "NNodes", "NodeList"),
    *("Start", "End", "ElapsedRaw"),
)
MAX_ACCOUNTING_BYTES = 8 * 2**20

# Of a step in which no loader was asked nothing is known to wait for data: what lies before its first forward pass is
# "before_forward" then. The journal has it in its column of the data wait, with no fetches (`read.run_folder`).
PHASES = ("data_wait", "before_forward", "forward", "backward", "optimizer", "other")
CATEGORIES = (
    "input",
    "host",
    "sync",
    "launch",
    "compute",
    "memory",
    "transfer",
    "communication",
    "compile",
    "io",
    "system",
)
SEVERITIES = ("critical", "warning", "info")

# A folder in a run folder: of a host, or of a rank, whose later processes have a number behind the rank's.
RUN_PART = re.compile(r"host-.+|rank-\d{1,9}(?:\.\d{1,9})?", re.DOTALL)

# The columns of a row of rank-N/steps.jsonl, in order. The first line of the file repeats them, so a reader goes by
# name and a later version may append columns.
STEP_COLUMNS = (
    "step",  # 0-based, counted over the whole process
    "kind",  # "train" | "eval"
    "epoch",  # 0-based: how often the loader that feeds the step was started again; null without a loader
    "start_ns",
    "wall_ns",
    "data_wait_ns",  # up to the first forward pass; a wait for data only where `fetches` is not 0
    "forward_ns",
    "backward_ns",
    "optimizer_ns",
    "other_ns",
    "device_ns",  # between device events at its edges; null without a device, and of most steps below 10 ms
    "samples",  # rows of the batches fetched in the step; null when no batch was seen
    "fetches",  # loader fetches in the step (> 1 with gradient accumulation)
    "first_batch",  # 1 when the step holds the first fetch of an epoch
    "in_window",  # 1 when torch.profiler (ours or the user's) was on during the step
    "signal",  # what cut the step: "user" | "optimizer" | "loader" | "profiler_step" | "xla_sync" | "end"
    "framework_step",  # steps the training framework has completed, by its own count, when this one ended; null without
    "minor_faults",  # pages mapped in the step by all threads of the process; null where an edge was not read
    "major_faults",  # pages among them that were read from a disk
)


@dataclass(frozen=True)
class Knob:
    """Something that is changed without editing the script. `knob` is a name of the table of knobs, `env:NAME` or
    `arg:--flag`; `value` is text as given on the command line."""

    knob: str
    value: str
