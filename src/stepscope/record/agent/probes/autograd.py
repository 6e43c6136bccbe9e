"""Backward passes: `Tensor.backward` and `torch.autograd.backward`, nested calls counted once.

In a script without an optimizer they are all there is to cut steps by. It is then told which line calls them, and
whether gradients were cleared since the last pass: the parameters were changed in between. Where not even `backward` is
called, `torch.autograd.grad` (and `torch.func`, which goes there) stands for it.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.frames import user_place
from stepscope.record.agent.probes.patch import PatchSet

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.guard import After


# Nodes of a graph that are looked at for a parameter; it stands behind every branch, most of them short.
NODES_LIMIT = 10_000
VALUES = 8  # of a gradient on the CPU that was neither replaced nor written to in a way that torch counts


class Gradients:
    """Whether one parameter behind a root was given new gradients since the last backward pass from there."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any]] = {}  # root -> (weak reference to the parameter, its gradient's state)
        self._running: tuple[int, Any] | None = None

    def before(self, root: int, tensors: Any) -> bool | None:
        """Whether they were cleared; None where that cannot be told."""
        known = self._seen.get(root)
        parameter = known[0]() if known is not None else _parameter(tensors)
        self._running = None if parameter is None else (root, weakref.ref(parameter))
        return None if known is None or parameter is None else _state(parameter) != known[1]

    def after(self) -> None:
        """The backward pass has ended."""
        if self._running is not None:
            root, reference = self._running
            parameter = reference()
            if parameter is not None:
                self._seen[root] = (reference, _state(parameter))


def _state(parameter: Any) -> Any:
    gradient = parameter.grad
    if gradient is None:
        return None
    values = None
    if gradient.device.type == "cpu" and str(gradient.layout) == "torch.strided":
        row = gradient.detach()
        while row.dim() > 1 and len(row):
            row = row[0]
        values = (row[:VALUES] if row.dim() else row).tolist()
    return id(gradient), gradient._version, parameter._version, values


def _parameter(tensors: Any) -> Any:
    """A leaf that a backward pass over `tensors` gives a gradient to."""
    first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
    waiting: list[Any] = [getattr(first, "grad_fn", None)]
    seen: set[Any] = set()
    while waiting and len(seen) < NODES_LIMIT:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            return variable
        waiting.extend(following for following, _ in node.next_functions)
    return None


class AutogradProbe:
    """Tells the step cutter where backward begins and ends."""

    name = "autograd"

    def __init__(self) -> None:
        self._patches = PatchSet()
        self._functional = PatchSet()

    def install(self, agent: Agent) -> None:
        """Wrap `torch.autograd.backward`, which `Tensor.backward` calls as well."""
        steps, source, offset_ns = agent.steps, agent.clock.source, agent.clock.epoch_offset_ns
        gradients = Gradients()

        # Closures: what they need is at hand, where every attribute would be looked up with cold caches.
        def before(*args: Any, **kwargs: Any) -> bool:
            if get_ident() != agent.training_thread and not agent.accepts(strong=True):
                return False
            now = source() + offset_ns
            if agent.framework_steps is not None:
                agent.framework_steps.sample(now)
            if self._functional.enabled:
                self.without_functional()
            if steps.wants_roots:
                root = hash(user_place(2)) or 1
                cleared = gradients.before(root, args[0] if args else kwargs.get("tensors"))
                steps.backward_start(source() + offset_ns, root, cleared)
            else:
                steps.backward_start(now)
            return True

        def after(begun: bool | None, _result: Any, _error: BaseException | None) -> None:
            if begun:
                steps.backward_end(source() + offset_ns)
                if steps.wants_roots:
                    gradients.after()

        pair = agent.guard.pair(self.name, before, after)

        def make() -> None:
            import torch

            self._patches.around(torch.autograd, "backward", pair)

        self._patches.install(make)
        if not agent.compile_used and not steps.optimizers_exist:
            self._install_functional(agent, after)

    def _install_functional(self, agent: Agent, after: After) -> None:
        def before(*_args: Any, **_kwargs: Any) -> bool:
            if agent.steps.optimizers_exist:
                self.without_functional()
                return False
            if get_ident() != agent.training_thread and not agent.accepts(strong=True):
                return False
            agent.steps.backward_start(agent.clock.now(), (hash(user_place(2)) or 1) if agent.steps.wants_roots else 0)
            return True

        def make() -> None:
            import torch

            self._functional.around(torch.autograd, "grad", agent.guard.pair(self.name, before, after))

        self._functional.install(make)

    def without_functional(self) -> None:
        """Leave `torch.autograd.grad` alone: the script trains otherwise, or compiles what Dynamo knows by identity."""
        self._functional.remove()

    def uninstall(self) -> None:
        """Restore the originals."""
        self._functional.remove()
        self._patches.remove()
