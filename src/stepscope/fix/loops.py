"""Edits around the training loop: work made every N steps only, autocast around forward and loss, a compiled model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import libcst as cst

from stepscope.fix.edits import Tree
from stepscope.fix.sources import NotMechanical

# What stays of the work may cost so much of a step without it: less than two runs of one program differ by.
KEPT_SHARE = 0.02
INTERVALS = (50, 100, 200, 500, 1000)
LEVELS = 3  # functions between the loop and the line that is named
_UPDATES = re.compile(r"opt|scaler", re.IGNORECASE)
_LEAVES = (cst.Return, cst.Break, cst.Continue, cst.Yield, cst.Await, cst.Raise, cst.Global, cst.Nonlocal)
_Loop = cst.For | cst.While


def interval(share: float, run: int) -> int:
    """Every how many steps work that takes this share of each has to be made so that it costs next to nothing, and is
    yet done more than once in a run of so many steps."""
    left = share / max(1e-6, 1.0 - share)
    told = [steps for steps in INTERVALS if 2 * steps <= run]
    if not told:
        raise NotMechanical(f"the run has {run} steps only; say every how many of them this is to be done: --every N")
    return next((steps for steps in told if left / steps <= KEPT_SHARE), told[-1])


def training_loops(tree: Tree) -> list[Any]:
    """The innermost loops that update weights; where none is seen, those that call `backward`."""
    found: dict[str, list[Any]] = {"step": [], "backward": []}
    for call in tree.all(cst.Call):
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in found:
            kind = call.func.attr.value
            loop = tree.around(call, cst.For, cst.While, cst.FunctionDef)
            updates = kind == "backward" or _UPDATES.search(tree.code(call.func.value))
            if updates and loop is not None and loop not in found[kind]:
                found[kind].append(loop)
    around = found["step"] or found["backward"]
    loops = [one for one in around if isinstance(one, _Loop)]
    if not loops:  # the step is a function, which a loop calls
        calls = [call for one in around for call in _calls_of(tree, one)]
        loops = [loop for call in calls if isinstance(loop := tree.around(call, cst.For, cst.While), _Loop)]
    return list(dict.fromkeys(loops))


def _calls_of(tree: Tree, function: cst.FunctionDef) -> list[cst.Call]:
    """The calls of a function of the file; of a method those of this name on any object, but on no module."""
    name = function.name.value
    if isinstance(tree.around(function, cst.ClassDef, cst.FunctionDef), cst.ClassDef):
        found = [call for call in tree.all(cst.Call) if isinstance(call.func, cst.Attribute)]
        return [call for call in found if call.func.attr.value == name and not tree.is_imported(call.func)]
    return tree.calls(*tree.names(function))


def every(tree: Tree, line: int | None, steps: int) -> bool:
    """Have what a line does in each step be done every so many; False where it is done as rarely already."""
    target, loop = _in_loop(tree, line)
    _check(tree, target, loop)
    for call in tree.all(cst.Call, target):
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "append":
            tree.notes.append(f"`{tree.code(call.func.value)}` then gets fewer entries")
    held, divisor = _interval(tree, target, loop)
    if divisor is not None:
        blocks = [one for one in tree.above(target) if isinstance(one, cst.IndentedBlock) and held in tree.above(one)]
        if held.orelse is not None or any(len(block.body) > 1 for block in blocks):
            raise NotMechanical(f"`{_asked(tree, held)}` holds more than this work: give it an interval of its own")
        known = tree.literal(divisor)
        if isinstance(known, int) and known >= steps:
            return False
        return tree.set_value(divisor, str(steps), "the interval", lambda one: isinstance(one, int) and one < steps)
    counter = _counter(tree, loop)
    tree.under([target], f"if {counter} % {steps} == 0:")
    return True


def _in_loop(tree: Tree, line: int | None) -> tuple[Any, Any]:
    """(the statement in a training loop that a line is or is called from, that loop)."""
    loops = training_loops(tree)
    if not loops:
        raise NotMechanical(
            f"{tree.name} holds no loop that trains: make the work at line {line} rarer where it is called"
        )
    found = tree.on(cst.BaseStatement, line)
    found = [node for node in found if tree.line(node) == line or isinstance(node, cst.SimpleStatementLine)]
    if not found:
        raise NotMechanical(f"no statement is on line {line} of {tree.name}")
    at: list[cst.CSTNode] = [found[0]]
    for _ in range(LEVELS):
        for one in at:
            loop = next((held for held in tree.above(one) if held in loops), None)
            if loop is not None and tree.around(one, cst.FunctionDef) is tree.around(loop, cst.FunctionDef):
                if len(at) > 1:
                    break
                return tree.statement(one), loop
        function = tree.around(at[0], cst.FunctionDef)
        if function is not None and any(_trains(tree, call) for call in tree.all(cst.Call, function)):
            raise NotMechanical(
                f"line {line} of {tree.name} is in `{function.name.value}`, which trains: count the steps there"
            )
        at = [] if function is None else list(_calls_of(tree, function))
        inside = [(call, held) for call in at for held in tree.above(call) if held in loops]
        at = [call for call, held in inside if len(inside) == 1 or _interval(tree, call, held)[1] is None] or at
        if len(at) != 1:
            break
    told = "from several places" if len(at) > 1 else "from no loop that can be seen in its file"
    raise NotMechanical(f"line {line} of {tree.name} is reached {told}: make the work rarer where it is called")


def _check(tree: Tree, target: Any, loop: Any) -> None:
    """Refuse what would change more than how often the work is done."""
    where = f"line {tree.line(target)} of {tree.name}"
    small = target.body[0] if isinstance(target, cst.SimpleStatementLine) and len(target.body) == 1 else None
    if small is None and not isinstance(target, cst.For | cst.With | cst.If):
        raise NotMechanical(f"{where} does several things; decide which of them every step needs")
    if isinstance(small, cst.Expr) and not isinstance(small.value, cst.Call):
        raise NotMechanical(f"{where} is no call that could be left out")
    if any(_trains(tree, call) for call in tree.all(cst.Call, target)):
        raise NotMechanical(f"{where} trains: it has to run in every step")
    if any(isinstance(node, _LEAVES) for node in tree.all(cst.CSTNode, target)):
        raise NotMechanical(f"{where} decides what runs next")
    if _goes_on(tree, target):
        raise NotMechanical(f"{where} adds up over all steps: decide whether a part of them will do")
    around = [one for one in takewhile(lambda one: one is not loop, tree.above(target)) if isinstance(one, cst.If)]
    made = {tree.code(one).strip() for one in _given(tree, loop)}
    for asks in (*around, *tree.all(cst.IfExp, target)):
        parts = (one for one in tree.all(cst.BaseExpression, asks) if asks.test in (one, *tree.above(one)))
        if _divisor(asks.test) is None and any(tree.code(one).strip() in made for one in parts):
            raise NotMechanical(f"`{_asked(tree, asks)}` (line {tree.line(asks)}) decides by what a step gave")
    function = tree.around(loop, cst.FunctionDef) or tree.module
    stored = {name for node in _given(tree, target) for name in _stored(tree, node)}
    for name in stored:
        others = [
            node for node in tree.all(cst.Name, function) if node.value == name and target not in tree.above(node)
        ]
        before = any(tree.line(node) < tree.line(loop) for node in others)
        if others and not before:
            raise NotMechanical(f"`{name}` of {where} is used in every step: decide where it may be older")


def _goes_on(tree: Tree, target: Any) -> bool:
    """Whether a statement makes a value of the one before: a sum, a moving average."""
    given = [(tree.code(to.target).strip(), of.value) for of in tree.all(cst.Assign, target) for to in of.targets]
    again = any(name in map(tree.code, tree.all(cst.BaseExpression, value)) for name, value in given)
    return again or any(tree.all(cst.AugAssign, target)) or bool(re.search(r"\.(add|mul|lerp)_\(", tree.code(target)))


def _trains(tree: Tree, call: cst.Call) -> bool:
    if not isinstance(call.func, cst.Attribute):
        return False
    kind, owner = call.func.attr.value, tree.code(call.func.value)
    updates = _UPDATES.search(owner) is not None or "sched" in owner.lower()
    return kind == "backward" or (kind in ("step", "zero_grad") and updates)


def _given(tree: Tree, inside: Any, *more: Any) -> Iterator[Any]:
    """What is given a value in a statement, each of a tuple alone; `more`: by these statements too."""
    for node in tree.all((cst.AssignTarget, cst.NamedExpr, *more), inside):
        parts = node.target.elements if isinstance(node.target, cst.Tuple | cst.List) else ()
        yield from (part.value for part in parts) if parts else (node.target,)


def _stored(tree: Tree, target: cst.CSTNode) -> list[str]:
    if isinstance(target, cst.Name):
        return [target.value]
    return [node.value for node in tree.all(cst.Name, target)]


def _interval(tree: Tree, node: cst.CSTNode, loop: Any) -> tuple[Any, cst.BaseExpression | None]:
    """(the innermost `if` between a loop and what it lets through now and then, the number of steps in it)."""
    for held in takewhile(lambda one: one is not loop, (node, *tree.above(node))):
        if isinstance(held, cst.If) and (held is node or held.body in (node, *tree.above(node))):
            divisor = _divisor(held.test)
            if divisor is not None:
                return held, divisor
    return None, None


def _asked(tree: Tree, held: Any) -> str:
    return f"if {' '.join(tree.code(held.test).split())}"


def _divisor(test: cst.CSTNode) -> cst.BaseExpression | None:
    """`N` of `step % N == 0` or `not step % N`, also as one condition of several that must all hold."""
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return _divisor(test.left) or _divisor(test.right)
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        other = test.comparisons[0]
        if not isinstance(other.operator, cst.Equal):
            return None
        test = test.left
    elif isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        test = test.expression
    else:
        return None
    if isinstance(test, cst.BinaryOperation) and isinstance(test.operator, cst.Modulo):
        return test.right
    return None


def _counter(tree: Tree, loop: Any) -> str:
    """A name that counts the steps of a loop; where there is none, one that `enumerate` gives it."""
    stored = [name for node in _given(tree, loop, cst.AugAssign, cst.For) for name in _stored(tree, node)]
    for node, once in _counts(tree, loop):
        if isinstance(node, cst.Name) and stored.count(node.value) == once:
            return str(node.value)
    if not isinstance(loop, cst.For) or loop.asynchronous is not None:
        where = f"the loop at line {tree.line(loop)} of {tree.name}"
        raise NotMechanical(f"{where} counts no steps: count them there first")
    used = {node.value for node in tree.all(cst.Name)}
    name = next(word for word in ("step_number", *(f"step_number_{n}" for n in range(1000))) if word not in used)
    space = cst.SimpleWhitespace(" ")

    def bracketed(node: Any) -> str:
        return f"({tree.code(node)})" if isinstance(node, cst.Tuple) and not node.lpar else tree.code(node)

    def counted(updated: Any) -> Any:
        return updated.with_changes(
            target=cst.parse_expression(f"{name}, {bracketed(updated.target)}"),
            iter=cst.parse_expression(f"enumerate({bracketed(updated.iter)})", tree.module.config_for_parsing),
            whitespace_after_for=space,
            whitespace_before_in=space,
            whitespace_after_in=space,
        )

    tree.change(loop, counted)
    return name


def _counts(tree: Tree, loop: Any) -> Iterator[tuple[Any, int]]:
    """What may count the steps of a loop, and how often the loop itself then gives it a value: what `range` or
    `enumerate` gives, what is divided by an interval, what grows by 1."""
    if isinstance(loop, cst.For):
        called = tree.names(loop.iter.func) if isinstance(loop.iter, cst.Call) else set()
        if "builtins.range" in called:
            yield loop.target, 0
        if "builtins.enumerate" in called and isinstance(loop.target, cst.Tuple):
            yield loop.target.elements[0].value, 0
        if isinstance(loop.target, cst.Name):
            for node in tree.all(cst.BinaryOperation, loop):
                divided = tree.code(node.left).strip() == loop.target.value
                if divided and isinstance(node.operator, cst.Modulo):
                    yield loop.target, 0
    for node in tree.all(cst.AugAssign, loop):
        within = tree.around(node, cst.If, cst.For, cst.While, cst.Try, cst.FunctionDef) is loop
        if within and isinstance(node.operator, cst.AddAssign) and tree.literal(node.value) == 1:
            yield node.target, 1


AUTOCAST = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.amp.autocast_mode.autocast")


def autocast(tree: Tree, torch: str, device: str, value: str) -> bool:
    """Autocast around what computes the loss of the one `backward` in the training loop; in float16 a scaled loss."""
    if tree.calls(*AUTOCAST):
        return False
    loops = training_loops(tree)
    calls = [call for call in tree.all(cst.Call) if isinstance(call.func, cst.Attribute)]
    passes = [
        call for call in calls if call.func.attr.value == "backward" and any(loop in tree.above(call) for loop in loops)
    ]
    if len(passes) != 1:
        raise NotMechanical(
            f"{tree.name} holds {len(passes)} calls of backward in its loops: choose what runs in {value}"
        )
    backward: Any = passes[0]
    last = tree.statement(backward)
    body = list(tree.around(last, cst.IndentedBlock).body)
    wanted = {node.value for node in tree.all(cst.Name, backward.func.value)}
    wanted |= {backward.func.value.value} if isinstance(backward.func.value, cst.Name) else set()
    inside = []
    for line in reversed(body[: body.index(last)]):
        given = [name for one in tree.all(cst.AssignTarget, line) for name in _stored(tree, one.target)]
        moved = re.search(r"=\s*(?:[\w.\[\], ]+\.(?:to|cuda)\(|next\()", tree.code(line))
        if moved:
            break
        if set(given) & wanted:
            inside.append(line)
            wanted |= {node.value for node in tree.all(cst.Name, line)}
    if not inside:
        raise NotMechanical(f"the loss of line {tree.line(backward)} of {tree.name} is not computed beside it")
    block = body[body.index(inside[-1]) : body.index(inside[0]) + 1]
    if any(
        _trains(tree, call) and "zero_grad" not in tree.code(call) for one in block for call in tree.all(cst.Call, one)
    ):
        raise NotMechanical(f"forward and update of {tree.name} lie among each other: choose what runs in {value}")
    for call in calls:
        behind = any(loop in tree.above(call) for loop in loops) and tree.line(call) > tree.line(block[0])
        if value == "bf16" and behind and call.func.attr.value == "numpy":
            raise NotMechanical(f"line {tree.line(call)} hands values to NumPy, which knows no bf16: convert them")
    kind = {"bf16": "bfloat16", "fp16": "float16"}[value]
    if kind == "float16":
        _scaled(tree, torch, device, backward, calls)
    tree.under(block, f'with {torch}.autocast("{device}", dtype={torch}.{kind}):')
    return True


def _scaled(tree: Tree, torch: str, device: str, backward: Any, calls: list[Any]) -> None:
    loop = tree.around(backward, cst.For, cst.While)
    steps = [
        call for call in calls if call.func.attr.value == "step" and _trains(tree, call) and loop in tree.above(call)
    ]
    clips = [call for call in calls if call.func.attr.value.startswith("clip_grad") and loop in tree.above(call)]
    if len(steps) != 1 or steps[0].args or clips or "scaler" in tree.module.code:
        raise NotMechanical("float16 takes torch.amp.GradScaler, and the update here is more than one optimizer.step()")
    outer = [node for node in (loop, *tree.above(loop)) if isinstance(node, _Loop)]
    tree.before(outer[-1], f'scaler = {torch}.amp.GradScaler("{device}")')
    tree.replace(backward, f"scaler.scale({tree.code(backward.func.value)}).backward()")
    tree.replace(steps[0], f"scaler.step({tree.code(steps[0].func.value)})")
    tree.after(tree.statement(steps[0]), "scaler.update()")


def compile_model(tree: Tree, mode: str) -> bool:
    """Compile, in its place, the model whose parameters the one optimizer of a file is given."""
    if tree.calls("torch.compile") or re.search(r"\.compile\(", tree.module.code):
        return False
    made = [
        call for call in tree.all(cst.Call) if any(name.startswith("torch.optim.") for name in tree.names(call.func))
    ]
    models = {
        tree.code(inner.func.value)
        for call in made
        if call.args
        for inner in (call.args[0].value, *tree.all(cst.Call, call.args[0]))
        if isinstance(inner, cst.Call)
        and isinstance(inner.func, cst.Attribute)
        and inner.func.attr.value == "parameters"
    }
    if len(made) != 1 or len(models) != 1 or models == {"self"}:
        raise NotMechanical(
            f"which model of {tree.name} to compile cannot be told from one optimizer and its parameters"
        )
    statement: Any = tree.statement(made[0])
    ends = isinstance(tree.around(made[0], cst.Return), cst.Return)  # nothing behind it would run
    (tree.before if ends else tree.after)(statement, f"{models.pop()}.compile({mode})")
    return True
