"""Secrets out of everything that is written: command lines, addresses, reprs of arguments.

Masked are values after flags or in assignments whose name looks like a credential, passwords inside URLs, and values
that start like a token of a well-known service. The name stays, so that a reader still sees what was passed.
"""

from __future__ import annotations

import re
from typing import Sequence

MASK = "***"

_SECRET_NAME = re.compile(
    r"(key|token|secret|passw(or)?d|passphrase|credential|bearer|(^|[-_.])(auth|pwd|pat|api)([-_.]|$))", re.IGNORECASE
)
# Names that contain such a word and hold an ordinary training setting.
_ORDINARY_NAME = re.compile(
    r"(tokeni[sz]er|(num|max|min|total|per|new|n)[-_]?(\w+[-_])?tokens|tokens[-_]?(per|num|count)|key[-_]?(dim|size|length)|keyframe"
    r"|pad[-_]token|(bos|eos|mask|unk|sep|cls)[-_]token([-_]id)?$|monkey|keyboard|key[-_]?value|keys?[-_]?(names?|columns?))",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^/\s:@]*):[^/\s@]+@")
_URL_USER = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s:@]{20,}@")
_URL_QUERY = re.compile(r"([?&][^=&\s]*(?:key|token|secret|password|signature|sig)[^=&\s]*=)[^&\s]+", re.IGNORECASE)
_KNOWN_TOKEN = re.compile(
    r"\b(sk-(?:[A-Za-z0-9]+-)*[A-Za-z0-9_]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|xox[abprs]-[\w-]{8,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|wandb_v1_\w{16,})"
)
_HEADER = re.compile(r"((?:authorization|bearer|basic|x-api-key)\s*[:=]?\s+)\S.*", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"^(?P<name>[-+]*[A-Za-z_][\w.\-/]*)=(?P<value>.+)$", re.DOTALL)
_FLAG = re.compile(r"^-{1,2}(?P<name>[A-Za-z][\w.\-]*)$")


def is_secret_name(name: str) -> bool:
    """Whether a flag, variable or argument of this name usually holds a credential."""
    return bool(_SECRET_NAME.search(_snake(name))) and not _ORDINARY_NAME.search(_snake(name))


def mask_text(text: str) -> str:
    """`text` with URL passwords, authorization headers and well-known tokens replaced by `***`."""
    text = _URL_PASSWORD.sub(r"\1:" + MASK + "@", text)
    text = _URL_USER.sub(r"\1" + MASK + "@", text)
    text = _URL_QUERY.sub(r"\1" + MASK, text)
    text = _HEADER.sub(r"\1" + MASK, text)
    return _KNOWN_TOKEN.sub(MASK, text)


def mask_argv(argv: Sequence[str]) -> list[str]:
    """A command line with every value that may be a credential replaced by `***`, argument for argument."""
    masked: list[str] = []
    hide_next = False
    for argument in argv:
        flag = _FLAG.match(argument)
        if hide_next and not flag:
            masked.append(MASK)
            hide_next = False
            continue
        hide_next = bool(flag) and is_secret_name(flag.group("name")) if flag else False
        masked.append(_mask_argument(argument))
    return masked


def _mask_argument(argument: str) -> str:
    if any(character.isspace() for character in argument):
        return _mask_words(mask_text(argument))
    assignment = _ASSIGNMENT.match(argument)
    if assignment and is_secret_name(assignment.group("name").lstrip("-+")):
        return assignment.group("name") + "=" + MASK
    return mask_text(argument)


def _mask_words(text: str) -> str:
    """A whole command inside one argument, as `sh -c` takes it."""
    pieces = re.split(r"(\s+)", text)
    words = iter(mask_argv([piece for piece in pieces if piece and not piece.isspace()]))
    return "".join(piece if not piece or piece.isspace() else next(words) for piece in pieces)


def _snake(name: str) -> str:
    """camelCase as camel_Case, so that `apiKey` and `authToken` are seen as words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
