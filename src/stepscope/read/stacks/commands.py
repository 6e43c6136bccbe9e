"""What a command line tells about a process: a launcher, a helper of multiprocessing, or a child that it spawned.

Only this word is kept. Command lines are recorded unmasked and may carry secrets, so the text itself ends here.
"""

from __future__ import annotations

import re

LAUNCHER = "launcher"
HELPER = "helper"
SPAWNED = "spawned"

_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.semaphore_tracker", "multiprocessing.forkserver")
_LAUNCHER_PROGRAMS = {
    *("torchrun", "torchrun.py", "accelerate", "accelerate-launch", "deepspeed", "deepspeed.py", "composer"),
    *("horovodrun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "prun", "hydra_pmi_proxy"),
    *("srun", "sbatch", "salloc", "jsrun", "aprun", "flux", "colossalai", "stepscope"),
}
_LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.elastic",
    "accelerate.commands",
    "accelerate.launch",
    "deepspeed.launcher",
    "horovod.runner",
    "composer.cli",
    "colossalai.cli",
    "mpi4py.run",
    "stepscope",
)
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*(?:-dbg|t|w)?(?:\.exe)?", re.IGNORECASE)
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_MAX_CHARS = 4096


def hint_of(command: str, above: str = "") -> str | None:
    """ "launcher", "helper", "spawned", or None where the command line says none of these.

    `above` is the parent's: a process with the same one was forked from it and does not do its parent's work. What
    a fork server forks was spawned.
    """
    text = command[:_MAX_CHARS]
    if "--multiprocessing-fork" in text or "from multiprocessing.spawn import" in text:
        return SPAWNED
    if any(f"from {module} import" in text for module in _HELPERS):
        return SPAWNED if command == above else HELPER
    return LAUNCHER if command != above and _launches(text) else None


def _launches(text: str) -> bool:
    words = text.split()
    if not words:
        return False
    if not _PYTHON.fullmatch(_base(words[0])):
        return _is_launcher_program(words[0])
    return _python_runs_launcher(words[1:])


def _python_runs_launcher(words: list[str]) -> bool:
    """Whether the script or module behind `python` and its options is a launcher."""
    position = 0
    while position < len(words) and words[position].startswith("-"):
        option = words[position]
        if option == "-m" or (option.startswith("-") and not option.startswith("--") and option.endswith("m")):
            module = words[position + 1] if position + 1 < len(words) else ""
            return any(module == known or module.startswith(f"{known}.") for known in _LAUNCHER_MODULES)
        if option == "-c":
            return False
        position += 2 if option in _WITH_VALUE else 1
    return position < len(words) and _is_launcher_program(words[position])


def _is_launcher_program(word: str) -> bool:
    name = _base(word)
    if name in _LAUNCHER_PROGRAMS:
        return True
    return word.replace("\\", "/").endswith(("torch/distributed/run.py", "torch/distributed/launch.py"))


def _base(word: str) -> str:
    return word.replace("\\", "/").rpartition("/")[2]
