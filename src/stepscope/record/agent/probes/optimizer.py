"""Optimizer steps, by PyTorch's own global hooks: they reach every optimizer, whoever calls it.

Under torch.compile both hooks return at once, so that a compiled optimizer step has the same graphs as without us.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.compiling import is_dynamo_compiling_check
from stepscope.record.agent.probes.patch import PatchSet
from stepscope.record.agent.probes.wrapper_importlib_bootstrap import make_wrapper

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class OptimizerProbe:
    """Tells the step cutter where an optimizer step begins and ends."""

    name = "optimizer"

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._closures = PatchSet()  # nothing in torch is replaced: it switches the wrappers of closures

    def install(self, agent: Agent) -> None:
        """Register the global pre and post hooks."""
        from torch.optim import optimizer as module

        steps, source, offset_ns = agent.steps, agent.clock.source, agent.clock.epoch_offset_ns
        faults = agent.page_faults
        is_compiling = is_dynamo_compiling_check()

        def start(optimizer: Any) -> None:
            if get_ident() == agent.training_thread or agent.accepts(strong=True):
                agent.optimizer_events += 1
                steps.optimizer_start(id(optimizer), source() + offset_ns)

        def end(optimizer: Any, _result: Any, _error: BaseException | None) -> None:
            if get_ident() == agent.training_thread or agent.accepts(strong=True):
                now = source() + offset_ns
                faults.optimizer_ended(now)
                steps.optimizer_end(id(optimizer), now)

        pair = agent.guard.pair(self.name, start, end)
        switch, before, after = pair.switch, pair.before, pair.after
        self._time_closures(agent)

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
            if is_compiling() or switch.off:
                return None
            try:
                before(optimizer)
                return self._with_closure(args, kwargs) if kwargs or len(args) > 1 else None
            except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                pair.trip(defect)
            return None

        def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not is_compiling() and not switch.off:
                try:
                    after(optimizer, None, None)
                except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                    pair.trip(defect)

        self._handles = [
            module.register_optimizer_step_pre_hook(before_step),
            module.register_optimizer_step_post_hook(after_step),
        ]

    def _time_closures(self, agent: Agent) -> None:
        steps, clock = agent.steps, agent.clock

        def start(*_args: Any, **_kwargs: Any) -> None:
            if agent.accepts(strong=True):
                steps.closure_start(clock.now())

        def end(_token: None, _result: Any, _error: BaseException | None) -> None:
            if agent.accepts(strong=True):
                steps.closure_end(clock.now())

        self._in_closure = agent.guard.pair(self.name, start, end)
        self._closures.enabled = True

    def _with_closure(self, args: Any, kwargs: Any) -> Any:
        """The arguments with the closure timed: forward and backward inside it are none of the optimizer's time."""
        if len(args) > 1 and callable(args[1]):
            return (args[0], make_wrapper(self._closures, args[1], self._in_closure), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, dict(kwargs, closure=make_wrapper(self._closures, kwargs["closure"], self._in_closure))
        return None

    def uninstall(self) -> None:
        """Remove both hooks."""
        self._closures.enabled = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
