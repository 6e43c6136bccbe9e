"""A shell script as simple commands, each word with its place in the text. Nothing is expanded or run.

Only what is needed to find where a program is started: quoting, comments, line continuations, here-documents, lists,
pipes, groups and substitutions. What stands inside `$(…)`, `${…}`, backquotes and here-documents belongs to the word or
to nothing, and is never looked into.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_BLANK = " \t\r"
_META = " \t\r\n;&|()<>"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^]]*\])?\+?=")
_END_OF_TEST = re.compile(r"\s\]\](?=[\s;&|)]|$)")
_CLOSING = {"(": ")", "{": "}"}
# Words after which another command begins.
_INTRODUCTIONS = frozenset(("if", "then", "elif", "else", "while", "until", "do", "{", "!", "coproc"))


class UnclosedText(Exception):
    """A quote, bracket or substitution that the text never closes; `offset` is where it opens."""

    def __init__(self, offset: int, what: str) -> None:
        super().__init__(what)
        self.offset, self.what = offset, what


@dataclass(frozen=True)
class Word:
    """`text` is the word without its quoting, expansions as written; `origins` the offset of each character of it.

    `start` is where the word begins in the script. `elements` are the words of an array `NAME=(…)`.
    """

    text: str
    start: int
    origins: tuple[int, ...]
    quoted: bool = False
    elements: tuple[Word, ...] | None = None

    @property
    def assigned(self) -> tuple[str, str] | None:
        found = _ASSIGNMENT.match(self.text)
        return None if found is None else (re.split(r"[\[+=]", self.text, maxsplit=1)[0], self.text[found.end() :])


@dataclass
class Command:
    """A simple command. `piped` says that it reads another's output, `fed` that a here-document is its input."""

    words: list[Word] = field(default_factory=list)
    piped: bool = False
    fed: bool = False


def commands(text: str, origins: Sequence[int] | None = None) -> list[Command]:
    """The simple commands of a script, in order.

    `origins` gives the place of each character of `text` in a larger script that holds it in quotes. Raises
    `UnclosedText`.
    """
    return list(_Reader(text, range(len(text) + 1) if origins is None else origins).commands())


