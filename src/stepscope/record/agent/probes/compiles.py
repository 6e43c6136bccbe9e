"""torch.compile: every compilation with its step and cause, and every graph break, from Dynamo's own records.

Nothing runs when a compiled function is called: Dynamo's list of finished compilations is looked at between steps and
while it compiles. No callback is registered with it, an exception in one would surface in the user's code; of its hook
for a context per recompilation (torch 2.7 and later) a key is handed out, under which we remember step and caller.
Dynamo is never imported by us: the probe arms itself once the script has.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict
from typing import Any, Callable, List, NamedTuple

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.frames import Place, user_places
from stepscope.record.agent.masking import mask_text
from stepscope.record.agent.patches import Probe, is_whole
from stepscope.record.agent.segments import StepRow

PACKAGE = "torch._dynamo"
BACKEND = "torch.compile"
KEY = "stepscope"
# Where no hook reads Dynamo's list during compilations: entries kept between two steps, of some 10 kB each.
ENTRIES_LIMIT = 1_024
CALLS_LIMIT = 1_024
FUNCTIONS_LIMIT = 10_000
EVENTS_LIMIT = 20_000
UNKNOWN_LIMIT = 5
TEXT_LIMIT = 2_000
LINE_LIMIT = 300
RESTARTS_LIMIT = 5
PLACES_LIMIT = 8
UNSUPPORTED = "Unsupported"  # Dynamo's exception for what it breaks the graph at
# Dynamo's name for the rest of a function after a graph break, and what separates it from the instruction's offset
RESUME_PREFIX = "torch_dynamo_resume_in_"
RESUME_SUFFIX = "_at_"
# A compilation whose own start is further from the moment Dynamo asked us about it than this: the clock was set.
_CLOCK_TOLERANCE_NS = 3_600_000_000_000

# field of a `compile` event -> (field of Dynamo's entry, its type)
_FIELDS: dict[str, tuple[str, type]] = {
    "function": ("co_name", str),
    "def_file": ("co_filename", str),
    "def_line": ("co_firstlineno", int),
    "guarded": ("has_guarded_code", bool),
    "is_forward": ("is_forward", bool),
    "cache_entries": ("cache_size", int),
    "recompile_reason": ("recompile_reason", str),
    "fail_type": ("fail_type", str),
    "fail_reason": ("fail_reason", str),
    "fail_file": ("fail_user_frame_filename", str),
    "fail_line": ("fail_user_frame_lineno", int),
    "runtime": ("is_runtime", bool),
}

HOOKED_STEP = "torch/optim/optimizer.py"  # the wrapper that calls the hooks of an optimizer's step

Places = List[Place]  # of user frames, the innermost first


class Call(NamedTuple):
    """The call that made Dynamo compile: the step, our clock then, and the user's frames that led to it."""

    step: int | None
    time_ns: int | None
    places: Places


