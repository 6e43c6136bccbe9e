"""What the messages of torch.compile and torch_xla mean: cause, subject, values, the user's line, the compiler's hint.

Pure parsing of text that compilers wrote for people; known are torch 2.6 to 2.13 and torch_xla 2.9. A wording that is
not known gives the cause "unknown", keeps its text, and is counted. Texts are untrusted: cut to a bound, read in time
proportional to their length, never a reason to raise. What is found are columns of the table `compiles`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from stepscope.read.raw import Row
from stepscope.read.text import boolean, string


class _Words(Struct):
    """compile_reasons.json: words of compilers and what they mean.

    `causes` says what each cause is. Beginnings of a graph break's reason, in lower case, tell its cause
    (`break_kinds`), a guard's whole text its cause and subject (`guards`, of `guard_parts`): a subject is made of
    groups, the groups `old` and `new` are what the compiled version expected and what came; the first that fits
    counts. `calls` are those whose first argument is the subject, `leads` sentences before a reason, `empty_advice`
    fits every break and helps with none, `torch_parts` are what shortened paths of torch's files begin with.
    """

    causes: dict[str, str]
    limits: tuple[str, ...]
    xla: tuple[tuple[str, str], ...]
    reads: frozenset[str]
    data_dependent: frozenset[str]
    break_kinds: dict[str, tuple[str, ...]]
    leads: tuple[str, ...]
    empty_advice: tuple[str, ...]
    torch_parts: frozenset[str]
    calls: dict[str, str]
    guard_parts: dict[str, str]
    guards: tuple[tuple[str, str | None, str], ...]


@cache
def known_words() -> _Words:
    """Read when the first message is: most traces hold none."""
    return msgspec.json.decode(Path(__file__).with_name("compile_reasons.json").read_bytes(), type=_Words)


_ID = re.compile(r"\[?(![0-9]{1,9}(?:/[0-9]{1,9}/[0-9]{1,9})?|[0-9]{1,9}/[0-9]{1,9}(?:_[0-9]{1,9})?)\]?: ")
_STACK = "\nUser stack trace:"
_HINT = " (HINT: "
_AVOID = "to avoid specialization "
_NOT_USER = "the guard itself is not due user code"
_PARAMETER = "Guard failed on a parameter, "
_CLOSURE = re.compile(r'guard on "([^"\n]{1,200})"([^,\n]{0,200})')


def parse_recompile(text: str, known_files: Iterable[str] = ()) -> Row:
    """What a reason of Dynamo for a recompile says, and the id of the `version` that did not fit ("2/7").

    Of several reasons the first counts. The line is that of the user which uses what changed, or reads it; None where
    the wording names none (of shapes it does not). `cause` is None where the compiler itself could not tell. Versions
    before 2.10 shorten paths; one that ends like one of `known_files` is completed, the first that fits.
    """
    text = text[:MAX_TEXT]
    head, _, stack = text.partition(_STACK)
    match = _ID.match(head)
    first, *lines = (head[match.end() :] if match else head).split("\n")
    head = "\n".join([first, *takewhile(lambda line: not _ID.match(line), lines)])  # up to the next reason
    head, _, hint = head.rpartition(_HINT) if _HINT in head else (head, "", "")
    hint = hint.rstrip().removesuffix(")")
    guard, comment = _split_comment(head)
    found = read_guard(guard)
    closure = _CLOSURE.match(hint)
    place = user_location(frames(stack)) if stack else None
    written = comment_location(comment) if comment and _NOT_USER not in comment else None
    if place is None and written is not None:
        place = resolve(written, known_files)
    if found.cause == "tensor_read":
        place = _reading(place, stack, written)
    return {
        **found._asdict(),
        "subject": value(closure[1] + closure[2].rstrip(". ")) if closure else found.subject,
        "hint": _advice(hint, guard, comment),
        "file": place.file if place else None,
        "line": place.line if place else None,
        "version": match[1] if match else None,
    }


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
    raw = [line.rpartition(", in ")[2].strip() for line in stack.split("\n") if 'File "' in line]
    names = [written.function if written else None, *raw]
    resumed = next((match for name in reversed(names) if name and (match := _RESUMED.fullmatch(name))), None)
    return place if place is None or resumed is None else place._replace(line=int(resumed[2]))


def _advice(hint: str, guard: str, comment: str) -> str | None:
    """The compiler's advice; a hint that only names a type or a variable is none."""
    if hint and not hint.startswith(("type ", 'guard on "')):
        return one_line(hint)
    for text, mark in ((comment, _AVOID), (guard, _PARAMETER)):
        at = text.find(mark)
        if at >= 0:
            return one_line(text[at:].removeprefix(_PARAMETER).strip().removesuffix(")"))
    return None


