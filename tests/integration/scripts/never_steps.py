"""Imports torch, or what the agent takes for it, but trains nothing."""

import stub_torch

print("imported", stub_torch.torch.__version__)
