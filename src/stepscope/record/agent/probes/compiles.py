"""torch.compile: every compilation with its step and cause, and every graph break, from Dynamo's own records.

Nothing runs when a compiled function is called: Dynamo's list of finished compilations is looked at between steps and
while it compiles. No callback is registered with it, an exception in one would surface in the user's code; of its hook
for a context per recompilation (torch 2.7 and later) a key is handed out, under which we remember step and caller.
Dynamo is never imported by us: the probe arms itself once the script has.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from types import FrameType
from typing import TYPE_CHECKING, Any, Callable, Iterable, List

from stepscope.record.agent.frames import Place, is_user_file
from stepscope.record.agent.masking import mask_text

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.segments import StepRow

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
            agent.after_compile.append(agent.guard.wrap(self.name, self.arm))
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
        calls[key] = Call(agent.steps.current_step(), agent.clock.now(), user_places())
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
                fresh, seen = new_entries(entries, last)
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
        limit, source = recompile_limit(), "CompilationMetrics, " + _torch_name()
        for entry in entries:
            if not is_known(entry):
                self._write_unknown(f"entry of type {type(entry).__name__} in Dynamo's compilation metrics", 1)
                continue
            call = None
            for key in context_keys(entry):
                call = self._calls.pop(key, call)
            fields = entry_fields(entry)
            places = call.places if call is not None else []
            fields.update(call_fields(places, self._function_of(fields["graph"])))
            step = call.step if call is not None else None
            known = {"step": step, "step_source": None if step is None else "context", "source": source}
            begun_ns = start_ns(entry, to_our_clock_ns, call)
            self._write("compile", begun_ns, duration_ns(entry), limit=limit, **known, **fields)
            given_up = whole_frame_break(entry)
            if given_up is not None and fields["graph"] not in broken:
                for name in ("graph", "call_file", "call_line", "call_function"):
                    given_up[name] = fields[name]
                self._write("graph_break", begun_ns, None, **known, **given_up)

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
            **call_fields(found.places, self._function_of(found.graph)),
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


TEXT_LIMIT = 2_000
LINE_LIMIT = 300
RESTARTS_LIMIT = 5
UNSUPPORTED = "Unsupported"  # Dynamo's exception for what it breaks the graph at
# Dynamo's name for the rest of a function after a graph break, and what separates it from the instruction's offset
RESUME_PREFIX = "torch_dynamo_resume_in_"
RESUME_SUFFIX = "_at_"
_STACK_LIMIT = 300
_PLACES_LIMIT = 8
# A compilation whose own start is further from the moment Dynamo asked us about it than this: the clock was set.
_CLOCK_TOLERANCE_NS = 3_600_000_000_000

Places = List[Place]  # of user frames, the innermost first


class Call:
    """The call that made Dynamo compile: the step, our clock then, and the user's frames that led to it."""

    __slots__ = ("places", "step", "time_ns")

    def __init__(self, step: int | None, time_ns: int, places: Places) -> None:
        self.step = step
        self.time_ns = time_ns
        self.places = places


def user_places() -> Places:
    """(file, line, function) of the innermost user frames."""
    places: Places = []
    frame: FrameType | None = sys._getframe()
    for _ in range(_STACK_LIMIT):
        if frame is None or len(places) == _PLACES_LIMIT:
            break
        code = frame.f_code
        if is_user_file(code.co_filename):
            file = code.co_filename if code.co_filename.startswith("<") else os.path.abspath(code.co_filename)
            places.append((file, frame.f_lineno, getattr(code, "co_qualname", code.co_name)))
        frame = frame.f_back
    return places


def call_fields(places: Places, function: str | None) -> dict[str, Any]:
    """`call_file`, `call_line`, `call_function`: who called `function`, each None when unknown.

    What follows a graph break is called by the function it was part of; the line that called that one is meant.
    """
    index = 0
    if function is not None and function.startswith(RESUME_PREFIX):
        while index < len(places) and _is_resumed(places[index]):
            index += 1
        index = min(index + 1, len(places) - 1)
    file, line, name = places[index] if places else (None, None, None)
    return {"call_file": file, "call_line": line, "call_function": None if name is None else _original_name(name)}


def new_entries(entries: Iterable[Any], last: Any) -> tuple[list[Any], bool]:
    """Entries that came after `last`, the oldest first, and whether `last` is still among them."""
    found: list[Any] = []
    for entry in reversed(list(entries)):
        if entry is last:
            return found[::-1], True
        found.append(entry)
    return found[::-1], False


def is_known(entry: Any) -> bool:
    """Whether the entry has the fields without which it tells nothing."""
    return hasattr(entry, "compile_id") and hasattr(entry, "co_name")


