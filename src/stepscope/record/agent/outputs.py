"""What modules put out in the few steps after a value that is not finite, where its graph did not tell who made it.

The loss of a CUDA device is read when its graph is gone, and checkpoints hide what a graph has saved. A value that
stays or comes again is then found by listening to all modules, as monitors do: for each call the ends of its first
input, of its output and of the module's own parameters, read with one copy per device. The steps are marked as
monitored. Where code is compiled nobody listens, as a hook would make it compile anew.
"""

from __future__ import annotations

import sys
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

from stepscope.record.agent.magnitudes import Numbers, first_tensor, measurable, obstacle, quietly
from stepscope.record.agent.origins import Model, line_of
from stepscope.record.agent.patches import ModuleHook

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.segments import StepRow

NAME = "outputs"
STEPS = 3  # that are listened to, one after the other
CALLS_LIMIT = 2_000  # of modules in a step


class _Called(NamedTuple):
    """A call of a module; where the ends of each are among the numbers."""

    module: Any
    given: Sequence[int]
    own: Sequence[int]
    made: Sequence[int]


class Outputs:
    """Listens to modules in the steps after `arm`; `found` tells what came of it, once it is known."""

    def __init__(self, agent: Agent, found: Callable[[dict[str, Any]], None]) -> None:
        self._agent = agent
        self._found = found
        self._left = 0  # steps to listen to
        self._numbers = Numbers()
        self._calls: list[_Called] = []
        self._own_ns = 0
        self._hook = ModuleHook(agent.guard.wrap(NAME, self._called), after=True)
        self._tell_guarded = agent.guard.wrap(NAME, self._tell)
        agent.before_compile.append(self.disarm)
        agent.add_step_listener(self._at_step, NAME, lambda: self.is_armed)
        agent.add_finish_hook(self.disarm, NAME)

    @property
    def is_armed(self) -> bool:
        """Whether something may still be found."""
        return self._left > 0

    def arm(self) -> None:
        """Listen from the next step on."""
        if not self._agent.compile_used:
            self._left = STEPS

    def disarm(self) -> None:
        """Listen no more."""
        self._left = 0
        self._close()

    def _close(self) -> None:
        self._hook.remove()
        self._calls, self._numbers = [], Numbers()

    def _at_step(self, row: StepRow | None, _now_ns: int) -> None:
        agent, calls, numbers = self._agent, self._calls, self._numbers
        self._close()
        if calls and row is not None:
            began = agent.clock.now()
            with quietly(sys.modules["torch"]):
                numbers.read(agent.metrics, partial(self._tell_guarded, calls, row.step))
            own_ns = self._own_ns + agent.clock.now() - began
            agent.journal.write("monitor", began, own_ns, step=row.step, measured=[NAME], cost_ns=own_ns)
        if not self._left or agent.own_profiler_active or agent.user_profiler_active:
            return
        if row is not None and row.kind == "train":
            self._left -= 1
            if self._left:
                self._own_ns = 0
                self._hook.add()

    def _called(self, module: Any, inputs: Any, output: Any) -> None:
        torch: Any = sys.modules["torch"]
        if get_ident() != self._agent.training_thread or not module.training:
            return  # without gradients as well: a checkpoint's first pass has none
        if len(self._calls) >= CALLS_LIMIT or obstacle(torch, self._agent.device.in_use) is not None:
            return
        began = self._agent.clock.now()
        with quietly(torch):
            own = [tensor for one in module.parameters(recurse=False) if (tensor := measurable(one)) is not None]
            parts = ([first_tensor(inputs)], own, [first_tensor(output)])
            self._calls.append(_Called(module, *(self._ends(torch, part) for part in parts)))
        self._own_ns += self._agent.clock.now() - began

    def _ends(self, torch: Any, tensors: Sequence[Any]) -> list[int]:
        return [self._numbers.put(end) for tensor in tensors if tensor is not None for end in torch.aminmax(tensor)]

    def _tell(self, calls: list[_Called], step: int, values: list[float]) -> None:
        """The first module that made something that is not finite, or was given it."""

        def finite(places: Sequence[int]) -> bool:
            return all(values[place] - values[place] == 0.0 for place in places)

        at = next((at for at, call in enumerate(calls) if not finite(call.made)), None)
        if at is None or not self._left:
            return
        self._left = 0
        call = calls[at]
        inner = {id(child) for one in calls for child in one.module.modules() if child is not one.module}
        model = Model(list({id(one.module): one.module for one in calls if id(one.module) not in inner}.values()))
        name = model.by_module.get(id(call.module))
        with_own = [one for one in calls if one.own]
        lost = [one for one in with_own if not finite(one.own)]
        if lost and len(lost) == len(with_own) > 1:
            self._found({"reason": f"no parameter was finite any more in step {step}"})
            return
        found: dict[str, Any] = {"where": "forward", "module": name, "again": step}
        if lost:  # a backward pass came to the last one first
            name = model.by_module.get(id(lost[-1].module))
            found.update(where="parameters", module=name, not_finite=len(lost), looked_at=len(with_own))
        elif not finite(call.given) and at == 0:
            found.update(where="inputs")
        elif not finite(call.given):
            name = None
            found.update(module=model.parents.get(found["module"] or ""))
            found.update(behind=model.by_module.get(id(calls[at - 1].module)))
        self._found({**found, **line_of(model, name, None)})
