"""What one frame of a sampled stack says of its thread: the phase of training it opens, and whether it waits.

Functions are matched by the last part of their name and the end of their file, as samplers write qualified names or
bare ones and full or shortened paths. How the marks of a stack's frames add up is said in `call_paths`.
"""

from __future__ import annotations

from stepscope.read.raw import Frame

DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, OTHER, STARTUP = (
    "data_wait",
    "forward",
    "backward",
    "optimizer",
    "other",
    "startup",
)

# (last part of the function's name, end of the file) -> phase
_MARKS: dict[str, tuple[tuple[str, str], ...]] = {
    "__next__": (("torch/utils/data/dataloader.py", DATA_WAIT),),
    "backward": (("torch/_tensor.py", BACKWARD), ("torch/autograd/__init__.py", BACKWARD)),
    "wrapper": (("torch/optim/optimizer.py", OPTIMIZER),),
    "_call_impl": (("torch/nn/modules/module.py", FORWARD),),
    "_wrapped_call_impl": (("torch/nn/modules/module.py", FORWARD),),
}
_OPTIMIZERS = "torch/optim/"
_SCHEDULERS = "lr_scheduler.py"

# Leaf frames in which a thread waits for something, whatever the sampler calls idle.
_WAITS: dict[str, tuple[str, ...]] = {
    "wait": ("threading.py", "multiprocessing/connection.py", "multiprocessing/synchronize.py", "asyncio/locks.py"),
    "select": ("selectors.py",),
    "poll": (
        "multiprocessing/connection.py",
        "multiprocessing/popen_fork.py",
        "multiprocessing/popen_forkserver.py",
        "multiprocessing/popen_spawn_posix.py",
    ),
    "_poll": ("multiprocessing/connection.py",),
    "accept": ("socket.py", "multiprocessing/connection.py"),
    "_recv": ("multiprocessing/connection.py",),
    "_wait_for_tstate_lock": ("threading.py",),
    "join": ("threading.py",),
    "get": ("queue.py", "multiprocessing/queues.py"),
    "put": ("queue.py", "multiprocessing/queues.py"),
    "_worker": ("concurrent/futures/thread.py",),
    "_try_wait": ("subprocess.py",),
    "result": ("concurrent/futures/_base.py",),
    "synchronize": ("torch/cuda/__init__.py", "torch/cuda/streams.py"),
}
# With a device, backward waits here for the engine's own threads.
_DEVICE_WAITS: dict[str, tuple[str, ...]] = {"_engine_run_backward": ("torch/autograd/graph.py",)}


def last_part(function: str) -> str:
    """`Optimizer.profile_hook_step.<locals>.wrapper` → `wrapper`."""
    return function.rpartition(".")[2] or function


def in_file(file: str, ending: str) -> bool:
    """Whether `file` is `ending` or ends in it at a path boundary."""
    file = file.replace("\\", "/")
    return file.endswith(ending) and (len(file) == len(ending) or file[-len(ending) - 1] == "/")


def phase_mark(frame: Frame) -> str | None:
    """The phase that this frame opens, None where it opens none."""
    name = last_part(frame.function)
    for ending, phase in _MARKS.get(name, ()):
        if in_file(frame.file, ending):
            return phase
    if name == "step" and _OPTIMIZERS in frame.file and not frame.file.endswith(_SCHEDULERS):
        return OPTIMIZER
    return None


def imports(frame: Frame) -> bool:
    """Whether the frame belongs to an import under way."""
    return "importlib._bootstrap" in frame.file


def is_wait(leaf: Frame, *, on_device: bool) -> bool:
    """Whether a thread whose innermost frame this is waits; `on_device` when the process trains on a GPU."""
    name = last_part(leaf.function)
    endings = _WAITS.get(name, ())
    if on_device:
        endings += _DEVICE_WAITS.get(name, ())
    return any(in_file(leaf.file, ending) for ending in endings)
