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


def is_compiling_check(name: str = "is_compiling") -> Callable[[], bool]:
    """torch's own "am I being traced" function, without importing Dynamo."""
    torch = sys.modules.get("torch")
    older = getattr(getattr(torch, "_utils", None), "is_compiling", bool)  # bool(): False
    check: Callable[[], bool] = getattr(getattr(torch, "compiler", None), name, None) or older
    return check


def is_dynamo_compiling_check() -> Callable[[], bool]:
    """Like `is_compiling_check`, of Dynamo alone where torch can tell: a third of the time, for calls in every step."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return is_compiling_check("is_dynamo_compiling" if hasattr(compiler, "is_dynamo_compiling") else "is_compiling")


def unless_compiling(hook: Callable[..., Any]) -> Callable[..., None]:
    """`hook` of an optimizer's step, left out in what Dynamo traces."""
    is_compiling = is_dynamo_compiling_check()

    def step_hook(*args: Any) -> None:
        if not is_compiling():
            hook(*args)

    return step_hook


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
    names = ("_FrameExecStrategy", "_FrameAction", "set_code_exec_strategy")
    strategy, action, assign = (getattr(dynamo, name, None) for name in names)
    skip: Callable[[CodeType], None] | None = getattr(dynamo, "skip_code", None)  # before torch 2.7
    if skip is not None or strategy is None or action is None or assign is None:
        return skip

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
