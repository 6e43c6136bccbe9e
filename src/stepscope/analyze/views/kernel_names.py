"""Short names of kernels that people can read and tell apart.

A C++ kernel keeps its function's name; what else is needed comes from its template arguments, in steps of detail until
no two kernels of a table share a name. Profilers demangle what they can, so names that are still mangled are those a
demangler gives up on (new types, too many arguments). Those are read identifier by identifier, in one pass, which works
for any of them and cannot be made to run away by a crafted name. Names of generated kernels (Triton, cuBLAS, Tensile)
are kept, without their tails of tuning parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

LEVELS = 5  # of detail
_LONGEST = 100  # characters of a short name; what would take more gets a number instead
_READ = 20_000  # characters of a name that are looked at
_PLAIN = 1_000  # of a name without arguments
_IDENTIFIER = re.compile(r"[A-Za-z_$][\w$]*$")
_NAMESPACES = re.compile(r"(?:\(anonymous namespace\)::|<unnamed>::|(?<!\w)[A-Za-z_]\w*::)+")
_WORD = re.compile(r"(?<!\w)[A-Za-z_]\w*")
_PAIRS = {")": "(", ">": "<", "]": "[", "}": "{"}

# Kernels that only carry another one: the first template argument is the name.
_CARRIERS = frozenset({"Kernel", "Kernel2", "kernel", "kentry", "device_kernel", "globalKernel", "kernel_entry"})
# Kernels that only say how they go over their data: what they compute is in a template argument.
_GENERIC = re.compile(r"elementwise|reduce_kernel|multi_tensor_apply|gpu_kernel|for_each|transform_kernel|trampoline")
# Template arguments that do not say what is computed.
_TYPES = frozenset(
    (
        *("anonymous", "namespace", "unnamed", "const", "volatile", "unsigned", "signed", "char", "bool", "short"),
        *("int", "long", "float", "double", "void", "size_t", "int8_t", "int16_t", "int32_t", "int64_t", "uint8_t"),
        *("uint16_t", "uint32_t", "uint64_t", "half", "__half", "Half", "BFloat16", "bfloat16_t", "complex"),
        *("Float8_e4m3fn", "Float8_e5m2", "__nv_bfloat16", "__hip_bfloat16", "array", "Array", "pair", "tuple"),
        *("true", "false", "nullptr", "decltype"),
    )
)
_FRAMES = frozenset(
    (
        *("gpu_kernel_impl", "gpu_kernel_impl_nocast", "gpu_index_kernel", "BinaryFunctor", "AUnaryFunctor"),
        *("BUnaryFunctor", "ReduceOp", "func_wrapper_t", "TensorListMetadata", "FusedOptimizerTensorListMetadata"),
        *("TensorListScalarListMetadata", "depth_to_max", "TrivialOffsetCalculator", "OffsetCalculator"),
        *("LoadWithoutCast", "StoreWithoutCast", "LoadWithCast", "StoreWithCast", "OpaqueType"),
        *("ROCPRIM_400200_NS", "detail", "target_arch", "lambda", "operator"),
    )
)
# Plain names with a tail of tuning parameters: what is kept in front of it.
_TAILS = (
    # Tensile: layouts and types, then the tile
    re.compile(r"(?P<a>(?:Custom_)?Cijk_[A-Za-z]+_[A-Za-z]+_[A-Z0-9]+)(?:_.*)?(?P<b>_MT\d+x\d+x\d+).*"),
    # xmma: up to the tile
    re.compile(r"(?P<a>\w*xmma_\w*?)_tilesize(?P<b>\d+x\d+x\d+)\w*"),
    # TensorRT-LLM: types, then the tile
    re.compile(r"(?P<a>(?:bmm|gemm)_\w+?)(?P<b>_t\d+x\d+x\d+(?:u\d+)?)_\w+"),
)
_SOURCE_NAME = re.compile(r"\d{1,4}")
_LITERAL = re.compile(r"L([a-z])(n?\d{1,18})E")
_NESTED = re.compile(r"N[KVr]*(?:St|S[0-9A-Z]*_)?")
_NO_NAME = re.compile(r"DF\d+[b_x]|[ST]\d*_")  # types with a number in them, and references back


def short_names(names: Sequence[str]) -> list[str]:
    """A short name for each of these different names, no two alike."""
    result = [_at_level(name, 0) for name in names]
    for level in range(1, LEVELS):
        counts = Counter(result)
        again = [number for number, short in enumerate(result) if counts[short] > 1]
        if not again:
            return result
        for number in again:
            result[number] = _at_level(names[number], level)
    return _numbered(result)


def _numbered(names: list[str]) -> list[str]:
    """The names with a number behind those that are still alike (cut at the same place)."""
    counts, seen, taken = Counter(names), Counter[str](), set(names)
    result = []
    for name in names:
        seen[name] += 1
        number = seen[name]
        short = name
        while counts[name] > 1 and (short == name or short in taken):
            short = f"{name} #{number}"
            number += 1
        taken.add(short)
        result.append(short)
    return result


@lru_cache(maxsize=8192)
def _at_level(name: str, level: int) -> str:
    """The name in the detail asked for, or in the most that is short enough."""
    name = name[:_READ]
    parts = None if name.startswith("_Z") else _parts(name)
    for detail in range(level, -1, -1):
        text = _mangled(name, detail) if parts is None else _written(*parts, detail)
        if len(text) <= _LONGEST or detail == 0:
            break
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _parts(name: str) -> tuple[str, str, str]:
    """Function, namespaces and template arguments; of a kernel that only carries another, those of the other."""
    function, namespaces, arguments = _taken_apart(name)
    if function in _CARRIERS and arguments:
        first, *others = _split(arguments)
        inner, _, deeper = _taken_apart(first)
        if inner and inner not in _TYPES:
            return inner, "", ", ".join([deeper, *others] if deeper else others)
    return (function, namespaces, arguments) if function else (name, "", "")


def _written(function: str, namespaces: str, arguments: str, level: int) -> str:
    """The name with as much of its template arguments as the level asks for."""
    if level == 0 and not arguments:
        return _without_tail(function)
    if level <= 1:
        telling = _telling(arguments) if _GENERIC.search(function) else None
        if level == 0 or telling is not None:
            return f"{function}<{telling}>" if telling else function
    if level <= 2:
        shown = [_argument(argument) for argument in _split(arguments)]
        return f"{function}<{', '.join(shown)}>" if shown else function
    plain = _NAMESPACES.sub("", arguments).replace(" >", ">")
    if level == 3:
        return f"{function}<{plain}>" if plain else function
    return f"{namespaces}{function}<{plain}>" if plain else f"{namespaces}{function}"


def _without_tail(name: str) -> str:
    for pattern in _TAILS if len(name) <= _PLAIN else ():
        match = pattern.fullmatch(name)
        if match:
            parts = [part.strip("_") for part in match.groupdict().values() if part]
            return " ".join(parts)
    return name


def _taken_apart(name: str) -> tuple[str, str, str]:
    """Function, its namespaces (with the last ::), and the text of its template arguments, of a C++ declaration."""
    text = name.strip().removesuffix(" const").removesuffix(" [clone .kd]").removesuffix(".kd")
    if text.endswith(")"):
        text = text[: _opening(text)].rstrip()
    arguments = ""
    if text.endswith(">"):
        start = _opening(text)
        arguments, text = text[start + 1 : -1].strip(), text[:start].rstrip()
    match = _IDENTIFIER.search(text)
    if match is None:
        return "", "", ""
    spaces = re.search(r"(?:\(anonymous namespace\)::|<unnamed>::|[A-Za-z_]\w*::)*$", text[: match.start()])
    return match[0], spaces[0] if spaces else "", arguments


def _opening(text: str) -> int:
    """Where the bracket opens that the last character closes; the end where none does."""
    closing = [text[-1]]
    for place in range(len(text) - 2, -1, -1):
        char = text[place]
        # comparisons and arrows inside parentheses are no brackets
        if char in ">" and (closing[-1] == ")" or text[place - 1] == "-"):
            continue
        if char in _PAIRS:
            closing.append(char)
        elif char == _PAIRS[closing[-1]]:
            closing.pop()
            if not closing:
                return place
    return len(text)


def _split(arguments: str) -> list[str]:
    """Template arguments at their outer commas."""
    parts, start, round_ones, others = [], 0, 0, 0
    for place, char in enumerate(arguments):
        if char in "()":
            round_ones += 1 if char == "(" else -1
        elif round_ones > 0:
            continue  # comparisons and arrows inside parentheses are no brackets
        elif char in "<[{":
            others += 1
        elif char in ">]}":
            others -= 1
        elif char == "," and others <= 0:
            parts.append(arguments[start:place].strip())
            start = place + 1
    parts.append(arguments[start:].strip())
    return [part for part in parts if part]


def _argument(text: str) -> str:
    """A template argument without namespaces and its own arguments; of a lambda the function around it."""
    if text.startswith("(") and not text.startswith("(anonymous"):
        return text.rpartition(")")[2] or text  # a value of an enumeration
    outer = _NAMESPACES.sub("", re.split(r"::\{lambda|::operator\(\)", text, maxsplit=1)[0])
    head = re.split(r"[<(]", outer, maxsplit=1)[0].strip()
    if head in _FRAMES:
        return _telling(text) or head
    return head or text[:24]


def _telling(arguments: str) -> str | None:
    """The first word of the arguments that says what is computed."""
    for match in _WORD.finditer(arguments):
        word, rest = match[0], arguments[match.end() : match.end() + 3]
        namespace = rest.startswith("::") and not arguments[match.end() + 2 :].startswith(("operator()", "{lambda"))
        if not namespace and word not in _TYPES and word not in _FRAMES:
            return word
    return None


def _mangled(name: str, level: int) -> str:
    """The function of a mangled name and the identifiers and numbers among its template arguments."""
    spaces, at = _nested(name)
    if not spaces:
        return name
    arguments = _identifiers(name, at)
    function = spaces[-1]
    if function in _CARRIERS:
        words = [word for word in arguments if not word.isdigit() and word not in spaces]
        if words:
            function, arguments = words[0], arguments[arguments.index(words[0]) + 1 :]
    shown = arguments[: (0, 3, 8, 16, 64)[level]]
    return f"{function}<{', '.join(shown)}>" if shown else function


def _nested(name: str) -> tuple[list[str], int]:
    """The names in front of a mangled name's arguments, outermost first, and where they end."""
    at, found = 2, []
    while at < len(name) and name[at] in "NLKVr":
        at += 1
    while at < len(name):
        if name.startswith("St", at):
            at += 2
            continue
        word, after = _source_name(name, at)
        if word is None:
            break
        if not word.startswith("_GLOBAL__"):  # an anonymous namespace
            found.append(word)
        at = after
    return found, at


