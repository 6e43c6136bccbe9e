"""What a graph break of torch.compile says: the cause, the user's line, the operator, the compiler's advice.

Three forms are known: a record of torch 2.7 and newer (a kind, then "Explanation:", "Hint:" and a link), the one-line
reason of older versions, and the note that a frame is skipped. See `compile_reasons` for what holds of all messages.
"""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.structs import asdict

from stepscope.tables.compile_guards import UNKNOWN
from stepscope.tables.compile_text import (
    Location,
    bounded,
    frames,
    is_library,
    is_torch,
    one_line,
    plain_function,
    user_location,
    value,
)


class Break(Struct, frozen=True):
    """Why the compiler could not follow. `file` and `line` are the user's line; None where the text has none.

    `reason` is the kind of break as the compiler names it and its explanation, without the stack; `operator` the
    operator or function that was called, `function` the function that the line is in.
    """

    cause: str
    file: str | None = None
    line: int | None = None
    function: str | None = None
    operator: str | None = None
    hint: str | None = None
    doc_url: str | None = None
    reason: str | None = None


_HEAD, _AT = "Graph break", " in user code at "
_REASONS = ("Graph Break Reason:", "Reason:")
_STACKS = ("\nUser code traceback:", "\nUser Stack", "\nStack variable source attribution:")
_LINK = re.compile(r"https?://[^\s\"'<>]{1,300}")
# sentences before the reason itself; they end with a colon
_LEADS = ("Encountered graph break when", "Failed to handle graph break gracefully")
_PREFIX = "Unsupported: "
# advice that fits every break and helps with none
_EMPTY_ADVICE = (
    "Please report an issue",
    "Please file an issue",
    "This graph break is fundamental",
    "This graph break may have been caused by an earlier",
    "It may be possible to write Dynamo tracing rules",
    "This is likely to be a Dynamo bug",
    "If it is a Python builtin",
    "If it is a third-party",
)
_SHOWN_HINTS = 2

_QUOTED_OPERATOR = re.compile(r"Operator `([\w.:]{1,200})`")
_OLD_OPERATOR = re.compile(r"operator: ([\w.:]{1,200})")
_BUILTIN = re.compile(r"builtin(?: operator|:)? `?([\w.<>]{1,200}?)`?(?:[\s`\[]|$)")
_QUOTED_CALL = re.compile(r"(?:builtin|Python builtin|function|method) `([^`\n]{1,200})`")
_DISABLED = re.compile(r"<(?:function|bound method) ([\w.<>]{1,200})")

_READS = ("tensor.item", "tensor.tolist", "tolist", "_local_scalar_dense", ".item()")
_READERS = frozenset({"bool", "int", "float", "complex"})
_PRINTERS = frozenset({"print", "warnings.warn", "_warnings.warn", "logging", "pprint"})
# beginnings of the reason, in lower case -> cause; the first that fits
_KINDS = (
    ("data-dependent", "data_dependent"),
    ("data dependent", "data_dependent"),
    ("dynamic shape operator", "data_dependent"),
    ("dynamic slicing with tensor", "data_dependent"),
    ("generic_jump", "data_dependent"),
    ("logger not supported", "print"),
    ("logging.logger", "print"),
    ("attempted to call function marked as skipped", "unsupported_call"),
    ("attempted to inline function marked as skipped", "unsupported_call"),
    ("skipped inlining", "unsupported_call"),
    ("failed to trace builtin operator", "unsupported_call"),
    ("unsupported method call", "unsupported_call"),
    ("unsupported function call", "unsupported_call"),
    ("unsupported tensor.", "unsupported_call"),
    ("tensor.", "unsupported_call"),
    ("call to `torch", "unsupported_call"),
    ("call torch._dynamo.disable", "unsupported_call"),
    ("skip calling `torch", "unsupported_call"),
    ("skip function", "unsupported_call"),
    ("'skip function", "unsupported_call"),
    ("'inline in skipfiles", "unsupported_call"),
    ("inline in skipfiles", "unsupported_call"),
    ("graph break due to unsupported", "unsupported_call"),
    ("builtin:", "unsupported_call"),
    ("call_function", "unsupported_call"),
    ("call_method", "unsupported_call"),
)


def parse_graph_break(text: str) -> Break:
    """What a record of a graph break says."""
    text = bounded(text)
    head = _head(text)
    body, stack = _parts(text)
    place = _place(head, frames(stack))
    if body is None and not text.startswith("Graph break"):
        body = _reason(text)  # the message of the exception alone
    if body is None:
        # a frame that is skipped as a whole; the reason was told before
        skipped = text.startswith("Graph break:") and ("skip" in text[:200] or "from user code" in text[:200])
        line = one_line(text.partition("\n")[0])
        return _placed(Break("unsupported" if skipped else UNKNOWN, reason=line), place)
    first, _, more = body.partition("\n")
    link = _LINK.search(more)
    cause, operator = _cause(first, more, told=head is not None)
    found = Break(
        cause=cause,
        operator=value(operator),
        hint=_hints(more),
        doc_url=link[0].rstrip(".,)") if link and "graph-break" in link[0] else None,
        reason=body.strip()[:2_000] or None,
    )
    return _placed(found, place)


