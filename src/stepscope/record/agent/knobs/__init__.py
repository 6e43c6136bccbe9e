"""The knobs: what can be changed about a training run without editing its script, and the table that names them.

A knob is one line of `KNOBS`, and a class, which those of one shape share: told apart by their names. The agent
installs the knobs of its configuration before the probes, each behind the guard: one that raises is taken back and
reported as not applied, and the training goes on as it would have. What was really applied is read back and written as
`knob` events.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Callable, Iterable

from stepscope.errors import UsageError
from stepscope.record.agent.masking import MASK, is_secret_name, mask_text
from stepscope.schema import Knob

AGENT = "agent"  # applied inside the training process
LAUNCH = "launch"  # applied to the command or its environment; the agent looks whether it arrived

_CPU_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
# Of environment variables but for those in which stepscope itself sends something to the training process.
_VARIABLE = re.compile(r"(?!STEPSCOPE_)[A-Za-z_][A-Za-z0-9_]*")
# A flag with its dashes, or the left side of a NAME=VALUE argument as configuration frameworks take them.
_FLAG = re.compile(r"-{1,2}[A-Za-z0-9][^\s=]*|[+~]{0,2}[A-Za-z_][\w.\-/@]*")
_SETTING = r"[a-z][a-z0-9_]*:(?:[A-Za-z0-9_.\-]+|\[[A-Za-z0-9_.:,\-]*\])"
_ALLOCATOR_CONF = re.compile(f"{_SETTING}(?:,{_SETTING})*")
_HIGHEST_CPU = 16_383  # beyond any machine; bounds what a range may unfold to
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class KnobEntry:
    """A line of the table. `module` and `class_name` are loaded in the training process only.

    `values` says in words what the knob takes, for help and errors, and `accepts` decides. `where` is AGENT or LAUNCH.
    """

    module: str
    class_name: str
    values: str
    summary: str
    accepts: Callable[[str], bool]
    where: str = AGENT


def _whole(module: str, class_name: str, least: int, most: int, summary: str) -> KnobEntry:
    words = f"a whole number{' from 1' if least else ', 0 for none'}"
    return KnobEntry(module, class_name, words, summary, partial(_is_whole, least, most))


def _choice(module: str, class_name: str, choices: str, summary: str, where: str = AGENT) -> KnobEntry:
    *others, last = words = choices.split()
    shown = f"{', '.join(others)} or {last}" if others else last
    return KnobEntry(module, class_name, shown, summary, frozenset(words).__contains__, where)


def _truth(module: str, class_name: str, summary: str) -> KnobEntry:
    return _choice(module, class_name, "true false", summary)


def _is_whole(least: int, most: int, text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9 and least <= int(text) <= most


def _is_cpu_list(text: str) -> bool:
    try:
        cpu_list(text)
    except UsageError:
        return False
    return True


# name -> entry. The two that end in a word in capitals or in --flag stand for every name with that prefix.
KNOBS: dict[str, KnobEntry] = {
    "loader.num_workers": _whole("loader", "LoaderArgument", 0, 512, "worker processes of every DataLoader"),
    "loader.prefetch_factor": _whole("loader", "LoaderArgument", 1, 1024, "batches each loader worker makes ahead"),
    "loader.pin_memory": _truth(
        "loader", "LoaderArgument", "batches are copied to page-locked memory, for an accelerator"
    ),
    "loader.persistent_workers": _truth(
        "loader", "LoaderArgument", "loader workers are kept from one epoch to the next"
    ),
    "torch.num_threads": _whole("settings", "Setting", 1, 4096, "threads of one operator on the CPU"),
    "torch.num_interop_threads": _whole("settings", "Setting", 1, 4096, "threads that run operators side by side"),
    "cpu.affinity": KnobEntry(
        "settings", "MainAffinity", "CPUs, such as 0-3,8", "the CPUs the training process may use", _is_cpu_list
    ),
    "cpu.worker_affinity": KnobEntry(
        "settings", "WorkerAffinity", "CPUs, such as 4-7", "the CPUs that loader workers may use", _is_cpu_list
    ),
    "gc": KnobEntry(
        "settings", "Collector", "freeze, off or a threshold (a whole number from 1)",
        "Python's garbage collector, from the first steady step on",
        lambda text: text in ("freeze", "off") or _is_whole(1, 999_999_999, text),
    ),
    "amp.dtype": _choice(
        "autocast", "AmpDtype", "bf16 fp16 off", "autocast of forward pass and loss; fp16 scales gradients"
    ),
    "matmul_precision": _choice(
        "settings", "Setting", "highest high medium", "how exactly matrices of float32 are multiplied"
    ),
    "cudnn.allow_tf32": _truth("settings", "Setting", "convolutions of float32 may use TF32"),
    "cudnn.benchmark": _truth("settings", "Setting", "cuDNN tries its algorithms for each new shape"),
    "cuda.linalg_library": _choice(
        "settings", "Setting", "cusolver magma default", "the library torch.linalg uses on CUDA"
    ),
    "memory_format": _choice("model", "MemoryFormat", "channels_last", "memory format of the model's convolutions"),
    "compile": _choice(
        "model", "Compile", "true false " + " ".join(COMPILE_MODES),
        "torch.compile of the model, or false to run what the script compiles as it is written",
    ),
    "compile.mode": _choice(
        "model", "Compile", " ".join(COMPILE_MODES),
        "the mode of what the script compiles, else of the model, which is then compiled",
    ),
    "compile.dynamic": _truth(
        "model", "Compile", "whether shapes are dynamic in what the script or compile=true compiles"
    ),
    "optimizer.fused": _truth("model", "OptimizerArgument", "one kernel updates many parameters"),
    "optimizer.foreach": _truth(
        "model", "OptimizerArgument", "each operation of the update is done for all parameters at once"
    ),
    "zero_grad.set_to_none": _truth(
        "model", "SetToNone", "zero_grad lets go of gradients instead of filling them with zeros"
    ),
    "allocator.conf": KnobEntry(
        "launched", "AllocatorConf", "settings such as expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF of the command",
        lambda text: len(text) <= 1000 and _ALLOCATOR_CONF.fullmatch(text) is not None, LAUNCH,
    ),
    "host.allocator": _choice(
        "launched", "HostAllocator", "keep keep_all huge_pages jemalloc tcmalloc",
        "how the process gets memory of the host, and whether it gives it back", LAUNCH,
    ),
    "env:NAME": KnobEntry(
        "launched", "Environment", "any text", "an environment variable of the command", lambda _: True, LAUNCH
    ),
    "arg:--flag": KnobEntry(
        "launched", "Argument", "any text, or nothing for a flag that takes no value", "a flag of the script's own",
        lambda _: True, LAUNCH,
    ),
}  # fmt: skip

ENVIRONMENT_PREFIX = "env:"
ARGUMENT_PREFIX = "arg:"
_PREFIXES = {
    ENVIRONMENT_PREFIX: ("env:NAME", _VARIABLE, "a variable's name after env:, not one of stepscope's own"),
    ARGUMENT_PREFIX: ("arg:--flag", _FLAG, "a flag after arg:, such as arg:--workers=4 or arg:model.width=64"),
}


def entry(name: str) -> KnobEntry | None:
    """The line of the table for a knob's name, `env:OMP_NUM_THREADS` and the like included; None when unknown."""
    for prefix, (key, names, _) in _PREFIXES.items():
        if name.startswith(prefix):
            return KNOBS[key] if names.fullmatch(name[len(prefix) :]) else None
    return KNOBS.get(name)


