"""A run reduced near its data: a few Parquet files for each host, from which a thousand ranks can be judged.

RUN/reduced/host-H holds the tables below and `reduced.json`, which is written last and carries the size and SHA-256 of
each. It may be copied away without the traces it was made of. All times are the host's own clock; missing is null,
never 0. Both sides of it are here: what writes a host, and what reads all of them.

All ranks are judged by reduced tables. Stacks, traces and telemetry are read in full of those alone that the verdict
points at, so that a report on a thousand ranks reads no more than one on a few.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.files import open_regular, read_small
from stepscope.model.ranks import RanksRead
from stepscope.read import Chosen, read_run
from stepscope.read.raw import Losses, RawHost, RawRank, RawRun
from stepscope.read.run_folder import ranks_in, read_accounting
from stepscope.schema import ACCOUNTING, PHASES, REDUCED, REDUCED_INDEX, REDUCED_SCHEMA, STEP_COLUMNS
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.schema import read_schemas
from stepscope.workers import side_by_side

STEPS_OF_BLOCK = 100  # steps that a row of a folded table stands for: block = step // 100
BUCKET_NS = 10_000_000_000  # of telemetry
PART = ".part"  # of a name: what is being written, or was when its writer was killed
_TRIES = 10
MAX_INDEX_BYTES = 32 * 2**20
MAX_TABLE_BYTES, MAX_TABLE_ROWS = 2 * 2**30, 50_000_000
MOST_STEPS = 4_000_000  # of the ranks that are looked at: each takes half a kilobyte there, and may be a bit of a file
MAX_RANK = 2**20
LABELS = ("steady", "warmup", "first_batch", "compile", "window", "monitor", "profiler", "incomplete", "eval")


SCHEMAS = read_schemas(Path(__file__).with_name("reduced_schema.json"))


class Group(Struct, frozen=True):
    """Ranks that exchange. `id` is the same on all hosts: made of description and ranks (`group_id`)."""

    id: str
    ranks: tuple[int, ...]
    description: str = ""  # as the framework words it: "default_pg", "TENSOR_MODEL_PARALLEL_GROUP", "mesh_tp"


class ReducedRank(Struct, frozen=True):
    """A training process. `dp`, `pp`, `tp`: its place in the layout; None where nothing tells it."""

    rank: int
    process: str = ""
    pid: int | None = None
    device: str | None = None
    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    exchange: tuple[str, ...] | None = None  # phases in which it waits for others; None: unknown
    exchange_source: str = ""
    samples_per_second: float | None = None  # of sampled stacks; None: not sampled


class TableFile(Struct, frozen=True):
    rows: int
    bytes: int
    sha256: str


class Index(Struct, frozen=True, kw_only=True):
    """reduced.json of a host."""

    schema: str
    version: str  # of stepscope
    host: str
    world_size: int | None
    ranks: tuple[ReducedRank, ...]
    groups: tuple[Group, ...] = ()
    tables: dict[str, TableFile]
    source: str  # digest of names, sizes and times of the files it was made of: the same source is not reduced again
    run: dict[str, Any] = {}  # name, script, started_ns, ended_ns, exit, scheduler: what the manifest says, masked
    left_out: tuple[str, ...] = ()  # what was too large or could not be read, in words


def group_id(ranks: Sequence[int], description: str = "") -> str:
    text = f"{description}\0{','.join(map(str, sorted(set(ranks))))}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_host(run: Path, index: Index, frames: Mapping[str, pl.DataFrame]) -> Path:
    """Write a host's tables whole to RUN/reduced/host-H, in place of what was there; raises OSError.

    Args:
        index: its `tables` are filled in here.
        frames: by name; a table that is left out is written empty.
    """
    target = run / REDUCED / f"host-{index.host}"
    target.parent.mkdir(parents=True, exist_ok=True)
    # a name of its own: processes of several machines, which number theirs alike, may write beside each other
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=PART, dir=target.parent))
    try:
        files = {}
        for name, schema in SCHEMAS.items():
            path = part / f"{name}.parquet"
            frame = frames[name] if name in frames else pl.DataFrame(schema=schema)
            frame = frame.select(pl.col(column).cast(kind) for column, kind in schema.items())
            frame = frame.rechunk()  # pieces would be row groups of their own
            frame.write_parquet(path, compression="zstd", compression_level=6, row_group_size=2**18, statistics=True)
            files[name] = TableFile(frame.height, path.stat().st_size, _digest(path))
        (part / REDUCED_INDEX).write_bytes(msgspec.json.encode(msgspec.structs.replace(index, tables=files)))
        part.chmod(0o777 & ~_umask())
        _put(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _put(part: Path, target: Path) -> None:
    """Move a whole folder to its place; what was there goes aside first and is deleted after. Raises OSError."""
    for left in reversed(range(_TRIES)):
        aside = part.with_name(f"{part.name}.old{PART}")
        with contextlib.suppress(FileNotFoundError):
            target.rename(aside)
        try:
            part.rename(target)
            return
        except OSError as error:
            # another that reduces the same host was quicker
            if not left or error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


class Reduced(Struct, frozen=True):
    """All hosts that could be read. `missing` ranks are of the world and of no host; None where its size is unknown."""

    folder: Path
    hosts: tuple[Index, ...]
    problems: tuple[str, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank.rank for host in self.hosts for rank in host.ranks}))

    @property
    def world_size(self) -> int | None:
        return max((host.world_size for host in self.hosts if host.world_size is not None), default=None)

    @property
    def missing(self) -> tuple[int, ...] | None:
        known = set(self.ranks)
        return None if self.world_size is None else tuple(rank for rank in range(self.world_size) if rank not in known)

    @property
    def host_of(self) -> dict[int, str]:
        return {rank.rank: host.host for host in self.hosts for rank in host.ranks}

    def part(self, name: str, host: Index) -> pl.LazyFrame:
        """A host's table, as it was written."""
        path = self.folder / f"host-{host.host}" / f"{name}.parquet"
        return pl.scan_parquet(path, schema=SCHEMAS[name], glob=False)

    def scan(self, name: str) -> pl.LazyFrame:
        """A table of all hosts, with `host`; columns and types are those of SCHEMAS."""
        frames = [
            self.part(name, host).with_columns(host=pl.lit(host.host)) for host in self.hosts if host.tables[name].rows
        ]
        return pl.concat(frames) if frames else pl.LazyFrame(schema={**SCHEMAS[name], "host": pl.String})


