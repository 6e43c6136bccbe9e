import stub_torch


def train() -> int:
    return len(list(stub_torch.steps(30, 0.0)))