def parse(text: str) -> Knob:
    """`KNOB=VALUE` as a knob that is known and takes the value. Raises UsageError, one line.

    A flag that takes no value may go without the equals sign: `arg:--amp` is `arg:--amp=`.
    """
    name, equals, value = text.partition("=")
    if not equals and not name.startswith(ARGUMENT_PREFIX):
        raise UsageError(f"a knob is written KNOB=VALUE, which {text!r} is not; {_nearest(text)}")
    knob = Knob(name.strip(), value)
    check(knob)
    return knob


def check(knob: Knob) -> None:
    """Raises UsageError for a knob that does not exist or does not take the value. Nothing is loaded for it."""
    for prefix, (_, names, wanted) in _PREFIXES.items():
        if knob.knob.startswith(prefix) and not names.fullmatch(knob.knob[len(prefix) :]):
            raise UsageError(f"{knob.knob!r} is no knob; write {wanted}")
    found = entry(knob.knob)
    if found is None:
        raise UsageError(f"{knob.knob!r} is no knob; {_nearest(knob.knob)}")
    if "\0" in knob.value or not found.accepts(knob.value):
        raise UsageError(f"knob {knob.knob} takes {found.values}, not {knob.value!r}")


def check_all(knobs: tuple[Knob, ...]) -> None:
    """`check` for each, and that no knob is set twice."""
    seen = set()
    for knob in knobs:
        check(knob)
        if knob.knob in seen:
            raise UsageError(f"knob {knob.knob} is set twice; keep one of the values")
        seen.add(knob.knob)


def masked(name: str, value: str) -> str:
    """The value of knob `name` as it may be written: without what the variable or flag holds if that is a secret."""
    bare = name.partition(":")[2] or name
    return MASK if value and is_secret_name(bare.lstrip("-+~")) else mask_text(value)


def cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a list such as `0-3,8`. Raises UsageError."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = _CPU_RANGE.fullmatch(part.strip()) if part.isascii() else None
        first, last = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (1, 0)
        if first > last or last > _HIGHEST_CPU:
            raise UsageError(f"{text!r} is no list of CPUs; write such as 0-3,8")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def cpu_text(cpus: Iterable[int]) -> str:
    """`cpus` as a list with ranges, the way the kernel writes it."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, KNOBS, n=1)
    return f"did you mean {close[0]}?" if close else "there are " + ", ".join(KNOBS)
