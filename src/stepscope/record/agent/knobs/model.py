"""Knobs of the model, torch.compile and the memory format of convolutions, and of its optimizer.

What the models of a script are, `RootFinder` finds out. `optimizer.fused` and `optimizer.foreach` are arguments of
constructors; a constructor that refuses what the knob asks for is called again as the script has it. What the parameter
groups hold when the first step is taken is what counts: a checkpoint loaded in between brings its own settings along.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any
from weakref import ref

from stepscope.record.agent.frames import Place, user_place
from stepscope.record.agent.knobs import COMPILE_MODES
from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.models import RootFinder
from stepscope.record.agent.patches import ModuleHook, Patches, bound, skip_own_code, unless_compiling
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.wrapper_importlib_bootstrap import Call

STEPS_TO_SEE = 5  # after them a compiled frame must have run


class _Plan:
    """What the three knobs of an agent want together, and what comes of it."""

    def __init__(self, knob: KnobBase) -> None:
        import torch

        self._torch: Any = torch
        self._knobs: list[KnobBase] = []
        self._eager = False
        self._compile = False  # the models, where the script compiles nothing
        self._arguments: dict[str, Any] = {}  # of torch.compile
        self._ours = False  # a call of torch.compile is ours
        self._script_place: Place | None = None
        self._script_calls = 0
        self._refusal: str | None = None
        self._model_names: list[str] = []
        self._rows = 0
        self._set_up = False
        self._model_place: Place | None = None
        self._finder: RootFinder = knob.shared(RootFinder)
        self._finder.listen(knob.guarded(self._note_model))
        self._patches = Patches(knob.agent.guard, knob.probe)
        self._patches.change(torch, "compile", self._changed, None, self._refused)
        knob.agent.add_boundary_hook(self._at_boundary, knob.probe)

    def want(self, knob: KnobBase) -> None:
        self._knobs.append(knob)
        if knob.name == "compile.dynamic":
            self._arguments["dynamic"] = knob.value == "true"
            return
        self._eager = self._eager or knob.value == "false"
        self._compile = self._compile or knob.value != "false"
        if knob.value in COMPILE_MODES:
            self._arguments["mode"] = knob.value

    def remove(self) -> None:
        """Restore torch.compile."""
        self._finder.close()
        self._patches.remove()
        self._knobs.clear()

    def _changed(self, *args: Any, **kwargs: Any) -> Call | None:
        if self._ours:
            return None
        self._script_calls += 1
        self._script_place = self._script_place or user_place()
        if self._eager:  # all compiled functions run as they are written
            set_stance = getattr(self._torch.compiler, "set_stance", None)
            if set_stance is None:
                self._refusal = "this torch cannot turn torch.compile off from outside (torch 2.6 and later can)"
            elif self._script_calls == 1:
                set_stance("force_eager")
            return None
        if kwargs.get("backend") not in (None, "inductor") or kwargs.get("options") or kwargs.get("disable"):
            self._refusal = "the script's torch.compile has a backend or options of its own, or is disabled"
            return None
        return Call(args, dict(kwargs, **self._arguments)) if self._arguments else None

    def _refused(self, _call: Call, error: BaseException) -> None:
        self._refusal = f"torch.compile refuses it: {str(error)[:200]}"

    def _note_model(self, _module: Any) -> None:
        self._model_place = self._model_place or user_place()

    def _first_step_over(self) -> None:
        """The script is set up: compile the models, unless it compiles something itself."""
        self._set_up = True
        models = self._finder.close()
        if self._eager and not self._script_calls:
            self._tell(False, reason="the script compiles nothing")
        elif self._script_calls == 0 and self._compile:
            self._compile_models(models)
        elif self._script_calls == 0:
            self._tell(False, reason="the script compiles nothing, and no compile=true is given")
        elif self._refusal is not None:
            self._tell(False, reason=self._refusal, place=self._script_place)
        elif not self._eager and not self._arguments and any(knob.name == "compile" for knob in self._knobs):
            self._tell(False, reason="the script compiles its model already", place=self._script_place)

    def _compile_models(self, models: list[Any]) -> None:
        if not models:
            self._tell(False, reason="no model was called in training")
            return
        if not hasattr(models[0], "compile"):
            self._tell(False, reason="this torch cannot compile a module in place (torch 2.2 and later can)")
            return
        models = [model for model in models if not isinstance(model, self._torch.jit.ScriptModule)]
        if not models:
            self._tell(False, reason="the model is a TorchScript module")
            return
        self._ours = True
        try:
            for model in models:
                model.compile(**self._arguments)
                rules = sys.modules.get("torch._dynamo.trace_rules")
                wrap = getattr(sys.modules.get("torch._dynamo.external_utils"), "wrap_inline", None)
                # of a class that is torch's own, which Dynamo would leave alone when it comes first, as torch.compile
                # does it for such: with a function around it
                if rules is not None and wrap is not None and rules.check(model.forward):
                    model._compiled_call_impl = self._torch.compile(wrap(model._call_impl), **self._arguments)
                self._model_names.append(type(model).__name__)
        finally:
            self._ours = False
        sys.modules["torch._dynamo"].config.suppress_errors = True  # a compiler that fails must not end the training
        skip_own_code()

    def _at_boundary(self, row: StepRow | None, _now_ns: int) -> None:
        if row is None or row.kind != "train" or self._done():
            return
        if not self._set_up:
            self._first_step_over()
            return
        self._rows += 1
        if self._eager or _frames("ok") > 0 or self._rows > STEPS_TO_SEE:
            self.look()

    def look(self) -> None:
        """Say what Dynamo has done."""
        if self._done() or not self._set_up:
            return
        compiled, seen = _frames("ok"), _frames("total")
        words = f"{compiled} of {seen} frames compiled"
        if self._eager:
            words = words if compiled else "what is handed to torch.compile runs as it is written"
            self._tell(not compiled, words, "Dynamo compiles on" if compiled else None, self._script_place)
            return
        if self._model_names:
            words = f"{', '.join(self._model_names[:4])} compiled in place: {words}"
        words += "".join(f", {name} {self._arguments[name]}" for name in sorted(self._arguments))
        reason = None if compiled else "Dynamo compiled no frame"
        self._tell(compiled > 0, words, reason, self._script_place or self._model_place)

    def _done(self) -> bool:
        return all(knob.reported for knob in self._knobs)

    def _tell(self, *answer: Any, **named: Any) -> None:
        for knob in self._knobs:
            if not knob.reported:
                knob.report(*answer, **named)


class Compile(KnobBase):
    """compile (true, a mode, or false), compile.mode and compile.dynamic: one plan of all that are given.

    A model that was compiled stays so when the knob is taken out.
    """

    family = "compile"
    missed = "no training step was completed after it"

    def install(self) -> None:
        self.shared(_Plan).want(self)

    def uninstall(self) -> None:
        plan = self.existing(_Plan)
        if plan is not None:
            plan.remove()

    def at_end(self) -> None:
        self.shared(_Plan).look()


def _frames(which: str) -> int:
    """Dynamo's own count of the frames it met ("total") or compiled ("ok")."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return int(counters["frames"][which]) if counters is not None else 0


