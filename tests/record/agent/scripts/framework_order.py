"""Trains through a framework that is imported before or after torch; prints what the wrapped method is called."""

import sys

for name in sys.argv[1:]:
    __import__(name)

import torch  # noqa: E402 - the order of imports is what is tried
from skorch.net import NeuralNet  # noqa: E402

data = torch.utils.data.TensorDataset(torch.ones(24, 4))
NeuralNet().fit_loop(torch.utils.data.DataLoader(data, batch_size=4), epochs=2)
print(NeuralNet.fit_loop.__qualname__)
