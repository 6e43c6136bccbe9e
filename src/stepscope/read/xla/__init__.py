"""What torch_xla writes as text: metrics reports, logs of XLA_METRICS_FILE with steps, debug logs of PT_XLA_DEBUG.

`files` puts the files of a run together, `content` reads one, `report`, `sections` and `analyses` are its three kinds
of text, and `journal` makes events of them, each thing counted once.
"""

from __future__ import annotations

from stepscope.read.xla.detect import holds_xla, is_xla_file
from stepscope.read.xla.files import read_xla_files

__all__ = ["holds_xla", "is_xla_file", "read_xla_files"]
