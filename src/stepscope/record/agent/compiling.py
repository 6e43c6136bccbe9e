"""Staying out of torch.compile's way.

Two different things are needed. Inside a region Dynamo traces, a hook of ours must fold away: it asks
`is_compiling_check()()` first, which Dynamo replaces by True. Outside, our functions run as ordinary frames under
Dynamo's frame callback, which would compile them like the user's; `skip_own_code` tells it not to.
"""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any, Callable, Iterator

# Functions of ours that stand for the user's: a function decorated with `region` is compiled like any other.
USER_SIDE = frozenset(["inside"])
# Functions of ours that call what they stand for: torch's own functions, or the user's.
PASSES_ON = frozenset(
    [
        "stepscope_wrapper",
        "call",
        "nvtx_range",
        "export_chrome_trace",
        "exec_module",
        "__enter__",
        "__exit__",
        "_run_on_profiler_stop",
    ]
)


def is_compiling_check() -> Callable[[], bool]:
    """torch's own "am I being traced" function, without importing Dynamo."""
    torch = sys.modules.get("torch")
    for home in (getattr(torch, "compiler", None), getattr(torch, "_utils", None)):
        check = getattr(home, "is_compiling", None)
        if check is not None:
            return check  # type: ignore[no-any-return]
    return bool  # of no argument: False


def is_dynamo_compiling_check() -> Callable[[], bool]:
    """Like `is_compiling_check`, of Dynamo alone where torch can tell: a third of the time, for calls in every step."""
    check = getattr(getattr(sys.modules.get("torch"), "compiler", None), "is_dynamo_compiling", None)
    return is_compiling_check() if check is None else check


def skip_own_code() -> None:
    """Have Dynamo run every function of stepscope's recorder as it is. Repeat after loading more of it."""
    skip = _skip_function()
    if skip is None:
        return
    for name, module in sys.modules.copy().items():
        if name.startswith("stepscope.record.") and module is not None:
            for code in _codes_of(vars(module), name):
                if code.co_name not in USER_SIDE:
                    skip(code)


def _skip_function() -> Callable[[CodeType], None] | None:
    """Dynamo's own way to leave a code object alone, from its C part, which `import torch` has loaded already."""
    dynamo = sys.modules.get("torch._C._dynamo.eval_frame")
    skip: Callable[[CodeType], None] | None = getattr(dynamo, "skip_code", None)
    if skip is not None:  # before torch 2.7
        return skip
    strategy = getattr(dynamo, "_FrameExecStrategy", None)
    action = getattr(dynamo, "_FrameAction", None)
    assign = getattr(dynamo, "set_code_exec_strategy", None)
    if strategy is None or action is None or assign is None:
        return None

    def skip_code(code: CodeType) -> None:
        # What a hook calls (the standard library, a profiler of ours) is left alone as well; what a wrapper calls is
        # the user's or torch's.
        inside = action.DEFAULT if code.co_name in PASSES_ON else action.SKIP
        assign(code, strategy(action.SKIP, inside))

    return skip_code


def _codes_of(namespace: dict[str, Any] | Any, module: str) -> Iterator[CodeType]:
    for value in list(namespace.values()):
        value = getattr(value, "__func__", value)
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, FunctionType):
            yield from _nested(value.__code__)
        elif isinstance(value, type) and value.__module__ == module:
            yield from _codes_of(vars(value), module)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
