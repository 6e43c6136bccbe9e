"""A training loop whose own profiler meets the recorder's windows at every possible moment; run by the tests.

argv: output JSON file. With STEPSCOPE_RECORD set, the agent is started as the launcher would.
Windows are expected in cycles of seven steps: two without, one warm-up, four recorded. Every scenario begins with a
cycle. What the script's profiler recorded is counted by category; the last scenario profiles in a second thread.
"""

import collections
import gc
import json
import os
import sys
import threading

import torch
from plain_sgd import PlainSGD
from torch.profiler import ProfilerActivity, profile, schedule

AGENT = None
if os.environ.get("STEPSCOPE_RECORD"):
    from stepscope.record.agent import core

    AGENT = core.start()

CYCLE = 7
STEPS = 14
OUTPUT = sys.argv[1]
FOLDER = os.path.dirname(OUTPUT)
data = torch.utils.data.TensorDataset(torch.randn(40_000, 8), torch.randn(40_000, 2))
batches = iter(torch.utils.data.DataLoader(data, batch_size=4))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = PlainSGD(model.parameters(), lr=0.01)
counts = {}


def count(name, prof):
    path = os.path.join(FOLDER, name + ".json")
    prof.export_chrome_trace(path)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    counts[name] = dict(collections.Counter(event.get("cat", "none") for event in events))


def train(steps, before=None, after=None):
    """Steps; `before` and `after` are what to do at the beginning and the end of some, by their number."""
    for index in range(steps):
        x, y = next(batches)
        if before and index in before:
            before[index]()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if after and index in after:
            after[index]()


def train_from_cycle_start(before=None, after=None):
    """Steps under a profiler that records stacks are not counted, so the next cycle may be anywhere."""
    gc.collect()
    train(3)
    while AGENT is not None and (AGENT.steps.current_step() + 1) % CYCLE:
        train(1)
    train(STEPS, before, after)


def from_to(name, first, last):
    """Makes and starts a profiler at the beginning of step `first`, stops it at the end of step `last`."""
    made = []

    def begin():
        made.append(profile(activities=[ProfilerActivity.CPU], with_stack=True))
        made[0].__enter__()

    def end():
        made[0].__exit__(None, None, None)
        count(name, made[0])

    train_from_cycle_start({first: begin}, {last: end})


def scheduled(name, made_at, wait, stop_at):
    """torch's own schedule: wait, one warm-up step, two recorded; stopped at the end of step `stop_at`."""
    made = []

    def make():
        made.append(
            profile(
                activities=[ProfilerActivity.CPU],
                with_stack=True,
                schedule=schedule(wait=wait, warmup=1, active=2, repeat=1),
                on_trace_ready=lambda prof: count(name, prof),
            )
        )
        made[0].start()

    steps = dict.fromkeys(range(made_at, stop_at), lambda: made[0].step())
    train_from_cycle_start({made_at: make}, {**steps, stop_at: lambda: made[0].stop()})


def legacy():
    """The older interface, made long before it is entered."""
    prof = torch.autograd.profiler.profile(use_kineto=True, with_stack=True)
    train_from_cycle_start({4: prof.__enter__}, {5: lambda: prof.__exit__(None, None, None)})
    count("legacy", prof)


def in_a_thread():
    """Profiles a few operators in a second thread while the training goes on; only its own operators are counted."""

    def body():
        prof = profile(activities=[ProfilerActivity.CPU])
        with prof:
            torch.nn.functional.relu(torch.ones(4, 4) @ torch.ones(4, 4))
        count("in_a_thread", prof)

    thread = threading.Thread(target=body)
    train_from_cycle_start({4: thread.start})
    while thread.is_alive():
        train(1)
    counts["in_a_thread"] = {"cpu_op": counts["in_a_thread"]["cpu_op"]}


from_to("before", 0, 1)
from_to("in_warmup", 2, 3)
from_to("in_active", 4, 5)
from_to("across_the_end", 6, 8)
from_to("after", 7, 8)
scheduled("made_in_warmup", 2, 1, 9)
scheduled("made_in_active", 4, 1, 11)
scheduled("recording_in_active", 3, 0, 5)
scheduled("waiting_all_along", 0, 4, 13)
legacy()
in_a_thread()
train_from_cycle_start()
with open(OUTPUT, "w") as file:
    json.dump(counts, file)
print("trained", len(counts))
sys.exit(7)