class ReducedFrames(Reduced, frozen=True, kw_only=True):
    """The same in memory, of what was never written as reduced tables: other tools' recordings. By host, then table."""

    frames: dict[str, dict[str, pl.DataFrame]]

    def part(self, name: str, host: Index) -> pl.LazyFrame:
        frame = self.frames[host.host].get(name)
        return pl.LazyFrame(schema=SCHEMAS[name]) if frame is None else frame.lazy()


def as_raw(reduced: Reduced, ranks: Collection[int]) -> RawRun:
    """The steps of some ranks as a journal would have them, where nothing but reduced tables is left of a run."""
    chosen = reduced.scan("steps").filter(pl.col("rank").is_in(list(ranks)))
    count = chosen.select(pl.len()).collect().item()
    if count > MOST_STEPS:
        raise UnreadableInputError(f"{reduced.folder}: {count} steps of a few ranks, and at most {MOST_STEPS} are read")
    frame = chosen.sort("rank", "step").collect()
    phases = [f"{phase}_us" for phase in PHASES]
    frame = frame.select(
        "rank",
        "step",
        kind=pl.when(pl.col("label") == LABELS.index("eval")).then(pl.lit("eval")).otherwise(pl.lit("train")),
        start_ns=pl.col("start_us") * 1000,
        **{f"{name[:-3]}_ns": pl.col(name).cast(pl.Int64) * 1000 for name in ("wall_us", *phases, "device_us")},
        samples=pl.col("samples").cast(pl.Int64),
        first_batch=pl.col("label") == LABELS.index("first_batch"),
        in_window=pl.col("label") == LABELS.index("window"),
    ).filter(pl.col("wall_ns").is_not_null() & pl.col("start_ns").is_not_null())
    rows = {rank: part.drop("rank").to_dicts() for (rank,), part in frame.partition_by("rank", as_dict=True).items()}
    missing = dict.fromkeys(STEP_COLUMNS)
    infos = {rank.rank: (host, rank) for host in reduced.hosts for rank in host.ranks if rank.rank in rows}
    return RawRun(
        folder=reduced.folder.parent if reduced.folder.name == REDUCED else reduced.folder,
        hosts=tuple(RawHost(host.host, {**host.run, "host": host.host}) for host in reduced.hosts if host.run),
        ranks=tuple(
            RawRank(
                name=rank.process or f"rank-{number}",
                rank=number,
                info={"rank": number, "pid": rank.pid, "device": rank.device, "host": host.host,
                      "world_size": host.world_size},
                steps=tuple({**missing, **row} for row in rows[number]),
            )
            for number, (host, rank) in sorted(infos.items())
        ),
        losses=Losses(),
    )  # fmt: skip


def reduced_folder(path: Path) -> Path | None:
    """The folder `reduced` of a run, or `path` itself where it is one; None where a run was not reduced."""
    for folder in (path / REDUCED, path):
        if folder.is_dir() and any((child / REDUCED_INDEX).is_file() for child in folder.glob("host-*")):
            return folder
    return None


