"""Colours of boxes, and the words for them: by what a frame is, or by how a side of a difference changed.

All fills are light enough for black text, in a bright page as in a dark one.
"""

from __future__ import annotations

# kind of frame -> (what the legend calls it, fill)
KINDS = {
    "user": ("your code", "#f6ad55"),
    "library": ("library", "#a9c7e8"),
    "wait": ("waiting", "#e79aa8"),
    "operator": ("operator", "#8fd0ad"),
    "kernel": ("on the device", "#ecd06f"),
    "import": ("import", "#cdb8e6"),
    "native": ("native", "#c3c8cf"),
    "root": ("", "#dfe4ea"),
}
SAME, NEW, GONE = 0, 1, 2
# (word, fill) of a change; from 3 on grown, then shrunk, by band
_BANDS = (0.15, 0.3, 0.5, 1.0)  # of the larger side: a box is in the first band that its change does not exceed
_GROWN = ("#f7d3cb", "#f0ab9d", "#e77f6d", "#dd5f4d")
_SHRUNK = ("#d0def5", "#a9c5f0", "#7faae8", "#5c8fe0")
CHANGES = (
    ("about the same", "#d9dde3"),
    ("new", "#ff9d3b"),
    ("gone", "#8f8fe6"),
    *(("grown", fill) for fill in _GROWN),
    *(("shrunk", fill) for fill in _SHRUNK),
)
LEGEND = (6, 10, NEW, GONE, SAME)  # the changes that a legend shows
_SMALL = 0.05  # of the larger side
_SMALL_OF_TREE = 0.001


def change(value: float, base: float, whole: float) -> int:
    """The position in `CHANGES` of a box that was worth `base` and is worth `value`, in a tree worth `whole`."""
    larger = max(value, base)
    difference = abs(value - base)
    if larger <= 0 or difference < _SMALL_OF_TREE * whole:
        return SAME
    if base == 0 or value == 0:
        return NEW if base == 0 else GONE
    if difference < _SMALL * larger:
        return SAME
    band = next(at for at, limit in enumerate(_BANDS) if difference <= limit * larger or limit == _BANDS[-1])
    return 3 + band + (0 if value > base else len(_BANDS))
