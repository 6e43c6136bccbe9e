"""Imports torch in the middle of its own import, as frameworks do."""

import torch
from plain_sgd import PlainSGD


class NeuralNet:
    def __init__(self):
        self.callbacks_ = []
        self.module = torch.nn.Linear(4, 1)
        self.optimizer = PlainSGD(self.module.parameters(), lr=0.1)

    def fit_loop(self, loader, epochs):
        for _ in range(epochs):
            self.run_single_epoch(loader, training=True)
            self.run_single_epoch(loader, training=False)

    def run_single_epoch(self, loader, training):
        for (batch,) in loader:
            with torch.set_grad_enabled(training):
                loss = self.module(batch).square().mean()
            if training:
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
