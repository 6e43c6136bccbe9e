"""What a failed guard of torch.compile says: the cause, what it was about, the value that was expected and the new one.

A guard is an expression that held when a version of a function was compiled, such as `L['x'].size()[0] == 8`, or a
sentence where the check is made in C++. The wordings are those of torch 2.6 to 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from stepscope.tables.compile_text import value

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
_TENSOR = re.compile(
    r"tensor '(.{1,500}?)' (?:Tensor )?(size|stride|dtype|rank|requires_grad|device index|dispatch key set) mismatch"
    r"(?: at index (\d{1,3}))?\. [Ee]xpected (?:device index to be |requires_grad=)?(.*)",
    re.DOTALL,
)
_NO_TENSOR = re.compile(r"expected type of '(.{1,500}?)' to be a tensor type,.{0,20}but found (.*)", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,40}")
_CLASS = re.compile(r"type=<(?:class|enum) '([^']{1,200})'>")
_ARGUMENT = re.compile(r"___check_(?:type_id|obj_id|fake_script_type)\((.{1,500}), \d{1,30}\)", re.DOTALL)
_NAME = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.[]'\""
_FUNCTIONS = ("function", "method", "builtin_function_or_method", "code")
_DEVICES = "CPU CUDA HIP XLA MPS MTIA XPU HPU Meta IPU VE Lazy PrivateUse1 PrivateUse2 PrivateUse3"
_BACKENDS = frozenset(_DEVICES.split())
_TRUTH = {"0": "False", "1": "True"}

# calls whose first argument is the subject -> cause
_CALLS = {
    "len": "length",
    "___tuple_iterator_len": "length",
    "___normalize_range_iter": "length",
    "___normalize_count_iter": "length",
    "___dict_version": "keys",
    "set.__contains__": "keys",
    "list": "keys",
    "hasattr": "attribute",
    "__math_isnan": "float_argument",
    "math.isnan": "float_argument",
    "__numpy_isnan": "constant",
}


def _no_subject(_rest: str) -> None:
    return None


def plain(text: str) -> str:
    """Names as the user wrote them: no `L[...]` around arguments, no dictionaries of modules between attributes."""
    return _PART.sub(r".\1", _LOCAL.sub(r"\1", text))


# beginnings of sentences and calls -> cause, and what makes the subject of the words behind it
_SENTENCES: dict[str, tuple[str | None, Callable[[str], str | None]]] = {
    "Duplicate tensor": ("object", lambda rest: re.sub(r"[\[\]\"']", "", plain(rest.partition(": ")[2]))),
    "getattr failed on source ": ("attribute", plain),
    "KeyError on ": ("keys", plain),
    "IndexError on ": ("length", plain),
    "Cache line invalidated": (
        "object",
        lambda rest: plain(rest.partition("because ")[2].partition(" got deallocated")[0]),
    ),
    "BACKEND_MATCH": ("new_function", lambda _: "backend"),
    "Unable to find recompilation reasons": (None, _no_subject),
    "Unexpected recompilation": (None, _no_subject),
    "_has_dynamo_dim_marking": ("attribute", _no_subject),
    "_dynamo_": ("attribute", _no_subject),
    "Shape guard failed": ("shape", _no_subject),
    "___check_global_state": ("global_state", _no_subject),
    "___check_torch_function_mode_stack": ("global_state", _no_subject),
    "___check_metadata_": ("object", _no_subject),
    "___check_opaque_guard_fn_": ("object", _no_subject),
    "__dtensor_spec_": ("object", _no_subject),
    "TYPE_MISMATCH(": ("type", _no_subject),
    "torch.is_grad_enabled": ("grad_mode", _no_subject),
    "torch._C._is_grad_enabled": ("grad_mode", _no_subject),
    "torch.": ("global_state", lambda rest: f"torch.{rest}".partition(" ")[0]),
    "___skip_backend_check": ("new_function", _no_subject),
}


def read_guard(text: str) -> Guard:
    """What `text`, a guard without its comment, says; cause "unknown" for a wording that is not known."""
    text = text.strip()
    for read in (_tensor, _sentence, _identity, _call, _dimension, _comparison):
        found = read(text)
        if found is not None:
            return Guard(found.cause, value(found.subject), value(found.old), value(found.new))
    return Guard(UNKNOWN)


def _tensor(text: str) -> Guard | None:
    match = _TENSOR.match(text)
    if match is None:
        match = _NO_TENSOR.match(text)
        if match is None:
            return None
        return Guard("type", plain(match[1]), "Tensor", match[2].removeprefix("<class '").removesuffix("'>"))
    what, index = match[2], match[3]
    name = plain(match[1])
    old, _, new = match[4].partition(". Guard failed on a parameter")[0].partition(", actual ")
    old, new = old.rstrip(". "), new.rstrip(". ")
    if what in ("size", "stride"):
        return Guard("shape" if what == "size" else "stride", f"{name}.{what}({index})", old, new)
    if what == "rank":
        return Guard("shape", f"{name}.dim()", old, new)
    if what == "requires_grad":
        return Guard("requires_grad", name, _TRUTH.get(old, old), {"0": "True", "1": "False"}.get(old))
    if what == "dispatch key set":
        return _dispatch(name, old, new)
    return Guard("dtype" if what == "dtype" else "device", name, old, new)


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


def _sentence(text: str) -> Guard | None:
    if text.startswith("GLOBAL_STATE changed:"):
        names = text.partition(":")[2].split()
        return Guard("grad_mode" if names == ["grad_mode"] else "global_state", ", ".join(names))
    if text.startswith("utils_device.CURRENT_DEVICE"):
        return Guard("global_state", "default device", text.partition(" == ")[2])
    head = text.removeprefix("not ")
    for start, (cause, subject) in _SENTENCES.items():
        if head.startswith(start):
            return Guard(cause, subject(head[len(start) :]))
    if text.startswith("hasattr(") and "'_dynamo_" in text:
        return Guard("attribute", plain(text.partition("(")[2].partition(",")[0]))
    return None


def _identity(text: str) -> Guard | None:
    """Checks of a type or of an object; newer versions name the type that was expected."""
    match = _ARGUMENT.match(text)
    if match is None:
        return None
    subject = plain(match[1])
    kind = _CLASS.search(text)
    expected = kind[1] if kind else None
    if text.startswith(("___check_type_id", "___check_fake_script_type")):
        return Guard("type", subject, expected)
    if subject.endswith(".__code__") or expected in _FUNCTIONS:
        return Guard("new_function", subject.removesuffix(".__code__"))
    if subject.endswith(".training"):
        return Guard("attribute", subject)
    return Guard("object", subject, expected)


def _call(text: str) -> Guard | None:
    """A known function of something: its length, its keys, whether it has an attribute."""
    head = text.removeprefix("not ").lstrip("(")
    if head.startswith("type(") and "isnan(" in head:
        head = head.partition(" and ")[2]
    name, opened, rest = head.partition("(")
    if opened and name == "___dict_contains":
        key, _, holder = rest.partition(", ")
        holder = holder.rstrip(") ")
        if holder.endswith(".__dict__"):
            return Guard("attribute", f"{plain(holder.removesuffix('.__dict__'))}.{key.strip(chr(39))}")
        return Guard("keys", plain(holder), *_contained(text, key))
    if opened and name == "str":
        return _term(rest)
    cause = _CALLS.get(name) if opened else None
    if cause is None:
        return None
    inner = _argument(rest)
    if name == "hasattr":
        subject, _, attribute = inner.partition(", ")
        return Guard(cause, f"{plain(subject)}.{attribute.strip(chr(39))}")
    if name == "set.__contains__":
        subject, _, item = inner.partition(", ")
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
    """Without or with a key, as it was and as it is now."""
    return (f"without {item}", f"with {item}") if text.startswith("not ") else (f"with {item}", f"without {item}")


def _argument(rest: str) -> str:
    """What stands up to the bracket that closes."""
    depth = 1
    for place, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if not depth:
            return rest[:place]
    return rest


def _term(rest: str) -> Guard | None:
    """`str(x.dtype) == 'torch.float32'`, as guards of exported programs are."""
    name, _, tail = rest.partition(")")
    subject, _, term = plain(name).rpartition(".")
    if term not in ("dtype", "device"):
        return None
    return Guard(term, subject, tail.partition(" == ")[2].strip("'"))


def _dimension(text: str) -> Guard | None:
    """A condition on sizes or strides, of a version compiled for dynamic shapes."""
    readable = plain(text)
    match = _DIMENSION.search(readable)
    if match is None:
        return None
    start = match.start()
    while start and readable[start - 1] in _NAME:
        start -= 1
    name = readable[start : match.start()]
    subject = f"{name}.{match[1]}({match[2]})"
    cause = "stride" if match[1] == "stride" else "shape"
    condition = _DIMENSION.sub(r".\1(\2)", readable)
    if condition.startswith("Ne("):
        condition = condition[3:].rpartition(")")[0].replace(", ", " != ", 1)
    for sign, mirrored in (("==", "=="), ("!=", "!="), ("<=", ">="), (">=", "<="), ("<", ">"), (">", "<")):
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
    if subject.endswith(".ndimension()"):
        return Guard("shape", subject.removesuffix(".ndimension()") + ".dim()", right)
    if subject.endswith(".requires_grad"):
        return Guard("requires_grad", subject.removesuffix(".requires_grad"), right)
    if subject.endswith(".raw_repr()"):
        return Guard("type", subject.removesuffix(".raw_repr()"))
    return Guard(_constant(left, subject, right), subject, right)


def _constant(left: str, subject: str, right: str) -> str:
    """The cause word of a plain value that a version was compiled for."""
    attribute = "." in subject.partition("['")[0].partition('["')[0]  # a dot inside `['a.b']` is no attribute
    if _INTEGER.fullmatch(right):
        bound_of_range = subject.endswith((".stop", ".start"))
        return "int_attribute" if attribute and not bound_of_range else "constant"
    if attribute:
        return "attribute"
    return "float_argument" if _is_float(right) and not left.startswith("G[") else "constant"


def _is_float(text: str) -> bool:
    try:
        float(text[:100])
    except ValueError:
        return False
    return True


def _truth(text: str) -> Guard | None:
    """`not xs`: a container that was empty. `n <= 8` and the like: a number in a range."""
    if text.startswith("not ") and all(char in _NAME for char in text[4:]):
        return Guard("length", plain(text[4:]), "0")
    for sign, mirrored in ((" <= ", ">="), (" >= ", "<="), (" < ", ">"), (" > ", "<")):
        left, found, right = text.partition(sign)
        if found and len(left) + len(right) <= 500:
            if _INTEGER.fullmatch(left):
                return Guard("constant", plain(right), f"{mirrored} {left}")
            return Guard("constant", plain(left), f"{sign.strip()} {right}")
    return None
