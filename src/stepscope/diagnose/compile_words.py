"""What to call the cause of a compilation, and what to do about it, by the words of `tables.compile_reasons`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stepscope.diagnose.common import shown
from stepscope.diagnose.compile_basis import function_name, spot, unclear
from stepscope.diagnose.thresholds import COMPILE
from stepscope.model.compilers import Change, CompilerCause

_TENSOR_SIZE = re.compile(r"(.{1,80}?)\.size\((-?\d{1,3})\)$")
TEXT_SHOWN = 160  # characters of a compiler's own text

# What changed, where the compiler names no subject.
_SUBJECTS = {
    "shape": "the size of a tensor",
    "dtype": "the dtype of a tensor",
    "stride": "the memory layout of a tensor",
    "device": "the device of a tensor",
    "requires_grad": "whether a tensor requires gradients",
    "constant": "a constant",
    "float_argument": "a float argument",
    "int_attribute": "an integer attribute",
    "attribute": "an attribute",
    "object": "an object",
    "type": "the type of an argument",
    "length": "the length of a container",
    "keys": "the keys of a dict",
    "grad_mode": "whether gradients are recorded",
    "global_state": "a global setting of torch",
    "tensor_read": "a value read from a tensor",
    "new_function": "a function that is made anew",
}

# What to do; `{what}` is the subject, `{place}` " at train.py:18" or nothing, `{call}` likewise where it is called.
_FIXES = {
    "dtype": "Cast {what} to one dtype before the call{call}",
    "stride": "Give {what} one memory layout: .contiguous() before the call{call}",
    "device": "Keep {what} on one device, moved there before the call{call}",
    "requires_grad": "Call the compiled function with {what} always alike; compile training and evaluation separately",
    "constant": "Keep {what} equal over the calls{place}, pass it as a tensor, or use it outside the compiled part",
    "float_argument": "Pass {what} as a tensor (torch.tensor({name}), made once and filled in place){place}; "
    "a Python float becomes a constant of the compiled version",
    "int_attribute": "Count {what} outside the compiled part, keep it in a tensor{place}, or set "
    "torch._dynamo.config.allow_unspec_int_on_nn_module = True",
    "attribute": "Set {what} once before training, or read it outside the compiled part{place}",
    "object": "Create {what} once and pass the same one in every call{place}",
    "type": "Pass the same type in every call{call}",
    "length": "Keep {what} equal over the calls: pad it, or stack it into one tensor{place}",
    "keys": "Keep {what} equal over the calls{place}",
    "grad_mode": "Compile training and evaluation separately: two torch.compile calls, each under its own grad mode",
    "global_state": "Set {what} once before training, not between calls{place}",
    "tensor_read": "Leave the value on the tensor instead of reading it (.item(), int(), bool()){place}: "
    "torch.where or torch.cond, or read it outside the compiled part; "
    "torch._dynamo.config.capture_scalar_outputs = True keeps an .item() in the graph",
    "new_function": "Make the function once, outside the loop, and pass the same one in every call{place}",
}
_UNKNOWN = "Keep what the compiler names equal over the calls, or move it out of the compiled part{place}"

_BREAKS = {
    "item": "Leave the value on the tensor{place}, or read it outside the compiled part; "
    "torch._dynamo.config.capture_scalar_outputs = True keeps an .item() in the graph",
    "print": "Take the print or log call{place} out of the compiled part",
    "data_dependent": "Replace the branch on a tensor's value{place} by torch.where or torch.cond, "
    "or move it out of the compiled part",
    "unsupported_call": "Call it outside the compiled part{place}, or register it as a custom operator "
    "(torch.library.custom_op)",
}
_BREAK = "Rewrite{place} with what the compiler supports, or move it out of the compiled part"


def what(cause: CompilerCause) -> str:
    """What changed."""
    if unclear(cause) and not cause.subject:
        return "an unknown cause"
    return clipped(cause.subject, 80) if cause.subject else _SUBJECTS.get(cause.cause, "something the compiler checks")


def clipped(text: str, limit: int = TEXT_SHOWN) -> str:
    """One line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def how_often(cause: CompilerCause) -> str:
    """`changes every step` or `grows every step`, else how many times it did."""
    if cause.first_step is not None and cause.last_step is not None and cause.count >= COMPILE.same_cause:
        span = cause.last_step - cause.first_step + 1
        if cause.step_count >= COMPILE.same_cause and cause.step_count >= COMPILE.every * span:
            return "grows every step" if cause.cause == "shape" and grows(cause) else "changes every step"
    return f"changed {cause.count} times" if cause.count != 1 else "changed"


