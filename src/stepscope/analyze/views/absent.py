"""Why a view of traces is empty: an empty table says nothing, a reason says what to record."""

from __future__ import annotations

from stepscope.analyze.views.communication import why_absent as why_no_collectives
from stepscope.analyze.views.distributed import why_absent as why_not_distributed
from stepscope.engine.spans import Base
from stepscope.model.views import Views

NO_TRACE = "no trace of torch.profiler was read"
NO_DEVICE = (
    "no trace holds work of a device: recorded on a CPU, without ProfilerActivity.CUDA or leave for CUPTI, or cut off"
)
NO_OPERATORS = "no trace holds operators: record with ProfilerActivity.CPU"
NO_MEMORY = "no trace holds allocations: record with profile_memory=True"
NO_BLOCKS = "the recording of memory does not tell"
NO_SNAPSHOT = "no memory snapshot was given: write one with torch.cuda.memory._dump_snapshot"
NO_FAILURE = "no allocation failed while memory was recorded"
NO_MODULES = "no trace holds modules: record with with_stack=True"
NO_STACKS = "no call stack behind that operator: check its name, or record with with_stack=True"
NO_COLLECTIVES = "no trace holds a collective: one process alone, or none ran while recording"


def reasons(base: Base, views: Views) -> dict[str, str]:
    """A reason for each of `views` that is empty."""
    found = {
        "overview": (any(span.overview and span.overview.steps for span in views.spans), NO_TRACE),
        "gpus": (any(span.gpus for span in views.spans), NO_DEVICE),
        "operators": (bool(views.operators), NO_OPERATORS),
        "kernels": (bool(views.kernels), NO_DEVICE),
        "memory": (views.memory is not None, NO_MEMORY),
        "modules": (views.modules is not None, NO_MODULES),
        "counters": (bool(views.counters), NO_DEVICE),
        "communication": (bool(views.communication), why_no_collectives(base) or NO_COLLECTIVES),
    }
    absent = {name: why if base.spans else NO_TRACE for name, (there, why) in found.items() if not there}
    if views.distributed is None:
        absent["distributed"] = why_not_distributed(base) or NO_COLLECTIVES
    return absent
