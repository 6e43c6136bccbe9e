"""Where a value that is not finite was made: looked for once it is there, never before.

On the CPU the loss is known not to be finite when `backward` is called, and its graph still stands then. It leads to
the parameters that were used, which tell the models, and holds tensors that the backward pass needs. Parameters are
looked at first. Where all are finite the graph is followed from the loss to the operator whose output is
not finite though what it was given is, as far as that was saved; what needs no gradient is an input. The operator's
module is the one whose parameters it uses, else the one between the modules before and after it that has this operator
in its `forward`.

Nothing runs but reductions over memory of the host, in slices, until a look's time is over. What hooks of the script's
would have to unpack (checkpoints, offloading) is left alone.

The loss of a CUDA device is read when its graph is gone, and checkpoints hide what a graph has saved. A value that
stays or comes again is then found by listening to all modules in a few steps (`Outputs`), as monitors do: for each
call the ends of its first input, of its output and of the module's own parameters, read with one copy per device. The
steps are marked as monitored. Where code is compiled nobody listens, as a hook would make it compile anew.
"""

from __future__ import annotations

import dis
import gc
import re
import sys
from bisect import bisect_left, bisect_right
from functools import partial
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Iterator, NamedTuple, Sequence
from weakref import ref

from stepscope.record.agent.frames import is_user_file
from stepscope.record.agent.models import SLICE, Numbers, first_tensor, measurable, named, obstacle, quietly, slices
from stepscope.record.agent.patches import ModuleHook

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.segments import StepRow


LOOK_NS = 50_000_000  # of the training's time, for one look
NODES_LIMIT = 20_000  # of a graph
SEARCHES_LIMIT = 2  # of all objects of the process for models
# Operators that hand on what is not finite, and make nothing of that kind out of moderate numbers.
PASSING = re.compile(
    "(Unsafe)?(View|T|Transpose|Permute|Reshape|Squeeze|Unsqueeze|Expand|Clone|AsStrided|Slice|Select|Split|Unbind|Cat|"
    r"Stack|Index|Gather|Add|Sub|Rsub|Sum|Mean|Neg|Abs|Alias|CopySlices|Max|Min|Repeat|Roll|Flip)([A-Z][A-Za-z]*)?Backward\d*"
)
LOGARITHM = re.compile(r"Log(1p|2|10)?Backward\d*")
DIVISION = re.compile(r"DivBackward\d*")
CONVERTING = re.compile(r"ToCopyBackward\d*")
PRODUCTS = re.compile(r"(Addmm|Mm|Bmm|Baddbmm|Convolution|Mul)Backward\d*")
# Operators that make it out of some finite numbers: zero, what is not positive, what is large.
RISKY = re.compile(r"(Sqrt|Rsqrt|Pow|Exp\w*|Reciprocal|Acos|Asin|Atanh|Tan|LinalgVectorNorm|Std|Var)Backward\d*")
SOFTMAX = re.compile(r"_?(Log)?Softmax\w*Backward\d*")  # of a row that is masked as a whole
MASKING = re.compile(r"(MaskedFill|Where)Backward\d*")  # an infinity they put in is meant
GIVEN = re.compile(
    r"(self|other|input|target|source|src|query|key|value|end|running_mean|running_var|(mat|batch|tensor|vec|x)\d?)$"
)
# How operators stand in source beside their own names.
SIGNS = {
    "div": ("/", "true_divide"),
    "mul": ("*",),
    "pow": ("**", "square"),
    "std": ("var",),
    "linalg_vector_norm": ("norm", "vector_norm"),
    "to_copy": ("to", "half", "bfloat16"),
}
OLD_SIGNS = {"BINARY_TRUE_DIVIDE": "/", "BINARY_MULTIPLY": "*", "BINARY_POWER": "**"}  # before Python 3.11

# How sure it is that an operator has made what is not finite: all it was given is finite, or it divides by a zero; what
# needs no gradient gave it; it makes it out of some numbers; something gave it a value that is not known; of what is
# finite it makes nothing else as a rule.
PROVEN, GIVEN_IT, RISK, HIDDEN, UNUSUAL, OPEN = range(6, 0, -1)


