"""The models of a script: the outermost modules that are called in training.

Found by a global forward pre-hook that is in place until the first training step is over, and no longer: it would slow
every module call down. Once torch.compile is used there is none at all, for Dynamo would compile anew without it; what
the script hands to torch.compile is a model then.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, Callable
from weakref import WeakKeyDictionary, ref

from stepscope.record.agent.compiling import is_compiling_check
from stepscope.record.agent.probes.patch import PatchSet

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent

NAME = "knob_roots"

_finders: WeakKeyDictionary[Agent, RootFinder] = WeakKeyDictionary()


def finder(agent: Agent) -> RootFinder:
    """The finder that all knobs of `agent` share, started on first use."""
    found = _finders.get(agent)
    if found is None:
        found = _finders[agent] = RootFinder(agent)
        found.start()
    return found


class RootFinder:
    """Listens until `close`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._patches = PatchSet()
        self._handle: Any = None
        self._inner: set[int] = set()  # ids of the roots and all that is inside them
        self._listeners: list[Callable[[Any], Any]] = []
        self._roots: list[ref[Any]] = []

    def listen(self, knob: str, listener: Callable[[Any], Any]) -> None:
        """Call `listener(module)` right before the first call of each root, on the switch of `knob`."""
        self._listeners.append(self._agent.guard.wrap("knob." + knob, listener))

    def start(self) -> None:
        """Put the hook in, and be told of torch.compile."""
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._is_grad_enabled = torch.is_grad_enabled
        self._module_type = torch.nn.Module
        is_compiling, called = is_compiling_check(), self._agent.guard.wrap(NAME, self._called)

        def before_forward(module: Any, _inputs: Any) -> None:
            if not is_compiling():
                called(module)

        pair = self._agent.guard.pair(NAME, self._before_compile)
        self._patches.install(lambda: self._patches.around(torch, "compile", pair))
        self._handle = register_module_forward_pre_hook(before_forward)

    def close(self) -> list[Any]:
        """End the search. Returns the models found that still exist, in order; may be asked again."""
        self._remove_hook()
        self._patches.remove()
        self._inner.clear()
        self._listeners.clear()
        return [module for module in (reference() for reference in self._roots) if module is not None]

    def _remove_hook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _called(self, module: Any) -> None:
        thread = self._agent.training_thread
        if id(module) in self._inner or (thread is not None and thread != get_ident()):
            return
        if module.training and self._is_grad_enabled():
            self._note(module)

    def _note(self, module: Any) -> None:
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._roots.append(ref(module))
            self._inner.update(map(id, module.modules()))
            for listener in self._listeners:
                listener(module)

    def _before_compile(self, target: Any = None, *_args: Any, **_kwargs: Any) -> None:
        self._remove_hook()
        module = target if isinstance(target, self._module_type) else getattr(target, "__self__", None)
        if isinstance(module, self._module_type) and id(module) not in self._inner:
            self._note(module)
