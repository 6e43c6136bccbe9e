"""memory_format: the model's convolutions and their batches with channels last.

The weights of each model are converted once, before its first call in training. That is all there is to do: a
convolution whose weight has channels last converts its input and returns the same format, so no batch has to be
touched, and nothing stays in the model that a checkpoint would hold. What the first convolution returns tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.record.agent.compiling import is_compiling_check
from stepscope.record.agent.frames import Place, user_place
from stepscope.record.agent.knobs import roots
from stepscope.record.agent.knobs.base import KnobBase

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.knobs.base import Report


class MemoryFormat(KnobBase):
    """Converts every root it is told of."""

    missed = "no model was called in training"

    def install(self, agent: Agent, value: str, report: Report) -> None:
        """`value`: channels_last."""
        import torch

        self._torch: Any = torch
        self._agent, self._report = agent, report
        self._format = getattr(torch, value)
        self._weight: Any = None  # one that was converted
        self._place: Place | None = None
        self._output: tuple[str, bool] | None = None  # class of the first convolution seen, and whether it heeds it
        self._handle: Any = None
        self._is_compiling = is_compiling_check()
        self._finder = roots.finder(agent)
        self._finder.listen(self.name, self._convert)

    def uninstall(self) -> None:
        """End the search. Converted weights stay as they are: their values are the same."""
        if hasattr(self, "_finder"):
            self._finder.close()
            self._remove_hook()
            self._weight = None

    def at_first_step(self) -> None:
        """Read a weight, and what was seen of the first convolution."""
        found = self._finder.close()
        self._remove_hook()
        weight, self._weight = self._weight, None
        if weight is None:
            if found:
                self._report(False, reason="the model has no weights of four dimensions", place=self._place)
            return
        applied = bool(weight.is_contiguous(memory_format=self._format))
        words = f"a weight of {tuple(weight.shape)} has its channels {'last' if applied else 'not last'}"
        if self._output is not None:
            kind, heeded = self._output
            words += f", and {kind} returns {'the same' if heeded else 'another format'}"
            applied = applied and heeded
        self._report(applied, words, None if applied else "it does not stay so", self._place)

    def _convert(self, module: Any) -> None:
        if self._place is None:
            self._place = user_place()
        weights = [one for one in module.parameters() if one.dim() == 4]
        if not weights:
            return
        module.to(memory_format=self._format)
        # Of one by one, or of one channel, both formats are the same.
        telling = [one for one in weights if one.shape[1] > 1 and one.shape[2] * one.shape[3] > 1]
        if self._weight is None:
            self._weight = (telling or weights)[0]
            if telling and not self._agent.compile_used:
                self._look_at_outputs()

    def _look_at_outputs(self) -> None:
        from torch.nn.modules.module import register_module_forward_hook

        convolution, is_compiling = self._torch.nn.Conv2d, self._is_compiling
        look = self._agent.guard.wrap("knob." + self.name, self._look)

        def after_forward(module: Any, _inputs: Any, output: Any) -> None:
            if isinstance(module, convolution) and not is_compiling():
                look(module, output)

        self._handle = register_module_forward_hook(after_forward)

    def _look(self, module: Any, output: Any) -> None:
        if getattr(output, "dim", int)() == 4 and output.shape[1] > 1 and output.shape[2] * output.shape[3] > 1:
            self._output = (type(module).__name__, bool(output.is_contiguous(memory_format=self._format)))
            self._remove_hook()

    def _remove_hook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
