"""Runs one operator again and again in the training's own Python: a program of its own, which imports torch alone.

It reads one JSON object from stdin and writes JSON lines to its stdout: what each variant is, then its times, so that
what was measured is kept where a later call ends the process (a device-side assertion, no memory). Nothing of a trace
is evaluated: the operator is looked up in `torch.ops.aten`, its arguments are parsed as numbers and checked against the
schema, and what an output would take is asked of the meta device before anything of that size is made.

It runs on Python 3.8 and torch 2.1 and newer, and on its own: nothing of the package is imported.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from typing import Any, Callable, Dict

Given = Dict[str, Any]  # a recorded argument or a variant, as JSON has it
Say = Callable[[Dict[str, Any]], None]

CALL_S = 0.005  # of calls between two looks at the clock: a clock's read and a synchronisation are below 1 % of it
WARM_UP_CALLS = 3
WARM_UP_S = 0.2
MAX_ROUNDS = 25
MAX_ELEMENTS_OF_LIST = 64
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan)")
_COMPLEX = re.compile(r"([-+]?[\d.]+(?:[eE][-+]?\d+)?)([-+][\d.]+(?:[eE][-+]?\d+)?)j")
# how a trace names what tensors hold, and the names of torch
TYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128", "long int": "int64", "long": "int64",
    "int": "int32", "short": "int16", "short int": "int16", "signed char": "int8", "unsigned char": "uint8",
    "bool": "bool",
}  # fmt: skip
COMPLEX_OF = {"float32": "complex64", "float64": "complex128"}
# Operators whose integer tensor is an index: which argument, and the argument whose size bounds it (along `dim`, else
# along the axis given here).
INDEXED = {
    "embedding": ("indices", "weight", 0),
    "index_select": ("index", "self", None),
    "gather": ("index", "self", None),
    "take_along_dim": ("indices", "self", None),
    "cross_entropy_loss": ("target", "self", 1),
    **{"nll_loss" + end: ("target", "self", 1) for end in ("", "_nd", "_forward", "_backward", "2d_forward")},
}
# Operators that only move, order or add up what is in a tensor, so that any integers do.
PLAIN = re.compile(
    "sum|mean|amax|amin|max|min|any|all|argmax|argmin|sort|argsort|topk|cumsum|clone|copy|to|_to_copy|contiguous|flip|roll"
    "|repeat|tile|tril|triu|diff|prod|unique|_unique2|unique_consecutive|nonzero|count_nonzero"
)
POSITIVE_DEFINITE = ("linalg_cholesky", "cholesky", "linalg_cholesky_ex")
DOMINANT = ("linalg_inv", "inverse", "linalg_solve", "linalg_lu", "linalg_det", "linalg_slogdet", "linalg_ldl",
            "linalg_solve_triangular", "triangular_solve", "cholesky_solve", "cholesky_inverse", "lu_", "_linalg_det",
            "_linalg_slogdet", "_linalg_solve", "logdet", "_lu")  # fmt: skip
UNIT_INTERVAL = ("log", "sqrt", "rsqrt", "pow", "binary_cross_entropy", "bernoulli", "logit", "acosh")


MISFIT = "its recorded arguments do not fit the operator as this torch knows it"
LISTS = "it takes a list of tensors, which is not replayed"
UNREAD = ("Generator", "str", "Device")  # kinds of arguments whose values traces do not hold


class NotReplayed(Exception):
    """Why an operator, or a variant of it, is not replayed: one line for the table."""


def parsed(text: str, kind: str) -> Any:
    """The value of a recorded argument: `kind` is what the schema wants, without "Optional". Raises `NotReplayed`."""
    if kind.startswith("List["):
        if not (text.startswith("[") and text.endswith("]")):
            raise NotReplayed("one of its lists was recorded in a form that is not known")
        parts = [part.strip() for part in text[1:-1].split(",") if part.strip()]
        if len(parts) > MAX_ELEMENTS_OF_LIST:
            raise NotReplayed("one of its lists is too long")
        return [parsed(part, kind[5:-1]) for part in parts]
    if text in ("True", "False"):
        if kind not in ("bool", "number", "Scalar"):
            raise NotReplayed(MISFIT)
        return text == "True"
    if kind == "bool" and text in ("0", "1"):
        return text == "1"
    found = _COMPLEX.fullmatch(text)
    if found and kind in ("number", "Scalar", "complex"):
        return complex(float(found[1]), float(found[2]))
    if not _NUMBER.fullmatch(text) or len(text) > 40:
        raise NotReplayed("one of its arguments was recorded in a form that is not known")
    if kind in ("int", "SymInt"):
        if not re.fullmatch(r"[-+]?\d{1,18}", text):
            raise NotReplayed(MISFIT)
        return int(text)
    if kind in ("float", "number", "Scalar"):
        return int(text) if kind != "float" and re.fullmatch(r"[-+]?\d{1,18}", text) else float(text)
    raise NotReplayed(f"an argument of type {kind} is not recorded in traces")


def kind_of(argument: Any) -> str:
    """The type of a schema's argument, without "Optional"."""
    kind = str(argument.type)
    return kind[9:-1] if kind.startswith("Optional[") else kind


