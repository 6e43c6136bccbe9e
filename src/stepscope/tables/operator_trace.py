"""A trace of operators, as ByteDance's StragglerAnalysis publishes them: microbatches and collectives of chosen steps.

One Parquet file holds a job: a row is an operation of a rank in a step, its start in seconds since the step began. It
becomes a reduced run in memory. What it does not tell stays unknown: hosts, phases of the host, tokens, telemetry.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from stepscope.errors import UnreadableInputError
from stepscope.files import open_regular, read_small
from stepscope.schema import REDUCED_SCHEMA
from stepscope.tables.reduced import LABELS, SCHEMAS, Group, Index, ReducedFrames, ReducedRank, TableFile, group_id

SUFFIX = ".parquet"
COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc")
RANKS_OF_HOST = 8  # the file names no hosts; eight devices in one are usual, and the survey's deviations agree
MAX_BYTES, MAX_ROWS = 2 * 2**30, 50_000_000
MAX_PLACE, MAX_STEP, MAX_S = 2**15, 2**31 - 1, 3600.0  # of a step
_WORK = {"forward-compute": "forward", "backward-compute": "backward", "optimizer": "optimizer", "gc": "gc"}
_SENT = {"forward-send": "send", "forward-recv": "recv", "backward-send": "send", "backward-recv": "recv"}
# Kinds of collectives and who takes part: the replicas of a stage, all, or the first and last stage of a replica.
# That of layer norms stays inside a tensor group, of which one rank is recorded.
_REPLICAS, _ALL, _ENDS = "DATA_PARALLEL_GROUP", "default_pg", "EMBEDDING_GROUP"
_CLIP = "optimizer-clip-main-grad"  # ends with an all-reduce of one number: the norm
_COLLECTIVES = {
    "params-all-gather": ("all_gather", _REPLICAS),
    "grads-reduce-scatter": ("reduce_scatter", _REPLICAS),
    "separate-grads-all-reduce": ("all_reduce", _REPLICAS),
    "embedding-grads-all-reduce": ("all_reduce", _ENDS),
    _CLIP: ("all_reduce", _ALL),
}
_IGNORED = ("layernorm-grads-all-reduce",)
_META = re.compile(rb"^([a-z_]{1,32}): +(\d{1,7})[ \r]*$", re.MULTILINE)
_NS = pl.Int64


def is_operator_trace(path: Path) -> bool:
    """Whether a file is one, by its name, its first bytes and its columns."""
    if path.suffix != SUFFIX or not path.is_file():
        return False
    try:
        with open_regular(path, follow=True) as file:
            if file.read(4) != b"PAR1":
                return False
        return set(COLUMNS) <= set(pl.read_parquet_schema(path))
    except (OSError, pl.exceptions.PolarsError):
        return False


def read_operator_trace(path: Path) -> ReducedFrames:
    """The job of one file, with the sizes that meta-NAME.yaml beside trace-NAME.parquet tells; rows that cannot be are
    left out and counted in `problems`. Raises UnreadableInputError where no row is left."""
    try:
        rows, problems = _rows(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UnreadableInputError(f"{path}: cannot be read as a trace of operators ({error})") from None
    if rows.is_empty():
        raise UnreadableInputError(f"{path}: a trace of operators without an operation that can be read")
    sizes = _sizes(path)
    tp = sizes.get("tp_size", 1) * sizes.get("dsp_size", 1)
    places = rows.group_by("rank").agg(pl.col("dp_rank", "stage").first()).sort("rank")
    world = sizes.get("world_size")
    if world is not None and world <= int(places["rank"].max() or 0):  # type: ignore[arg-type]
        problems.append(f"world_size {world} of {_beside(path).name} is too small for its ranks: left out")
        world = None
    groups, calls = _calls(rows, places, world)
    frames = {"steps": _steps(rows), "work": _work(rows), "collectives": calls}
    hosts, parts = [], {}
    host_of = (places["rank"] // RANKS_OF_HOST).to_list()
    for number in sorted(set(host_of)):
        name = f"ranks-{number * RANKS_OF_HOST}-{number * RANKS_OF_HOST + RANKS_OF_HOST - 1}"
        mine = places.filter(pl.col("rank") // RANKS_OF_HOST == number)
        parts[name] = {
            table: frame.filter(pl.col("rank").is_in(mine["rank"].implode())) for table, frame in frames.items()
        }
        hosts.append(
            Index(
                schema=REDUCED_SCHEMA,
                version="",
                host=name,
                world_size=world,
                ranks=tuple(
                    ReducedRank(rank, dp=dp, pp=stage, tp=0, exchange=("forward", "backward", "optimizer", "other"),
                                exchange_source="a pipeline's stages wait for each other inside their phases")
                    for rank, dp, stage in mine.rows()
                ),
                groups=tuple(groups.values()),
                tables={
                    table: TableFile(parts[name][table].height if table in frames else 0, 0, "") for table in SCHEMAS
                },
                source=path.name,
            )
        )  # fmt: skip
    if len(hosts) > 1:
        problems.append(f"hosts are not recorded: each {RANKS_OF_HOST} ranks are taken for those of one")
    if tp > 1:
        problems.append(f"of each {tp} ranks of a tensor group one is recorded, and stands for them")
    return ReducedFrames(folder=path.parent, hosts=tuple(hosts), problems=tuple(problems), frames=parts)


def _beside(path: Path) -> Path:
    return path.with_name(f"meta-{path.stem.removeprefix('trace-')}.yaml")


def _sizes(path: Path) -> dict[str, int]:
    """Whole numbers of the file beside it; empty where there is none."""
    try:
        text = read_small(_beside(path), 2**16, follow=True)
    except OSError:
        return {}
    return {key.decode(): int(value) for key, value in _META.findall(text) if 0 < int(value) < 2**20}


def _rows(path: Path) -> tuple[pl.DataFrame, list[str]]:
    with open_regular(path, follow=True) as file:
        size = file.seek(0, 2)
    if size > MAX_BYTES:
        raise OSError(f"more than {MAX_BYTES} bytes")
    schema = pl.read_parquet_schema(path)
    odd = [name for name in COLUMNS if not _is_kind(name, schema[name])]
    if odd:
        raise OSError(f"column {odd[0]} is {schema[odd[0]]}")
    lazy = pl.scan_parquet(path, glob=False)
    count = int(lazy.select(pl.len()).collect().item())
    if count > MAX_ROWS:
        raise OSError(f"more than {MAX_ROWS} rows")
    places = ("dp_rank", "stage", "rank")
    names = [*_WORK, *_SENT, *_COLLECTIVES, *_IGNORED]
    start, length = pl.col("start_ts").cast(pl.Float64), pl.col("duration").cast(pl.Float64)
    rows = (
        lazy.select(COLUMNS)
        .filter(
            pl.all_horizontal(pl.col(name).is_between(0, MAX_PLACE) for name in places)
            & pl.col("step").is_between(0, MAX_STEP)
            & start.is_between(0, MAX_S)  # NaN is not between
            & length.is_between(0, MAX_S)
            & (start + length <= MAX_S)
            & pl.col("optype").cast(pl.String).is_in(names)
        )
        .select(
            *(pl.col(name).cast(pl.Int32) for name in (*places, "step")),
            pl.col("optype").cast(pl.String),
            pl.col("seq_id").cast(pl.Int64),
            pl.col("mc").cast(pl.Int32),
            pl.col("mb_id").cast(pl.Int32),
            start_ns=(start * 1e9).round().cast(_NS),
            end_ns=((start + length) * 1e9).round().cast(_NS),
        )
        .collect()
    )
    # a rank has one place
    sure = rows.group_by("rank").agg(sure=(pl.col("dp_rank").n_unique() == 1) & (pl.col("stage").n_unique() == 1))
    rows = rows.join(sure.filter("sure").select("rank"), on="rank", how="semi")
    problems = (
        [f"{count - rows.height} of {count} rows left out: no operation that can be"] if rows.height < count else []
    )
    return _one_after_the_other(rows), problems


def _is_kind(name: str, kind: pl.DataType) -> bool:
    if name == "optype":
        return kind in (pl.String, pl.Categorical, pl.Enum)
    return kind.is_float() if name in ("start_ts", "duration") else kind.is_integer()


def _one_after_the_other(rows: pl.DataFrame) -> pl.DataFrame:
    """Times of a step are since it began; recorded steps are laid one behind the other, which keeps their order."""
    steps = rows.group_by("step").agg(wall_ns=pl.col("end_ns").max() - pl.col("start_ns").min()).sort("step")
    steps = steps.with_columns(at_ns=pl.col("wall_ns").cum_sum() - pl.col("wall_ns"))
    return rows.join(steps, on="step").with_columns(pl.col("start_ns", "end_ns") + pl.col("at_ns"))


def _steps(rows: pl.DataFrame) -> pl.DataFrame:
    spent = pl.col("end_ns") - pl.col("start_ns")
    work = pl.col("optype").is_in([name for name, kind in _WORK.items() if kind != "gc"])
    own = rows.group_by("rank", "step").agg(
        start_us=pl.col("at_ns").first() // 1000,
        wall_us=pl.col("wall_ns").first() // 1000,
        compute_us=pl.when(work.any()).then(spent.filter(work).sum() // 1000),
        gc_us=pl.when((pl.col("optype") == "gc").any()).then(spent.filter(pl.col("optype") == "gc").sum() // 1000),
    )
    own = own.with_columns(label=pl.lit(LABELS.index("steady")))
    return _shaped("steps", own.sort("step", "rank"))


def _work(rows: pl.DataFrame) -> pl.DataFrame:
    work = rows.filter(pl.col("optype").is_in(list(_WORK)) & (pl.col("end_ns") > pl.col("start_ns"))).with_columns(
        kind=pl.col("optype").replace_strict(_WORK, return_dtype=pl.String),
        microbatch=pl.when(pl.col("mb_id") >= 0).then("mb_id"),
        chunk=pl.when(pl.col("mc") >= 0).then("mc"),
    )
    return _shaped("work", work.sort("step", "rank", "start_ns"))


def _calls(rows: pl.DataFrame, places: pl.DataFrame, world: int | None) -> tuple[dict[str, Group], pl.DataFrame]:
    """Groups by id, and the calls. The n-th message between two stages in a step is one call, to and fro in turns."""
    replicas, stages = places["dp_rank"].to_list(), places["stage"].to_list()
    rank_at = {(dp, stage): rank for rank, dp, stage in places.rows()}
    last = max(stages)
    groups: dict[str, Group] = {}
    keys: list[tuple[str, int, int, str]] = []  # description, dp, stage -> id

    def group(name: str, members: Sequence[int], of: Sequence[tuple[int, int]]) -> None:
        made = Group(group_id(members, name), tuple(sorted(set(members))), name)
        groups[made.id] = made
        keys.extend((name, dp, stage, made.id) for dp, stage in of)

    everyone = list(zip(replicas, stages, strict=True))
    group(_ALL, range(world) if world is not None else places["rank"].to_list(), everyone)
    for stage in sorted(set(stages)):
        of = [place for place in everyone if place[1] == stage]
        group(_REPLICAS, [rank_at[place] for place in of], of)
    for dp in sorted(set(replicas)):
        ends = [(dp, stage) for stage in {0, last} if (dp, stage) in rank_at]
        group(_ENDS, [rank_at[place] for place in ends], ends)
        for stage in range(last):
            pair = [(dp, stage), (dp, stage + 1)]
            if all(place in rank_at for place in pair):  # the pair is named after its earlier stage
                group("PIPELINE_PAIR", [rank_at[place] for place in pair], pair[:1])
    known = pl.DataFrame(
        keys, schema={"name": pl.String, "dp_rank": pl.Int32, "pair": pl.Int32, "group": pl.String}, orient="row"
    )
    kinds = {**{name: kind for name, (kind, _) in _COLLECTIVES.items()}, **_SENT}
    names = {**{name: group for name, (_, group) in _COLLECTIVES.items()}, **dict.fromkeys(_SENT, "PIPELINE_PAIR")}
    calls = rows.filter(pl.col("optype").is_in(list(kinds))).with_columns(
        kind=pl.col("optype").replace_strict(kinds, return_dtype=pl.String),
        name=pl.col("optype").replace_strict(names, return_dtype=pl.String),
        back=pl.col("optype").str.starts_with("backward").cast(pl.Int64),
    )
    before = pl.col("optype").is_in(["forward-recv", "backward-send"])
    calls = calls.with_columns(
        pair=pl.col("stage") - before.cast(pl.Int32),
        sequence=pl.when(pl.col("name") == "PIPELINE_PAIR")
        .then(2 * pl.col("seq_id") + pl.col("back"))
        .otherwise(pl.col("seq_id")),
        basis=pl.lit("device"),
        bytes=pl.when(pl.col("optype") == _CLIP).then(4),
    ).join(known, on=["name", "dp_rank", "pair"])
    return groups, _shaped("collectives", calls.sort("step", "rank", "start_ns"))


def _shaped(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    schema = SCHEMAS[table]
    return frame.select(
        # what overlaps may add up to more than a column holds
        (pl.col(name) if name in frame.columns else pl.lit(None).alias(name)).cast(kind, strict=False)
        for name, kind in schema.items()
    )
