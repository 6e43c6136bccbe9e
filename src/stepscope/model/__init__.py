"""Every type that crosses a layer: frozen dataclasses, standard library only.

This package is also imported inside the user's training process, so it must run on Python 3.8: annotations are
strings, and nothing here is evaluated with newer syntax. Times are integer nanoseconds on the epoch clock unless a
name says otherwise; `None` means "not measured" and is never replaced by zero.
"""

from __future__ import annotations

from stepscope.model.analysis import Analysis, Report
from stepscope.model.facts import (
    FixedCosts,
    HotLine,
    IoFacts,
    LoaderFacts,
    LoopFacts,
    Note,
    OperatorFacts,
    PartitionPart,
    ProcessFacts,
    PythonFacts,
    Quality,
    RunFacts,
    Site,
    StackFacts,
    StepFacts,
    WindowFacts,
)
from stepscope.model.findings import (
    Abstention,
    Diagnosis,
    Disagreement,
    Evidence,
    Finding,
    Ignored,
    Interval,
    Place,
    Risk,
    Try,
    Unexplained,
    UnexplainedPart,
)
from stepscope.model.schema import (
    CATEGORIES,
    PHASES,
    RANK_SCHEMA,
    REPORT_SCHEMA,
    RUN_SCHEMA,
    SEVERITIES,
    STEP_COLUMNS,
    STEPS_SCHEMA,
)
from stepscope.model.trace import DeviceLine, DeviceLines, DeviceTime, ReadingFacts, TraceFacts

__all__ = [
    "CATEGORIES",
    "PHASES",
    "RANK_SCHEMA",
    "REPORT_SCHEMA",
    "RUN_SCHEMA",
    "SEVERITIES",
    "STEPS_SCHEMA",
    "STEP_COLUMNS",
    "Abstention",
    "Analysis",
    "DeviceLine",
    "DeviceLines",
    "DeviceTime",
    "Diagnosis",
    "Disagreement",
    "Evidence",
    "Finding",
    "FixedCosts",
    "HotLine",
    "Ignored",
    "Interval",
    "IoFacts",
    "LoaderFacts",
    "LoopFacts",
    "Note",
    "OperatorFacts",
    "PartitionPart",
    "Place",
    "ProcessFacts",
    "PythonFacts",
    "Quality",
    "ReadingFacts",
    "Report",
    "Risk",
    "RunFacts",
    "Site",
    "StackFacts",
    "StepFacts",
    "TraceFacts",
    "Try",
    "Unexplained",
    "UnexplainedPart",
    "WindowFacts",
]