def check(argument: Any, kind: str, given: Given) -> None:
    """Raises `NotReplayed` where an argument cannot be what was recorded, or cannot be made again."""
    if given["type"] in TYPES:
        if kind == "Tensor" or ("number" in kind and not given["sizes"]):
            return
        raise NotReplayed(LISTS if kind == "List[Tensor]" else MISFIT)
    if "List" in given["type"] and "Tensor" in given["type"]:
        raise NotReplayed(LISTS)
    if "Tensor" in kind and given["type"]:
        what = given["type"][:40]
        raise NotReplayed(MISFIT if what.startswith("Scalar") else f"its tensors hold {what}, which is not replayed")
    if given["value"] and kind not in UNREAD:
        parsed(given["value"], kind)
    elif not (argument.has_default_value() or kind == "Device" or kind != str(argument.type)):
        raise NotReplayed(f"it needs {argument.name[:40]}, which is not recorded in traces")


def storage_elements(sizes: list[int], strides: list[int]) -> int:
    """How many elements a tensor of these sizes and strides spans."""
    if any(size == 0 for size in sizes):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))


class Call:
    """One recorded call of an operator, ready to be made: schema, arguments, and how to fill its tensors."""

    def __init__(self, torch: Any, name: str, recorded: list[Given]) -> None:
        self.torch, self.name = torch, name
        packet = getattr(torch.ops.aten, name, None)
        if packet is None or not hasattr(packet, "overloads"):
            raise NotReplayed(f"torch {torch.__version__} has no operator of this name")
        why = MISFIT
        for overload in packet.overloads():
            try:
                self.function = getattr(packet, overload)
                self.arguments = self._matched(self.function._schema.arguments, recorded)
                return
            except NotReplayed as error:
                why = str(error) if why == MISFIT else why
        raise NotReplayed(why)

    def _matched(self, wanted: Any, recorded: list[Given]) -> list[tuple[Any, str, Given]]:
        """(schema argument, its type, how it was recorded) of each; raises `NotReplayed` for another overload."""
        if len(recorded) > len(wanted):
            raise NotReplayed(MISFIT)
        # an output that is handed in is overwritten by every call, and read by none
        if any(argument.alias_info and argument.alias_info.is_write and not argument.is_out for argument in wanted):
            raise NotReplayed("it changes its input in place, so that a second call has another input")
        made = [(argument, kind_of(argument), given) for argument, given in zip(wanted, recorded)]
        for argument, kind, given in made:
            check(argument, kind, given)
        if not all(argument.has_default_value() for argument in wanted[len(recorded) :]):
            raise NotReplayed(MISFIT)
        return made

    def bytes(self, dtype: str | None) -> int:
        """Bytes of its tensors' storages, as they were recorded, or with floating ones as `dtype`."""
        total = 0
        for _argument, _kind, given in self.arguments:
            if given["type"] in TYPES:
                made = getattr(self.torch, self._dtype(given["type"], dtype))
                total += (
                    storage_elements(given["sizes"], given["strides"]) * self.torch.empty(0, dtype=made).element_size()
                )
        return total

    @staticmethod
    def _dtype(recorded: str, wanted: str | None) -> str:
        name = TYPES[recorded]
        if wanted is None or not (name.startswith(("float", "bfloat", "complex"))):
            return name
        if name.startswith("complex"):
            if wanted not in COMPLEX_OF:
                raise NotReplayed(f"there are no complex numbers of {wanted}")
            return COMPLEX_OF[wanted]
        return wanted

    def made(self, device: str, dtype: str | None) -> tuple[list[Any], dict[str, Any]]:
        """(positional, keyword) arguments on `device`; random where they are tensors. Raises `NotReplayed`."""
        positional, keyword = [], {}
        for argument, kind, given in self.arguments:
            if given["type"] in TYPES and "Tensor" in kind:
                value = self._tensor(argument.name, given, device, dtype)
            elif kind == "Device":
                value = self.torch.device(device)
            elif given["value"] and kind not in UNREAD:
                value = parsed(given["value"], kind)
            else:
                value = argument.default_value if argument.has_default_value() else None
            if argument.kwarg_only:
                keyword[argument.name] = value
            else:
                positional.append(value)
        return positional, keyword

    def _tensor(self, argument: str, given: Given, device: str, dtype: str | None) -> Any:
        torch = self.torch
        kind = getattr(torch, self._dtype(given["type"], dtype))
        sizes, strides = given["sizes"], given["strides"]
        if device == "meta":
            return torch.empty_strided(sizes, strides, dtype=kind, device=device)
        count = storage_elements(sizes, strides)
        if not (kind.is_floating_point or kind.is_complex):
            base = self._integers(argument, count, kind)
        elif self.name.startswith(UNIT_INTERVAL) and not self.name.endswith("with_logits") and kind.is_floating_point:
            base = torch.rand(count).mul_(0.9).add_(0.05).to(kind)
        else:
            base = torch.randn(count, dtype=torch.complex64 if kind.is_complex else torch.float32).to(kind)
        tensor = torch.as_strided(base, sizes, strides)
        if len(sizes) >= 2 and sizes[-1] == sizes[-2]:
            if self.name in POSITIVE_DEFINITE:
                full = tensor.to(torch.complex128 if kind.is_complex else torch.float64)
                eye = torch.eye(sizes[-1], dtype=full.dtype)
                tensor.copy_(full @ full.mH / sizes[-1] + eye)
            elif self.name.startswith(DOMINANT):
                tensor.copy_(tensor + 2 * math.sqrt(sizes[-1]) * torch.eye(sizes[-1], dtype=kind))
        if device == "cpu":
            return tensor
        return torch.as_strided(base.to(device), sizes, strides)

    def _integers(self, argument: str, count: int, kind: Any) -> Any:
        torch = self.torch
        if self.name in INDEXED and argument == INDEXED[self.name][0]:
            _name, bounded_by, axis = INDEXED[self.name]
            sizes = next(given["sizes"] for one, _kind, given in self.arguments if one.name == bounded_by)
            if axis is None:
                along = next(given["value"] for one, _kind, given in self.arguments if one.name == "dim")
                axis = parsed(along, "int") if along else 0
            elif self.name.startswith(("cross", "nll")) and len(sizes) == 1:
                axis = 0
            if not -len(sizes) <= axis < max(1, len(sizes)):
                raise NotReplayed("its index has no axis to count along")
            bound = sizes[axis] if sizes else 1
            if bound < 1 and count:
                raise NotReplayed("its index has nothing to point at")
            return torch.randint(max(1, bound), (count,), dtype=kind)
        tags = getattr(torch, "Tag", None)
        plain = PLAIN.fullmatch(self.name) is not None or (tags is not None and tags.pointwise in self.function.tags)
        if not plain and not any(one.alias_info for one in self.function._schema.returns):
            raise NotReplayed("what the integers in its input mean is not known")
        return torch.randint(2 if kind == torch.bool else 100, (count,)).to(kind)

    def output_bytes(self) -> int | None:
        """Bytes of what it returns, asked of the meta device; None where the operator cannot tell without data."""
        torch = self.torch
        try:
            positional, keyword = self.made("meta", None)
            with torch.no_grad():
                found = self.function(*positional, **keyword)
        except NotReplayed:
            raise
        except Exception:  # noqa: BLE001 - no meta implementation, or the result depends on data
            return None
        many = found if isinstance(found, (tuple, list)) else [found]
        return int(sum(one.numel() * one.element_size() for one in many if isinstance(one, torch.Tensor)))


