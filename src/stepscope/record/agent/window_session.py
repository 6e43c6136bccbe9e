"""One profiler session of ours, from prepare to export, and the flag that tells our calls from the user's.

The low-level `torch.autograd.profiler.profile` is used directly: `torch.profiler.profile` imports the compiler stack on
its first start (over a second) and keeps step records we have no use for. Every torch attribute that is not in all
versions from 2.1 on is looked for before it is used.
"""

from __future__ import annotations

import _thread
import functools
import inspect
import json
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from contextlib import contextmanager
from sys import getprofile, setprofile
from threading import get_ident
from types import CodeType
from typing import Any, Callable, Iterator

from stepscope.record.agent.config import of_standard_library

resource = of_standard_library("resource")
# With `verbose` the trace repeats a call stack on every operator: measured 1.5 times the bytes and 3 times the time to
# stop, for what the nesting of python_function events says already.
VERBOSE = False
# What a window may need below a limit: a trace of 600 MB before it is written, threads of torch's with heaps of 64 MB.
ROOM_BYTES = 2**30
_ENDING_S = 50e-6  # how often a thread that has done its work is looked for; it needs the interpreter once more

_ours = threading.local()
_opened = False  # a session of ours, in this process or the one it was forked from


def in_our_call() -> bool:
    """True on a thread that is inside a profiler call made by `Session`."""
    return bool(getattr(_ours, "depth", 0))


def in_shared_call() -> bool:
    """True on a thread that drives the profiler `stepscope.profile` made for the script."""
    return bool(getattr(_ours, "shared", 0))


class _InOurCall:
    """Stands in a filter of warnings for the pattern of their texts: any, of a call of ours."""

    def match(self, _text: str) -> bool:
        return in_our_call()


_QUIET = ("ignore", _InOurCall(), Warning, None, 0)


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
    # Not by `catch_warnings`: warnings of other threads would be lost, and those shown once shown once more.
    filters: Any = warnings.filters
    filters.insert(0, _QUIET)
    try:
        yield
    finally:
        if _QUIET in filters:
            filters.remove(_QUIET)
        _ours.depth -= 1
        if before is not None and isinstance(shown, set):
            shown.intersection_update(before)


def anything_enabled() -> bool:
    """True when a profiler session is recording, on this thread or (where torch keeps a flag) on any other."""
    import torch

    flag = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    return bool(flag) or bool(torch.autograd._profiler_enabled())


def without_room() -> str | None:
    """Why recording could take the process to a limit of its memory, where torch ends it without an exception."""
    for kind, field in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        limit = resource.getrlimit(kind)[0]
        if limit == resource.RLIM_INFINITY:
            continue
        with open("/proc/self/statm", "rb") as file:
            taken = int(file.read().split()[field]) * resource.getpagesize()
        if limit - taken < ROOM_BYTES:
            return "the process's limit of memory (ulimit -v, ulimit -d) leaves less than 1 GiB"
    return None


def device_in_use() -> str | None:
    """ "cuda" or "xpu" when the process already uses one and the profiler can record it; never initialises a device."""
    import torch

    supported = {str(activity).rpartition(".")[2].lower() for activity in torch.autograd._supported_activities()}
    names = (name for name in ("cuda", "xpu") if name in supported)
    return next((name for name in names if getattr(getattr(torch, name, None), "is_initialized", bool)()), None)


class _Ending:
    """Held by a thread alone."""