class _LateError(Exception):
    """The time of a look is over."""


class Origins:
    """What is not finite in a process, looked at when told so. The results are fields of an event.

    Models are looked for among all objects only where there are others than `first_model`.
    """

    def __init__(self, first_model: ref[Any] | None) -> None:
        self._torch: Any = sys.modules["torch"]
        self._roots = [] if first_model is None else [first_model]
        self._searches = 0
        self._end_ns = 0

    def of_loss(self, loss: Any, device_in_use: bool) -> dict[str, Any]:
        """The loss is not finite, and its graph still stands."""
        nodes = _nodes(loss.grad_fn)

        def look() -> dict[str, Any]:
            model = self._model([node.variable for node in nodes if hasattr(node, "variable")])
            return self._among("parameters", model.tensors) or self._made(nodes, model)

        return self._looked(look, device_in_use) if nodes else {"reason": "the loss is made of nothing"}

    def of_gradients(self, parameters: Sequence[Any], device_in_use: bool) -> dict[str, Any]:
        """The norm of the gradients of `parameters` is not finite."""

        def look() -> dict[str, Any]:
            tensors = [(name, one.grad) for name, one in self._model(parameters).tensors if one.grad is not None]
            return self._among("gradients", tensors) or {"reason": "the gradients are finite, or not on the CPU"}

        return self._looked(look, device_in_use)

    def _looked(self, look: Callable[[], dict[str, Any]], device_in_use: bool) -> dict[str, Any]:
        why = obstacle(self._torch, device_in_use)
        if why is not None:
            return {"reason": why}
        try:
            with quietly(self._torch):
                return look()
        except _LateError:
            return {"reason": f"there is more to look at than {LOOK_NS // 1_000_000} ms allow"}

    def _model(self, leaves: Sequence[Any]) -> Model:
        """The models that hold `leaves`; from here on the time of a look runs."""
        wanted = set(map(id, leaves))
        model = Model([root for root in (known() for known in self._roots) if root is not None])
        if not wanted <= set(model.names) and self._searches < SEARCHES_LIMIT:
            self._searches += 1
            roots: list[Any] = []
            covered: set[int] = set()
            for count, _, root, own in sorted(_roots(self._torch, wanted), key=lambda each: each[:2]):
                if count and not own <= covered:
                    covered |= own
                    roots.append(root)
            self._roots = [ref(root) for root in roots]
            model = Model(roots)
        self._end_ns = monotonic_ns() + LOOK_NS
        return model

    def _among(self, where: str, tensors: list[tuple[str, Any]]) -> dict[str, Any] | None:
        """The last in order of definition that is not finite, which a backward pass came to first."""
        known = [(name, ends) for name, tensor in tensors if (ends := self.ends(tensor)) is not None]
        bad = [name for name, ends in known if not _are_finite(ends)]
        if not bad:
            return None
        about = {"where": where, "not_finite": len(bad), "looked_at": len(known)}
        if len(bad) == len(known) > 1:
            return about
        return {**about, "module": bad[-1].rpartition(".")[0] or None, "parameter": bad[-1]}

    def ends(self, tensor: Any) -> tuple[float, float] | None:
        """The lowest and the highest, NaN where there is one; None where it cannot be read here."""
        plain = measurable(tensor)
        if plain is None or not plain.is_cpu:
            return None
        low, high = float("inf"), float("-inf")
        for (part,) in slices(plain):
            if monotonic_ns() > self._end_ns:
                raise _LateError
            least, most = (float(end) for end in self._torch.aminmax(part))
            if least != least:
                return least, least
            low, high = min(low, least), max(high, most)
        return low, high

    def _made(self, nodes: list[Any], model: Model) -> dict[str, Any]:
        rank, _, node = self._maker(nodes[0])
        operator = _operator(node)
        if getattr(_function(node), "__module__", "").startswith("torch."):
            return {"reason": f"it was made inside {operator}, which hides its modules from the graph"}
        if rank == OPEN:
            return {"reason": "the tensors that the graph has saved do not tell what made it"}
        where = "inputs" if rank in (GIVEN_IT, HIDDEN) else "forward"
        found = {"where": where, "operator": operator, **_place(node, operator, nodes, model)}
        # A batch with such values is in the running means of the modules behind it: only the maker's own buffers tell.
        own = found.get("module")
        buffers = [] if own is None else model.modules[own].named_buffers(recurse=False)
        return self._among("parameters", [(f"{own}.{name}", one) for name, one in buffers]) or found

    def _maker(self, bad: Any) -> tuple[int, int, Any]:
        """(how sure it is, how early in the forward pass, the node) of what made the output of `bad`."""
        seen: set[Any] = set()
        while True:
            start, deeper, waiting, region = bad, None, [bad], []
            while waiting and deeper is None:
                node = waiting.pop()
                if node in seen:
                    continue
                facts = _Facts(self, node, self._torch)
                if node is not start and facts.output is False:
                    deeper = node
                elif node is start or facts.output is None:
                    seen.add(node)
                    deeper = facts.bad
                    waiting += facts.unknown
                    certain = node is start and facts.rank in (OPEN, RISK, UNUSUAL) and not facts.unknown
                    region.append((PROVEN if certain else facts.rank, -node._sequence_nr(), node))
                elif facts.rank == UNUSUAL:
                    region.append((UNUSUAL, -node._sequence_nr(), node))
            if deeper is None or deeper in seen:
                best = max(region, key=lambda each: each[:2])
                # Of several that may have, nobody knows which.
                is_one = best[0] >= GIVEN_IT or sum(rank == best[0] for rank, *_ in region) == 1
                return best if is_one else (OPEN, *best[1:])
            bad = deeper


