"""What a single-file report holds, as its script would read it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any

DATA = re.compile(r'<script type="application/json" id="stepscope-data"([^>]*)>(.*?)</script>', re.DOTALL)


def documents_text(page: str) -> str:
    """The JSON text in the page; "" of a page without, such as the plain report."""
    found = DATA.search(page)
    if found is None:
        return ""
    if 'data-encoding="gzip-base64"' in found[1]:
        return gzip.decompress(base64.b64decode(found[2])).decode()
    return found[2]


def embedded(page: str) -> dict[str, Any]:
    """The documents in the page, of which there is one element."""
    assert len(DATA.findall(page)) == 1
    found: dict[str, Any] = json.loads(documents_text(page))
    return found
