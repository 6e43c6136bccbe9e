"""The knobs: what can be changed about a training run without editing its script, and the table that names them.

A knob is one line of `KNOBS`, and a class, which those of one shape share: told apart by their names. The agent
installs the knobs of its configuration before the probes, each behind the guard: one that raises is taken back and
reported as not applied, and the training goes on as it would have. What was really applied is read back and written as
`knob` events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from stepscope.errors import UsageError
from stepscope.record.agent.knobs import values
from stepscope.record.agent.masking import MASK, is_secret_name, mask_text
from stepscope.schema import Knob

AGENT = "agent"  # applied inside the training process
LAUNCH = "launch"  # applied to the command or its environment; the agent looks whether it arrived


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


_TRUTH = "true or false"

# name -> entry. The two that end in a word in capitals or in --flag stand for every name with that prefix.
KNOBS: dict[str, KnobEntry] = {
    "loader.num_workers": KnobEntry(
        "loader", "LoaderArgument", "a whole number, 0 for none", "worker processes of every DataLoader",
        values.whole(0, 512),
    ),
    "loader.prefetch_factor": KnobEntry(
        "loader", "LoaderArgument", "a whole number from 1", "batches each loader worker makes ahead",
        values.whole(1, 1024),
    ),
    "loader.pin_memory": KnobEntry(
        "loader", "LoaderArgument", _TRUTH, "batches are copied to page-locked memory, for an accelerator", values.truth
    ),
    "loader.persistent_workers": KnobEntry(
        "loader", "LoaderArgument", _TRUTH, "loader workers are kept from one epoch to the next", values.truth
    ),
    "torch.num_threads": KnobEntry(
        "settings", "Setting", "a whole number from 1", "threads of one operator on the CPU", values.whole(1, 4096)
    ),
    "torch.num_interop_threads": KnobEntry(
        "settings", "Setting", "a whole number from 1", "threads that run operators side by side",
        values.whole(1, 4096),
    ),
    "cpu.affinity": KnobEntry(
        "process", "MainAffinity", "CPUs, such as 0-3,8", "the CPUs the training process may use", values.is_cpu_list
    ),
    "cpu.worker_affinity": KnobEntry(
        "process", "WorkerAffinity", "CPUs, such as 4-7", "the CPUs that loader workers may use", values.is_cpu_list
    ),
    "gc": KnobEntry(
        "process", "Collector", "freeze, off or a threshold (a whole number from 1)",
        "Python's garbage collector, from the first steady step on", values.collector,
    ),
    "amp.dtype": KnobEntry(
        "autocast", "AmpDtype", "bf16, fp16 or off", "autocast of forward pass and loss; fp16 scales gradients",
        values.one_of("bf16", "fp16", "off"),
    ),
    "matmul_precision": KnobEntry(
        "settings", "Setting", "highest, high or medium", "how exactly matrices of float32 are multiplied",
        values.one_of("highest", "high", "medium"),
    ),
    "cudnn.allow_tf32": KnobEntry("settings", "Setting", _TRUTH, "convolutions of float32 may use TF32", values.truth),
    "cudnn.benchmark": KnobEntry(
        "settings", "Setting", _TRUTH, "cuDNN tries its algorithms for each new shape", values.truth
    ),
    "cuda.linalg_library": KnobEntry(
        "settings", "Setting", "cusolver, magma or default", "the library torch.linalg uses on CUDA",
        values.one_of("cusolver", "magma", "default"),
    ),
    "memory_format": KnobEntry(
        "model", "MemoryFormat", "channels_last", "memory format of the model's convolutions",
        values.one_of("channels_last"),
    ),
    "compile": KnobEntry(
        "model", "Compile", "true, false, default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs",
        "torch.compile of the model, or false to run what the script compiles as it is written",
        values.one_of("true", "false", *values.COMPILE_MODES),
    ),
    "compile.mode": KnobEntry(
        "model", "Compile", "default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs",
        "the mode of what the script compiles, else of the model, which is then compiled",
        values.one_of(*values.COMPILE_MODES),
    ),
    "compile.dynamic": KnobEntry(
        "model", "Compile", _TRUTH, "whether shapes are dynamic in what the script or compile=true compiles",
        values.truth,
    ),
    "optimizer.fused": KnobEntry(
        "optimizer", "OptimizerArgument", _TRUTH, "one kernel updates many parameters", values.truth
    ),
    "optimizer.foreach": KnobEntry(
        "optimizer", "OptimizerArgument", _TRUTH, "each operation of the update is done for all parameters at once",
        values.truth,
    ),
    "zero_grad.set_to_none": KnobEntry(
        "optimizer", "SetToNone", _TRUTH, "zero_grad lets go of gradients instead of filling them with zeros",
        values.truth,
    ),
    "allocator.conf": KnobEntry(
        "launched", "AllocatorConf", "settings such as expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF of the command", values.allocator_conf, LAUNCH,
    ),
    "host.allocator": KnobEntry(
        "launched", "HostAllocator", "keep, keep_all, huge_pages, jemalloc or tcmalloc",
        "how the process gets memory of the host, and whether it gives it back",
        values.one_of("keep", "keep_all", "huge_pages", "jemalloc", "tcmalloc"), LAUNCH,
    ),
    "env:NAME": KnobEntry(
        "launched", "Environment", "any text", "an environment variable of the command", values.anything, LAUNCH
    ),
    "arg:--flag": KnobEntry(
        "launched", "Argument", "any text, or nothing for a flag that takes no value", "a flag of the script's own",
        values.anything, LAUNCH,
    ),
}  # fmt: skip

ENVIRONMENT_PREFIX = "env:"
ARGUMENT_PREFIX = "arg:"
_PREFIXES = {
    ENVIRONMENT_PREFIX: ("env:NAME", values.is_variable, "a variable's name after env:, not one of stepscope's own"),
    ARGUMENT_PREFIX: ("arg:--flag", values.is_flag, "a flag after arg:, such as arg:--workers=4 or arg:model.width=64"),
}


def entry(name: str) -> KnobEntry | None:
    """The line of the table for a knob's name, `env:OMP_NUM_THREADS` and the like included; None when unknown."""
    for prefix, (key, accepts, _) in _PREFIXES.items():
        if name.startswith(prefix):
            return KNOBS[key] if accepts(name[len(prefix) :]) else None
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
    for prefix, (_, accepts, wanted) in _PREFIXES.items():
        if knob.knob.startswith(prefix) and not accepts(knob.knob[len(prefix) :]):
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


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, KNOBS, n=1)
    return f"did you mean {close[0]}?" if close else "there are " + ", ".join(KNOBS)
