"""Graph breaks, from the logger Dynamo tells them to, while what the user sees of that logger stays as it was.

Dynamo formats these records only when the logger is enabled, so it is given a level of ours, recognised by identity. A
filter in front of everything else takes a copy and then lets pass exactly what the user's own level would have let
pass. `set_logs` is not used and `propagate` not changed: both would alter what is printed. Frames that Dynamo gives up
as a whole need no logger, their entries tell (see `compiles`).
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Callable

from stepscope.record.agent.compile_entries import Places, current_graph, short_text, user_places

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent

LOGGER = "torch._dynamo.symbolic_convert.__graph_breaks"


class _Level(int):
    """An int of our own: a logger whose level is this very object has it from us."""


LEVEL = _Level(logging.DEBUG)


class Break:
    """A graph break, until the compilation it is part of is known: `places` are the user's frames then."""

    __slots__ = ("graph", "places", "step", "text", "time_ns")

    def __init__(self, time_ns: int, step: int | None, graph: str | None, text: str, places: Places) -> None:
        self.time_ns = time_ns
        self.step = step
        self.graph = graph
        self.text = text
        self.places = places


class GraphBreakTap:
    """Hands every graph break to `tell`, from `arm` to `disarm`; both may be repeated."""

    def __init__(self, agent: Agent, tell: Callable[[Break], None]) -> None:
        self._agent = agent
        self._tell = tell
        self._take: Callable[[logging.LogRecord], Any] = agent.guard.wrap("graph_breaks", self._taken)
        self._logger = logging.getLogger(LOGGER)
        self._users_level = logging.NOTSET

    @property
    def armed(self) -> bool:
        """Whether the logger still has our level: `set_logs` takes it away."""
        return self._logger.level is LEVEL

    def arm(self) -> None:
        """Enable the logger (again, where the user's logging settings have changed since)."""
        logger = self._logger
        if self not in logger.filters:
            logger.filters.insert(0, self)  # ahead of filters that would not have been asked
        if logger.level is not LEVEL:
            self._users_level = logger.level
            logger.setLevel(LEVEL)

    def disarm(self) -> None:
        """Give the logger back as the user would have it."""
        logger = self._logger
        if logger.level is LEVEL:
            logger.setLevel(self._users_level)
        if self in logger.filters:
            logger.filters.remove(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Called by logging for every record: whether the user's settings let it pass."""
        self._take(record)
        if self._logger.level is not LEVEL or record.levelno >= self._users_effective_level():
            return True
        if not record.args:  # told in full: a repetition is told with arguments
            _forget_newest()
        return False

    def _users_effective_level(self) -> int:
        parent = self._logger.parent
        return self._users_level or (parent.getEffectiveLevel() if parent is not None else logging.NOTSET)

    def _taken(self, record: logging.LogRecord) -> None:
        agent = self._agent
        now, step = agent.clock.now(), agent.steps.current_step()
        self._tell(Break(now, step, current_graph(), short_text(record.getMessage()), user_places()))


def _forget_newest() -> None:
    """Undo that Dynamo has noted this place as told in full: the user was not told, and would be in short later."""
    checker = getattr(sys.modules.get("torch._dynamo.utils"), "graph_break_dup_warning_checker", None)
    told = getattr(checker, "set", None)
    if isinstance(told, OrderedDict) and told:
        told.popitem(last=True)
