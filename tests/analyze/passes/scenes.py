"""Steps with needless work written out by hand, on a device or without one. Times are µs."""

from __future__ import annotations

from typing import Any

from tests.analyze.views.module_traces import Nested

USER = "/home/user/project/train.py"
DOUBLE = {"types": '["double","double"]', "shapes": "[[64,64],[64,64]]"}


class Steps(Nested):
    """Steps of `length`, each with a training call of `Net_0` from 0 to 100 and its backward pass from 100 to 200."""

    def __init__(self, count: int = 4, length: float = 1000) -> None:
        super().__init__()
        self.length = length
        self.spans = [(number * length, length) for number in range(count)]
        self.mains: list[int] = []
        for number, (at, _) in enumerate(self.spans):
            main = self.add("python_function", f"{USER}(3): train", at, length)
            self.mains.append(main)
            call = self.module("Net_0", at, 100, main, python_module=0)
            forward = self.operator("aten::linear", at + 10, 80, call, sequence=number * 100)
            back = self.backward("AddmmBackward0", at + 100, 100, forward, main, sequence=number * 100)
            self.forward, self.back = forward, back

    def extra(self, step: int, start: float, length: float, nodes: int = 3, scored: bool = True) -> int:
        """A call of `Net_0` that no backward pass reads, made by a function of the user's; the row of the call."""
        at = self.spans[step][0] + start
        around = self.add("python_function", f"{USER}(30): accuracy", at, length + 20, parent=self.mains[step])
        call = self.module("Net_0", at, length, around, python_module=0)
        for number in range(nodes + 1 if nodes else 1):
            numbered: dict[str, Any] = {"sequence": step * 100 + 50 + number} if nodes else {}
            self.operator("aten::linear", at + number, 1, call, **numbered)
        if scored:
            self.operator("aten::item", at + length + 5, 5, around)
        return call

    def work(self, step: int, start: float, length: float, below: int, stream: int = 7) -> None:
        """A kernel launched below a slice."""
        self.launch("gemm", self.spans[step][0] + start, length, below)
        self.events[-1]["stream"] = stream
        self.events[-1]["track"] = f"0/{stream}"
        if self.links[-1]["launch"] is not None:
            self.events[self.links[-1]["launch"]]["start_ns"] = self.events[below]["start_ns"]