class _Facts:
    """What the saved tensors of a node tell.

    `output`: whether it is finite, None where that is not known. `bad` is what gave it a tensor that is not finite,
    `unknown` what gave it others.
    """

    def __init__(self, look: Origins, node: Any, torch: Any) -> None:
        self.output: bool | None = None
        self.bad: Any = None
        self.rank = OPEN
        self._torch = torch
        self._node = node
        self._name = type(node).__name__
        self._edges = [edge for edge, _ in node.next_functions]
        self._good: set[Any] = set()
        self._largest = 1.0  # that a product can be
        self._is_harmless = self._is_judged = False  # what is finite stays so; that is known or not
        for which, tensor in _saved(node):
            if which == "other" and DIVISION.match(self._name) and tensor.is_cpu and tensor.numel() <= SLICE:
                self._is_judged = True
                self.rank = PROVEN if int(torch.count_nonzero(tensor)) < tensor.numel() else self.rank
            ends = look.ends(tensor)
            if ends is not None:
                self._take(which, tensor, ends)
        left = [edge for edge in self._edges if edge is not None and edge not in self._good]
        self.unknown = [] if self.bad else [edge for edge in left if not hasattr(edge, "variable")]
        self._judge()

    def _take(self, which: str, tensor: Any, ends: tuple[float, float]) -> None:
        finite, maker = _are_finite(ends), tensor.grad_fn
        if maker is self._node:
            self.output = finite and self.output is not False
        elif maker is not None and maker in self._edges:
            if finite or (ends[0] == ends[0] and MASKING.match(type(maker).__name__)):
                self._good.add(maker)
            else:
                self.bad = self.bad or maker
        elif not finite and GIVEN.match(which) and self.rank == OPEN:
            self.rank = GIVEN_IT
        if not finite:
            return
        if LOGARITHM.match(self._name):
            self._is_judged = True
            self._is_harmless = ends[0] > (-1.0 if self._name.startswith("Log1p") else 0.0)
            self.rank = OPEN if self._is_harmless else PROVEN
        elif PRODUCTS.match(self._name):
            terms = 1 if self._name.startswith("Mul") else tensor[:1].numel()
            self._is_judged = True
            self._largest *= max(1.0, -ends[0], ends[1]) * terms
            self._is_harmless = self._largest < self._torch.finfo(tensor.dtype).max / 10

    def _is_risky(self) -> bool:
        if LOGARITHM.match(self._name) or DIVISION.match(self._name):
            return not self._is_judged
        if SOFTMAX.match(self._name):
            return any(edge is not None and MASKING.match(type(edge).__name__) for edge in self._edges)
        if PRODUCTS.match(self._name):
            return self._is_judged and not self._is_harmless
        if CONVERTING.match(self._name):
            made = getattr(self._node, "_input_metadata", ())
            return any(one.dtype is self._torch.float16 for one in made)
        return bool(RISKY.match(self._name)) or _function(self._node) is not None

    def _judge(self) -> None:
        if self.rank != OPEN:
            return
        if self._is_risky():
            self.rank = RISK
        elif MASKING.match(self._name):
            self.rank = OPEN
        elif PASSING.match(self._name):
            self.rank = HIDDEN if None in self._edges else OPEN
        elif not any(kind.match(self._name) for kind in (PRODUCTS, LOGARITHM, DIVISION, CONVERTING)):
            self._is_harmless = bool(self._good)
            self.rank = UNUSUAL
        if self._is_harmless and self.output is None and not self.unknown and not self.bad:
            self.output = True