class Variant:
    """An operator on one device with one number of threads and one dtype, and the times of its calls."""

    def __init__(self, torch: Any, call: Call, spec: Given) -> None:
        self.torch, self.spec = torch, spec
        self._function = call.function
        self._cuda = spec["device"] != "cpu"
        self._threads = spec["threads"]
        self._use_threads()
        self._positional, self._keyword = call.made(spec["device"], spec["dtype"])
        self._block = 1

    def _use_threads(self) -> None:
        if self._threads is not None and self.torch.get_num_threads() != self._threads:
            self.torch.set_num_threads(self._threads)

    def warm_up(self) -> None:
        """Calls until the times of calls mean something; decides how many make a block."""
        end, calls, took = time.perf_counter() + WARM_UP_S, 0, 0.0
        while calls < WARM_UP_CALLS or time.perf_counter() < end:
            took = self.time(1)
            calls += 1
            if took > WARM_UP_S:
                break
        self._block = max(1, min(10000, int(CALL_S / max(took, 1e-7))))

    def time(self, calls: int | None = None) -> float:
        """Seconds of a call, the mean of a block; of a GPU until it has ended there."""
        calls = self._block if calls is None else calls
        self._use_threads()
        function, positional, keyword = self._function, self._positional, self._keyword
        if self._cuda:
            self.torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function(*positional, **keyword)
        if self._cuda:
            self.torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls


