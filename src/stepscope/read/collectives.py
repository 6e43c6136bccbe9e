"""What a collective's arguments say, as compact JSON text of an allow-list, bounded in size.

They stand on the operator `record_param_comms` and, where the writer knew enough, on the kernels; the list of ranks
may be a list or the text of one, and the writer cuts long ones short with an ellipsis.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stepscope.read.lenient import first_value

COLLECTIVE_KEYS = (
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Group size",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "Process Group ID",
    "Src Rank",
    "Dst Rank",
    "Seq",
    "In split size",
    "Out split size",
    "Comms Id",
    "Global rank start",
    "Global rank stride",
    "Root Rank",
)
_MAX_VALUE_BYTES = 2048


def collective_text(raw: Any) -> str | None:
    """The allow-listed arguments among `raw`, a JSON object; None where there is none that can be kept."""
    value = first_value(bytes(raw))
    if not isinstance(value, dict):
        return None
    kept = {key: value[key] for key in COLLECTIVE_KEYS if value.get(key) is not None}
    small = {key: item for key, item in kept.items() if len(msgspec.json.encode(item)) <= _MAX_VALUE_BYTES}
    return msgspec.json.encode(small).decode() if small else None