def _head(text: str) -> Location | None:
    """The place that the first line names."""
    line = text.partition("\n")[0]
    before, found, place = line.partition(_AT)
    file, colon, number = place.strip().rpartition(":")
    if not found or not before.startswith(_HEAD) or not colon or not file or len(file) > 1_000:
        return None
    return Location(file, int(number), None) if number.isdecimal() and len(number) < 10 else None


def failure_cause(text: str) -> str:
    """The cause word of a failure's message, which is worded like a graph break's."""
    first, _, more = _reason(bounded(text)).partition("\n")
    return _cause(first, more, told=True)[0]


def _parts(text: str) -> tuple[str | None, str]:
    """The reason without what stands around it, and the stack."""
    start = -1
    for mark in _REASONS:
        at = text.find(mark)
        if at >= 0:
            start = at + len(mark)
            break
    ends = [at for mark in _STACKS if (at := text.find(mark, max(start, 0))) >= 0]
    end = min(ends, default=len(text))
    return (_reason(text[start:end]) if start >= 0 else None), text[end:] if ends or start >= 0 else text


def _reason(text: str) -> str:
    """From the line that names the kind of break on."""
    body = text.strip()
    while body.startswith(_LEADS):
        _, found, rest = body.partition(":\n")
        if not found:
            break
        body = rest.strip()
    return body.removeprefix(_PREFIX)


def _place(own: Location | None, stack: list[Location]) -> Location | None:
    """The user's line: where the break is, or who called the library's code it is in."""
    if own is not None:
        if not is_torch(own.file) and not is_library(own.file):
            function = next((place.function for place in reversed(stack) if place[:2] == own[:2]), None)
            return own._replace(function=function)
        if not stack:
            return None if is_torch(own.file) else own
    return user_location(stack)


def _placed(found: Break, place: Location | None) -> Break:
    if place is None:
        return found
    function = plain_function(place.function) if place.function else None
    return Break(**{**asdict(found), "file": place.file, "line": place.line, "function": function})


def _cause(first: str, more: str, *, told: bool) -> tuple[str, str | None]:
    """The cause word, and the operator or function that was called. `told`: it is the reason of a break for sure."""
    low = first.lower()
    operator = _operator(first, more)
    called = (operator or "").rpartition("::")[2]
    if called == "_local_scalar_dense" or any(part in low for part in _READS):
        return "item", operator or "aten::_local_scalar_dense"
    if operator in _READERS and "tensor" in (low + more[:1_000].lower()):
        return "item", operator
    if operator in _PRINTERS or (operator or "").startswith("logging."):
        return "print", operator
    cause = next((cause for start, cause in _KINDS if low.startswith(start)), None)
    if cause is None:
        # a kind of break that this table does not list is still one, where the record has the form of one
        cause = "unsupported" if first and (told or "Explanation:" in more) else UNKNOWN
    return cause, operator


def _operator(first: str, more: str) -> str | None:
    explanation = more[:1_000]
    for pattern, where in ((_QUOTED_OPERATOR, explanation), (_OLD_OPERATOR, first)):
        match = pattern.search(where)
        if match:
            return _aten(match[1].rstrip(".;"))
    if first.startswith("Failed to trace builtin"):
        match = _BUILTIN.search(explanation)
    elif "builtin: " in first or "unsupported builtin " in first or "unsupported Python builtin " in first:
        match = _BUILTIN.search(first)
    elif first.startswith(("Skip calling", "call torch._dynamo.disable")):
        match = _DISABLED.search(first + explanation)
    else:
        match = _QUOTED_CALL.search(explanation)
    return match[1].rstrip(".") if match else None


def _aten(name: str) -> str:
    """`aten.nonzero.default` as profilers write it: `aten::nonzero`."""
    parts = name.split(".")
    return f"{parts[0]}::{parts[1]}" if len(parts) > 1 and "::" not in name else name


def _hints(text: str) -> str | None:
    """The first hints that say what to do about this break; each may go over several lines."""
    found: list[str] = []
    for part in f"\n{text}".split("\n  Hint: ")[1:]:
        hint = one_line(part.partition("\n\n")[0])
        if hint and not hint.startswith(_EMPTY_ADVICE):
            found.append(hint)
    return one_line(" ".join(found[:_SHOWN_HINTS]))