class CompilesProbe(Probe):
    """Writes `compile` and `graph_break` events, and sets `agent.last_compile_step`."""

    name = "compiles"

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._utils: Any = None  # torch._dynamo.utils once armed
        self._tap = GraphBreakTap(agent.guard.wrap("graph_breaks", self._break_told))
        hook = agent.guard.wrap(self.name, self._compile_begins)
        self._hook = lambda: hook() or KEY
        self._get_hooks: Any = lambda: None  # Dynamo's list of hooks for the recompile context, where torch has such
        self._hooks: Any = None  # Dynamo's list of hooks, ours in it; replaced when somebody resets it
        self._last: Any = None  # the newest entry seen
        self._own_entries: Any = None  # Dynamo's list where we have raised its limit
        self._limit_before: int | None = None
        self._calls: dict[str, Call] = {}
        self._calls_made = 0
        self._breaks: list[tuple[Call, str | None, str]] = []  # with graph and text, until its compilation is known
        self._functions: dict[str, str] = {}  # by the first part of the graph's id: entries at the limit name none
        self._lock = threading.Lock()
        self._compiled = False  # since the last boundary
        self._frames_counted = 0
        self._left_out = 0
        self._written = 0
        self._unknown = 0
        agent.after_compile.append(agent.guard.wrap(self.name, self.arm))
        agent.add_boundary_hook(self._at_boundary, self.name)
        agent.add_finish_hook(self._finish, self.name)
        utils = _dynamo_utils()
        if utils is not None:  # what was compiled before recording began is not ours to tell
            entries = getattr(utils, "_compilation_metrics", None)
            self._last = entries[-1] if entries else None
            self._frames_counted = _frames_total(utils)

    def install(self) -> None:
        """Arm at once where Dynamo is loaded, else when torch.compile has been called or at a step boundary."""
        super().install()
        self.arm()

    def uninstall(self) -> None:
        """Take in what there is and leave Dynamo and its loggers as they would be without us."""
        super().uninstall()
        utils, self._utils = self._utils, None
        if utils is None:
            return
        try:
            if not self._agent.guard.is_off(self.name):
                self._drain(utils)
        finally:
            self._tap.disarm()
            hooks = self._get_hooks()
            if hooks and self._hook in hooks:
                hooks.remove(self._hook)
            self._hooks = None
            if self._own_entries is not None and utils._compilation_metrics is self._own_entries:
                utils.set_compilation_metrics_limit(self._limit_before)
            self._own_entries = None

    def arm(self) -> None:
        """Hook into Dynamo if the script has loaded it (again, where something was reset). Idempotent."""
        utils = _dynamo_utils()
        if not self._patches.enabled or utils is None:
            return
        self._utils = utils
        self._tap.arm()
        register = getattr(utils, "register_hook_for_recompile_user_context", None)
        if register is not None:
            self._get_hooks = utils.get_hook_for_recompile_user_context
            if self._hook not in (self._get_hooks() or ()):
                register(self._hook)
            self._hooks = self._get_hooks()
        limit = getattr(getattr(utils, "_compilation_metrics", None), "maxlen", None)
        if self._hooks is None and self._own_entries is None and limit is not None and limit < ENTRIES_LIMIT:
            self._limit_before = limit
            utils.set_compilation_metrics_limit(ENTRIES_LIMIT)
            self._own_entries = utils._compilation_metrics

    def _at_boundary(self, row: StepRow | None, _now: int) -> None:
        if self._utils is None and PACKAGE in sys.modules:
            self.arm()
        utils = self._utils
        if utils is None:
            return
        entries = getattr(utils, "_compilation_metrics", None)
        if entries is None:  # a torch without compilation metrics: how many frames were compiled since the last look
            total = _frames_total(utils)
            count, self._frames_counted = total - self._frames_counted, total
            if count > 0 and row is not None:
                self._compiled = True
                call = Call(row.step, row.start_ns, [])
                self._write("compile", row.start_ns, call, "counters, " + _torch_name(), count=count)
        elif (entries and entries[-1] is not self._last) or self._breaks:
            self._drain(utils)
        if self._compiled:
            self._compiled = False
            if row is not None:
                self._agent.last_compile_step = row.step
        if self._hooks is not None:
            if self._get_hooks() is not self._hooks:
                self.arm()
        elif not self._tap.armed:  # with a hook, it is armed where a compilation begins
            self.arm()

    def _compile_begins(self) -> str:
        """Dynamo begins to compile a frame, on this thread; the text comes back in the entry of that compilation."""
        if self._utils is None:
            return KEY
        self._drain(self._utils)
        self._tap.arm()
        self._calls_made += 1
        key = f"{KEY}:{self._calls_made}"
        self._calls[key] = _call(self._agent)
        if len(self._calls) > CALLS_LIMIT:
            self._calls.pop(next(iter(self._calls)), None)
        return key

    def _break_told(self, record: logging.LogRecord) -> None:
        found = _call(self._agent), current_graph(), _short(record.getMessage())
        if self._utils is not None:
            self._drain(self._utils)
        self._breaks.append(found)

    def _finish(self) -> None:
        if self._utils is not None:
            self._drain(self._utils)
        if self._left_out:
            self._unknown = 0
            self._write_unknown(f"events of torch.compile after the first {EVENTS_LIMIT:,}", self._left_out)

    def _drain(self, utils: Any) -> None:
        """Write what is new. A thread that finds another one at it leaves it to that one."""
        if not self._lock.acquire(False):
            return
        try:
            fresh = self._new_entries(getattr(utils, "_compilation_metrics", None))
            breaks, self._breaks = self._breaks, []
            for entry in fresh:
                graph, function = getattr(entry, "compile_id", None), getattr(entry, "co_name", None)
                if isinstance(function, str) and len(self._functions) < FUNCTIONS_LIMIT:
                    self._functions[str(graph).partition("/")[0]] = function
            source = LOGGER + ", " + _torch_name()
            for call, graph, text in breaks:
                caller = self._caller(call, graph)
                self._write("graph_break", call.time_ns, call, source, reason=text, graph=graph, **caller)
            told = frozenset(graph for _, graph, _ in breaks)
            to_our_clock_ns = self._agent.clock.now() - time.time_ns()
            for entry in fresh:
                self._compiled = True
                self._write_entry(entry, told, to_our_clock_ns)
        finally:
            self._lock.release()

    def _new_entries(self, entries: Any) -> list[Any]:
        """Those that came since the last time, the oldest first; entries are told apart by identity."""
        if not entries or entries[-1] is self._last:
            return []
        last, self._last = self._last, entries[-1]
        fresh: list[Any] = []
        for entry in reversed(list(entries)):
            if entry is last:
                break
            fresh.append(entry)
        else:
            if last is not None and len(fresh) == entries.maxlen:
                self._write_unknown("compilations that Dynamo dropped before they could be read", None)
        return fresh[::-1]

    def _write_entry(self, entry: Any, told: frozenset[str | None], to_our_clock_ns: int) -> None:
        if not hasattr(entry, "compile_id") or not hasattr(entry, "co_name"):
            self._write_unknown(f"entry of type {type(entry).__name__} in Dynamo's compilation metrics", 1)
            return
        call = Call(None, None, [])
        contexts = getattr(entry, "recompile_user_contexts", None)
        for key in contexts if isinstance(contexts, (set, list, tuple)) else ():
            call = self._calls.pop(key, call) if isinstance(key, str) else call
        graph, source = _graph_name(entry.compile_id), "CompilationMetrics, " + _torch_name()
        fields = {name: _value(entry, *known) for name, known in _FIELDS.items()}
        if (fields["def_file"] or "").endswith(HOOKED_STEP):
            self._agent.steps.optimizer_compiled(self._agent.clock.now())
        config = sys.modules.get("torch._dynamo.config")
        limit = getattr(config, "recompile_limit", getattr(config, "cache_size_limit", None))
        restarts = getattr(entry, "restart_reasons", None)
        kept = restarts if isinstance(restarts, (set, list, tuple)) else ()
        restarts = sorted(reason for reason in kept if isinstance(reason, str))
        caller = self._caller(call, graph)
        begun_us, ended_us, duration_us = (
            _value(entry, f"{x}_us", int) for x in ("start_time", "end_time", "duration")
        )
        begun_ns = None if begun_us is None else begun_us * 1_000 + to_our_clock_ns
        if call.time_ns is not None and (begun_ns is None or abs(call.time_ns - begun_ns) > _CLOCK_TOLERANCE_NS):
            begun_ns = call.time_ns
        if duration_us is None and begun_us is not None and ended_us is not None:
            duration_us = ended_us - begun_us
        self._write(
            "compile",
            begun_ns,
            call,
            source,
            duration_ns=None if duration_us is None else duration_us * 1_000,
            # how many versions of one function are compiled at most, as configured now; the second before torch 2.7
            limit=limit if isinstance(limit, int) else None,
            direction={True: "forward", False: "backward"}.get(fields["is_forward"]),
            graph=graph,
            restarts=[_short(text.split("\n", 1)[0], LINE_LIMIT) for text in restarts[:RESTARTS_LIMIT]],
            **fields,
            **caller,
        )
        # A frame given up for what Dynamo does not support. At the limit of versions nothing is guarded either, but
        # there `has_guarded_code` is not set at all.
        if fields["fail_type"] == UNSUPPORTED and fields["guarded"] is False and graph not in told:
            place = {name: fields["fail_" + name] for name in ("reason", "file", "line")}
            self._write("graph_break", begun_ns, call, source, graph=graph, **place, **caller)

    def _caller(self, call: Call, graph: str | None) -> dict[str, Any]:
        """`call_file`, `call_line`, `call_function`: who called the function compiled, each None when unknown.

        What follows a graph break is called by the function it was part of; the line that called that one is meant.
        """
        places, index = call.places, 0
        function = None if graph is None else self._functions.get(graph.partition("/")[0])
        if function is not None and function.startswith(RESUME_PREFIX):
            while index < len(places) and _is_resumed(places[index][2]):
                index += 1
            index = min(index + 1, len(places) - 1)
        file, line, name = places[index] if places else (None, None, None)
        if name is not None and _is_resumed(name):  # "forward" for "torch_dynamo_resume_in_forward_at_14"
            scope, dot, own = name.rpartition(".")
            name = scope + dot + (own[len(RESUME_PREFIX) :].rpartition(RESUME_SUFFIX)[0] or own)
        return {"call_file": file, "call_line": line, "call_function": name}

    def _write(self, kind: str, time_ns: int | None, call: Call, source: str, **fields: Any) -> None:
        self._written += 1
        if self._written > EVENTS_LIMIT:
            self._left_out += 1
            return
        fields = {"count": 1, "step": call.step, "source": source, **fields}
        if "graph" in fields:
            fields["step_source"] = None if call.step is None else "context"
        self._agent.journal.write(kind, time_ns, fields.pop("duration_ns", None), backend=BACKEND, **fields)

    def _write_unknown(self, what: str, count: int | None) -> None:
        self._unknown += 1
        if self._unknown <= UNKNOWN_LIMIT:
            self._agent.journal.write("compile_unknown", what=what, count=count, source=_torch_name())