def apart(work: Callable[[], None]) -> None:
    """Run `work` on a thread of its own and wait for it; on the calling one where no thread can be started any more, or
    where the C library could end the process for want of memory for one.

    glibc gives a new thread a heap of its own. On the training thread's, what torch keeps after its first sessions lies
    between the script's tensors, and decides which freed memory goes back to the system: page faults of all later
    steps were seen to change five-fold.
    """
    if without_room() is not None:
        work()
        return
    raised: list[BaseException] = []
    begun: list[bool] = []
    over = _thread.allocate_lock()
    over.acquire()

    def run(ending: _Ending) -> None:
        del ending  # an error of `work` holds this frame
        begun.append(True)
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the caller's to handle
            raised.append(error)

    def ended(_: object) -> None:
        over.release()

    ending = _Ending()  # its own end is the thread's, whatever another thread has raised in it, and wherever
    living = weakref.ref(ending, ended)
    try:
        thread = _thread.start_new_thread(run, (ending,))
    except RuntimeError:  # the interpreter is ending
        work()
        return
    del ending
    while living() is not None:
        try:
            over.acquire()
        except BaseException as error:  # noqa: BLE001 - a signal's handler raised: not before torch's call is over
            raised.append(error)
    while _is_in(thread, run.__code__, ended.__code__):  # a profiler that starts now would record it
        time.sleep(_ENDING_S)
    if raised:
        raise raised[-1]
    if not begun:
        work()


def _is_in(thread: int, *codes: CodeType) -> bool:
    """Whether the thread's first function is one of these."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_code in codes


def begin_here() -> None:
    """Open and close an empty session, a millisecond: libkineto wants its first one on the thread that imported torch,
    and says so on the script's stderr otherwise.
    """
    first = Session(memory=False, device=None, stacks=False)
    first.start()
    first.stop()


def in_forked_child() -> None:
    """Let this process end without the destructors of the libraries that its parent loaded, if a session was opened.

    libkineto then keeps a thread that a forked child has no more, and its destructor waits for it for ever. By then
    Python has finished, and C streams are flushed here; a child of `multiprocessing` ends without destructors anyway.
    """
    if not _opened:
        return
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit"):  # glibc: handlers get the exit status, the last one registered comes first
        library.on_exit(library._exit, None)
        library.on_exit(library.fcloseall, None)


def trace_path(folder: str) -> str:
    """A path in `folder` for the next trace, never one that exists, compressed or not."""
    taken = set(os.listdir(folder))
    number = 0
    while any(f"trace-{number}.pt.trace.json{suffix}" in taken for suffix in ("", ".gz", ".tmp")):
        number += 1
    return os.path.join(folder, f"trace-{number}.pt.trace.json")


@functools.lru_cache(maxsize=None)
def quiet_allocator() -> Any | None:
    """torch's own threshold for what it logs (c10), a C integer; None where it cannot be had.

    In a session with allocations its CPU allocator logs a warning for memory that it gave out before, on the script's
    stderr, at the first block and at every thousandth. While one records, only errors are logged.
    """
    import ctypes

    import torch

    path = os.path.join(os.path.dirname(str(torch.__file__)), "lib", "libc10.so")
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(path), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # another platform, or a build that logs by glog
        return None


ERRORS_ALONE = 2  # c10's level of errors


class Session:
    """prepare → start → stop → export, asked for on one thread. After `abandon` no call reaches torch any more.

    `stacks`: Python functions are recorded, for which torch takes the place of `sys.setprofile` on all threads.
    `is_apart`: it is stopped and exported on threads of our own (`apart`), which only one over all threads can be.
    It starts on the training thread: torch keeps the thread that starts one, and names it in the script's own traces.
    """

    def __init__(self, *, memory: bool, device: str | None, stacks: bool, is_apart: bool = False) -> None:
        self.state = "new"  # new | prepared | recording | stopped | gone
        self.thread = get_ident()
        self._visible = False
        self._log_level = quiet_allocator() if memory else None
        self._logged = 0
        self.stacks, self.device = stacks, device
        with our_call():
            self._profiler, all_threads = _build(memory=memory, device=device, stacks=stacks)
        self._run: Callable[[Callable[[], None]], None] = apart if is_apart and all_threads else lambda work: work()

    def prepare(self) -> None:
        """Device tracing warms up from here on."""
        global _opened
        _opened = True
        # The thread that libkineto starts with its first session takes no signal: one that the script has blocked in
        # its own threads, to wait for it, would end the process there.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with our_call():
                self._profiler._prepare_trace()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.state = "prepared"

    def start(self) -> None:
        """Recording begins."""
        import torch

        if self.state == "new":
            self.prepare()
        if self._log_level is not None:
            self._logged = self._log_level.value
            self._log_level.value = max(self._logged, ERRORS_ALONE)
        try:
            with our_call():
                self._profiler._start_trace()
                # A session over all threads is not the thread's own: torch then answers False here while it records.
                self._visible = bool(torch.autograd._profiler_enabled())
                self.state = "recording"
                _add_metadata(torch, stacks=self.stacks)
        except BaseException:
            self._log_again()
            raise

    def stop(self) -> None:
        """Recording ends; torch assembles the trace, which takes longer than anything else here."""
        if self.state == "prepared":  # torch complains on stderr when a prepared session is left behind
            self.start()
        hook: Any = getprofile()
        try:
            self._run(our_call()(lambda: self._profiler.__exit__(None, None, None)))
        finally:
            self._log_again()
            if hook is not None and type(hook).__name__ != "TraceContext" and getprofile() is None:
                # The script has put one in the place of torch's, which torch takes out all the same.
                hook.enable() if hasattr(hook, "enable") else setprofile(hook)
        self.state = "stopped"

    def export(self, path: str) -> int:
        """Writes plain JSON to `path` by way of a temporary name; the file's size in bytes."""
        temporary = path + ".tmp"

        self._run(our_call()(lambda: self._profiler.export_chrome_trace(temporary)))
        size = os.path.getsize(temporary)
        os.replace(temporary, path)
        self._profiler = None
        return size

    def abandon(self) -> None:
        """Another session took over: touching this one would crash the process, so it is only forgotten."""
        self.state = "gone"
        self._profiler = None
        self._log_again()

    def _log_again(self) -> None:
        level, self._log_level = self._log_level, None
        if level is not None:
            level.value = self._logged

    def alive(self) -> bool:
        """False once another session replaced this one as far as torch can tell."""
        import torch

        if self.state != "recording":
            return self.state == "prepared"
        if self._visible and not torch.autograd._profiler_enabled():
            return False
        return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def _add_metadata(torch: Any, *, stacks: bool) -> None:
    """What `torch.profiler` states about itself in a trace; readers of other tools look for it."""
    add = getattr(torch.autograd, "_add_metadata_json", None)
    if add is None:
        return
    for key in ("with_stack", "record_shapes", "with_flops") if stacks else ("record_shapes", "with_flops"):
        add(key, "1")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        group = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
        add("distributedInfo", json.dumps({"backend": str(distributed.get_backend()), **group}))