def _are_finite(ends: tuple[float, float]) -> bool:
    return all(end - end == 0.0 for end in ends)


def _function(node: Any) -> Any:
    """The `torch.autograd.Function` that the node is of; None where it is torch's own operator."""
    return getattr(type(node), "_forward_cls", None)


def _nodes(root: Any) -> list[Any]:
    nodes: dict[Any, None] = {}
    waiting = [root]
    while waiting and len(nodes) < NODES_LIMIT:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            waiting += [following for following, _ in node.next_functions]
    return list(nodes)


def _saved(node: Any) -> Iterator[tuple[str, Any]]:
    """What a node has saved, by name, where no hook has to be called for it and nobody has written to it since."""
    for attribute in dir(type(node)):
        if not attribute.startswith("_raw_saved_"):
            continue
        try:
            raw = getattr(node, attribute)
            raws = raw if isinstance(raw, (tuple, list)) else (raw,)
            # Before torch has `unpack_hook` nobody can tell.
            if any(getattr(one, "unpack_hook", one) is not None for one in raws if one is not None):
                continue
            which = attribute[len("_raw_saved_") :]
            public = f"_saved_{which}" if hasattr(type(node), f"_saved_{which}") else "saved_tensors"
            value = getattr(node, public)
        except RuntimeError:  # it is freed already, or was changed in place
            continue
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if tensor is not None:
                yield which, tensor


def _operator(node: Any) -> str:
    """As the script calls it, about."""
    name = re.sub(r"Backward\d*$", "", type(node).__name__)
    if _function(node) is not None:
        return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub("^(Native|Mkldnn|Linalg)", "", name)).lower()


# -------------------------------------------------------------------------------------------------------- modules


class Model:
    """All modules of the script's models, by name in order of definition, with their parameters."""

    def __init__(self, roots: list[Any]) -> None:
        self.modules = dict(named(roots, "named_modules"))
        self.tensors = list(named(roots, "named_parameters"))
        self.names = {id(one): name for name, one in self.tensors[::-1]}
        self.by_module = {id(module): name for name, module in self.modules.items()}
        self.parents = {
            self.by_module[id(child)]: name for name, module in self.modules.items() for child in module.children()
        }
        self.owners = {
            id(one): name for name, module in self.modules.items() for one in module.parameters(recurse=False)
        }
        self.order = {name: place for place, name in enumerate(self.modules)}

    def above(self, name: str | None) -> list[str]:
        """The modules that `name` is in, the innermost first."""
        found = []
        while name is not None and name in self.parents:
            name = self.parents[name]
            found.append(name)
        return found


def _roots(torch: Any, wanted: set[int]) -> Iterator[tuple[int, int, Any, set[int]]]:
    """(minus how many of the wanted parameters, its place, the model, which) of each that is in no other."""
    classes, waiting = {torch.nn.Module}, [torch.nn.Module]
    while waiting:
        new = [each for each in type.__subclasses__(waiting.pop()) if each not in classes]
        classes.update(new)
        waiting += new
    modules = [one for one in gc.get_objects() if type(one) in classes and "_modules" in vars(one)]
    inner = {id(child) for module in modules for child in vars(module)["_modules"].values()}
    for place, module in enumerate(modules):
        if id(module) not in inner:
            own = wanted & set(map(id, torch.nn.Module.parameters(module)))
            yield -len(own), place, module, own


