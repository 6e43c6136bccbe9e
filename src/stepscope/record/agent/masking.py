"""Secrets out of everything that is written: command lines, addresses, reprs of arguments, names of threads.

Masked are values after flags, in assignments, headers and JSON whose name looks like a credential; passwords inside
URLs; and, whatever their name, values that look like a token: of a well-known service, or as random as a key. The name
stays, so that a reader still sees what was passed. In doubt a value is masked: an ordinary one that is hidden costs a
look at the script, a key that is shown costs the key.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Match, Sequence

MASK = "***"
MAX_ARGUMENT = 8_192  # characters of one argument that are kept
MAX_ARGUMENTS = 1_000
MAX_ALL = 65_536  # characters of a command line
MAX_NAMES = 10  # before one value
CUT = "..."

_SECRET_NAME = re.compile(
    r"(key|token|secret|passw(or)?d|passphrase|credential|bearer|cookie|(^|[-_.])(auth|authorization|pwd|pat|api)([-_.]|$)"
    r"|(^|[-_.])(pass|pw|creds?)$)",
    re.IGNORECASE,
)
# Names that contain such a word and hold an ordinary training setting.
_ORDINARY_NAME = re.compile(
    r"(tokeni[sz]er|(num|max|min|total|per|new|n)[-_]?(\w+[-_])?tokens|tokens[-_]?(per|num|count)|key[-_]?(dim|size|length)|keyframe"
    r"|pad[-_]token|(bos|eos|mask|unk|sep|cls)[-_]token([-_]id)?$|monkey|keyboard|key[-_]?value|keys?[-_]?(names?|columns?)"
    r"|(num|n|single|multi|two|first|second)[-_]pass$)",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{0,20}://[^/\s:@]*):[^/\s@]+@")
_URL_USER = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{0,20}://)[^/\s:@]{20,}@")
_URL_QUERY = re.compile(r"([?&][^=&\s]*(?:key|token|secret|password|signature|sig)[^=&\s]*=)[^&\s]+", re.IGNORECASE)
_KNOWN_TOKEN = re.compile(
    r"\b(sk-(?:[A-Za-z0-9]{1,20}-){0,4}[A-Za-z0-9_]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|xox[abprs]-[\w-]{8,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|wandb_v1_\w{16,})"
)
_HEADER = re.compile(r"((?:authorization|bearer|basic|x-api-key)\s*[:=]?\s+)\S.*", re.IGNORECASE)
# "name": "value", 'name': 'value', name: value, X-Name: value; a value in quotes may hold spaces
_PAIR = re.compile(
    r"(?P<name>(?P<quote>[\"']?)(?P<word>[A-Za-z_][\w.\-]{0,80})(?P=quote)\s*:\s*)"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s,;{}\[\]\"'/][^\s,;}\]]*)"
)
_ASSIGNMENT = re.compile(r"^(?P<name>[-+]*[A-Za-z_][\w.\-/]*)=(?P<value>.+)$", re.DOTALL)
_FLAG = re.compile(r"^-{1,2}(?P<name>[A-Za-z][\w.\-]*)$")
_LOGIN = re.compile(r"^([^:\s/]+):\S+$")  # user:password, after a flag for it
_LOGIN_FLAGS = ("-u", "--user", "--userpwd", "--proxy-user")
_NUMBER = re.compile(r"^[-+]?[\d.,:]+([eE][-+]?\d+)?[a-zA-Z%]?$")
# Programs that take a password as `-pPASSWORD`, or after `-p`; and those in which that is a partition.
_PASSWORD_PROGRAMS = re.compile(r"^(mysql\w*|mariadb[\w-]*|sshpass|7z\w?|smbclient|docker|podman)$")
_PARTITION_PROGRAMS = re.compile(r"^(srun|sbatch|salloc)$")

# How random a value is: a key changes between small letters, capitals and digits all the time, a name hardly. Of 2,000
# keys in base 62 each these limits find 95.5 % at 20 characters and 99.9 % at 40; of 20,000 paths of files they hide 4.
_WORD = re.compile(r"[A-Za-z0-9+/_=~.\-]{20,}")
_HEXADECIMAL = re.compile(r"(?<![A-Za-z0-9-])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{32,}(?![A-Za-z0-9])")
_CHANGE = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])")
_PARTS = re.compile(r"[A-Za-z0-9]+")
MIN_CHANGES = 0.25  # of the characters
MIN_BITS = 3.5  # of entropy, a character
_AWS_SECRET = re.compile(r"^(?=.*[a-z])(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9/+]{40}$")
MIN_BITS_OF_AWS = 4.5  # paths of that length stay below


def is_secret_name(name: str) -> bool:
    """Whether a flag, variable or argument of this name usually holds a credential."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)  # so that `apiKey` and `authToken` are seen as words
    return bool(_SECRET_NAME.search(name)) and not _ORDINARY_NAME.search(name)


