"""A number of things with their noun, the same wherever a sentence counts."""

from __future__ import annotations

_HISSING = ("s", "x", "ch", "sh")


def things(number: int, noun: str) -> str:
    """A number, thousands separated, with its noun, which stands in the plural unless there is one: 1 step, 1,234
    steps, 2 batches."""
    hissing = noun.endswith(_HISSING) and not noun.endswith("epoch")
    plural = "" if number == 1 else "es" if hissing else "s"
    return f"{number:,} {noun}{plural}"
