"""Numbers in a sentence: how many things there are, and how long one takes."""

from __future__ import annotations

_HISSING = ("s", "x", "ch", "sh")


def things(number: int, noun: str) -> str:
    """A number, thousands separated, with its noun, which stands in the plural unless there is one: 1 step, 1,234
    steps, 2 batches."""
    hissing = noun.endswith(_HISSING) and not noun.endswith("epoch")
    plural = "" if number == 1 else "es" if hissing else "s"
    return f"{number:,} {noun}{plural}"


def short(value: float) -> str:
    """Three significant digits, all of those before the point: 0.412, 41.2, 1,234; never 1.23e+03."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