def absent(torch: Any, device: str) -> str | None:
    """Why `device` cannot be used here, or None."""
    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        return "not on this machine"
    if ":" in device and int(device.partition(":")[2]) >= torch.cuda.device_count():
        return "not on this machine"
    return None


def room(torch: Any, device: str) -> int:
    """Bytes that are free for tensors on `device`."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 2**31


def limited(max_bytes: int) -> None:
    """Let the kernel end this process rather than another where memory gets short, and hold what it may take."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    try:
        import resource

        with open("/proc/self/statm") as file:
            now = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")  # data, which is what RLIMIT_DATA counts
        resource.setrlimit(resource.RLIMIT_DATA, (now + max_bytes, resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError, IndexError):
        pass


def one_line(error: BaseException) -> str:
    """Why something is not replayed: our own reason, or the first line of what torch raised."""
    if isinstance(error, NotReplayed):
        return str(error)
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def replay(torch: Any, task: dict[str, Any], say: Say) -> None:
    """Measure what `task` asks for; `say` is handed a dictionary for each thing that is known."""
    end = time.perf_counter() + task["seconds"]
    for number, shape in enumerate(task["calls"]):
        try:
            call = Call(torch, task["operator"], shape["arguments"])
            output = call.output_bytes()
        except Exception as error:  # noqa: BLE001 - a trace is untrusted, and torch is of any version
            say({"call": number, "reason": one_line(error)})
            continue
        variants = []
        for index, spec in enumerate(task["variants"]):
            key = {"call": number, "variant": index}
            try:
                variants.append((key, ready(torch, call, spec, output, task["max_bytes"])))
            except Exception as error:  # noqa: BLE001
                say(dict(key, reason=one_line(error)))
        left = max(0.0, end - time.perf_counter()) / (len(task["calls"]) - number)
        take_turns(variants, time.perf_counter() + left, say)


def ready(torch: Any, call: Call, spec: Given, output: int | None, max_bytes: int) -> Variant:
    """The variant, warmed up; raises `NotReplayed` where it takes too much or its device is not here."""
    why = absent(torch, spec["device"])
    if why is not None:
        raise NotReplayed(why)
    asked = call.bytes(spec["dtype"]) + (output or 0)
    most = min(max_bytes, room(torch, spec["device"]) // 2)
    if asked > most:
        raise NotReplayed(f"it takes {asked / 1e9:.1f} GB, more than replay may ({most / 1e9:.1f} GB)")
    variant = Variant(torch, call, spec)
    variant.warm_up()
    return variant


def take_turns(variants: list[tuple[Given, Variant]], end: float, say: Say) -> None:
    """Time the variants in turns: what changes meanwhile (clocks, neighbours) meets all of them alike."""
    for turn in range(MAX_ROUNDS):
        if turn and time.perf_counter() > end:
            return
        for key, variant in tuple(variants):
            try:
                say(dict(key, seconds=variant.time()))
            except Exception as error:  # noqa: BLE001
                say(dict(key, reason=one_line(error)))
                variants.remove((key, variant))


def main() -> None:
    """Reads the task, writes what is found."""
    task = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints is no answer

    def say(found: dict[str, Any]) -> None:
        output.write(json.dumps(found) + "\n")
        output.flush()

    try:
        import torch
    except ImportError as error:
        say({"problem": f"this Python has no torch ({one_line(error)})"})
        return
    if not any(spec["device"] != "cpu" for spec in task["variants"]) or not torch.cuda.is_available():
        limited(2 * task["max_bytes"] + 2**30)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    say({"torch": str(torch.__version__), "python": sys.version.split()[0], "gpus": names,
         "threads": torch.get_num_threads()})  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        replay(torch, task, say)


if __name__ == "__main__":
    main()
