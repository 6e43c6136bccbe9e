"""What the messages of torch.compile and torch_xla mean: cause, subject, values, the user's line, the compiler's hint.

Pure parsing of text that compilers wrote for people, so it changes with every release; known are torch 2.6 to 2.13 and
torch_xla 2.9. A wording that is not known gives the cause "unknown", keeps its text, and is counted as drift. Texts
are untrusted: cut to a bound, read in time proportional to their length, never a reason to raise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from stepscope.read.text import boolean, string
from stepscope.tables.compile_breaks import Break, parse_graph_break
from stepscope.tables.compile_guards import UNKNOWN, read_guard
from stepscope.tables.compile_text import (
    Location,
    bounded,
    comment_location,
    frames,
    one_line,
    resolve,
    resumed_at,
    user_location,
    value,
)

__all__ = [
    "CAUSES",
    "Break",
    "Reason",
    "is_limit_hit",
    "operator_cause",
    "parse_graph_break",
    "parse_recompile",
    "stated_limit",
    "xla_cause",
]

CAUSES: dict[str, str] = {
    # recompiles, and the limit of them
    "shape": "the size or number of dimensions of a tensor changed",
    "stride": "the memory layout of a tensor changed",
    "dtype": "the data type of a tensor changed",
    "device": "a tensor was on another device",
    "requires_grad": "a tensor needed a gradient, or no longer did",
    "type": "a value was of another type, or None",
    "constant": "an argument or variable had another value",
    "float_argument": "a float argument had another value",
    "int_attribute": "an integer attribute had another value",
    "attribute": "an attribute appeared, vanished or had another value",
    "object": "another object was passed, or the same one twice",
    "new_function": "another function was passed, or one was made anew",
    "length": "a list, tuple or range had another length",
    "keys": "a dictionary or set had other keys",
    "grad_mode": "gradients were switched on or off",
    "global_state": "a global setting changed: autocast, threads, default dtype or device, a function mode",
    "tensor_read": "a value read from a tensor (.item(), .tolist()) was compiled in as a constant",
    # graph breaks, and transfers of a device
    "item": "a tensor's value was read: .item(), .tolist(), int(), float(), bool()",
    "print": "something was printed or logged",
    "data_dependent": "what to do next, or a shape, depended on the values of a tensor",
    "unsupported_call": "a function was called that the compiler cannot follow, or was told not to",
    "unsupported": "another construct that the compiler cannot follow",
    "copy": "a tensor was copied to the host: .cpu(), .to('cpu'), .numpy()",
    # torch_xla
    "user_sync": "the script's own sync or step mark",
    "loader_sync": "the parallel loader's sync at the end of a step",
    "read_value": "a tensor's value was needed before the next sync",
    "dynamo": "torch.compile on XLA",
    "unlowered": "an operator that XLA does not have ran on the CPU",
    "data_dependent_shape": "an operator whose output's shape depends on values: nonzero, unique, masked_select",
    "unknown": "worded in a way this version does not know",
}

_ID = re.compile(r"\[?(![0-9]{1,9}(?:/[0-9]{1,9}/[0-9]{1,9})?|[0-9]{1,9}/[0-9]{1,9}(?:_[0-9]{1,9})?)\]?: ")
_STACK = "\nUser stack trace:"
_HINT = " (HINT: "
_AVOID = "to avoid specialization "
_NOT_USER = "the guard itself is not due user code"
_PARAMETER = "Guard failed on a parameter, "
_CLOSURE = re.compile(r'guard on "([^"\n]{1,200})"([^,\n]{0,200})')


class Reason(Struct, frozen=True):
    """Why a function was compiled again. `version` is the id of the version that did not fit ("2/7").

    `file` and `line` are the user's line that uses what changed, or reads it; None where the wording names none (of
    shapes it does not). `cause` is None where the compiler itself could not tell.
    """

    cause: str | None
    subject: str | None = None
    old: str | None = None
    new: str | None = None
    hint: str | None = None
    file: str | None = None
    line: int | None = None
    version: str | None = None


def parse_recompile(text: str, known_files: Iterable[str] = ()) -> Reason:
    """What a reason of Dynamo for a recompile says. Of several reasons the first counts.

    Versions before 2.10 shorten paths; one that ends like one of `known_files` is completed, the first that fits.
    """
    text = bounded(text)
    head, _, stack = text.partition(_STACK)
    match = _ID.match(head)
    head = _first_reason(head[match.end() :] if match else head)
    head, hint = _split_hint(head)
    guard, comment = _split_comment(head)
    found = read_guard(guard)
    subject = found.subject
    closure = _CLOSURE.match(hint) if hint else None
    if closure:
        subject = value(closure[1] + closure[2].rstrip(". "))
    place = user_location(frames(stack)) if stack else None
    written = comment_location(comment) if comment and _NOT_USER not in comment else None
    if place is None and written is not None:
        place = resolve(written, known_files)
    if found.cause == "tensor_read":
        place = _reading(place, stack, written)
    return Reason(
        cause=found.cause,
        subject=subject,
        old=found.old,
        new=found.new,
        hint=_advice(hint, guard, comment),
        file=place.file if place else None,
        line=place.line if place else None,
        version=match[1] if match else None,
    )


def _first_reason(head: str) -> str:
    """The lines up to the one in which another reason begins."""
    lines = head.split("\n")
    for number, line in enumerate(lines[1:], 1):
        if _ID.match(line):
            return "\n".join(lines[:number])
    return head


def _split_hint(head: str) -> tuple[str, str | None]:
    at = head.rfind(_HINT)
    if at < 0:
        return head, None
    return head[:at], head[at + len(_HINT) :].rstrip().removesuffix(")")


def _split_comment(head: str) -> tuple[str, str]:
    """The guard, and the comment behind it: two blanks and a hash, outside of any quoted text."""
    quote = ""
    at = 0
    while at < len(head):
        char = head[at]
        if char == "\\":
            at += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and head.startswith("  #", at - 2):
            return head[: at - 2].strip(), head[at:]
        at += 1
    if not quote:
        return head.strip(), ""
    # quotes that do not match up, as in some sentences: the first one that looks like it
    guard, _, comment = head.partition("  # ")
    return guard.strip(), f"# {comment}" if comment else ""


def _reading(place: Location | None, stack: str, written: Location | None) -> Location | None:
    """Where a value was read: the line of the graph break behind which the function resumed."""
    names = [name for name in (written.function if written else None, *_raw_names(stack)) if name]
    line = next((at for name in reversed(names) if (at := resumed_at(name)) is not None), None)
    return place if place is None or line is None else place._replace(line=line)


def _raw_names(stack: str) -> list[str]:
    return [line.rpartition(", in ")[2].strip() for line in stack.split("\n") if 'File "' in line]


def _advice(hint: str | None, guard: str, comment: str) -> str | None:
    """The compiler's advice; a hint that only names a type or a variable is none."""
    if hint and not hint.startswith(("type ", 'guard on "')):
        return one_line(hint)
    for text, mark in ((comment, _AVOID), (guard, _PARAMETER)):
        at = text.find(mark)
        if at >= 0:
            return one_line(text[at:].removeprefix(_PARAMETER).strip().removesuffix(")"))
    return None


