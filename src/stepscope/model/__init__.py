"""Every type that crosses a layer of the analysis: frozen structs.

Structs, as Python takes half a millisecond to make a dataclass and there are hundreds. The few that are dataclasses
have subclasses whose fields are found when something asks for them. Times are integer nanoseconds on the epoch clock
unless a name says otherwise; `None` means "not measured" and is never replaced by zero. What is imported here
is so for other packages.
"""

from __future__ import annotations

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
from stepscope.model.run_facts import (
    Analysis,
    BatchContent,
    FixedCosts,
    FrameworkFacts,
    HotLine,
    IoFacts,
    LoaderFacts,
    LoopFacts,
    Note,
    PartitionPart,
    ProcessFacts,
    ProfiledFacts,
    PythonFacts,
    Quality,
    Report,
    RunFacts,
    Settings,
    Site,
    SourceFiles,
    StackFacts,
    StepFacts,
    WindowFacts,
)
from stepscope.model.trace import DeviceLine, DeviceLines, DeviceTime, ReadingFacts, TraceFacts
from stepscope.schema import (
    CATEGORIES,
    PHASES,
    RANK_SCHEMA,
    REPORT_SCHEMA,
    RUN_SCHEMA,
    SEVERITIES,
    STEP_COLUMNS,
    STEPS_SCHEMA,
)
