"""Writes py-spy raw files of any size as a training run leaves them: `python generate_stacks.py OUT MEGABYTES`.

A main process with loader workers. Most records are different stacks that share their beginnings: a loop over steps, a
model of nested modules, transforms in a worker, imports that call imports; so a line is some 3.5 KB long, and the same
few thousand frames make up all of them. The same size and seed give the same file.
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
_FLUSH = 200
_TRAINING = 'process 4100:"/home/user/venv/bin/python projects/forecast/train.py --config configs/large.yaml"'
_WORKERS = 4


class Program:
    """A fixed program: the places of its model, its transforms and its imports where a sample may find it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._modules = [self._module_path() for _ in range(400)]
        self._transforms = [self._transform_path() for _ in range(200)]
        self._imports = [self._import_path() for _ in range(300)]

    def records(self) -> Iterator[str]:
        """Records without end."""
        choose = self._random
        while True:
            worker = choose.randrange(_WORKERS) if choose.random() < 0.4 else None
            if worker is not None:
                head = (
                    f"{_TRAINING};{_TRAINING.replace('4100', str(4200 + worker))};thread ({4200 + worker}): MainThread"
                )
                frames = self._loop() + _WORKER_START + choose.choice(self._transforms)
            else:
                head = f"{_TRAINING};thread (4100): MainThread"
                training = choose.random() < 0.7
                frames = self._loop() + choose.choice(self._modules) if training else choose.choice(self._imports)
            yield f"{head};{';'.join(frames + self._leaf())} {int(choose.paretovariate(1.2))}"

    def _line(self, first: int, count: int) -> int:
        return self._random.randrange(first, first + count)

    def _loop(self) -> list[str]:
        return [
            "<module> (projects/forecast/train.py:312)",
            "main (projects/forecast/train.py:246)",
            f"Trainer.fit (projects/forecast/engine/trainer.py:{self._line(120, 3)})",
            f"Trainer.train_step (projects/forecast/engine/trainer.py:{self._line(180, 6)})",
        ]

    def _leaf(self) -> list[str]:
        """Where exactly the sample fell: what makes most stacks different ones."""
        module = self._random.choice(_PACKAGES)
        return [
            f"_Dispatched.apply (torch/{module}/functional.py:{self._line(40, 300)})",
            f"_checked (torch/{module}/_support.py:{self._line(10, 40)})",
        ]

    def _module_path(self) -> list[str]:
        frames: list[str] = []
        for _ in range(self._line(14, 6)):
            layer = self._random.choice(_LAYERS)
            file = f"projects/forecast/models/{layer.lower()}.py"
            frames += [*_CALL, f"{layer}.forward ({file}:{self._line(20, 40)})"]
        return frames

    def _transform_path(self) -> list[str]:
        steps = [self._random.randrange(40) for _ in range(self._line(30, 12))]
        return [f"Step{n}.__call__ (projects/forecast/data/steps/step_{n}.py:{self._line(8, 30)})" for n in steps]

    def _import_path(self) -> list[str]:
        frames = ["<module> (projects/forecast/train.py:3)"]
        for _ in range(self._line(8, 5)):
            module = f"torch/{self._random.choice(_PACKAGES)}/part_{self._random.randrange(20)}.py"
            frames += [*_IMPORT, f"<module> ({module}:{self._line(1, 30)})"]
        return frames


_WORKER_START = [
    "DataLoader.__iter__ (torch/utils/data/dataloader.py:505)",
    "DataLoader._get_iterator (torch/utils/data/dataloader.py:424)",
    "_MultiProcessingDataLoaderIter.__init__ (torch/utils/data/dataloader.py:1227)",
    "BaseProcess.start (multiprocessing/process.py:121)",
    "BaseProcess._bootstrap (multiprocessing/process.py:314)",
    "BaseProcess.run (multiprocessing/process.py:108)",
    "_worker_loop (torch/utils/data/_utils/worker.py:374)",
    "_MapDatasetFetcher.fetch (torch/utils/data/_utils/fetch.py:54)",
]


def generate(out: Path, megabytes: float, seed: int = 7) -> tuple[int, int]:
    """Write `megabytes` (of 1e6 bytes) to `out`; returns the file's records and samples."""
    source = Program(seed).records()
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