_CURRENT_LIMIT = re.compile(r"currently set to (\d{1,9})\)")


def is_limit_hit(event: Mapping[str, Any]) -> bool:
    """Whether a compile event says that a function has reached its limit of versions.

    By its structure (a reason to recompile, but neither code nor a direction, because the limit is checked before
    anything is compiled), or by the wording of the failure, which changes with versions.
    """
    words = f"{string(event.get('fail_type')) or ''} {string(event.get('fail_reason')) or ''}"[:MAX_TEXT].lower()
    if "recompilelimitexceeded" in words or any(limit in words for limit in known_words().limits):
        return True
    if event.get("graph") is None or string(event.get("recompile_reason")) is None:
        return False
    return boolean(event.get("guarded")) is None and boolean(event.get("is_forward")) is None


def stated_limit(event: Mapping[str, Any]) -> int | None:
    match = _CURRENT_LIMIT.search((string(event.get("fail_reason")) or "")[:MAX_TEXT])
    return int(match[1]) if match else None


def xla_cause(text: str | None) -> str | None:
    """The cause word of a reason of torch_xla; None without a text, "unknown" for one that is not known."""
    if not text:
        return None
    low = text[:MAX_TEXT].lower()
    return next((cause for part, cause in known_words().xla if part in low), UNKNOWN)


def operator_cause(operator: str | None, otherwise: str | None) -> str | None:
    """The cause that an operator's name tells: it reads one value, its output's shape depends on values, or neither."""
    name = (operator or "").split(".")[0]
    if name in known_words().reads:
        return "item"
    return "data_dependent_shape" if name in known_words().data_dependent else otherwise


_HEAD, _AT = "Graph break", " in user code at "
_REASONS = ("Graph Break Reason:", "Reason:")
_STACKS = ("\nUser code traceback:", "\nUser Stack", "\nStack variable source attribution:")
_LINK = re.compile(r"https?://[^\s\"'<>]{1,300}")
_PREFIX = "Unsupported: "
_SHOWN_HINTS = 2

_QUOTED_OPERATOR = re.compile(r"Operator `([\w.:]{1,200})`")
_OLD_OPERATOR = re.compile(r"operator: ([\w.:]{1,200})")
_BUILTIN = re.compile(r"builtin(?: operator|:)? `?([\w.<>]{1,200}?)`?(?:[\s`\[]|$)")
_QUOTED_CALL = re.compile(r"(?:builtin|Python builtin|function|method) `([^`\n]{1,200})`")
_DISABLED = re.compile(r"<(?:function|bound method) ([\w.<>]{1,200})")

_READ_NAMES = ("tensor.item", "tensor.tolist", "tolist", "_local_scalar_dense", ".item()")
_READERS = frozenset({"bool", "int", "float", "complex"})
_PRINTERS = frozenset({"print", "warnings.warn", "_warnings.warn", "logging", "pprint"})


