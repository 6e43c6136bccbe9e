"""Which traces are of workers of one run, and so may be compared call by call.

Files of one folder are, as for the TensorBoard plugin. Files of several folders are only if each says which rank it is,
no two the same, and nothing speaks against it: two runs that lie side by side both have a rank 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec import Struct

from stepscope.engine.spans import Base, Span

MAX_RANKS = 1 << 16  # a size of the world beyond this is no size but damage
_APART_NS = 3600 * 10**9  # clocks of the hosts of one run do not differ by an hour
_NAMED = 3  # in a sentence

ALONE = "one worker alone: give traces of several ranks of the same run, or the folder with them"


class Peers(Struct, frozen=True):
    """The spans of workers of one run, by worker; `missing` are ranks that are known of and have no trace."""

    workers: tuple[tuple[Span, ...], ...]
    missing: tuple[int, ...]
    guessed: bool  # nothing says which ranks the files are of


def peers(base: Base) -> Peers | str:
    """The workers to compare, or why there are none."""
    by_process: dict[str, list[Span]] = {}
    for span in base.spans:
        by_process.setdefault(span.ref.process, []).append(span)
    recorded = bool(base.tables.manifests) or base.tables.journal.height > 0
    workers = _last_of_each_rank(by_process.values()) if recorded else list(by_process.values())
    if len(workers) < 2:
        return ALONE
    claims = {
        (process, trace): rank
        for process, trace, rank in base.tables.traces.select("process", "trace", "claimed_rank").iter_rows()
    }
    claimed = [claims.get((spans[0].ref.process, spans[0].ref.trace)) for spans in workers]
    if not recorded:
        reason = _not_one_run(workers, claimed)
        if reason is not None:
            return reason
    guessed = not recorded and None in claimed
    ranks = {spans[0].ref.rank for spans in workers}
    missing = () if guessed else _missing(base, workers, ranks)
    return Peers(tuple(tuple(spans) for spans in workers), missing, guessed)


def _last_of_each_rank(workers: Iterable[list[Span]]) -> list[list[Span]]:
    """Of ranks that were started several times, what ran last."""
    last: dict[int, list[Span]] = {}
    for spans in workers:
        known = last.get(spans[0].ref.rank)
        if known is None or _begin(spans) > _begin(known):
            last[spans[0].ref.rank] = spans
    return [last[rank] for rank in sorted(last)]


def _not_one_run(workers: Sequence[list[Span]], claimed: Sequence[int | None]) -> str | None:
    folders = list(dict.fromkeys(spans[0].ref.run for spans in workers))
    repeated = [rank for rank, count in Counter(rank for rank in claimed if rank is not None).items() if count > 1]
    if len(folders) < 2:
        if repeated:
            named = _some(
                [spans[0].ref.worker for spans, rank in zip(workers, claimed, strict=True) if rank in repeated]
            )
            return f"two runs in one folder: {named} are all rank {min(repeated)}; give the files of one run"
    else:
        several = f"{len(workers)} workers of {len(folders)} folders ({_some(folders)})"
        if repeated:
            return f"{several}, of which two are rank {min(repeated)}: different runs; give one of them"
        if None in claimed:
            return f"{several}, and not all say which rank they are: give the folder of one run"
        begins = sorted((_begin(spans), _end(spans)) for spans in workers)
        if any(after[0] - before[1] > _APART_NS for before, after in pairwise(begins)):
            return f"{several}, recorded more than an hour apart: different runs; give one of them"
    sizes = {size for spans in workers if (size := _world_size(spans)) is not None}
    if len(sizes) > 1:
        return (
            f"workers of runs of different sizes ({_some([str(size) for size in sorted(sizes)])} ranks): give one run"
        )
    return None


def _missing(base: Base, workers: Sequence[list[Span]], ranks: set[int]) -> tuple[int, ...]:
    sizes = [info.world_size for info in base.tables.ranks] + [_world_size(spans) for spans in workers]
    size = max((size for size in sizes if size is not None), default=0)
    return tuple(rank for rank in range(size) if rank not in ranks) if size <= MAX_RANKS else ()


def _world_size(spans: Sequence[Span]) -> int | None:
    for span in spans:
        info = span.metadata.get("distributedInfo")
        size = info.get("world_size") if isinstance(info, dict) else None
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None


def _begin(spans: Sequence[Span]) -> int:
    return min((int(span.start_ns.min()) for span in spans if len(span)), default=0)


def _end(spans: Sequence[Span]) -> int:
    return max((int(span.end_ns.max()) for span in spans if len(span)), default=0)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown
