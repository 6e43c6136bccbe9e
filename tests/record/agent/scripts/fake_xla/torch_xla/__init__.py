"""As much of torch_xla as is read between steps: its counters and metrics, and the sync that ends a step."""

from __future__ import annotations

import time
from collections import deque

import torch  # noqa: F401 - torch_xla does, and the agent wakes up with it

__version__ = "2.9.0-fake"
RING = 1024


class Native:
    """The compiled part. `post` and `count` do what operators do; `slow_s` is what reading a metric takes."""

    def __init__(self) -> None:
        self.metrics: dict = {}
        self.counters: dict = {}
        self.looks = 0
        self.slow_s = 0.0

    def post(self, name, value, end=None):
        entry = self.metrics.setdefault(name, [0, 0.0, deque(maxlen=RING)])
        entry[0] += 1
        entry[1] += value
        entry[2].append((time.time() if end is None else end, float(value)))

    def count(self, name, by=1):
        self.counters[name] = self.counters.get(name, 0) + by

    def _xla_metric_data(self, name):
        self.looks += 1
        if self.slow_s:
            time.sleep(self.slow_s)
        entry = self.metrics.get(name)
        return None if entry is None else (entry[0], entry[1], tuple(entry[2]))

    def _xla_metric_names(self):
        return list(self.metrics)

    def _xla_counter_value(self, name):
        return self.counters.get(name)

    def _xla_counter_names(self):
        return list(self.counters)

    def _get_executed_fallback_ops(self):
        return [name for name in self.counters if "aten::" in name]

    def clear(self):
        self.metrics.clear()
        self.counters.clear()


_XLAC = Native()


def sync():
    """The end of a step."""
    _XLAC.count("MarkStep")


def compiled(ns=2_000_000):
    """A graph was compiled."""
    _XLAC.post("CompileTime", ns)


def read_value(ns=1_000_000):
    """`tensor.item()`."""
    _XLAC.count("aten::_local_scalar_dense")
    fetched(ns)


def fetched(ns=1_000_000, size=4):
    """Something came to the host."""
    _XLAC.post("TransferFromDeviceTime", ns)
    _XLAC.post("InboundData", size)


from torch_xla.debug import metrics  # noqa: E402, F401 - as torch_xla itself does