def parse_graph_break(text: str) -> Row:
    """Why the compiler could not follow: what a record of a graph break says.

    `reason` is the kind of break as the compiler names it and its explanation, without the stack; `operator` the
    operator or function that was called, `function` the one that the user's line is in, where the text names one.
    """
    text = text[:MAX_TEXT]
    head = _head(text)
    body, stack = _parts(text)
    place = _place(head, frames(stack))
    where: Row = {}
    if place is not None:
        function = plain_function(place.function) if place.function else None
        where = {"file": place.file, "line": place.line, "function": function}
    if body is None and not text.startswith("Graph break"):
        body = _reason(text)  # the message of the exception alone
    if body is None:
        # a frame that is skipped as a whole; the reason was told before
        skipped = text.startswith("Graph break:") and ("skip" in text[:200] or "from user code" in text[:200])
        line = one_line(text.partition("\n")[0])
        return {"cause": "unsupported" if skipped else UNKNOWN, "reason": line, **where}
    first, _, more = body.partition("\n")
    link = _LINK.search(more)
    cause, operator = _cause(first, more, told=head is not None)
    page = link[0].rstrip(".,)") if link and "graph-break" in link[0] else None
    advice = " ".join(part for part in (_hints(more), page) if part) or None
    reason = body.strip()[:2_000] or None
    return {"cause": cause, "operator": value(operator), "hint": advice, "reason": reason, **where}


def _head(text: str) -> Location | None:
    before, found, place = text.partition("\n")[0].partition(_AT)
    file, colon, number = place.strip().rpartition(":")
    if not found or not before.startswith(_HEAD) or not colon or not file or len(file) > 1_000:
        return None
    return Location(file, int(number), None) if number.isdecimal() and len(number) < 10 else None


def failure_cause(text: str) -> str:
    first, _, more = _reason(text[:MAX_TEXT]).partition("\n")
    return _cause(first, more, told=True)[0]


def _parts(text: str) -> tuple[str | None, str]:
    start = next((text.find(mark) + len(mark) for mark in _REASONS if mark in text), -1)
    ends = [at for mark in _STACKS if (at := text.find(mark, max(start, 0))) >= 0]
    end = min(ends, default=len(text))
    return (_reason(text[start:end]) if start >= 0 else None), text[end:] if ends or start >= 0 else text


def _reason(text: str) -> str:
    body = text.strip()
    while body.startswith(known_words().leads) and ":\n" in body:
        body = body.partition(":\n")[2].strip()
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


def _cause(first: str, more: str, *, told: bool) -> tuple[str, str | None]:
    low = first.lower()
    operator = _operator(first, more)
    called = (operator or "").rpartition("::")[2]
    if called == "_local_scalar_dense" or any(part in low for part in _READ_NAMES):
        return "item", operator or "aten::_local_scalar_dense"
    if operator in _READERS and "tensor" in (low + more[:1_000].lower()):
        return "item", operator
    if operator in _PRINTERS or (operator or "").startswith("logging."):
        return "print", operator
    cause = next((cause for cause, starts in known_words().break_kinds.items() if low.startswith(starts)), None)
    if cause is None:
        # a kind of break that this table does not list is still one, where the record has the form of one
        cause = "unsupported" if first and (told or "Explanation:" in more) else UNKNOWN
    return cause, operator


def _operator(first: str, more: str) -> str | None:
    explanation = more[:1_000]
    for pattern, where in ((_QUOTED_OPERATOR, explanation), (_OLD_OPERATOR, first)):
        match = pattern.search(where)
        if match:  # `aten.nonzero.default` as profilers write it: `aten::nonzero`
            name = match[1].rstrip(".;")
            parts = name.split(".")
            return f"{parts[0]}::{parts[1]}" if len(parts) > 1 and "::" not in name else name
    if first.startswith("Failed to trace builtin"):
        match = _BUILTIN.search(explanation)
    elif "builtin: " in first or "unsupported builtin " in first or "unsupported Python builtin " in first:
        match = _BUILTIN.search(first)
    elif first.startswith(("Skip calling", "call torch._dynamo.disable")):
        match = _DISABLED.search(first + explanation)
    else:
        match = _QUOTED_CALL.search(explanation)
    return match[1].rstrip(".") if match else None


def _hints(text: str) -> str | None:
    """The first hints that say what to do about this break; each may go over several lines."""
    hints = (one_line(part.partition("\n\n")[0]) for part in f"\n{text}".split("\n  Hint: ")[1:])
    helpful = [hint for hint in hints if hint and not hint.startswith(known_words().empty_advice)]
    return one_line(" ".join(helpful[:_SHOWN_HINTS]))


