"""Text from runs and traces, made harmless before it reaches a screen or a page.

Names in a run folder are untrusted: a file name may hold an escape sequence that clears the terminal, or a
right-to-left mark that shows one line and means another. Everything a renderer prints passes `plain`; it shows such
characters as escapes instead of obeying them. Rich markup is harmless because renderers build `rich.text.Text`, which
reads none; HTML is escaped on top by `markup`.
"""

from __future__ import annotations

import html
import json
import re

# C0 and C1 controls, soft hyphen, zero-width and directional characters, line and paragraph separators, byte-order
# mark, interlinear annotations, tag characters, and lone surrogates (which no encoder accepts)
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)
LONGEST = 400  # characters of one name or sentence; longer ones are cut in the middle of nowhere useful


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def visible(text: str) -> str:
    """`text` with control and directional characters shown as escapes."""
    return _UNSAFE.sub(_visible, text)


def plain(text: object, limit: int = LONGEST) -> str:
    """`text` on one line, control and directional characters shown as escapes, cut to `limit` characters."""
    value = str(text)
    if len(value) > limit:
        value = value[: limit - 1] + "…"
    elif value.isascii() and value.isprintable():  # nearly all of the thousands that a page has
        return value
    return visible(value.replace("\t", "    "))


def one_line(text: object, limit: int = 2000) -> str:
    """Like `plain`, but line breaks become spaces: for sentences that we wrote ourselves."""
    return plain(" ".join(str(text).split()), limit)


def harmless_json(data: bytes) -> bytes:
    """The same JSON, with such characters as escapes of its own; the encoder leaves those above ASCII as they are."""
    if data.isascii():
        return data
    text = data.decode("utf-8")
    return _UNSAFE.sub(lambda found: found[0] if found[0] < " " else json.dumps(found[0])[1:-1], text).encode("utf-8")


def markup(text: object, limit: int = LONGEST) -> str:
    """`text` ready for an HTML element or a quoted attribute."""
    return html.escape(plain(text, limit), quote=True)
