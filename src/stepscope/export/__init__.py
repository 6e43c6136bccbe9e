"""Cuts traces and merges ranks into one Chrome trace that Perfetto and chrome://tracing open.

Each source is read two or three times, as a stream: to survey it (`survey.py`), for a cut to choose what stays
(`selection.py`), and to write it (`merge.py`). Memory holds one byte per event and, for a cut, a few numbers per arrow,
launch and kept slice, never the events.
"""

from __future__ import annotations

from stepscope.export.merge import Cut, Exported, export, parse_categories, parse_range

__all__ = ["Cut", "Exported", "export", "parse_categories", "parse_range"]