class MemoryFormat(KnobBase):
    """Converts every root it is told of; weights stay so when it is taken out, their values are the same."""

    missed = "no model was called in training"

    def __init__(self, *known: Any) -> None:
        super().__init__(*known)
        self._outputs = ModuleHook(self.guarded(self._look), after=True)
        self._weight: Any = None  # one that was converted

    def install(self) -> None:
        import torch

        self._convolution: Any = torch.nn.Conv2d
        self._format = getattr(torch, self.value)
        self._place: Place | None = None
        self._output: tuple[str, bool] | None = None  # class of the first convolution seen, and whether it heeds it
        self.shared(RootFinder).listen(self.guarded(self._convert))

    def uninstall(self) -> None:
        finder = self.existing(RootFinder)
        if finder is not None:
            finder.close()
        self._outputs.remove()
        self._weight = None

    def at_first_step(self) -> None:
        """Read a weight, and what was seen of the first convolution."""
        found = self.shared(RootFinder).close()
        self._outputs.remove()
        weight, self._weight = self._weight, None
        if weight is None:
            if found:
                self.report(False, reason="the model has no weights of four dimensions", place=self._place)
            return
        applied = bool(weight.is_contiguous(memory_format=self._format))
        words = f"a weight of {tuple(weight.shape)} has its channels {'last' if applied else 'not last'}"
        if self._output is not None:
            kind, heeded = self._output
            words += f", and {kind} returns {'the same' if heeded else 'another format'}"
            applied = applied and heeded
        self.report(applied, words, None if applied else "it does not stay so", self._place)

    def _convert(self, module: Any) -> None:
        self._place = self._place or user_place()
        weights = [one for one in module.parameters() if one.dim() == 4]
        if not weights:
            return
        module.to(memory_format=self._format)
        # Of one by one, or of one channel, both formats are the same.
        telling = [one for one in weights if one.shape[1] > 1 and one.shape[2] * one.shape[3] > 1]
        if self._weight is None:
            self._weight = (telling or weights)[0]
            if telling and not self.agent.compile_used:
                self._outputs.add()

    def _look(self, module: Any, _inputs: Any, output: Any) -> None:
        four = isinstance(module, self._convolution) and getattr(output, "dim", int)() == 4
        if four and output.shape[1] > 1 and output.shape[2] * output.shape[3] > 1:
            self._output = (type(module).__name__, bool(output.is_contiguous(memory_format=self._format)))
            self._outputs.remove()


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
