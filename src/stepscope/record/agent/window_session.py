"""One profiler session of ours, from prepare to export, and the flag that tells our calls from the user's.

The low-level `torch.autograd.profiler.profile` is used directly: `torch.profiler.profile` imports the compiler stack on
its first start (over a second) and keeps step records we have no use for. Every torch attribute that is not in all
versions from 2.1 on is looked for before it is used.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import warnings
from contextlib import contextmanager
from typing import Any, Iterator

# With `verbose` the trace repeats a call stack on every operator: measured 1.5 times the bytes and 3 times the time to
# stop, for what the nesting of python_function events says already.
VERBOSE = False

_ours = threading.local()


def in_our_call() -> bool:
    """True on a thread that is inside a profiler call made by `Session`."""
    return bool(getattr(_ours, "depth", 0))


def in_shared_call() -> bool:
    """True on a thread that drives the profiler `stepscope.profile` made for the script."""
    return bool(getattr(_ours, "shared", 0))


@contextmanager
def shared_call() -> Iterator[None]:
    """Marks calls of a profiler that belongs to the script and records for us as well."""
    _ours.shared = getattr(_ours, "shared", 0) + 1
    try:
        yield
    finally:
        _ours.shared -= 1


@contextmanager
def our_call() -> Iterator[None]:
    """Marks the calls as ours, and keeps what torch warns about in them from reaching the user's stderr.

    torch remembers which warnings it has shown; that memory is put back, so the user's own profiler still warns.
    """
    shown = getattr(sys.modules.get("torch.profiler.profiler"), "_WARNINGS_SHOWN", None)
    before = set(shown) if isinstance(shown, set) else None
    _ours.depth = getattr(_ours, "depth", 0) + 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _ours.depth -= 1
        if before is not None and isinstance(shown, set):
            shown.intersection_update(before)


def anything_enabled() -> bool:
    """True when a profiler session is recording, on this thread or (where torch keeps a flag) on any other."""
    import torch

    flag = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    return bool(flag) or bool(torch.autograd._profiler_enabled())


def device_in_use() -> str | None:
    """ "cuda" or "xpu" when the process already uses one and the profiler can record it; never initialises a device."""
    import torch

    supported = {str(activity).rpartition(".")[2].lower() for activity in torch.autograd._supported_activities()}
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        is_initialized = getattr(module, "is_initialized", None)
        if name in supported and is_initialized is not None and is_initialized():
            return name
    return None


def trace_path(folder: str) -> str:
    """A path in `folder` for the next trace, never one that exists, compressed or not."""
    taken = set(os.listdir(folder))
    number = 0
    while any(f"trace-{number}.pt.trace.json{suffix}" in taken for suffix in ("", ".gz", ".tmp")):
        number += 1
    return os.path.join(folder, f"trace-{number}.pt.trace.json")


class Session:
    """prepare → start → stop → export, on one thread. After `abandon` no call reaches torch any more."""

    def __init__(self, *, memory: bool, device: str | None) -> None:
        self.state = "new"  # new | prepared | recording | stopped | gone
        self.thread = threading.get_ident()
        self._visible = False
        with our_call():
            self._profiler: Any = _build(memory=memory, device=device)

    def prepare(self) -> None:
        """Device tracing warms up from here on."""
        with our_call():
            self._profiler._prepare_trace()
        self.state = "prepared"

    def start(self) -> None:
        """Recording begins."""
        import torch

        if self.state == "new":
            self.prepare()
        with our_call():
            self._profiler._start_trace()
            # A session over all threads is not the thread's own, and torch then answers False here while it records.
            self._visible = bool(torch.autograd._profiler_enabled())
            self.state = "recording"
            _add_metadata(torch)

    def stop(self) -> None:
        """Recording ends; torch assembles the trace, which takes longer than anything else here."""
        if self.state == "prepared":  # torch complains on stderr when a prepared session is left behind
            self.start()
        with our_call():
            self._profiler.__exit__(None, None, None)
        self.state = "stopped"

    def export(self, path: str) -> int:
        """Writes plain JSON to `path` by way of a temporary name; the file's size in bytes."""
        temporary = path + ".tmp"
        with our_call():
            self._profiler.export_chrome_trace(temporary)
        size = os.path.getsize(temporary)
        os.replace(temporary, path)
        self._profiler = None
        return size

    def abandon(self) -> None:
        """Another session took over: touching this one would crash the process, so it is only forgotten."""
        self.state = "gone"
        self._profiler = None

    def alive(self) -> bool:
        """False once another session replaced this one as far as torch can tell."""
        import torch

        if self.state != "recording":
            return self.state == "prepared"
        if self._visible and not torch.autograd._profiler_enabled():
            return False
        return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def _add_metadata(torch: Any) -> None:
    """What `torch.profiler` states about itself in a trace; readers of other tools look for it."""
    add = getattr(torch.autograd, "_add_metadata_json", None)
    if add is None:
        return
    for key in ("with_stack", "record_shapes", "with_flops"):
        add(key, "1")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        add("distributedInfo", json.dumps(_distributed_info(distributed)))


def _distributed_info(distributed: Any) -> dict[str, Any]:
    return {
        "backend": str(distributed.get_backend()),
        "rank": distributed.get_rank(),
        "world_size": distributed.get_world_size(),
    }


def _build(*, memory: bool, device: str | None) -> Any:
    import torch

    arguments: dict[str, Any] = {
        "record_shapes": True,
        "with_stack": True,
        "with_flops": True,
        "profile_memory": memory,
        "use_kineto": True,
    }
    config = _experimental_config(torch, all_threads=not memory)
    if config is not None:
        arguments["experimental_config"] = config
    accepted = inspect.signature(torch.autograd.profiler.profile.__init__).parameters
    if device is not None:
        if "use_device" in accepted:
            arguments["use_device"] = device
        if device == "cuda" and "use_cuda" in accepted and not _use_device_suffices(torch):
            arguments["use_cuda"] = True
            arguments.pop("use_device", None)
    return torch.autograd.profiler.profile(**{k: v for k, v in arguments.items() if k in accepted})


def _use_device_suffices(torch: Any) -> bool:
    """Before 2.3 `use_device` named only third-party backends and CUDA had a switch of its own."""
    parts = str(torch.__version__).split(".")
    return len(parts) > 1 and (int(parts[0]), int(parts[1])) >= (2, 3)


def _experimental_config(torch: Any, *, all_threads: bool) -> Any | None:
    """The newest set of options this torch accepts; each unknown keyword is a TypeError."""
    make = getattr(torch._C._profiler, "_ExperimentalConfig", None)
    if make is None:
        return None
    # A session over all threads is not told of allocations: torch hands them to the session of the thread alone.
    everywhere = ({"verbose": VERBOSE, "profile_all_threads": True},) if all_threads else ()
    for options in (*everywhere, {"verbose": VERBOSE}, {}):
        try:
            return make(**options)
        except TypeError:
            continue
    return None
