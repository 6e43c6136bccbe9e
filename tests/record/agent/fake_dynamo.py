"""A Dynamo of a few lines: what the probe touches of it, without torch."""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stepscope.record.agent import frames
from stepscope.record.agent.probes.compiles import LOGGER


class FakeDynamo:
    """`compile_frame` does what Dynamo does then. Older ones have no hook for contexts, the oldest no metrics."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hooked: bool = True, metrics: bool = True) -> None:
        package = ModuleType("torch._dynamo")
        self.utils: Any = ModuleType("torch._dynamo.utils")
        self.utils.counters = {"frames": {"total": 0}}
        self.utils.graph_break_dup_warning_checker = SimpleNamespace(set=OrderedDict())
        if metrics:
            self.utils._compilation_metrics = deque(maxlen=64)
            self.utils.set_compilation_metrics_limit = self._set_limit
        if hooked:
            self.reset_hooks()
            self.utils.get_hook_for_recompile_user_context = lambda: self.utils.hooks
            self.utils.register_hook_for_recompile_user_context = self._register
        self._modules = {"torch._dynamo": package, "torch._dynamo.utils": self.utils}
        self._monkeypatch = monkeypatch
        for name in self._modules:
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(frames.user_files, __file__, False)  # torch is no code of the user's
        logger = logging.getLogger(LOGGER)
        monkeypatch.setattr(logger, "filters", [])
        monkeypatch.setattr(logger, "level", logging.NOTSET)

    def load(self) -> None:
        """What the script's first call of torch.compile does."""
        for name, module in self._modules.items():
            self._monkeypatch.setitem(sys.modules, name, module)

    def reset_hooks(self) -> None:
        self.utils.hooks = None

    def compile_frame(self, graph: str, function: str = "forward", break_at: str | None = None, **fields: Any) -> None:
        contexts = {hook()[:256] for hook in getattr(self.utils, "hooks", None) or ()}
        if break_at is not None:
            self.break_graph(break_at)
        entry = SimpleNamespace(
            compile_id=graph,
            co_name=function,
            start_time_us=time.time_ns() // 1_000,
            duration_us=1_000,
            is_forward=True,
            has_guarded_code=True,
            recompile_user_contexts=contexts or None,
        )
        vars(entry).update(fields)
        self.utils._compilation_metrics.append(entry)

    def break_graph(self, text: str) -> None:
        """What Dynamo does with its logger at a graph break: each place is told in full once."""
        logger, told = logging.getLogger(LOGGER), self.utils.graph_break_dup_warning_checker.set
        if logger.isEnabledFor(logging.DEBUG) and text not in told:
            told[text] = None
            logger.debug("Graph break in user code: " + text)
        else:
            logger.debug("Graph break (duplicate): %s", text)

    def _register(self, hook: Callable[[], str]) -> None:
        self.utils.hooks = self.utils.hooks or []
        self.utils.hooks.append(hook)

    def _set_limit(self, size: int) -> None:
        self.utils._compilation_metrics = deque(self.utils._compilation_metrics, maxlen=size)
