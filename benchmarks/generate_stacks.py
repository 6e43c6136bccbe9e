"""Writes py-spy raw files of any size as a training run leaves them: `python generate_stacks.py OUT MEGABYTES`.

A main process with loader workers. Most records are different stacks that share their beginnings: a loop over epochs and
steps, a model of nested modules down to a functional call, backward, an optimizer, a loader, and imports that call
imports; so a line is some 3.5 KB long, and the same few thousand frames make up all of them. The same size and seed
give the same file.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

_TORCH = "torch/nn/modules"
_CALL = (f"Module._wrapped_call_impl ({_TORCH}/module.py:1780)", f"Module._call_impl ({_TORCH}/module.py:1791)")
_IMPORT = (
    "_find_and_load (<frozen importlib._bootstrap>:1176)",
    "_find_and_load_unlocked (<frozen importlib._bootstrap>:1147)",
    "_load_unlocked (<frozen importlib._bootstrap>:690)",
    "SourceFileLoader.exec_module (<frozen importlib._bootstrap_external>:940)",
    "_call_with_frames_removed (<frozen importlib._bootstrap>:241)",
)
_PACKAGES = ("nn", "optim", "autograd", "distributed", "utils/data", "fx", "jit", "cuda", "ao/quantization", "export")
_LAYERS = ("Decoder", "Block", "Attention", "Mlp", "Branch", "Gate", "Encoder", "Head")
_FLUSH = 1000


def records(random_: random.Random) -> Iterator[str]:
    """Records without end."""
    parent = 'process 4100:"/home/user/venv/bin/python projects/forecast/train.py --config configs/large.yaml"'
    heads = [f"{parent};thread (4100): MainThread"] * 6
    heads += [f'{parent};process {4200 + n}:"/home/user/venv/bin/python projects/forecast/train.py --config '
              f'configs/large.yaml";thread ({4200 + n}): MainThread' for n in range(4)]  # fmt: skip
    make = (_forward, _forward, _forward, _backward, _import, _import)
    while True:
        head = random_.choice(heads)
        frames = _worker(random_) if "process 42" in head else random_.choice(make)(random_)
        yield f"{head};{';'.join(frames)} {int(random_.paretovariate(1.2))}"


def _loop(random_: random.Random) -> list[str]:
    return [
        f"<module> (projects/forecast/train.py:{random_.randrange(310, 316)})",
        f"main (projects/forecast/train.py:{random_.randrange(240, 250)})",
        f"Trainer.fit (projects/forecast/engine/trainer.py:{random_.randrange(120, 124)})",
        f"Trainer.train_step (projects/forecast/engine/trainer.py:{random_.randrange(180, 200)})",
    ]


def _forward(random_: random.Random) -> list[str]:
    frames = _loop(random_)
    for _ in range(random_.randrange(10, 17)):
        layer = random_.choice(_LAYERS)
        frames += [*_CALL, f"{layer}.forward (projects/forecast/models/{layer.lower()}.py:{random_.randrange(20, 60)})"]
    return [*frames, *_CALL, f"Linear.forward ({_TORCH}/linear.py:{random_.choice((125, 134))})"]


def _backward(random_: random.Random) -> list[str]:
    frames = _forward(random_)
    line = random_.randrange(620, 632)
    tail = [f"Tensor.backward (torch/_tensor.py:{line})", "backward (torch/autograd/__init__.py:388)"]
    return [*frames, *tail, "_engine_run_backward (torch/autograd/graph.py:979)"]


def _import(random_: random.Random) -> list[str]:
    frames = ["<module> (projects/forecast/train.py:3)"]
    for _ in range(random_.randrange(6, 11)):
        module = f"torch/{random_.choice(_PACKAGES)}/part_{random_.randrange(20)}.py"
        frames += [*_IMPORT, f"<module> ({module}:{random_.randrange(1, 30)})"]
    return frames


def _worker(random_: random.Random) -> list[str]:
    frames = _loop(random_)
    frames += [
        "DataLoader.__iter__ (torch/utils/data/dataloader.py:505)",
        "DataLoader._get_iterator (torch/utils/data/dataloader.py:424)",
        "_MultiProcessingDataLoaderIter.__init__ (torch/utils/data/dataloader.py:1227)",
        "BaseProcess.start (multiprocessing/process.py:121)",
        "BaseProcess._bootstrap (multiprocessing/process.py:314)",
        "BaseProcess.run (multiprocessing/process.py:108)",
        f"_worker_loop (torch/utils/data/_utils/worker.py:{random_.choice((358, 374))})",
        f"_MapDatasetFetcher.fetch (torch/utils/data/_utils/fetch.py:{random_.choice((54, 57))})",
    ]
    for _ in range(random_.randrange(20, 45)):
        step = random_.randrange(40)
        frames.append(f"Step{step}.__call__ (projects/forecast/data/steps/step_{step}.py:{random_.randrange(8, 40)})")
    return frames


def generate(out: Path, megabytes: float, seed: int = 7) -> tuple[int, int]:
    """Write `megabytes` (of 1e6 bytes) to `out`; returns the file's records and samples."""
    random_ = random.Random(seed)
    source = records(random_)
    written = count = samples = 0
    with out.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            lines = [next(source) for _ in range(_FLUSH)]
            written += file.write("\n".join(lines) + "\n")
            count += len(lines)
            samples += sum(int(line.rpartition(" ")[2]) for line in lines)
    return count, samples


if __name__ == "__main__":
    print(*generate(Path(sys.argv[1]), float(sys.argv[2])))
