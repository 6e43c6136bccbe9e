"""What the messages of torch.compile and torch_xla mean: cause, subject, values, the user's line, the compiler's hint.

Pure parsing of text that compilers wrote for people, so it changes with every release; known are torch 2.6 to 2.13 and
torch_xla 2.9. A wording that is not known gives the cause "unknown", keeps its text, and is counted as drift. Texts
are untrusted: cut to a bound, read in time proportional to their length, never a reason to raise.

What a graph break of torch.compile says: the cause, the user's line, the operator, the compiler's advice.

Three forms are known: a record of torch 2.7 and newer (a kind, then "Explanation:", "Hint:" and a link), the one-line
reason of older versions, and the note that a frame is skipped. See `compile_reasons` for what holds of all messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from stepscope.read.text import boolean, string
from stepscope.tables.compile_guards import UNKNOWN, read_guard
from stepscope.tables.compile_text import (
    Location,
    bounded,
    comment_location,
    frames,
    is_library,
    is_torch,
    one_line,
    plain_function,
    resolve,
    resumed_at,
    user_location,
    value,
)

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
    first, *lines = (head[match.end() :] if match else head).split("\n")
    head = "\n".join([first, *takewhile(lambda line: not _ID.match(line), lines)])  # up to the next reason
    head, _, hint = head.rpartition(_HINT) if _HINT in head else (head, "", "")
    hint = hint.rstrip().removesuffix(")")
    guard, comment = _split_comment(head)
    found = read_guard(guard)
    subject = found.subject
    closure = _CLOSURE.match(hint)
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
    raw = [line.rpartition(", in ")[2].strip() for line in stack.split("\n") if 'File "' in line]
    names = [written.function if written else None, *raw]
    line = next((at for name in reversed(names) if (at := resumed_at(name)) is not None), None)
    return place if place is None or line is None else place._replace(line=line)


def _advice(hint: str, guard: str, comment: str) -> str | None:
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

_READ_NAMES = ("tensor.item", "tensor.tolist", "tolist", "_local_scalar_dense", ".item()")
_READERS = frozenset({"bool", "int", "float", "complex"})
_PRINTERS = frozenset({"print", "warnings.warn", "_warnings.warn", "logging", "pprint"})
# cause -> beginnings of the reason, in lower case
_KINDS: dict[str, tuple[str, ...]] = {
    "data_dependent": (
        "data-dependent", "data dependent", "dynamic shape operator", "dynamic slicing with tensor", "generic_jump",
    ),
    "print": ("logger not supported", "logging.logger"),
    "unsupported_call": (
        "attempted to call function marked as skipped", "attempted to inline function marked as skipped",
        "skipped inlining", "failed to trace builtin operator", "unsupported method call", "unsupported function call",
        "unsupported tensor.", "tensor.", "call to `torch", "call torch._dynamo.disable", "skip calling `torch",
        "skip function", "'skip function", "'inline in skipfiles", "inline in skipfiles",
        "graph break due to unsupported", "builtin:", "call_function", "call_method",
    ),
}  # fmt: skip


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
    start = next((text.find(mark) + len(mark) for mark in _REASONS if mark in text), -1)
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
    if called == "_local_scalar_dense" or any(part in low for part in _READ_NAMES):
        return "item", operator or "aten::_local_scalar_dense"
    if operator in _READERS and "tensor" in (low + more[:1_000].lower()):
        return "item", operator
    if operator in _PRINTERS or (operator or "").startswith("logging."):
        return "print", operator
    cause = next((cause for cause, starts in _KINDS.items() if low.startswith(starts)), None)
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
    hints = (one_line(part.partition("\n\n")[0]) for part in f"\n{text}".split("\n  Hint: ")[1:])
    helpful = [hint for hint in hints if hint and not hint.startswith(_EMPTY_ADVICE)]
    return one_line(" ".join(helpful[:_SHOWN_HINTS]))