def _call(agent: Agent) -> Call:
    return Call(agent.steps.current_step(), agent.clock.now(), user_places(2, PLACES_LIMIT))


def _dynamo_utils() -> Any:
    """torch._dynamo.utils if Dynamo has been imported, and not only begun to be, on another thread."""
    return sys.modules.get(PACKAGE + ".utils") if is_whole(PACKAGE) else None


def _frames_total(utils: Any) -> int:
    frames = getattr(utils, "counters", {}).get("frames")
    return int(frames.get("total", 0)) if frames else 0


def _torch_name() -> str:
    return "torch " + str(getattr(sys.modules.get("torch"), "__version__", None))


def current_graph() -> str | None:
    """Dynamo's id of the frame this thread is compiling ("2/8"), None when it is not."""
    context = getattr(sys.modules.get("torch._guards"), "CompileContext", None)
    current = getattr(context, "current_compile_id", None)
    return _graph_name(current()) if current is not None else None


def _graph_name(compile_id: Any) -> str | None:
    return None if compile_id is None or str(compile_id) in ("", "None") else str(compile_id)[:LINE_LIMIT]


def _short(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text`, at most `limit` characters of it, secrets masked."""
    return mask_text(text if len(text) <= limit else text[: limit - 3] + "...")


def _value(entry: Any, name: str, kind: type) -> Any:
    """A field of an entry, None where it is not of its type: a version of torch may leave out anything."""
    value = getattr(entry, name, None)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return None
    return _short(value) if isinstance(value, str) else value


def _is_resumed(function: str) -> bool:
    return function.rpartition(".")[2].startswith(RESUME_PREFIX)


LOGGER = "torch._dynamo.symbolic_convert.__graph_breaks"


class _Level(int):
    """An int of our own: a logger whose level is this very object has it from us."""


LEVEL = _Level(logging.DEBUG)


class GraphBreakTap:
    """Hands every graph break to `tell`, which must not raise, from `arm` to `disarm`; both may be repeated."""

    def __init__(self, tell: Callable[[logging.LogRecord], Any]) -> None:
        self._tell = tell
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
        if not self.armed:
            self._users_level = logger.level
            logger.setLevel(LEVEL)

    def disarm(self) -> None:
        """Give the logger back as the user would have it."""
        if self.armed:
            self._logger.setLevel(self._users_level)
        if self in self._logger.filters:
            self._logger.filters.remove(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Called by logging for every record: whether the user's settings let it pass."""
        self._tell(record)
        parent = self._logger.parent
        users_level = self._users_level or (parent.getEffectiveLevel() if parent is not None else logging.NOTSET)
        if not self.armed or record.levelno >= users_level:
            return True
        if not record.args:  # told in full: a repetition is told with arguments
            # Undo that Dynamo has noted this place as told: the user was not told, and would be in short later.
            checker = getattr(sys.modules.get("torch._dynamo.utils"), "graph_break_dup_warning_checker", None)
            told = getattr(checker, "set", None)
            if isinstance(told, OrderedDict) and told:
                told.popitem(last=True)
        return False
