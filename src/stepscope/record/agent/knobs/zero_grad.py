"""zero_grad.set_to_none: whether `zero_grad` lets go of gradients or fills them with zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator

from stepscope.record.agent.frames import user_place
from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.knobs.calls import Arguments, Call, CallPatches
from stepscope.record.agent.knobs.values import TRUTHS

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.knobs.base import Report

_NAMES = ["self", "set_to_none"]


class SetToNone(KnobBase):
    """Changes the argument of `zero_grad` of torch's optimizers and modules, wherever the script calls it."""

    missed = "zero_grad was never called while there were gradients"

    def install(self, agent: Agent, value: str, report: Report) -> None:
        """`value`: true or false."""
        import torch

        self._value, self._report = TRUTHS[value], report
        self._looks = 2  # places: of an optimizer, and of a module
        self._patches = CallPatches(agent, self.name)
        self._patches.change(torch.optim.Optimizer, "zero_grad", self._changed, self._look)
        self._patches.change(torch.nn.Module, "zero_grad", self._changed, self._look)

    def uninstall(self) -> None:
        """Restore the originals."""
        patches = getattr(self, "_patches", None)
        if patches is not None:
            patches.remove()

    def _changed(self, *args: Any, **kwargs: Any) -> Call:
        arguments = Arguments(_NAMES, args, kwargs)
        watched = None
        if self._looks > 0:
            watched = next((one for one in _parameters(args[0]) if one.grad is not None), None)
        given = arguments.get("set_to_none", True)
        arguments.set("set_to_none", self._value)
        return arguments.call(None if watched is None else (watched, given))

    def _look(self, call: Call, _result: Any) -> None:
        """What became of a gradient that was there before the call."""
        if call.token is None:
            return
        self._looks -= 1
        parameter, given = call.token
        found = "None" if parameter.grad is None else "a tensor of zeros" if not parameter.grad.any() else "kept"
        words = f"gradients are {found} after zero_grad"
        if bool(given) == self._value:
            words += ", as the script's own call has it"
        applied = found == ("None" if self._value else "a tensor of zeros")
        reason = None if applied else "this zero_grad does not heed its argument"
        self._report(applied, words, reason, user_place())


def _parameters(owner: Any) -> Iterator[Any]:
    groups = getattr(owner, "param_groups", None)
    if isinstance(groups, list):
        for group in groups:
            yield from group["params"]
    else:
        yield from owner.parameters()
