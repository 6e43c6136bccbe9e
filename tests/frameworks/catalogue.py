"""The loops of `tests/frameworks/loops`, and the environment that can run them. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

LOOPS = Path(__file__).resolve().parent / "loops"
REPOSITORY = LOOPS.parents[2]
PYTHON = "STEPSCOPE_TEST_FRAMEWORKS"  # names an interpreter to use instead of that of `make frameworks`


@dataclass(frozen=True)
class Loop:
    """A script of the folder with its arguments; `needs` are modules beside torch, `start` goes before the script."""

    name: str
    script: str
    needs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    start: tuple[str, ...] = ()

    def command(self, python: Path) -> list[str]:
        """The line that trains."""
        return [str(python), *self.start, str(LOOPS / f"{self.script}.py"), *self.arguments]


RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no")
ALL = (
    Loop("hf_trainer", "hf_trainer", ("transformers", "accelerate")),
    Loop("hf_accumulation", "hf_trainer", ("transformers", "accelerate"), ("--accumulation", "4")),
    Loop("hf_slow_data", "hf_trainer", ("transformers", "accelerate"), ("--accumulation", "4", "--item-ms", "8")),
    Loop("trl_sft", "trl_sft", ("trl", "peft", "datasets")),
    Loop("accelerate", "accelerate_loop", ("accelerate",)),
    Loop("accelerate_launch", "accelerate_loop", ("accelerate",), start=LAUNCH),
    Loop("lightning", "lightning_loop", ("lightning",)),
    Loop("lightning_accumulation", "lightning_loop", ("lightning",), ("--accumulation", "4")),
    Loop("lightning_manual", "lightning_manual", ("lightning",)),
    Loop("fabric", "fabric_loop", ("lightning",)),
    Loop("fastai", "fastai_loop", ("fastai", "matplotlib", "requests")),
    Loop("ignite", "ignite_loop", ("ignite",)),
    Loop("skorch", "skorch_loop", ("skorch",)),
    Loop("keras", "keras_loop", ("keras",)),
    Loop("nanogpt", "nanogpt"),
    Loop("examples_mnist", "examples_mnist"),
    Loop("examples_imagenet", "examples_imagenet"),
    Loop("examples_dcgan", "examples_dcgan"),
    Loop("examples_word_language_model", "examples_word_language_model"),
    Loop("lbfgs", "lbfgs"),
    Loop("lbfgs_loader", "lbfgs", arguments=("--loader",)),
    Loop("torch_func", "torch_func"),
    Loop("torch_func_loader", "torch_func", arguments=("--loader",)),
    Loop("maml", "maml"),
    Loop("endless_loader", "endless_loader"),
    Loop("without_loader", "without_loader"),
    Loop("forked_child", "forked_child"),
    Loop("ddp", "ddp", start=RANKS),
    Loop("fsdp2", "fsdp2", start=RANKS),
)


def interpreter() -> Path:
    """The Python of the frameworks' environment, which may not exist."""
    return Path(os.environ.get(PYTHON) or REPOSITORY / ".venv-frameworks" / "bin" / "python")


def missing(python: Path, loops: tuple[Loop, ...] = ALL) -> set[str]:
    """Of all modules that loops need, those that `python` lacks; all of them where there is no such Python."""
    names = {"torch", *(name for loop in loops for name in loop.needs)}
    if not python.is_file():
        return names
    ask = "import importlib.util, json, sys; find = importlib.util.find_spec"
    ask += "; print(json.dumps([name for name in sys.argv[1:] if find(name) is None]))"
    answer = subprocess.run([str(python), "-c", ask, *sorted(names)], capture_output=True, text=True, check=True)
    return set(json.loads(answer.stdout))
