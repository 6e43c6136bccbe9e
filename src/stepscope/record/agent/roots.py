"""The models of a script: the outermost modules that are called in training.

They are found by a global hook that is in place until the first training step is over, and no longer: it would slow
every module call down. Once torch.compile is used there is none at all, for Dynamo would compile anew without it; what
the script hands to torch.compile is a model then.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, Callable, Iterator
from weakref import ref

from stepscope.record.agent.patches import ModuleHook, Patches

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent

NAME = "knob_roots"


class RootFinder:
    """Listens until `close`. `owner` is a knob, which all knobs share it with, or another part of `owner.agent`."""

    def __init__(self, owner: Any) -> None:
        import torch

        agent: Agent = owner.agent
        self._agent = agent
        self._torch: Any = torch
        self._inner: set[int] = set()  # ids of the roots and all that is inside them
        self._listeners: list[Callable[[Any], Any]] = []
        self._roots: list[ref[Any]] = []
        self._patches = Patches(agent.guard, NAME)
        self._patches.look(torch, "compile", self._before_compile)
        self._hook = ModuleHook(agent.guard.wrap(NAME, self._called))
        self._hook.add()

    def listen(self, listener: Callable[[Any], Any]) -> None:
        """Call `listener(module)`, which must not raise, right before the first call of each root."""
        self._listeners.append(listener)

    def close(self) -> list[Any]:
        """End the search. Returns the models found that still exist, in order; may be asked again."""
        self._hook.remove()
        self._patches.remove()
        self._inner.clear()
        self._listeners.clear()
        return [module for module in (reference() for reference in self._roots) if module is not None]

    def _called(self, module: Any) -> None:
        thread = self._agent.training_thread
        if id(module) in self._inner or (thread is not None and thread != get_ident()):
            return
        if module.training and self._torch.is_grad_enabled():
            self._note(module)

    def _note(self, module: Any) -> None:
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._roots.append(ref(module))
            self._inner.update(map(id, module.modules()))
            for listener in self._listeners:
                listener(module)

    def _before_compile(self, target: Any = None, *_args: Any, **_kwargs: Any) -> None:
        self._hook.remove()
        module = module_of(self._torch, target)
        if module is not None and id(module) not in self._inner:
            self._note(module)


def module_of(torch: Any, target: Any) -> Any:
    """The module that is handed to torch.compile, or whose method is; None where it is a function."""
    module = target if isinstance(target, torch.nn.Module) else getattr(target, "__self__", None)
    return module if isinstance(module, torch.nn.Module) else None


def named(roots: list[Any], what: str) -> Iterator[tuple[str, Any]]:
    """Parameters or modules of all roots; of several, the name of a root's class goes before. Names are told once."""
    seen: set[str] = set()
    for root in roots:
        for name, one in getattr(root, what)():
            parts = ([type(root).__name__] if len(roots) > 1 or not name else []) + ([name] if name else [])
            full = unique = ".".join(parts)
            number = 1
            while unique in seen:
                number += 1
                unique = f"{full}~{number}"
            seen.add(unique)
            yield unique, one
