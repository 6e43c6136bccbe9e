"""Knobs of the optimizer: how it updates its parameters (optimizer.fused and optimizer.foreach), and zero_grad.

Both of the former are arguments of their constructors; a constructor that refuses what the knob asks for is called
again as the script has it. What the parameter groups hold when the first step is taken is what counts: a checkpoint
loaded in between brings its own settings along.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import ref

from stepscope.record.agent.frames import Place, user_place
from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.patches import bound, unless_compiling
from stepscope.record.agent.wrapper_importlib_bootstrap import Call

PENDING_LIMIT = 1_000  # optimizers made and not yet stepped that are looked after
_EXCLUDES = {"fused": "foreach", "foreach": "fused"}


class OptimizerArgument(KnobBase):
    """Changes one argument of every constructor in torch.optim that has it; subclasses call these."""

    missed = "the script made no optimizer"

    def install(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.argument = self.name.partition(".")[2]
        self._value = self.value == "true"
        self._pending: dict[int, tuple[ref[Any], Place | None]] = {}  # optimizers that have not taken a step
        self._refusals: dict[int, str] = {}
        for kind in list(vars(torch.optim).values()):
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
                self._change(kind)
        self._patches.look(torch.optim.Optimizer, "__init__", self._note)
        self._handles = [register_optimizer_step_pre_hook(unless_compiling(self.guarded(self._look)))]

    def at_end(self) -> None:
        for found, place in list(self._pending.values()):
            optimizer = found()
            if optimizer is not None:
                self._answer(optimizer, place)
        self._pending.clear()

    def _change(self, kind: Any) -> None:
        function = vars(kind).get("__init__")
        signature = None if function is None else inspect.signature(function)
        if signature is None or self.argument not in signature.parameters:
            return
        other = _EXCLUDES[self.argument]

        def change(*args: Any, **kwargs: Any) -> Call | None:
            call = bound(signature, args, kwargs)
            if call is None:
                return None
            call.arguments[self.argument] = self._value
            if self._value and call.arguments.get(other):
                call.arguments[other] = None
            return Call(call.args, call.kwargs, args[0])

        def unfold(*args: Any, **kwargs: Any) -> Call | None:
            call = bound(signature, args, kwargs)
            if call is None or not hasattr(call.arguments.get("params"), "__next__"):
                return None
            # a second call would find the iterator used up
            call.arguments["params"] = list(call.arguments["params"])
            return Call(call.args, call.kwargs)

        self._patches.change(kind, "__init__", change, None, self._refused)
        self._patches.change(kind, "__init__", unfold)

    def _refused(self, call: Call, error: BaseException) -> None:
        self._refusals[id(call.token)] = str(error).split("\n")[0][:200]

    def _note(self, optimizer: Any, *_args: Any, **_kwargs: Any) -> None:
        if len(self._pending) < PENDING_LIMIT:
            self._pending[id(optimizer)] = (ref(optimizer), user_place())

    def _look(self, optimizer: Any, *_step: Any) -> None:
        found = self._pending.pop(id(optimizer), None)
        if found is not None and found[0]() is optimizer:
            self._answer(optimizer, found[1])

    def _answer(self, optimizer: Any, place: Place | None) -> None:
        name, argument = type(optimizer).__name__, self.argument
        if argument not in optimizer.defaults:
            self.report(False, reason=f"{name} takes no {argument}", place=place)
            return
        values = {group.get(argument) for group in optimizer.param_groups}
        observed = f"{name} has {argument}={', '.join(sorted(map(str, values)))}"
        refusal = self._refusals.pop(id(optimizer), None)
        reason = "its parameter groups, or a checkpoint loaded, have their own"
        if refusal is not None:
            reason = f"{name} refuses it: {refusal}"
        applied = values == {self._value}
        self.report(applied, observed, None if applied else reason, place)


class SetToNone(KnobBase):
    """Changes the argument of `zero_grad` of torch's optimizers and modules, wherever the script calls it."""

    missed = "zero_grad was never called while there were gradients"

    def install(self) -> None:
        import torch

        self._value = self.value == "true"
        self._looks = 2  # places: of an optimizer, and of a module
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._patches.change(owner, "zero_grad", self._changed, self._look)

    def _changed(self, owner: Any, *args: Any, **kwargs: Any) -> Call:
        watched = None
        if self._looks > 0:
            groups = getattr(owner, "param_groups", None)
            of_groups = (one for group in groups or () for one in group["params"])
            parameters = of_groups if isinstance(groups, list) else owner.parameters()
            watched = next((one for one in parameters if one.grad is not None), None)
        given = args[0] if args else kwargs.get("set_to_none", True)
        call = (owner, *args[1:]), {**kwargs, "set_to_none": self._value}
        return Call(*call, None if watched is None else (watched, given))

    def _look(self, call: Call, _result: Any) -> None:
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
        self.report(applied, words, reason, user_place())
