"""torch.compile: every compilation with its step and cause, and every graph break, from Dynamo's own records.

Nothing runs when a compiled function is called: Dynamo's list of finished compilations is looked at between steps and
while it compiles. No callback is registered with it, an exception in one would surface in the user's code; of its hook
for a context per recompilation (torch 2.7 and later) a key is handed out, under which we remember step and caller.
Dynamo is never imported by us: the probe arms itself once the script has.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from stepscope.record.agent import compile_entries
from stepscope.record.agent.compile_entries import Call
from stepscope.record.agent.probes.graph_breaks import LOGGER, Break, GraphBreakTap

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.phases import StepRow

PACKAGE = "torch._dynamo"
UTILS = PACKAGE + ".utils"
BACKEND = "torch.compile"
KEY = "stepscope"
# Where no hook reads Dynamo's list during compilations: entries kept between two steps, of some 10 kB each.
ENTRIES_LIMIT = 1_024
CALLS_LIMIT = 1_024
FUNCTIONS_LIMIT = 10_000
EVENTS_LIMIT = 20_000
UNKNOWN_LIMIT = 5


class CompilesProbe:
    """Writes `compile` and `graph_break` events, and sets `agent.last_compile_step`."""

    name = "compiles"

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._installed = False
        self._utils: Any = None  # torch._dynamo.utils once armed
        self._tap: GraphBreakTap | None = None
        self._hook: Any = None
        self._get_hooks: Any = None
        self._hooks: Any = None  # Dynamo's list of hooks, ours in it; replaced when somebody resets it
        self._last: Any = None  # the newest entry seen
        self._own_entries: Any = None  # Dynamo's list where we have raised its limit
        self._limit_before: int | None = None
        self._calls: dict[str, Call] = {}
        self._calls_made = 0
        self._breaks: list[Break] = []
        self._functions: dict[str, str] = {}  # by the first part of the graph's id: entries at the limit name none
        self._lock = threading.Lock()
        self._compiled = False  # since the last boundary
        self._frames_counted = 0
        self._left_out = 0
        self._written = 0
        self._unknown = 0

    # ----------------------------------------------------------------------------------------- install, uninstall

    def install(self, agent: Agent) -> None:
        """Arm at once where Dynamo is loaded, else when torch.compile has been called or at a step boundary."""
        self._installed = True
        if self._agent is None:
            self._agent = agent
            self._tap = GraphBreakTap(agent, self._break_told)
            hook = agent.guard.wrap(self.name, self._compile_begins)
            self._hook = lambda: hook() or KEY
            agent.add_boundary_hook(self._at_boundary, self.name)
            agent.add_finish_hook(self._finish, self.name)
            utils = _dynamo_utils()
            if utils is not None:  # what was compiled before recording began is not ours to tell
                entries = getattr(utils, "_compilation_metrics", None)
                self._last = entries[-1] if entries else None
                self._frames_counted = _frames_total(utils)
        self.arm()

    def uninstall(self) -> None:
        """Take in what there is and leave Dynamo and its loggers as they would be without us."""
        self._installed = False
        utils, self._utils = self._utils, None
        if utils is None:
            return
        try:
            if self._agent is not None and not self._agent.guard.is_off(self.name):
                self._drain(utils)
        finally:
            if self._tap is not None:
                self._tap.disarm()
            hooks = _hooks_of(utils)
            if hooks and self._hook in hooks:
                hooks.remove(self._hook)
            self._hooks = None
            if self._own_entries is not None and utils._compilation_metrics is self._own_entries:
                utils.set_compilation_metrics_limit(self._limit_before)
            self._own_entries = None

    def arm(self) -> None:
        """Hook into Dynamo if the script has loaded it (again, where something was reset). Idempotent."""
        utils = _dynamo_utils()
        if not self._installed or self._tap is None or utils is None:
            return
        self._utils = utils
        self._tap.arm()
        self._register(utils)
        entries = getattr(utils, "_compilation_metrics", None)
        limit = getattr(entries, "maxlen", None)
        if self._hooks is None and self._own_entries is None and limit is not None and limit < ENTRIES_LIMIT:
            self._limit_before = limit
            utils.set_compilation_metrics_limit(ENTRIES_LIMIT)
            self._own_entries = utils._compilation_metrics

    def _register(self, utils: Any) -> None:
        register = getattr(utils, "register_hook_for_recompile_user_context", None)
        if register is None:
            return
        if self._hook not in (_hooks_of(utils) or ()):
            register(self._hook)
        self._get_hooks = utils.get_hook_for_recompile_user_context
        self._hooks = self._get_hooks()

    # ------------------------------------------------------------------------------------------ when we are called

    def _at_boundary(self, row: StepRow | None, _now: int) -> None:
        utils = self._utils
        if utils is None:
            if self._installed and PACKAGE in sys.modules:
                self.arm()
                utils = self._utils
            if utils is None:
                return
        entries = getattr(utils, "_compilation_metrics", None)
        if entries is None:
            self._count_frames(utils, row)
        elif (entries and entries[-1] is not self._last) or self._breaks:
            self._drain(utils)
        if self._compiled:
            self._compiled = False
            if row is not None and self._agent is not None:
                self._agent.last_compile_step = row.step
        if self._hooks is not None:
            if self._get_hooks() is not self._hooks:
                self.arm()
        elif self._tap is not None and not self._tap.armed:  # with a hook, it is armed where a compilation begins
            self.arm()

    def _compile_begins(self) -> str:
        """Dynamo begins to compile a frame, on this thread; the text comes back in the entry of that compilation."""
        agent, utils = self._agent, self._utils
        if agent is None or utils is None:
            return KEY
        self._drain(utils)
        if self._tap is not None:
            self._tap.arm()
        self._calls_made += 1
        key = f"{KEY}:{self._calls_made}"
        calls = self._calls
        calls[key] = Call(agent.steps.current_step(), agent.clock.now(), compile_entries.user_places())
        if len(calls) > CALLS_LIMIT:
            calls.pop(next(iter(calls)), None)
        return key

    def _break_told(self, found: Break) -> None:
        if self._utils is not None:
            self._drain(self._utils)
        self._breaks.append(found)

    def _finish(self) -> None:
        if self._utils is not None:
            self._drain(self._utils)
        if self._left_out:
            self._unknown = 0
            self._write_unknown(f"events of torch.compile after the first {EVENTS_LIMIT:,}", self._left_out)

    # -------------------------------------------------------------------------------------------------- the events

    def _drain(self, utils: Any) -> None:
        """Write what is new. A thread that finds another one at it leaves it to that one."""
        if not self._lock.acquire(False):
            return
        try:
            entries = getattr(utils, "_compilation_metrics", None)
            fresh: list[Any] = []
            if entries and entries[-1] is not self._last:
                last, self._last = self._last, entries[-1]
                fresh, seen = compile_entries.new_entries(entries, last)
                if last is not None and not seen and len(fresh) == entries.maxlen:
                    self._write_unknown("compilations that Dynamo dropped before they could be read", None)
            breaks, self._breaks = self._breaks, []
            for entry in fresh:
                self._note_function(entry)
            for found in breaks:
                self._write_break(found)
            if fresh:
                self._compiled = True
                self._write_entries(fresh, frozenset(found.graph for found in breaks))
        finally:
            self._lock.release()

    def _write_entries(self, entries: list[Any], broken: frozenset[str | None]) -> None:
        """Write entries; `broken` are the graphs whose breaks the logger has told."""
        agent = self._agent
        if agent is None:
            return
        to_our_clock_ns = agent.clock.now() - time.time_ns()
        limit, source = compile_entries.recompile_limit(), "CompilationMetrics, " + _torch_name()
        for entry in entries:
            if not compile_entries.is_known(entry):
                self._write_unknown(f"entry of type {type(entry).__name__} in Dynamo's compilation metrics", 1)
                continue
            call = None
            for key in compile_entries.context_keys(entry):
                call = self._calls.pop(key, call)
            fields = compile_entries.entry_fields(entry)
            places = call.places if call is not None else []
            fields.update(compile_entries.call_fields(places, self._function_of(fields["graph"])))
            step = call.step if call is not None else None
            known = {"step": step, "step_source": None if step is None else "context", "source": source}
            start_ns = compile_entries.start_ns(entry, to_our_clock_ns, call)
            self._write("compile", start_ns, compile_entries.duration_ns(entry), limit=limit, **known, **fields)
            given_up = compile_entries.whole_frame_break(entry)
            if given_up is not None and fields["graph"] not in broken:
                for name in ("graph", "call_file", "call_line", "call_function"):
                    given_up[name] = fields[name]
                self._write("graph_break", start_ns, None, **known, **given_up)

    def _write_break(self, found: Break) -> None:
        self._write(
            "graph_break",
            found.time_ns,
            None,
            step=found.step,
            step_source=None if found.step is None else "context",
            reason=found.text,
            graph=found.graph,
            source=LOGGER + ", " + _torch_name(),
            **compile_entries.call_fields(found.places, self._function_of(found.graph)),
        )

    def _note_function(self, entry: Any) -> None:
        graph, function = getattr(entry, "compile_id", None), getattr(entry, "co_name", None)
        if isinstance(function, str) and len(self._functions) < FUNCTIONS_LIMIT:
            self._functions[str(graph).partition("/")[0]] = function

    def _function_of(self, graph: str | None) -> str | None:
        return None if graph is None else self._functions.get(graph.partition("/")[0])

    def _count_frames(self, utils: Any, row: StepRow | None) -> None:
        """Of a torch without compilation metrics: how many frames were compiled since the last look."""
        total = _frames_total(utils)
        count, self._frames_counted = total - self._frames_counted, total
        if count > 0 and row is not None:
            self._compiled = True
            self._write("compile", row.start_ns, None, step=row.step, count=count, source="counters, " + _torch_name())

    def _write(self, kind: str, time_ns: int | None, duration_ns: int | None, **fields: Any) -> None:
        if self._agent is None:
            return
        self._written += 1
        if self._written > EVENTS_LIMIT:
            self._left_out += 1
            return
        count = fields.pop("count", 1)
        self._agent.events.write(kind, time_ns, duration_ns, backend=BACKEND, count=count, **fields)

    def _write_unknown(self, what: str, count: int | None) -> None:
        self._unknown += 1
        if self._unknown <= UNKNOWN_LIMIT and self._agent is not None:
            self._agent.events.write("compile_unknown", what=what, count=count, source=_torch_name())


def _dynamo_utils() -> Any:
    """torch._dynamo.utils if Dynamo has been imported, and not only begun to be, on another thread."""
    package = sys.modules.get(PACKAGE)
    if package is None or getattr(getattr(package, "__spec__", None), "_initializing", False):
        return None
    return sys.modules.get(UTILS)


def _hooks_of(utils: Any) -> Any:
    """Dynamo's list of hooks for the recompile context; None without one, or where torch has no such hooks."""
    get = getattr(utils, "get_hook_for_recompile_user_context", None)
    return get() if get is not None else None


def _frames_total(utils: Any) -> int:
    frames = getattr(utils, "counters", {}).get("frames")
    return int(frames.get("total", 0)) if frames else 0


def _torch_name() -> str:
    return "torch " + str(getattr(sys.modules.get("torch"), "__version__", None))
