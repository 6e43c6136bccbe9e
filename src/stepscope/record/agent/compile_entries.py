"""What torch.compile tells of each compilation, as fields of a `compile` event: raw facts, no wording is parsed.

An entry is a `CompilationMetrics` of Dynamo, which differs between versions of torch: a field that is missing or of
another type is None, never an error. Texts are bounded. Entries are told apart by identity: Dynamo's list of them rolls
and may be replaced or cleared at any time.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any, Iterable, List

from stepscope.record.agent.frames import Place, is_user_file
from stepscope.record.agent.masking import mask_text

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