def _place(node: Any, operator: str, nodes: list[Any], model: Model) -> dict[str, Any]:
    """The module of a node and, where it is known, the line of the script's that calls the operator, or the module."""
    own = [model.owners[leaf] for leaf in _leaves(node) if leaf in model.owners]
    if own:
        return {"module": own[0], **line_of(model, own[0], operator)}
    uses = sorted(
        (user._sequence_nr(), model.owners[leaf])
        for user in nodes
        if len(user.next_functions) > 1 or not PASSING.match(type(user).__name__)
        for leaf in _leaves(user)
        if leaf in model.owners
    )
    at = bisect_left(uses, (node._sequence_nr(), ""))
    before, after = (uses[at - 1][1] if at else None), (uses[at][1] if at < len(uses) else None)
    first, last = (None if name is None else model.order[name] for name in (before, after))
    between = [  # those that have neither parameters nor modules
        name
        for name, place in model.order.items()
        if (first is None or place > first) and (last is None or place < last)
        if not any(vars(model.modules[name])[kind] for kind in ("_modules", "_parameters"))
    ]
    # One that its parameters name may do more before or after it uses them.
    ends = [name for name in (before, after) if name is not None]
    around = list(dict.fromkeys(ends + model.above(before) + model.above(after)))
    using = [  # torch's own module for the operator, or one that calls it
        name
        for name in between + around
        if type(model.modules[name]).__name__.lower() == operator.replace("_", "")
        or _lines(model.modules[name], operator)
    ]
    if len(using) == 1:
        return {"module": using[0], **line_of(model, using[0], operator)}
    if before is not None and after is not None:
        above = [before, *model.above(before)]
        common = next((name for name in [after, *model.above(after)] if name in above), None)
        return {"module": common, "behind": before}
    return {"behind": before}


def _leaves(node: Any) -> list[int]:
    """The ids of the parameters that a node uses, transposed or converted or as they are."""
    found = []
    for edge, _ in node.next_functions:
        for _ in range(4):
            if edge is None or hasattr(edge, "variable"):
                break
            name = type(edge).__name__
            is_view = len(edge.next_functions) == 1 and (PASSING.match(name) or CONVERTING.match(name))
            edge = edge.next_functions[0][0] if is_view else None
        if edge is not None and hasattr(edge, "variable"):
            found.append(id(edge.variable))
    return found


def line_of(model: Model, name: str | None, operator: str | None) -> dict[str, Any]:
    """The line of the operator in the module's `forward`, or that which calls the module."""
    if name is None:
        return {}
    module, parent = model.modules[name], model.parents.get(name)
    lines = [] if operator is None else _lines(module, operator)
    if not lines and parent is not None:
        module, lines = model.modules[parent], _lines(model.modules[parent], name.rpartition(".")[2])
    if len(lines) != 1:
        return {}
    code = type(module).forward.__code__
    return {"file": code.co_filename, "line": lines[0], "function": code.co_name}