def context_keys(entry: Any) -> list[str]:
    """The texts that hooks for Dynamo's recompile context have given for this entry, ours among them."""
    contexts = getattr(entry, "recompile_user_contexts", None)
    return [key for key in contexts if isinstance(key, str)] if isinstance(contexts, (set, list, tuple)) else []


def entry_fields(entry: Any) -> dict[str, Any]:
    """The fields of a `compile` event that the entry alone tells."""
    is_forward = _flag(entry, "is_forward")
    return {
        "direction": None if is_forward is None else "forward" if is_forward else "backward",
        "graph": graph_name(getattr(entry, "compile_id", None)),
        "function": _text(entry, "co_name"),
        "def_file": _text(entry, "co_filename"),
        "def_line": _integer(entry, "co_firstlineno"),
        "guarded": _flag(entry, "has_guarded_code"),
        "is_forward": is_forward,
        "cache_entries": _integer(entry, "cache_size"),
        "recompile_reason": _text(entry, "recompile_reason"),
        "fail_type": _text(entry, "fail_type"),
        "fail_reason": _text(entry, "fail_reason"),
        "fail_file": _text(entry, "fail_user_frame_filename"),
        "fail_line": _integer(entry, "fail_user_frame_lineno"),
        "restarts": _first_lines(getattr(entry, "restart_reasons", None)),
        "runtime": _flag(entry, "is_runtime"),
    }


def whole_frame_break(entry: Any) -> dict[str, Any] | None:
    """`reason`, `file`, `line` where Dynamo has given the frame up for something it does not support, else None.

    At the limit of versions nothing is guarded either, but there `has_guarded_code` is not set at all.
    """
    if _text(entry, "fail_type") != UNSUPPORTED or _flag(entry, "has_guarded_code") is not False:
        return None
    return {
        "reason": _text(entry, "fail_reason"),
        "file": _text(entry, "fail_user_frame_filename"),
        "line": _integer(entry, "fail_user_frame_lineno"),
    }


def start_ns(entry: Any, to_our_clock_ns: int, call: Call | None) -> int | None:
    """When the compilation began, on our clock: the entry's time plus `to_our_clock_ns`."""
    start_us = _integer(entry, "start_time_us")
    start = None if start_us is None else start_us * 1_000 + to_our_clock_ns
    if call is not None and (start is None or abs(call.time_ns - start) > _CLOCK_TOLERANCE_NS):
        return call.time_ns
    return start


def duration_ns(entry: Any) -> int | None:
    """How long the compilation took."""
    duration_us = _integer(entry, "duration_us")
    if duration_us is None:
        start, end = _integer(entry, "start_time_us"), _integer(entry, "end_time_us")
        duration_us = None if start is None or end is None else end - start
    return None if duration_us is None else duration_us * 1_000


def recompile_limit() -> int | None:
    """How many versions of one function Dynamo compiles at most, as configured now."""
    config = sys.modules.get("torch._dynamo.config")
    for name in ("recompile_limit", "cache_size_limit"):  # the second before torch 2.7
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def current_graph() -> str | None:
    """Dynamo's id of the frame this thread is compiling ("2/8"), None when it is not."""
    context = getattr(sys.modules.get("torch._guards"), "CompileContext", None)
    current = getattr(context, "current_compile_id", None)
    return graph_name(current()) if current is not None else None


def graph_name(compile_id: Any) -> str | None:
    """A compile id as text."""
    return None if compile_id is None or str(compile_id) in ("", "None") else str(compile_id)[:LINE_LIMIT]


def short_text(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text`, at most `limit` characters of it, secrets masked."""
    return mask_text(text if len(text) <= limit else text[: limit - 3] + "...")


def _text(entry: Any, name: str) -> str | None:
    value = getattr(entry, name, None)
    return short_text(value) if isinstance(value, str) else None


def _integer(entry: Any, name: str) -> int | None:
    value = getattr(entry, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(entry: Any, name: str) -> bool | None:
    value = getattr(entry, name, None)
    return value if isinstance(value, bool) else None


def _first_lines(reasons: Any) -> list[str]:
    if not isinstance(reasons, (set, list, tuple)):
        return []
    texts = sorted(reason for reason in reasons if isinstance(reason, str))[:RESTARTS_LIMIT]
    return [short_text(text.split("\n", 1)[0], LINE_LIMIT) for text in texts]


def _is_resumed(place: Place) -> bool:
    return place[2].rpartition(".")[2].startswith(RESUME_PREFIX)


def _original_name(function: str) -> str:
    """The user's name of a function that Dynamo has renamed: "forward" for "torch_dynamo_resume_in_forward_at_14"."""
    scope, dot, name = function.rpartition(".")
    if not name.startswith(RESUME_PREFIX):
        return function
    return scope + dot + (name[len(RESUME_PREFIX) :].rpartition(RESUME_SUFFIX)[0] or name)


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