_LIMITS = (
    "recompile limit exceeded",
    "cache limit exceeded",
    "recompile_limit reached",
    "cache_size_limit reached",
    "accumulated_recompile_limit",
    "accumulated_cache_size_limit",
    "fail_on_recompile_limit_hit",
    "fail_on_cache_limit_hit",
)
_CURRENT_LIMIT = re.compile(r"currently set to (\d{1,9})\)")


def is_limit_hit(event: Mapping[str, Any]) -> bool:
    """Whether a compile event says that a function has reached its limit of versions.

    By its structure (a reason to recompile, but neither code nor a direction, because the limit is checked before
    anything is compiled), or by the wording of the failure, which changes with versions.
    """
    words = bounded(f"{string(event.get('fail_type')) or ''} {string(event.get('fail_reason')) or ''}").lower()
    if "recompilelimitexceeded" in words or any(limit in words for limit in _LIMITS):
        return True
    if event.get("graph") is None or string(event.get("recompile_reason")) is None:
        return False
    return boolean(event.get("guarded")) is None and boolean(event.get("is_forward")) is None


def stated_limit(event: Mapping[str, Any]) -> int | None:
    """The limit that the message of a failure names."""
    match = _CURRENT_LIMIT.search(bounded(string(event.get("fail_reason")) or ""))
    return int(match[1]) if match else None


# parts of what torch_xla says a compilation or a transfer was for -> cause
_XLA = (
    ("parallel loader", "loader_sync"),
    ("dynamo", "dynamo"),
    ("trying to access tensor value", "read_value"),
    ("access tensor value", "read_value"),
    ("torch_xla.sync", "user_sync"),
    ("mark_step", "user_sync"),
    ("torch_xla.compile", "user_sync"),
    ("steptrace", "user_sync"),
)


def xla_cause(text: str | None) -> str | None:
    """The cause word of a reason of torch_xla; None without a text, "unknown" for one that is not known."""
    if not text:
        return None
    low = bounded(text).lower()
    return next((cause for part, cause in _XLA if part in low), UNKNOWN)


_READS = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"})
_DEPENDENT_NAMES = """
    nonzero nonzero_numpy argwhere masked_select repeat_interleave bincount combinations unique unique2 _unique _unique2
    unique_dim unique_consecutive unique_dim_consecutive
"""
_DATA_DEPENDENT = frozenset(f"aten::{name}" for name in _DEPENDENT_NAMES.split())


def operator_cause(operator: str | None, otherwise: str | None) -> str | None:
    """The cause that an operator's name tells: it reads one value, its output's shape depends on values, or neither."""
    name = (operator or "").split(".")[0]
    if name in _READS:
        return "item"
    return "data_dependent_shape" if name in _DATA_DEPENDENT else otherwise
