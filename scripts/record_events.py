"""Records what a training script tells the step cutter, for a golden test: `record_events.py OUT SCRIPT [ARGUMENT...]`.

Run it with a Python that has what the script needs, and with `src` on its path. OUT gets one JSON document: the events
with their arguments, identities counted from 1 and times in microseconds from the first one, and the rows cut from
them. `tests/record/agent/test_recorded_loops.py` cuts them again.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

EVENTS = (
    *("loader_created", "loader_length", "fetch_start", "fetch_end", "fetch_stop", "iterator_dead"),
    *("backward_start", "backward_end", "optimizer_created", "optimizer_start", "optimizer_end", "optimizer_skipped"),
    *("closure_start", "closure_end", "module_forward", "evaluation_start", "evaluation_end", "interrupt", "finish"),
)
NAMED = frozenset(["optimizer_start", "optimizer_end", "optimizer_skipped", "module_forward", "backward_start"])
LIMIT = 1_500  # events: enough for a few epochs of a small loop


class Log:
    """Writes down calls of a step cutter's methods, which do what they did."""

    def __init__(self, steps: Any) -> None:
        self.events: list[list[Any]] = []
        self._names: dict[int, int] = {}
        self._first_ns: int | None = None
        for name in EVENTS:
            setattr(steps, name, self._logged(name, getattr(steps, name)))

    def _logged(self, name: str, original: Any) -> Any:
        def logged(*arguments: Any) -> Any:
            if len(self.events) < LIMIT:
                self.events.append([name, *(self._short(name, value) for value in arguments)])
            return original(*arguments)

        return logged

    def _short(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if value > 10**17 and (name not in NAMED or abs(value - (self._first_ns or value)) < 10**13):  # a time
            self._first_ns = value if self._first_ns is None else self._first_ns
            return (value - self._first_ns) // 1_000
        return self._names.setdefault(value, len(self._names) + 1) if name in NAMED and value else value


def main() -> None:
    out, script, *arguments = sys.argv[1:]
    import torch  # noqa: F401 - the agent hooks what is loaded

    from stepscope.record.agent import core
    from stepscope.record.agent.config import Config, WindowConfig

    with tempfile.TemporaryDirectory() as folder:
        agent = core.start(Config(run=folder, host_dir=folder, window=WindowConfig(mode="off")))
        assert agent is not None
        log = Log(agent.steps)
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
        agent.finish("done")
    Path(out).write_text("[\n" + ",\n".join(json.dumps(event) for event in log.events) + "\n]\n")
    print(len(log.events), "events")


if __name__ == "__main__":
    main()
