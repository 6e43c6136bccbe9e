"""`env:NAME=value`: the launcher sets the variable; here the training process is asked whether it sees it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stepscope.record.agent.knobs import masked
from stepscope.record.agent.knobs.base import KnobBase, Report

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class Environment(KnobBase):
    """Reports what the variable is once torch is imported, which is when nearly all variables of torch are read."""

    def install(self, _agent: Agent, value: str, report: Report) -> None:
        variable = self.name.partition(":")[2]
        seen = os.environ.get(variable)
        if seen == value:
            report(True, masked(self.name, seen))
        elif seen is None:
            report(False, reason="the training process does not have the variable; something in between removed it")
        else:
            report(False, masked(self.name, seen), "the script or what starts it sets the variable itself")
