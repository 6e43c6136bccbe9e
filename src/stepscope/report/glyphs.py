"""The few drawing characters of the terminal report, with twins for terminals that cannot show them."""

from __future__ import annotations

from msgspec import Struct

# Colours of the parts of a step by position; basic ones, which every terminal theme defines readably.
COLOURS = ("red", "blue", "green", "magenta", "cyan", "yellow", "bright_black")


class Glyphs(Struct, frozen=True):
    """`fills` tell the parts of the bar apart without colour."""

    fills: str
    quote: str
    separator: str
    warning: str

    def fill(self, index: int) -> str:
        """The character that fills part `index` of the bar."""
        return self.fills[index % len(self.fills)]

    def colour(self, index: int) -> str:
        """The style of part `index` of the bar."""
        return COLOURS[index % len(COLOURS)]

    def encodable(self, line: str) -> str:
        """`line` in characters that the terminal has: signs of ours by their twins, others as escapes."""
        if self is UNICODE:
            return line
        return line.translate(TWINS).encode("ascii", errors="backslashreplace").decode("ascii")


TWINS = {ord("–"): "-", ord("…"): "~"}  # of the same width, so that columns stay aligned
UNICODE = Glyphs(fills="█▓▒░▞=+", quote="│", separator=" · ", warning="!")
ASCII = Glyphs(fills="#=+-:o.", quote="|", separator=", ", warning="!")


def glyphs_for(encoding: str) -> Glyphs:
    """The set that `encoding` can carry."""
    try:
        UNICODE.fills.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE
