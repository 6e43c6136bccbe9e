"""The deepest functions by sampled time, and what the samples stand on."""

from __future__ import annotations

from msgspec import Struct


class HotspotRow(Struct, frozen=True):
    """The samples whose innermost frame this is, by what `Hotspots.by` groups.

    Where a row merges several frames, what they differ in is None. The library columns name the innermost frame of the
    chosen library on the way there, itself included; None where there is none. `waiting`: the innermost frame is a
    known wait; waiting and working are never merged. `kind` and `phase` are those that hold most of its samples.
    """

    name: str | None
    path: str | None
    line: int | None
    library_function_name: str | None
    library_function_path: str | None
    library_function_line: int | None
    samples: int
    proportion: float  # of the selected samples
    waiting: bool
    kind: str  # "python" | "module" (top-level code) | "import" | "compile" | "native" | "none" (no frame was seen)
    module: str  # the module of the user's code, or the package of a library; "" where that is unknown
    phase: str | None  # the phase of the main threads of ranks; None for all other threads
    seconds: float | None  # of threads: samples / rate
    ms_per_step: float | None  # of the main thread of a rank, mean over ranks; None without steps
    roles: dict[str, int]  # role of the process -> samples


class SampledProcess(Struct, frozen=True):
    """A process that selected samples come from. `rank` is None for one that belongs to no rank.

    `pid` is None where the file does not tell processes apart, and `threads` where it does not tell threads apart.
    """

    host: str
    pid: int | None
    role: str
    rank: int | None
    threads: int | None
    samples: int
    waiting_samples: int


class Hotspots(Struct, frozen=True):
    """Rows, most samples first. `samples` + `skipped_samples` is the files' own sum whatever was selected.

    `selected_samples` and the values of `left_out` add up to `samples`.
    """

    samples: int
    skipped_samples: int
    unit: str  # of all counts: "samples", or the "us" or "bytes" of files that hold weights
    by: str  # "line" | "function" | "file" | "module"
    library: str  # what the library columns look for: a name or path, or "your own code"
    selected_samples: int  # what proportions are of
    waiting_samples: int  # of the selected
    left_out: dict[str, int]  # reason -> samples that were not selected
    rows: tuple[HotspotRow, ...]
    working_rows: int  # how many there are, of which `rows` may hold the first only
    waiting_rows: int
    kinds: dict[str, int]  # kind of the innermost frame -> selected samples
    processes: tuple[SampledProcess, ...]
    files: int
    formats: tuple[str, ...]
    idle: bool | None  # whether waiting threads were sampled too; None where nothing tells
    idle_source: str | None  # "recorded", or "inferred" from the threads that only ever wait
    rate_hz: float | None  # None where it is unknown or differs between files
    wall_s: float | None  # that sampling lasted
    wall_source: str | None  # "recorded", or "nominal": the samples of the busiest thread at the rate
    steps: int  # steady training steps behind `ms_per_step`, of all ranks
    mean_step_ms: float | None
    warnings: tuple[str, ...]
