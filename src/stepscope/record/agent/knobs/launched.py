"""Knobs that the launcher applies, to command or environment; here the process is asked whether they arrived."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from typing import Any, Sequence

from stepscope.record.agent.knobs import masked
from stepscope.record.agent.knobs.base import NO_DEVICE, KnobBase


class Environment(KnobBase):
    """Reports what the variable is once torch is imported, which is when nearly all variables of torch are read."""

    def install(self) -> None:
        seen = os.environ.get(self.name.partition(":")[2])
        reason = "the script or what starts it sets the variable itself"
        if seen is None:
            reason = "the training process does not have the variable; something in between removed it"
        applied = seen == self.value
        self.report(applied, seen and masked(self.name, seen), None if applied else reason)


class Argument(KnobBase):
    """Reports the arguments as `sys.argv` has them when torch is imported."""

    def install(self) -> None:
        seen = argument_of(sys.argv[1:], self.name.partition(":")[2])
        if seen is None:
            self.report(False, reason="the training process did not get it; the command does not hand it on")
        elif self.value in ("", seen):
            self.report(True, masked(self.name, seen) if self.value else "given")
        else:
            self.report(False, masked(self.name, seen), "the training process got another value")


POSITIONAL_FROM_HERE = "--"


def argument_of(words: Sequence[str], flag: str) -> str | None:
    """The value of the last `flag` among arguments, "" for one that stands alone; None where there is none."""
    found: str | None = None
    for index, word in enumerate(words):
        if word == POSITIONAL_FROM_HERE:
            break
        if word.startswith(flag + "="):
            found = word[len(flag) + 1 :]
        elif is_short_with_number(word, flag):
            found = word[len(flag) :]
        elif word == flag and flag.startswith("-"):
            following = words[index + 1] if index + 1 < len(words) else POSITIONAL_FROM_HERE
            found = "" if looks_like_flag(following) else following
    return found


def is_short_with_number(word: str, flag: str) -> bool:
    """Whether `word` is a one-letter flag with a number right behind it, such as -j4."""
    return len(flag) == 2 and word.startswith(flag) and word[2:].isdecimal()


def looks_like_flag(word: str) -> bool:
    """Whether an argument is a flag of its own and no value: a dash that does not begin a number."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def allocator_variables(value: str) -> dict[str, str]:
    """What the launcher sets in the environment of the command."""
    return dict.fromkeys(VARIABLES, value)


class AllocatorConf(KnobBase):
    """Looks after the first step, when the allocator has been started if it ever is."""

    missed = NO_DEVICE

    def at_first_step(self) -> None:
        """Read back what the allocator itself says of its settings, where it does."""
        if not self.agent.device.in_use:
            self.report(False, reason=NO_DEVICE)
            return
        if self.value not in [os.environ.get(name) for name in VARIABLES]:
            self.report(False, reason=f"the process does not see it in {VARIABLES[0]}")
            return
        memory: Any = sys.modules["torch"].cuda.memory
        found = memory._snapshot().get("allocator_settings") if hasattr(memory, "_snapshot") else None
        settings = found if isinstance(found, dict) else {}  # this torch may not tell them
        told = settings.get(VARIABLES[0]) or settings.get(VARIABLES[1])
        if told is not None and told != self.value:
            self.report(False, f"the allocator has {told}", "the script sets its own")
            return
        names = [part.partition(":")[0] for part in self.value.split(",") if ":" in part]
        words = ", ".join(f"{name} is {settings[name]}" for name in names if name in settings)
        self.report(True, f"the allocator says {words}" if words else f"{VARIABLES[0]} is set in the process")


# glibc takes no larger threshold than this; tensors above it are mapped anew whatever it is, unless nothing may be.
LARGEST_THRESHOLD_BYTES = 33_554_432
NO_TRIM_BYTES = 4_294_967_296
KEEP, KEEP_ALL, HUGE = "keep", "keep_all", "huge_pages"
LIBRARIES = ("jemalloc", "tcmalloc")
_TRIM = {"MALLOC_TRIM_THRESHOLD_": str(NO_TRIM_BYTES)}
_VARIABLES = {
    KEEP: {"MALLOC_MMAP_THRESHOLD_": str(LARGEST_THRESHOLD_BYTES), **_TRIM},
    KEEP_ALL: {"MALLOC_MMAP_MAX_": "0", **_TRIM},
    HUGE: {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}
_FOLDERS = ("/usr/lib/*-linux-gnu*", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/lib64")


def installed(name: str) -> str | None:
    """The path of an allocator's shared library, for LD_PRELOAD; None where it is not installed."""
    for folder in _FOLDERS:
        for pattern in (f"lib{name}.so*", f"lib{name}_minimal.so*"):
            found = sorted(glob.glob(f"{folder}/{pattern}"))
            if found:
                return found[0]
    return None


def host_allocator_variables(value: str, preloaded: str | None = None) -> dict[str, str]:
    """What a command's environment needs; empty for a library that is not installed. `preloaded`: LD_PRELOAD so far."""
    if value in _VARIABLES:
        return dict(_VARIABLES[value])
    path = installed(value) if value in LIBRARIES else None
    return {} if path is None else {"LD_PRELOAD": " ".join([path, *([preloaded] if preloaded else [])])}


class HostAllocator(KnobBase):
    """Reads back what the process was started with."""

    def install(self) -> None:
        value = self.value
        wanted = _VARIABLES.get(value, {})
        missing = [name for name, text in wanted.items() if os.environ.get(name) != text]
        loaded: str | None = " ".join(f"{name}={text}" for name, text in wanted.items())
        if value in LIBRARIES:  # the path of its library in this process
            loaded = None
            with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
                loaded = next((line.split()[-1] for line in maps if f"/lib{value}" in line), None)
        if loaded is None:
            reason = f"the process was started without lib{value}.so: something in between removed it"
            if installed(value) is None:
                reason = f"lib{value}.so is not installed on this machine"
            self.report(False, reason=reason)
        elif missing:
            self.report(False, reason=f"the training process does not see {', '.join(missing)} as set")
        else:
            self.report(True, loaded)
