"""Traces of modules written out by hand, and the base that views are made from."""

from __future__ import annotations

from typing import Any

from stepscope.analyze.context import Context
from stepscope.engine.spans import Base
from stepscope.tables.schema import Tables
from tests.analyze.traces import BACK_THREAD, Slices, tables
from tests.builders import T0

US = 1000


class Nested(Slices):
    """Slices that lie in each other. Times are µs; a slice begins where its parent names it."""

    def module(self, name: str, start_us: float, duration_us: float, parent: int | None = None, **more: Any) -> int:
        """A call of a module; `name` is that of the instance: "Conv2d_0"."""
        return self.add("python_function", f"nn.Module: {name}", start_us, duration_us, parent=parent, **more)

    def operator(self, name: str, start_us: float, duration_us: float, parent: int | None = None, **more: Any) -> int:
        return self.add("cpu_op", name, start_us, duration_us, parent=parent, **more)

    def backward(
        self,
        name: str,
        start_us: float,
        duration_us: float,
        forward: int | None,
        parent: int | None = None,
        **more: Any,
    ) -> int:
        """An operator of the backward pass, whose forward operator is `forward`."""
        whole = {"forward": forward, "forward_thread": BACK_THREAD, **more}
        return self.operator(f"autograd::engine::evaluate_function: {name}", start_us, duration_us, parent, **whole)

    def annotation(self, name: str, start_us: float, duration_us: float, parent: int | None = None) -> int:
        return self.add("user_annotation", name, start_us, duration_us, parent=parent)

    def launch(self, kernel: str, start_us: float, duration_us: float, below: int | None) -> int:
        """A kernel whose launch takes no time; `below` None: launched before the recording."""
        number = self.kernel(start_us, duration_us, kernel, below=below)
        if below is not None:
            operator = below if self.events[below]["category"] == "cpu_op" else None
            self.events[self.links[-1]["launch"]]["duration_ns"] = 0
            self.links[-1]["operator"] = operator
        return number

    def tables(self, steps_us: list[tuple[float, float]] | None = None) -> Tables:
        """The tables, with self times; steps are (start, duration)."""
        for row in self.events:
            row["self_ns"] = row["duration_ns"]
        for row in self.events:
            if row.get("parent") is not None:
                self.events[row["parent"]]["self_ns"] -= row["duration_ns"]
        rows = [
            {"step": number, "start_ns": T0 + round(start * US), "wall_ns": round(length * US), "in_window": True}
            for number, (start, length) in enumerate(steps_us or [])
        ]
        return tables(self, steps=rows)


def base_of(made: Tables, sources: dict[str, str] | None = None) -> Base:
    """The base of the views, as the analysis makes it; `sources` are texts by file."""
    return Context(made, sources or {}).base
