"""Lists of nodes as SLURM writes them, `gpu[01-03,7],login`, as names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from stepscope.record.host.pyspy import output_of

MOST_NODES = 20_000  # the largest machines have fewer
_SECONDS = 2.0  # for scontrol, which asks nobody for this
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_PIECE = re.compile(r"([^\[\],]*)(?:\[([0-9,-]+)\])?")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def nodes_of(text: str) -> tuple[str, ...]:
    """The names in a list, by `scontrol` where it is there, else by `expanded`; empty where neither understands it."""
    said = output_of(["scontrol", "show", "hostnames", text], _SECONDS) if _could_be_a_list(text) else None
    names = tuple(said.split())[:MOST_NODES] if said else ()
    return names if names and all(map(_NAME.fullmatch, names)) else expanded(text)


def _could_be_a_list(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9._,\[\]-]*", text) is not None


def expanded(text: str) -> tuple[str, ...]:
    """The names in a list; empty where it is none, or of more than `MOST_NODES`. `01-03` keeps its zeros."""
    names: list[str] = []
    for part in _parts(text):
        pieces = list(_pieces(part))
        size = 1
        for numbers in pieces:
            size *= len(numbers)
        if not size or len(names) + size > MOST_NODES:
            return ()
        names += map("".join, product(*pieces))
    return tuple(dict.fromkeys(names)) if all(map(_NAME.fullmatch, names)) else ()


def _parts(text: str) -> Iterator[str]:
    """What commas outside of brackets part."""
    depth = start = 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def _pieces(part: str) -> Iterator[list[str]]:
    """The words that follow each other in the names: one for a fixed text, some for a bracket; none for damage."""
    at = 0
    while at < len(part):
        found = _PIECE.match(part, at)
        if found is None or found.end() == at:
            yield []
            return
        at = found.end()
        yield [found[1]]
        if found[2] is not None:
            yield _numbers(found[2])


def _numbers(text: str) -> list[str]:
    words: list[str] = []
    for each in text.split(","):
        found = _RANGE.fullmatch(each)
        if found is None:
            return []
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or len(words) + last - first >= MOST_NODES:
            return []
        words += (f"{number:0{len(found[1])}d}" for number in range(first, last + 1))
    return words