def load(folder: Path) -> Reduced:
    """Read what every host says of itself. A host with a damaged or unknown index or table is left out, and said.

    `folder` is what `reduced_folder` gives, or that of one host, copied away alone. Raises UnreadableInputError where
    no host is left.
    """
    alone = (folder / REDUCED_INDEX).is_file()
    hosts: list[Index] = []
    problems: list[str] = []
    seen: dict[int, str] = {}
    children = [folder] if alone else sorted(folder.glob("host-*"))
    for child, index in zip(children, side_by_side(_host_or_why, children), strict=True):
        if isinstance(index, str):
            problems.append(f"{child.name}: left out ({index})")
            continue
        again = sorted(rank.rank for rank in index.ranks if rank.rank in seen)
        if again:
            problems.append(f"{child.name}: left out (rank {again[0]} is told by {seen[again[0]]} too)")
            continue
        seen.update((rank.rank, child.name) for rank in index.ranks)
        hosts.append(index)
    if not hosts:
        why = f"; {problems[0]}" if problems else ""
        raise UnreadableInputError(
            f"{folder}: no host's reduced tables can be read{why}; run `stepscope reduce RUN` again"
        )
    return Reduced(folder.parent if alone else folder, tuple(hosts), tuple(problems))


def _host_or_why(folder: Path) -> Index | str:
    try:
        return read_host(folder)
    except (OSError, ValueError, pl.exceptions.PolarsError) as error:
        return f"{REDUCED_INDEX}: {error.strerror}" if isinstance(error, OSError) else str(error)


_HOST = re.compile(r"host-([^/\0]{1,255})", re.DOTALL)
# made here: a decoder that is made in several threads at once crashes the process at times (msgspec 0.22)
_INDEX = msgspec.json.Decoder(Index)


def read_host(folder: Path) -> Index:
    """A host's index, its tables there with the sizes and columns they should have; raises ValueError, OSError."""
    try:
        index = _INDEX.decode(read_small(folder / REDUCED_INDEX, MAX_INDEX_BYTES))
    except msgspec.MsgspecError as error:
        raise ValueError(f"{REDUCED_INDEX}: {error}") from None
    if index.schema != REDUCED_SCHEMA:
        raise ValueError(f"{REDUCED_INDEX} is {index.schema!r}, this version reads {REDUCED_SCHEMA!r}")
    name = _HOST.fullmatch(folder.name)
    if name is None or name[1] != index.host:
        raise ValueError(f"{REDUCED_INDEX} is of host {index.host!r}")
    if any(not 0 <= rank.rank < MAX_RANK for rank in index.ranks):
        raise ValueError("a rank's number is damaged")
    if index.world_size is not None and not 0 < index.world_size <= MAX_RANK:
        raise ValueError("the number of ranks is damaged")
    for table, schema in SCHEMAS.items():
        path, said = folder / f"{table}.parquet", index.tables.get(table)
        if said is None or path.is_symlink() or not path.is_file() or path.stat().st_size != said.bytes:
            raise ValueError(f"{path.name} is missing, or not as large as {REDUCED_INDEX} says")
        if said.bytes > MAX_TABLE_BYTES:
            raise ValueError(f"{path.name} is too large")
        if _digest(path) != said.sha256:
            raise ValueError(f"{path.name} is not what {REDUCED_INDEX} was written for")
        if dict(pl.read_parquet_schema(path)) != schema:
            raise ValueError(f"{path.name} has other columns than {REDUCED_SCHEMA}")
        rows = pl.scan_parquet(path, glob=False).select(pl.len()).collect().item()  # of the footer
        if rows != said.rows or rows > MAX_TABLE_ROWS:
            raise ValueError(f"{path.name} has too many rows, or not as many as {REDUCED_INDEX} says")
    return index


MOST_IN_FULL = 16  # ranks of a run that are read in full, verdict or not
MOST_CHOSEN = 20  # of more
READ_OF_HEALTHY = 4  # where none is a suspect


def all_are_read(folder: Path, reduced: Reduced) -> bool:
    """Whether a run is so small, and so completely here, that its reduced tables are not needed."""
    return len(reduced.ranks) <= MOST_IN_FULL and ranks_in(folder) >= set(reduced.ranks)