def _build(*, memory: bool, device: str | None, stacks: bool) -> tuple[Any, bool]:
    """(torch's profiler, whether it records all threads)."""
    import torch

    arguments: dict[str, Any] = dict.fromkeys(("record_shapes", "with_flops", "use_kineto"), True)
    arguments.update(with_stack=stacks, profile_memory=memory)
    config, all_threads = _experimental_config(torch, all_threads=not memory)
    if config is not None:
        arguments["experimental_config"] = config
    accepted = inspect.signature(torch.autograd.profiler.profile.__init__).parameters
    if device is not None:
        if "use_device" in accepted:
            arguments["use_device"] = device
        # Before 2.3 `use_device` named only third-party backends and CUDA had a switch of its own.
        version = (*map(int, str(torch.__version__).split(".")[:2]), 0)
        if device == "cuda" and "use_cuda" in accepted and version < (2, 3):
            arguments["use_cuda"] = True
            arguments.pop("use_device", None)
    made = torch.autograd.profiler.profile(**{k: v for k, v in arguments.items() if k in accepted})
    return made, all_threads and "experimental_config" in accepted


def _experimental_config(torch: Any, *, all_threads: bool) -> tuple[Any | None, bool]:
    """(the newest set of options this torch accepts, whether all threads are in it). Unknown ones are TypeErrors."""
    make = getattr(torch._C._profiler, "_ExperimentalConfig", None)
    if make is None:
        return None, False
    # A session over all threads is not told of allocations: torch hands them to the session of the thread alone.
    everywhere = ({"verbose": VERBOSE, "profile_all_threads": True},) if all_threads else ()
    for options in (*everywhere, {"verbose": VERBOSE}, {}):
        try:
            return make(**options), "profile_all_threads" in options
        except TypeError:
            continue
    return None, False