def because(cause: CompilerCause) -> str:
    """`s.calls changes every step`; of a wording nobody knows, the wording."""
    if unclear(cause):
        return (
            f"the compiler says: {clipped(cause.text, 80)}" if cause.text else "this version of torch does not say why"
        )
    return f"{what(cause)} {how_often(cause)}"


def changes(items: Sequence[Change]) -> str | None:
    """`8 to 12 (step 2), 12 to 16 (step 3)`."""
    parts = []
    for change in items[: COMPILE.changes_shown]:
        if change.old is None and change.new is None:
            continue
        values = " to ".join(clipped(value, 40) for value in (change.old, change.new) if value is not None)
        parts.append(f"{values} (step {change.step})" if change.step is not None else values)
    return ", ".join(parts) or None


def grows(cause: CompilerCause) -> bool:
    """Whether the values only went up: something is accumulated."""
    values = [value for change in cause.changes for value in (change.old, change.new) if value is not None]
    numbers = [int(value) for value in values if value.isdecimal() and len(value) < 19]
    enough = len(numbers) == len(values) and len(cause.changes) >= COMPILE.same_cause
    return enough and numbers == sorted(numbers) and numbers[0] < numbers[-1]


def recompile_fix(cause: CompilerCause) -> str:
    """What removes the cause, with the compiler's own hint where there is one."""
    place = f" at {shown(cause.place)}" if cause.place else ""
    call = f" at {shown(cause.call)}" if cause.call else ""
    if unclear(cause) and not cause.text:
        text = "Record the run with torch 2.9 or newer, or TORCH_LOGS=recompiles, which name the cause; then remove it"
    elif cause.cause == "shape":
        text = _shape_fix(cause, call)
    else:
        name = cause.subject if cause.subject and cause.subject.isidentifier() else "value"
        text = _FIXES.get(cause.cause, _UNKNOWN).format(what=what(cause), place=place, call=call, name=name)
    return text + hinted(cause)


def _shape_fix(cause: CompilerCause, call: str) -> str:
    match = _TENSOR_SIZE.match(cause.subject or "")
    marked = (
        f"torch._dynamo.mark_dynamic({match.group(1)}, {match.group(2)})" if match else "torch._dynamo.mark_dynamic"
    )
    dynamic = f"{marked} before the call{call}, or torch.compile(..., dynamic=True)"
    if grows(cause):
        begin = cause.definition or cause.place
        inside = f" {function_name(cause.function)}{f' ({shown(begin)})' if begin else ''}"
        return (
            f"{what(cause)} grows: take what accumulates (a torch.cat or a list) out of the compiled{inside} "
            f"and join it behind the loop; where it must stay, {dynamic}"
        )
    return f"Let the size change without a new version: {dynamic}; or pad to a few fixed sizes"


def break_reason(cause: CompilerCause) -> str:
    """Why a graph breaks, in a few words."""
    if cause.cause == "unsupported_call" and cause.operator:
        return f"the compiler cannot follow {clipped(cause.operator, 60)}"
    known = {
        "item": "a tensor's value is read",
        "print": "something is printed",
        "data_dependent": "what to do next depends on a tensor's values",
    }
    return known.get(cause.cause) or clipped(cause.text, 60) or "for a reason that was not told"


def break_fix(cause: CompilerCause) -> str:
    """What removes a graph break."""
    place = f" at {shown(cause.place)}" if cause.place else ""
    return _BREAKS.get(cause.cause, _BREAK).format(place=place) + hinted(cause)


def hinted(cause: CompilerCause) -> str:
    """The compiler's own advice, quoted."""
    return f". The compiler's hint: {clipped(cause.hint, 300)}" if cause.hint else ""


def without(cause: CompilerCause) -> str:
    """The experiment that would prove a finding wrong: `With s.calls kept equal over all calls`."""
    place = spot(cause)
    if unclear(cause):
        return f"With what the compiler names{f' at {shown(place)}' if place else ''} kept equal over all calls"
    return f"With {what(cause)} kept equal over all calls"
