"""All rules: those of the categories' files, where a new one is a function under `@rule` and nothing else.

A rule names its inputs; where one is missing the rule abstains by name instead of guessing from the rest. A risk is no
finding: it has no cost, no share and no rank among the losses.
"""

from __future__ import annotations

from stepscope.diagnose import (
    communication,
    compiled_run,
    compute,
    device,
    host,
    input,
    machine,
    memory,
    needless_work,
    ranks,
    training,
)
from stepscope.diagnose.rule import ADVICE, Rule

_FILES = (input, host, machine, device, compute, memory, ranks, communication, needless_work)

_found = [*compiled_run.ON_COMPILERS, *(value for file in _FILES for value in vars(file).values())]
_FOUND = {value.name: value for value in _found if isinstance(value, Rule)}
RULES: tuple[Rule, ...] = tuple(_FOUND[name] for name in dict.fromkeys((*ADVICE.order, *_FOUND)))
RISKS = (ranks.hang, *memory.RISKS, *training.RISKS)
