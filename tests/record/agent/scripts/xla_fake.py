"""Ten steps on a torch_xla that only counts: every step compiles, reads a value, and calls an operator on the host."""

import time

import torch_xla

torch_xla.compiled()
time.sleep(0.05)
torch_xla.sync()
for _step in range(10):
    torch_xla.compiled()
    torch_xla.read_value()
    torch_xla._XLAC.count("aten::median")
    torch_xla.fetched()
    torch_xla.sync()
torch_xla.read_value()
print("done", torch_xla._XLAC.counters["MarkStep"])