def chosen_ranks(reduced: Reduced, suspects: Sequence[int], asked_for: Collection[int]) -> tuple[int, ...]:
    """The ranks to look at: suspects and their peers, of a run without any a few; and those that somebody asked for."""
    ranks = reduced.ranks
    some = suspects or ranks[:: max(1, len(ranks) // READ_OF_HEALTHY)][:READ_OF_HEALTHY]
    return tuple(sorted({*some[:MOST_CHOSEN], *asked_for}))


def read_in_full(folder: Path, reduced: Reduced, ranks: Sequence[int]) -> RawRun:
    """These ranks with their hosts, the others left where they are; steps of reduced tables for ranks not in `folder`.

    Raises UnreadableInputError where nothing of the ranks can be read.
    """
    here = ranks_in(folder).intersection(ranks)
    told = as_raw(reduced, ranks)
    told = replace(told, accounting=read_accounting(folder / ACCOUNTING, told.losses))
    if not here:
        return told
    try:
        raw = read_run(folder, Chosen(here, _hosts_of(folder, {reduced.host_of.get(rank) for rank in here})))
    except UnreadableInputError:
        return told
    told = as_raw(reduced, set(ranks) - here)
    names = {host.name for host in raw.hosts}
    return replace(
        raw,
        hosts=(*raw.hosts, *(host for host in told.hosts if host.name not in names)),
        ranks=tuple(sorted((*raw.ranks, *told.ranks), key=lambda rank: (rank.rank, rank.name))),
    )


def _hosts_of(folder: Path, names: Collection[str | None]) -> frozenset[str]:
    """Those of a run folder: a node has as many as it had launchers, "node1" and "node1.2"."""
    found = (path.name.removeprefix("host-") for path in folder.glob("host-*"))
    known = {name for name in names if name is not None}
    return frozenset(
        name for name in found if not known or name in known or any(name.startswith(f"{host}.") for host in known)
    )


def stands_on(folder: Path, reduced: Reduced, ranks: Sequence[int]) -> RanksRead:
    """What a report on `ranks` beside the verdict on all of them stands on."""
    here, judged, size = ranks_in(folder), set(reduced.ranks), reduced.world_size
    absent = None if size is None else sorted(set(range(size)) - judged - here)
    left = sorted(here - judged)
    told = (f"host {host.host}: {text}" for host in reduced.hosts for text in host.left_out)
    return RanksRead(
        hosts=len(reduced.hosts),
        in_full=tuple(rank for rank in ranks if rank in here),
        by_steps=tuple(rank for rank in ranks if rank not in here),
        absent=None if absent is None else len(absent),
        absent_ranks=ranges(absent or ()),
        not_reduced=len(left),
        not_reduced_ranks=ranges(left),
        problems=(*reduced.problems, *told),
        judged_hosts=tuple(host.host for host in reduced.hosts),
    )


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers with those that follow each other drawn together: 0-7, 12, 40-47."""
    said = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        said.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(said)


_SUB = 6  # bits kept behind the leading one
_EXACT = 2 << _SUB  # smaller values have a bin each
MAX_VALUE = 2**53


class Sketch(Struct, frozen=True):
    """`bins` ascending without doubles, `counts` above 0; shape (used bins,) both."""

    bins: Int64
    counts: Int64

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def quantile(self, share: float) -> float:
        """The value below which `share` (0 to 1) of the values lie, to within 0.8 %; NaN of nothing."""
        if not len(self.bins):
            return float("nan")
        row = int(np.searchsorted(np.cumsum(self.counts), share * self.count))
        return float(middles(self.bins)[min(row, len(self.bins) - 1)])


def bins_of(values: Int64) -> Int64:
    """The bin of each value; those below 0 count as 0, above 2^53 as 2^53."""
    values = np.clip(values, 0, MAX_VALUE - 1)
    # the exponent of a double is its number of leading bits, exactly: values are below 2^53
    shift = np.maximum(np.frexp(values.astype(np.float64))[1] - _SUB - 1, 0).astype(np.int64)
    bins: Int64 = (values >> shift) + shift * (_EXACT // 2)
    return bins


def middles(bins: Int64) -> Floats:
    """The middle of each bin's range of values."""
    shift = np.maximum(bins // (_EXACT // 2) - 1, 0)
    first = (bins - shift * (_EXACT // 2)) << shift
    return np.asarray(first + ((1 << shift) - 1) / 2, np.float64)


def sketch(values: Int64) -> Sketch:
    bins, counts = np.unique(bins_of(np.asarray(values, np.int64)), return_counts=True)
    return Sketch(bins.astype(np.int64), counts.astype(np.int64))


def merged(sketches: Iterable[Sketch]) -> Sketch:
    parts = list(sketches)
    none = np.zeros(0, np.int64)
    bins, row = np.unique(np.concatenate([none, *(part.bins for part in parts)]), return_inverse=True)
    counts = np.zeros(len(bins), np.int64)
    np.add.at(counts, row, np.concatenate([none, *(part.counts for part in parts)]))
    return Sketch(bins, counts)
