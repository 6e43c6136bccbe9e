"""`steps.py COUNT PAUSE`: steps of so many seconds with a stub for PyTorch; each tells how many were before it."""

import sys

import stub_torch

for before in stub_torch.steps(int(sys.argv[1]), float(sys.argv[2])):
    print(f"step {before}:", flush=True)
print("result of all", flush=True)