class _Reader:
    """One pass over the text; `_at` is the next character."""

    def __init__(self, text: str, origins: Sequence[int]) -> None:
        self._text, self._origins, self._at = text, origins, 0
        self._heredocs: list[tuple[str, bool]] = []
        self._open = 0  # round brackets that hold commands

    def commands(self) -> Iterator[Command]:
        command = Command()
        while (mark := self._skip_blank()) != "":
            if mark in "<>" or self._text.startswith("&>", self._at):
                self._at += mark == "&"
                command.fed |= self._redirection()
            elif mark in ";&|\n()":
                kept = self._operator(mark)
                if command.words and kept:
                    yield command
                goes_on = mark == "\n" and command.piped and not command.words  # a pipe at the end of a line
                is_pipe = mark == "|" and self._text[self._at - 2 : self._at] != "||"
                command = Command(piped=is_pipe or goes_on)
            else:
                word = self._word()
                if word.text.isdecimal() and not word.quoted and self._text[self._at : self._at + 1] in ("<", ">"):
                    continue  # the 2 of `2>file`
                if not command.words and not word.quoted and word.text == "[[":
                    end = _END_OF_TEST.search(self._text, self._at)  # operators mean something else in there
                    if end is None:
                        raise UnclosedText(self._origins[self._at - 2], "[[")
                    self._at = end.end()
                elif command.words or word.quoted or word.text not in _INTRODUCTIONS:
                    command.words.append(word)
        if command.words:
            yield command

    def _skip_blank(self) -> str:
        """Skip blanks, continued lines and comments; the next character, empty at the end."""
        while self._at < len(self._text):
            mark = self._text[self._at]
            if mark in _BLANK:
                self._at += 1
            elif self._text.startswith(("\\\n", "\\\r\n"), self._at):
                self._at = self._text.index("\n", self._at) + 1
            elif mark == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                return mark
        return ""

    def _operator(self, mark: str) -> bool:
        """Pass one operator; False when what stood before it was no command: a `case` pattern, a function's name."""
        if mark == "(" and self._text.startswith("((", self._at) and self._skip_arithmetic():
            return True
        self._at += 1
        if mark == "\n":
            self._skip_heredocs()
        elif mark == "(":
            self._open += 1
            return False
        elif mark == ")":
            self._open -= 1
            if self._open < 0:
                self._open = 0
                return False
        elif mark in "&|" and self._text[self._at : self._at + 1] in ("&", "|"):
            self._at += 1
        return True

    def _redirection(self) -> bool:
        """Pass a redirection and its target; True for a here-document or here-string."""
        start = self._at
        while self._text[self._at : self._at + 1] in ("<", ">", "&", "|"):
            self._at += 1
        sign = self._text[start : self._at]
        if sign in ("<", ">") and self._text.startswith("(", self._at):
            self._skip_bracketed(self._at)  # a process substitution
            return False
        strip = sign == "<<" and self._text.startswith("-", self._at)
        self._at += strip
        mark = self._skip_blank()
        if mark in ("<", ">") and self._text.startswith("(", self._at + 1):
            self._skip_bracketed(self._at + 1)
            return False
        target = self._word() if mark and mark not in _META else None
        if sign == "<<" and target is not None:
            self._heredocs.append((target.text, strip))
        return sign.startswith("<<")

    def _skip_heredocs(self) -> None:
        for end, strip in self._heredocs:
            while self._at < len(self._text):
                stop = self._text.find("\n", self._at)
                stop = len(self._text) if stop < 0 else stop
                line = self._text[self._at : stop].rstrip("\r")
                self._at = min(stop + 1, len(self._text))
                if (line.lstrip("\t") if strip else line) == end:
                    break
        self._heredocs.clear()

    def _skip_arithmetic(self) -> bool:
        """Pass `((…))`; False when the brackets are two groups of commands."""
        start = self._at
        self._skip_bracketed(start)
        if self._text[self._at - 2 : self._at] == "))" and "\n" not in self._text[start : self._at]:
            return True
        self._at = start
        return False

    def _word(self) -> Word:
        start, text, origins, quoted = self._at, "", [], False
        while self._at < len(self._text) and self._text[self._at] not in _META:
            mark = self._text[self._at]
            if self._text.startswith(("\\\n", "\\\r\n"), self._at):
                self._at = self._text.index("\n", self._at) + 1
                continue
            quoted |= mark in "'\"\\"
            for piece, place in self._piece(mark):
                text += piece
                origins.append(place)
            if text.endswith("=") and _ASSIGNMENT.fullmatch(text) and self._text.startswith("(", self._at):
                return self._array(text, start, origins)
        self._at = max(self._at, start + 1)
        return Word(text, self._origins[start], tuple(self._origins[place] for place in origins), quoted)

    def _piece(self, mark: str) -> Iterator[tuple[str, int]]:
        """The next quoted or plain part of a word, character by character, each with its offset."""
        start = self._at
        if mark == "\\":
            self._at += 2
            yield self._text[start + 1 : start + 2], start
        elif mark == "'":
            end = self._find(start + 1, "'")
            self._at = end + 1
            yield from ((self._text[at], at) for at in range(start + 1, end))
        elif mark == '"':
            yield from self._double_quoted()
        elif mark in "$`":
            self._at = self._after_expansion(start)
            yield from ((self._text[at], at) for at in range(start, self._at))
        else:
            self._at += 1
            yield mark, start

    def _double_quoted(self) -> Iterator[tuple[str, int]]:
        start = self._at
        self._at += 1
        while True:
            mark = self._text[self._at : self._at + 1]
            if mark == "":
                raise UnclosedText(self._origins[start], "double quote")
            if mark == '"':
                self._at += 1
                return
            at = self._at
            if mark == "\\" and self._text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
                self._at += 2
                if self._text[at + 1] != "\n":
                    yield self._text[at + 1], at
                continue
            self._at = self._after_expansion(at) if mark in "$`" else at + 1
            yield from ((self._text[place], place) for place in range(at, self._at))

    def _array(self, text: str, start: int, origins: list[int]) -> Word:
        opened = self._at
        self._skip_bracketed(opened)
        inside = commands(self._text[opened + 1 : self._at - 1], self._origins[opened + 1 : self._at])
        elements = tuple(word for command in inside for word in command.words)
        places = tuple(self._origins[place] for place in origins)
        return Word(text, self._origins[start], places, elements=elements)

    def _after_expansion(self, start: int) -> int:
        """The offset behind `$…` or a backquoted command at `start`."""
        if self._text[start] == "`":
            return self._find(start + 1, "`", escapes=True) + 1
        if self._text[start + 1 : start + 2] in ("(", "{"):
            at, self._at = self._at, start
            self._skip_bracketed(start + 1)
            end, self._at = self._at, at
            return end
        if self._text.startswith("$'", start):
            return self._find(start + 2, "'", escapes=True) + 1
        return start + 1

    def _find(self, start: int, mark: str, *, escapes: bool = False) -> int:
        at = start
        while at < len(self._text) and self._text[at] != mark:
            at += 2 if escapes and self._text[at] == "\\" else 1
        if at >= len(self._text):
            raise UnclosedText(self._origins[start - 1], f"quote {mark}")
        return at

    def _skip_bracketed(self, start: int) -> None:
        opening = self._text[start]
        closing, depth, at = _CLOSING[opening], 0, start
        while at < len(self._text):
            mark = self._text[at]
            if mark == "\\":
                at += 1
            elif mark == "'" and not (opening == "{" and self._text[start - 1] == "$"):
                at = self._find(at + 1, "'")
            elif mark == "#" and opening == "(" and self._text[at - 1].isspace():
                end = self._text.find("\n", at)
                at = len(self._text) if end < 0 else end
            elif mark == '"':
                self._at = at
                for _ in self._double_quoted():
                    pass
                at = self._at - 1
            elif mark == opening:
                depth += 1
            elif mark == closing:
                depth -= 1
                if depth == 0:
                    self._at = at + 1
                    return
            at += 1
        raise UnclosedText(self._origins[start], f"bracket {opening}")