def _lines(module: Any, operator: str) -> list[int]:
    """The lines of a module's own `forward` that call `operator`, by name or by its sign."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return []
    starts = [start for start in dis.findlinestarts(code) if start[1] is not None]
    names = {operator, f"{operator}_", *SIGNS.get(operator, ())}
    found = []
    for one in dis.get_instructions(code):
        if one.argval in names or one.argrepr.rstrip("=") in names or OLD_SIGNS.get(one.opname) in names:
            found.append(starts[bisect_right(starts, (one.offset, sys.maxsize)) - 1][1])
    return list(dict.fromkeys(found))


NAME = "outputs"
STEPS = 3  # that are listened to, one after the other
CALLS_LIMIT = 2_000  # of modules in a step


class _Called(NamedTuple):
    """A call of a module; where the ends of each are among the numbers."""

    module: Any
    given: Sequence[int]
    own: Sequence[int]
    made: Sequence[int]


class Outputs:
    """Listens to modules in the steps after `arm`; `found` tells what came of it, once it is known."""

    def __init__(self, agent: Agent, found: Callable[[dict[str, Any]], None]) -> None:
        self._agent = agent
        self._found = found
        self._left = 0  # steps to listen to
        self._numbers = Numbers()
        self._calls: list[_Called] = []
        self._own_ns = 0
        self._hook = ModuleHook(agent.guard.wrap(NAME, self._called), after=True)
        self._tell_guarded = agent.guard.wrap(NAME, self._tell)
        agent.before_compile.append(self.disarm)
        agent.add_step_listener(self._at_step, NAME, lambda: self.is_armed)
        agent.add_finish_hook(self.disarm, NAME)

    @property
    def is_armed(self) -> bool:
        """Whether something may still be found."""
        return self._left > 0

    def arm(self) -> None:
        """Listen from the next step on."""
        if not self._agent.compile_used:
            self._left = STEPS

    def disarm(self) -> None:
        """Listen no more."""
        self._left = 0
        self._close()

    def _close(self) -> None:
        self._hook.remove()
        self._calls, self._numbers = [], Numbers()

    def _at_step(self, row: StepRow | None, _now_ns: int) -> None:
        agent, calls, numbers = self._agent, self._calls, self._numbers
        self._close()
        if calls and row is not None:
            began = agent.clock.now()
            with quietly(sys.modules["torch"]):
                numbers.read(agent.metrics, partial(self._tell_guarded, calls, row.step))
            own_ns = self._own_ns + agent.clock.now() - began
            agent.journal.write("monitor", began, own_ns, step=row.step, measured=[NAME], cost_ns=own_ns)
        if not self._left or agent.own_profiler_active or agent.user_profiler_active:
            return
        if row is not None and row.kind == "train":
            self._left -= 1
            if self._left:
                self._own_ns = 0
                self._hook.add()

    def _called(self, module: Any, inputs: Any, output: Any) -> None:
        torch: Any = sys.modules["torch"]
        if get_ident() != self._agent.training_thread or not module.training:
            return  # without gradients as well: a checkpoint's first pass has none
        if len(self._calls) >= CALLS_LIMIT or obstacle(torch, self._agent.device.in_use) is not None:
            return
        began = self._agent.clock.now()
        with quietly(torch):
            own = [tensor for one in module.parameters(recurse=False) if (tensor := measurable(one)) is not None]
            parts = ([first_tensor(inputs)], own, [first_tensor(output)])
            put, ends = self._numbers.put, torch.aminmax
            places = ([put(end) for one in part if one is not None for end in ends(one)] for part in parts)
            self._calls.append(_Called(module, *places))
        self._own_ns += self._agent.clock.now() - began

    def _tell(self, calls: list[_Called], step: int, values: list[float]) -> None:
        """The first module that made something that is not finite, or was given it."""

        def finite(places: Sequence[int]) -> bool:
            return all(values[place] - values[place] == 0.0 for place in places)

        at = next((at for at, call in enumerate(calls) if not finite(call.made)), None)
        if at is None or not self._left:
            return
        self._left = 0
        call = calls[at]
        inner = {id(child) for one in calls for child in one.module.modules() if child is not one.module}
        model = Model(list({id(one.module): one.module for one in calls if id(one.module) not in inner}.values()))
        name = model.by_module.get(id(call.module))
        with_own = [one for one in calls if one.own]
        lost = [one for one in with_own if not finite(one.own)]
        if lost and len(lost) == len(with_own) > 1:
            self._found({"reason": f"no parameter was finite any more in step {step}"})
            return
        found: dict[str, Any] = {"where": "forward", "module": name, "again": step}
        if lost:  # a backward pass came to the last one first
            name = model.by_module.get(id(lost[-1].module))
            found.update(where="parameters", module=name, not_finite=len(lost), looked_at=len(with_own))
        elif not finite(call.given) and at == 0:
            found.update(where="inputs")
        elif not finite(call.given):
            name = None
            found.update(module=model.parents.get(found["module"] or ""))
            found.update(behind=model.by_module.get(id(calls[at - 1].module)))
        self._found({**found, **line_of(model, name, None)})