def _identifiers(name: str, at: int) -> list[str]:
    """Identifiers and numbers of a mangled name from `at` on; of a nested name the last part."""
    found: list[str] = []
    while at < len(name):
        literal = _LITERAL.match(name, at) if name[at] == "L" else None
        if literal is not None:
            found.append(str(bool(int(literal[2]))).lower() if literal[1] == "b" else literal[2].replace("n", "-"))
            at = literal.end()
            continue
        skipped = _NO_NAME.match(name, at)
        if skipped is not None:
            at = skipped.end()
            continue
        nested = _NESTED.match(name, at)
        word, after = _source_name(name, nested.end() if nested else at)
        if word is not None:
            further, beyond = _source_name(name, after) if nested else (None, after)
            while further is not None:
                word, after = further, beyond
                further, beyond = _source_name(name, after)
            found.append(word)
        at = after if word is not None or not nested else nested.end()
    return found


def _source_name(name: str, at: int) -> tuple[str | None, int]:
    """The identifier with its length in front that begins at `at`, and where to go on."""
    match = _SOURCE_NAME.match(name, at)
    if match is None or match[0].startswith("0"):
        return None, at + 1
    end = match.end() + int(match[0])
    word = name[match.end() : end]
    if end > len(name) or not _WORD.fullmatch(word):
        return None, match.end()
    return word, end
