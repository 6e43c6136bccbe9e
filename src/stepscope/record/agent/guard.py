"""The one guard around everything stepscope does inside the user's process.

A hook that raises is reported once and switched off; the training never notices. Only `Exception` is caught: a
KeyboardInterrupt or SystemExit that happens to arrive inside a hook belongs to the user and passes through, and so does
what a signal's handler of the script raises there, as a time limit does, or torch where a loader's worker died, and
what another thread has raised there. Fault injection lives here too, so that tests exercise exactly the path a real
defect would take.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, TypeVar

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")

R = TypeVar("R")

Before = Callable[..., Any]  # called with the arguments of the call; its result, if any, is handed to After
After = Callable[[Any, Any, Optional[BaseException]], Any]  # (what before returned, result, exception)


class InjectedFault(Exception):
    """Raised inside the guard instead of running a hook that the configuration names as faulty."""


class Switch:
    """Of one probe: off once a hook of it has raised."""

    __slots__ = ("off", "trip")

    def __init__(self, probe: str, report: Callable[[str, str], None]) -> None:
        self.off = False

        def trip(error: Exception) -> None:
            if _is_of_a_signal(error) or _is_from_outside(error):
                raise error
            self.off = True
            try:
                report(probe, f"{type(error).__name__}: {error}"[:500])
            except Exception:  # noqa: BLE001 - reporting a failure must not become one
                return

        self.trip = trip


class Pair(NamedTuple):
    """What a probe does before and after a call, with the probe's switch.

    The wrapper around the call is the guard itself: it asks `switch.off`, calls `before` and `after` directly and hands
    what they raise to `switch.trip`. A layer less than a wrapped hook, for calls made several times a step.
    """

    switch: Switch
    before: Before
    after: After


class HookList:
    """Guarded hooks that are called together: one failing does not keep the others from being called."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._pairs: list[Pair] = []

    def add(self, probe: str, hook: Callable[..., Any], first: bool = False) -> None:
        """Call `hook` from now on, before (`first`) or after the others."""
        self._pairs.insert(0 if first else len(self._pairs), self._guard.pair(probe, hook))

    def call(self, *args: Any) -> None:
        """Call all hooks that are not switched off."""
        for pair in self._pairs:
            if not pair.switch.off:
                try:
                    pair.before(*args)
                except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                    pair.switch.trip(defect)


class Guard:
    """Wraps hooks so that they never raise. `report(probe, error)` is called once per probe that failed."""

    def __init__(self, report: Callable[[str, str], None], faults: str | None = None) -> None:
        self._report = report
        self._faults: frozenset[str] = frozenset((faults or "").replace(",", " ").split())
        self._switches: dict[str, Switch] = {}
        self._stopped = False

    def wrap(self, probe: str, hook: Callable[P, R], inject: bool = True) -> Callable[P, R | None]:
        """`hook`, guarded: returns None when it raises and does nothing from then on.

        All hooks of one `probe` share a switch. `inject=False` exempts it from fault injection.
        """
        switch = self._switch(probe)
        run: Callable[..., Any] = _raise_injected if inject and self._is_faulty(probe) else hook

        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if switch.off:
                return None
            try:
                return run(*args, **kwargs)  # type: ignore[no-any-return]
            except Exception as error:  # noqa: BLE001 - the one guard: nothing of ours may reach the training
                switch.trip(error)
                return None

        return guarded

    def pair(self, probe: str, before: Before, after: After | None = None) -> Pair:
        """`before` and `after` for a wrapper that guards them (see `Pair`), on the switch of `probe`."""
        if self._is_faulty(probe):
            before = after = _raise_injected
        return Pair(self._switch(probe), before, after or (lambda _token, _result, _error: None))

    def is_off(self, probe: str) -> bool:
        """Whether `probe` has failed or the whole guard was stopped."""
        return self._stopped or (probe in self._switches and self._switches[probe].off)

    def stop(self) -> None:
        """Turn every guarded hook, present and future, into a no-op (used in forked children)."""
        self._stopped = True
        for switch in self._switches.values():
            switch.off = True

    def _switch(self, probe: str) -> Switch:
        switch = self._switches.get(probe)
        if switch is None:
            switch = self._switches[probe] = Switch(probe, self._report)
        switch.off = switch.off or self._stopped
        return switch

    def _is_faulty(self, probe: str) -> bool:
        return bool(self._faults) and ("*" in self._faults or probe in self._faults)


def _is_of_a_signal(error: Exception) -> bool:
    """Whether the handler of a signal raised it: a function that was handed the frame which it then returned to."""
    traceback = error.__traceback__ and error.__traceback__.tb_next  # beyond the wrapper that caught it
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        names = code.co_varnames[: count + bool(code.co_flags & inspect.CO_VARARGS)]  # behind them: own variables
        given = [frame.f_locals.get(name) for name in names]
        given += [part for parts in given if parts.__class__ is tuple for part in parts]
        if frame.f_back is not None and any(one is frame.f_back for one in given):
            return True
    return False


def _raise_injected(*_args: Any, **_kwargs: Any) -> Any:
    raise InjectedFault("fault injected for a test")


_FOLDER = os.path.dirname(os.path.abspath(__file__))
_WITHOUT_ARGUMENTS = (AssertionError, MemoryError, NotImplementedError, StopIteration)
_NOT_THE_SCRIPTS = {"builtins", "torch", "numpy", "stepscope", *getattr(sys, "stdlib_module_names", ())}


def _is_from_outside(error: Exception) -> bool:
    """Whether another thread had it raised here, as time limits do (`PyThreadState_SetAsyncExc`).

    It is made without arguments, or of a class in Python that nothing of ours raises, and it strikes a line of our own.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or not traceback.tb_frame.f_code.co_filename.startswith(_FOLDER):
        return False
    kind = type(error)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ".py"  # what code of C raises is of a library
    is_known = not hasattr(sys, "stdlib_module_names") or kind.__module__.partition(".")[0] in _NOT_THE_SCRIPTS
    return (file.endswith(".py") and not is_known) or (not error.args and kind not in _WITHOUT_ARGUMENTS)
