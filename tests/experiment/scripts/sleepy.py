"""A training whose data set sleeps, so that loader workers help. Writes down what it was started with."""

import argparse
import json
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

PAUSE_S = 0.025 if "--slow" in sys.argv else 0.004


class Sleepy(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(PAUSE_S)
        return torch.full((4,), float(index % 3)), torch.tensor(float(index % 3))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--note", default="")
    parser.add_argument("--seen")
    parser.add_argument("--slow", action="store_true", help="sleep for longer than a busy machine takes")
    arguments = parser.parse_args()
    if arguments.seen:
        with open(arguments.seen, "a") as file:
            seen = {"note": arguments.note, "variable": os.environ.get("SLEEPY"), "stdin": sys.stdin.read()}
            file.write(json.dumps(seen) + "\n")
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    for inputs, targets in DataLoader(Sleepy(), batch_size=4):
        loss = (model(inputs)[:, 0] - targets).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():  # by hand: an optimizer of torch's imports the compiler, which takes a second
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad


main()