MAX_TEXT = 20_000
MAX_VALUE = 200  # of a subject or a value
MAX_ADVICE = 600

_FRAME = re.compile(r'File "([^"\n]{1,1000})", line (\d{1,9})(?:, in ([^\n]{1,200}))?')
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.{1,200})_at_(\d{1,9})")
_PLACE = re.compile(r":(\d{1,9}) in (\S{1,200})")
_FRAMEWORK = ("/site-packages/torch", "/dist-packages/torch", "/torch/_", "/stepscope/record/")
_SHORTEST_SUFFIX = 6  # "a.py" would fit too many paths


class Location(NamedTuple):
    """A place in a message; `line` or `function` is None where the message does not say it."""

    file: str
    line: int | None
    function: str | None


def value(text: str | None) -> str | None:
    """A value as a message writes it, on one line and cut; None for nothing."""
    text = " ".join(text[: 4 * MAX_VALUE].split()) if text else ""
    return (text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…") or None


def one_line(text: str) -> str | None:
    """Advice on one line, cut to what a report can show."""
    return " ".join(text[:2_000].split())[:MAX_ADVICE] or None


def frames(text: str) -> list[Location]:
    return [
        Location(match[1], int(match[2]), plain_function(match[3].strip()) if match[3] else None)
        for match in _FRAME.finditer(text)
    ]


def plain_function(name: str) -> str:
    """The function as the user wrote it: what Dynamo resumes after a graph break is a part of one."""
    match = _RESUMED.fullmatch(name)
    return match[1] if match else name


def user_location(places: Iterable[Location]) -> Location | None:
    outside = [place for place in places if not is_torch(place.file)]
    own = [place for place in outside if not is_library(place.file)]
    return own[-1] if own else outside[-1] if outside else None


def is_torch(file: str) -> bool:
    """Whether a file is of torch, torch_xla or this package's recorder, or no file at all."""
    path = file.replace("\\", "/")
    if path.startswith(("<", "torch/", "torch_xla/", "stepscope/")):  # no file, or as traces shorten paths
        return True
    return any(part in path for part in _FRAMEWORK)


def is_library(file: str) -> bool:
    """Whether a file belongs to an installed package or to Python itself."""
    return any(part in file.replace("\\", "/") for part in ("/site-packages/", "/dist-packages/", "/lib/python3"))


def comment_location(comment: str) -> Location | None:
    """The place at the end of a guard's comment: `code  # path:12 in function`. The path is shortened.

    Lines of torch's own stand in brackets.
    """
    tail = comment.rpartition("  # ")[2].removeprefix("# ").strip(" ()")
    match = _PLACE.search(tail)
    return Location(tail[: match.start()][-1000:], int(match[1]), match[2]) if match and match.start() else None


def resolve(place: Location, known: Iterable[str]) -> Location | None:
    """`place` with the full path of the known file its shortened path is of; None for a file of torch."""
    file = place.file.replace("\\", "/")
    for full in known:
        path = full.replace("\\", "/")
        if path == file or (len(file) >= _SHORTEST_SUFFIX and path.endswith(file)):
            return None if is_torch(full) else place._replace(file=full)
    if is_torch(file) or file.partition("/")[0] in known_words().torch_parts:
        return None
    return place


UNKNOWN = "unknown"


class Guard(NamedTuple):
    """`old` is what the compiled version expected, `new` what came; None where the wording does not tell.

    `cause` is None where the compiler says that it cannot tell itself.
    """

    cause: str | None
    subject: str | None = None
    old: str | None = None
    new: str | None = None


_LOCAL = re.compile(r"\b[LG]\[['\"]([^'\"\[\]]{1,200})['\"]\]")
_PART = re.compile(r"\.(?:_modules|_parameters|_buffers|__dict__)\[['\"]([^'\"\[\]]{1,200})['\"]\]")
_DIMENSION = re.compile(r"\.(size|stride)\(\)\[(\d{1,3})\]")
_INTEGER = re.compile(r"[+-]?\d{1,40}")
_NAME = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.[]'\""
_DEVICES = "CPU CUDA HIP XLA MPS MTIA XPU HPU Meta IPU VE Lazy PrivateUse1 PrivateUse2 PrivateUse3"
_BACKENDS = frozenset(_DEVICES.split())
_MIRRORED = {"==": "==", "!=": "!=", "<=": ">=", ">=": "<=", "<": ">", ">": "<"}


def plain(text: str) -> str:
    """Names as the user wrote them: no `L[...]` around arguments, no dictionaries of modules between attributes."""
    return _PART.sub(r".\1", _LOCAL.sub(r"\1", text))


@cache
def _guards() -> tuple[tuple[re.Pattern[str], str | None, str], ...]:
    known = known_words()
    return tuple(
        (re.compile(re.sub(r"<([A-Z]+)>", lambda part: known.guard_parts[part[1]], pattern), re.DOTALL), cause, subject)
        for pattern, cause, subject in known.guards
    )


def read_guard(text: str) -> Guard:
    """What `text`, a guard without its comment, says; cause "unknown" for a wording that is not known."""
    text = text.strip()
    fits = ((match, cause, subject) for pattern, cause, subject in _guards() if (match := pattern.fullmatch(text)))
    told = next(fits, None)
    found = _told(*told) if told else _call(text) or _dimension(text) or _comparison(text) or Guard(UNKNOWN)
    return Guard(found.cause, value(found.subject), value(found.old), value(found.new))


def _told(match: re.Match[str], cause: str | None, subject: str) -> Guard:
    said = {name: found or "" for name, found in match.groupdict().items()}
    old, new = said.pop("old", None), said.pop("new", None)
    said = {name: found if name in ("key", "item", "words", "found") else plain(found) for name, found in said.items()}
    if "list" in said:
        said["list"] = re.sub(r"[\[\]\"']", "", said["list"])
    if "words" in said:
        said["words"] = ", ".join(said["words"].split())
    name = subject.format(**said)
    if cause == "dispatch":
        return _dispatch(name, old or "", new or "")
    if cause == "requires_grad":
        old, new = {"0": ("False", "True"), "1": ("True", "False")}.get(old or "", (old, None))
    if "found" in said:
        old, new = "Tensor", said["found"]
    if "key" in said:
        old, new = _contained(said["without"], said["key"])
    return Guard(cause, name, old, new)


def _dispatch(name: str, old: str, new: str) -> Guard:
    """Key sets differ by the device, by autocast, or by the kind of tensor."""
    before, after = (frozenset(text.partition("(")[2].rpartition(")")[0].split(", ")) for text in (old, new))
    if any(key.startswith("Autocast") for key in before ^ after) and not (before ^ after) & _BACKENDS:
        was_on = any(key.startswith("Autocast") for key in before - after)
        return Guard("global_state", "autocast", *(("on", "off") if was_on else ("off", "on")))
    devices = [sorted(keys & _BACKENDS) for keys in (before, after)]
    if devices[0] != devices[1]:
        return Guard("device", name, ", ".join(devices[0]), ", ".join(devices[1]))
    return Guard("type", name, ", ".join(sorted(before - after)), ", ".join(sorted(after - before)))


def _call(text: str) -> Guard | None:
    head = text.removeprefix("not ").lstrip("(")
    if head.startswith("type(") and "isnan(" in head:
        head = head.partition(" and ")[2]
    name, opened, rest = head.partition("(")
    cause = known_words().calls.get(name) if opened else None
    if cause is None:
        return None
    inner = _argument(rest)
    subject, _, item = inner.partition(", ")
    if name == "set.__contains__":
        return Guard(cause, plain(subject), *_contained(text, item))
    if name.endswith("isnan"):
        return Guard(cause, plain(inner), None, "nan") if text.startswith("not ") else Guard(cause, plain(inner), "nan")
    old = text.partition(" == ")[2]
    new = "" if old else text.partition(" != ")[2]
    if cause == "keys":
        inner = inner.removeprefix("dict.keys(").removesuffix(")").removesuffix(".keys(")
    if plain(inner).startswith("___stack"):
        return Guard("tensor_read", None, old, None)
    return Guard(cause, plain(inner), old, None if old else new)


def _contained(text: str, item: str) -> tuple[str, str]:
    return (f"without {item}", f"with {item}") if text.startswith("not ") else (f"with {item}", f"without {item}")


def _argument(rest: str) -> str:
    """What stands up to the bracket that closes."""
    depth = 1
    for place, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if not depth:
            return rest[:place]
    return rest


def _dimension(text: str) -> Guard | None:
    """A condition on sizes or strides, of a version compiled for dynamic shapes."""
    readable = plain(text)
    match = _DIMENSION.search(readable)
    if match is None:
        return None
    start = match.start()
    name = readable[len(readable[:start].rstrip(_NAME)) : start]
    subject = f"{name}.{match[1]}({match[2]})"
    cause = "stride" if match[1] == "stride" else "shape"
    condition = _DIMENSION.sub(r".\1(\2)", readable)
    if condition.startswith("Ne("):
        condition = condition[3:].rpartition(")")[0].replace(", ", " != ", 1)
    for sign, mirrored in _MIRRORED.items():
        left, found, right = condition.partition(f" {sign} ")
        if not found or " and " in condition:
            continue
        if left == subject:
            return _bound(cause, subject, sign, right)
        if right == subject:
            return _bound(cause, subject, mirrored, left)
    return Guard(cause, subject, condition)


def _bound(cause: str, subject: str, sign: str, other: str) -> Guard:
    if sign == "!=":
        return Guard(cause, subject, f"not {other}", other)
    return Guard(cause, subject, other if sign == "==" else f"{sign} {other}")


def _comparison(text: str) -> Guard | None:
    for sign in (" == ", " is not ", " is ", " != "):
        left, found, right = text.partition(sign)
        if found:
            break
    else:
        return _truth(text)
    subject, right = plain(left), right.strip()
    if subject.startswith("___stack"):
        return Guard("tensor_read", None, right)
    if sign.startswith(" is"):
        if right == "None":
            return Guard("type", subject, "not None" if "not" in sign else "None", "None" if "not" in sign else None)
        return Guard("object", f"{subject}, {plain(right)}")
    if sign == " != ":
        return Guard(_constant(left, subject, right), subject, f"not {right}", right)
    if "___as_tensor(" in right:
        return Guard("float_argument", subject)
    for end, cause, shown in ((".ndimension()", "shape", ".dim()"), (".requires_grad", "requires_grad", "")):
        if subject.endswith(end):
            return Guard(cause, subject.removesuffix(end) + shown, right)
    if subject.endswith(".raw_repr()"):
        return Guard("type", subject.removesuffix(".raw_repr()"))
    return Guard(_constant(left, subject, right), subject, right)


def _constant(left: str, subject: str, right: str) -> str:
    """The cause word of a plain value that a version was compiled for."""
    attribute = "." in subject.partition("['")[0].partition('["')[0]  # a dot inside `['a.b']` is no attribute
    if _INTEGER.fullmatch(right):
        return "int_attribute" if attribute and not subject.endswith((".stop", ".start")) else "constant"
    if attribute:
        return "attribute"
    with suppress(ValueError):
        float(right[:100])
        return "constant" if left.startswith("G[") else "float_argument"
    return "constant"


def _truth(text: str) -> Guard | None:
    """`not xs`: a container that was empty. `n <= 8` and the like: a number in a range."""
    if text.startswith("not ") and all(char in _NAME for char in text[4:]):
        return Guard("length", plain(text[4:]), "0")
    for sign in ("<=", ">=", "<", ">"):
        left, found, right = text.partition(f" {sign} ")
        if found and len(left) + len(right) <= 500:
            if _INTEGER.fullmatch(left):
                return Guard("constant", plain(right), f"{_MIRRORED[sign]} {left}")
            return Guard("constant", plain(left), f"{sign} {right}")
    return None
