"""The deepest functions by sampled time, and what the samples stand on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HotspotRow:
    """The samples whose innermost frame this is, by what `Hotspots.by` groups.

    The library columns name the innermost frame of the chosen library on the way there; None where there is none, and
    where rows of different callers were merged. `waiting`: the innermost frame is a known wait.
    """

    name: str
    path: str
    line: int | None
    library_function_name: str | None
    library_function_path: str | None
    library_function_line: int | None
    samples: int
    proportion: float  # of the selected samples
    waiting: bool
    kind: str  # "python" | "module" (top-level code) | "import" | "compile" | "native" | "none" (no frame was seen)
    phase: str | None  # the one that holds most of its samples, of main threads
    roles: dict[str, int]  # role of the process -> samples


@dataclass(frozen=True)
class SampledProcess:
    """A process that samples come from. `rank` is None for one that trains nothing and belongs to no rank."""

    host: str
    pid: int | None
    role: str
    rank: int | None
    threads: int
    samples: int
    waiting_samples: int


@dataclass(frozen=True)
class Hotspots:
    """Rows, most samples first. `samples` + `skipped_samples` is the files' own sum whatever was selected."""

    samples: int
    skipped_samples: int
    unit: str  # of all counts: "samples", or the "us" or "bytes" of files that hold weights
    by: str  # "function" | "line" | "file" | "module"
    library: str  # what the library columns look for: a name or path, or "your own code"
    selected_samples: int  # what proportions are of
    waiting_samples: int  # of the selected
    left_out: dict[str, int]  # reason -> samples that were not selected
    rows: tuple[HotspotRow, ...]
    processes: tuple[SampledProcess, ...]
    files: int
    formats: tuple[str, ...]
    idle: bool | None  # whether waiting threads were sampled; None where the files do not tell
    rate_hz: float | None
    wall_s: float | None  # that sampling lasted
    warnings: tuple[str, ...]