def mask_text(text: str) -> str:
    """`text` with passwords of URLs, headers, values of secret names and what looks like a token replaced by `***`."""
    text = _URL_PASSWORD.sub(r"\1:" + MASK + "@", text)
    text = _URL_USER.sub(r"\1" + MASK + "@", text)
    text = _URL_QUERY.sub(r"\1" + MASK, text)
    text = _HEADER.sub(r"\1" + MASK, text)
    text = _PAIR.sub(_mask_pair, text)
    text = _HEXADECIMAL.sub(MASK, _KNOWN_TOKEN.sub(MASK, text))
    return _WORD.sub(_mask_random, text)


def mask_argv(argv: Sequence[str]) -> list[str]:
    """A command line with every value that may be a credential replaced by `***`, argument for argument.

    A long one is cut: `...` ends an argument that was, and stands for arguments that were left out.
    """
    kept: list[str] = []
    left = MAX_ALL
    for argument in argv[:MAX_ARGUMENTS]:
        longest = min(MAX_ARGUMENT, left)
        kept.append(argument if len(argument) <= longest else argument[:longest] + CUT)
        left -= min(len(argument), longest)
        if left <= 0:
            break
    return _masked(kept if len(kept) == len(argv) else [*kept, CUT])


def _masked(argv: Sequence[str]) -> list[str]:
    programs = [argument.rpartition("/")[2] for argument in argv[:4]]
    takes_password: bool | None = any(map(_PASSWORD_PROGRAMS.match, programs)) or None  # in -p; None: nobody knows
    if any(map(_PARTITION_PROGRAMS.match, programs)):
        takes_password = False
    masked: list[str] = []
    before = ""
    for argument in argv:
        if _is_value_of_secret(before, argument, takes_password):
            masked.append(MASK)
            before = ""
            continue
        login = _LOGIN.match(argument) if before in _LOGIN_FLAGS else None
        masked.append(login.group(1) + ":" + MASK if login else _mask_argument(argument, takes_password))
        before = argument
    return masked


def _is_value_of_secret(flag: str, argument: str, takes_password: bool | None) -> bool:
    """Whether `argument`, which follows `flag`, is a credential's value and no flag of its own."""
    named = _FLAG.match(flag)
    if not named:
        return False
    if named.group(0) in ("-p", "-P"):
        own = "/" in argument or "." in argument or _NUMBER.match(argument)
        is_password = _is_mixed(argument) if takes_password is None else takes_password
        return not argument.startswith("-") and not own and is_password
    if not is_secret_name(named.group("name")):
        return False
    return not _FLAG.match(argument) or (not argument.startswith("--") and _is_mixed(argument))


def _mask_argument(argument: str, takes_password: bool | None) -> str:
    if any(character.isspace() for character in argument):  # a whole command, as `sh -c` takes it
        parts = re.split(r"(\s+)", mask_text(argument))
        words = iter(_masked([part for part in parts if part and not part.isspace()]))
        return "".join(part if not part or part.isspace() else next(words) for part in parts)
    names = ""
    for _ in range(MAX_NAMES):  # --env=TOKEN=abc
        assignment = _ASSIGNMENT.match(argument)
        if not assignment:
            break
        names += assignment.group("name") + "="
        if is_secret_name(assignment.group("name").lstrip("-+")):
            return names + MASK
        argument = assignment.group("value")
    password = argument[2:] if argument[:2] in ("-p", "-P") else ""
    joined = not names and len(password) > 2 and not _NUMBER.match(password)
    if joined and (_is_mixed(password) if takes_password is None else takes_password):
        return argument[:2] + MASK
    return names + mask_text(argument)


def _is_mixed(text: str) -> bool:
    """More than one kind among lower case, capitals, digits and signs: no word, no flag, no number."""
    kinds = (str.islower, str.isupper, str.isdigit, lambda character: character in "!@#$%^&*+?~")
    return sum(any(kind(character) for character in text) for kind in kinds) > 1


def _mask_pair(found: Match[str]) -> str:
    value = found.group("value")
    if not is_secret_name(found.group("word")) or _NUMBER.match(value):
        return found.group(0)
    quote = value[0] if value[0] in "\"'" else ""
    return found.group("name") + quote + MASK + quote


def _mask_random(found: Match[str]) -> str:
    """`***` for a word that is as random as a key; a path or a dotted name is looked at part by part."""
    word = found.group(0)
    if _is_random(word) or (_AWS_SECRET.match(word) and _bits(word) > MIN_BITS_OF_AWS):
        return MASK
    return "".join(MASK if len(part) >= 20 and _is_random(part) else part for part in re.split(r"([/.=])", word))


def _is_random(word: str) -> bool:
    parts = _PARTS.findall(word)
    characters = sum(map(len, parts))
    if characters < 0.9 * len(word) or not any(character.isdigit() for character in word):
        return False
    changes = sum(len(_CHANGE.findall(part)) for part in parts)
    return changes >= MIN_CHANGES * characters and _bits(word) >= MIN_BITS


def _bits(word: str) -> float:
    # Shannon's entropy of its characters
    return -sum(n / len(word) * math.log2(n / len(word)) for n in Counter(word).values())
