"""From a finding to the edits that cure it, or to what a person has to decide.

Arguments of constructors and settings of frameworks are those of `diagnose/in_script.json`, which findings quote; a
knob of another kind and a rule without a knob have a recipe here. Nothing here runs the user's code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import libcst as cst
from msgspec import Struct

from stepscope.diagnose.in_script import LOADER, edit_of
from stepscope.diagnose.rule import train_steps
from stepscope.fix import loops
from stepscope.fix.edits import Held, Tree
from stepscope.fix.sources import NotMechanical, Source, Sources
from stepscope.model import Analysis, Finding, Place
from stepscope.model.findings import Try

LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
REMOVABLE = ("gc.collect", "torch.cuda.empty_cache", "torch.cuda.synchronize", "torch.mps.empty_cache")
# knob -> (full name of the call, its argument) that sets it for the process
SETTINGS = {
    "torch.num_threads": "set_num_threads",
    "torch.num_interop_threads": "set_num_interop_threads",
    "matmul_precision": "set_float32_matmul_precision",
    "cuda.linalg_library": "backends.cuda.preferred_linalg_library",
}
ASSIGNED = {"cudnn.benchmark": "backends.cudnn.benchmark", "cudnn.allow_tf32": "backends.cudnn.allow_tf32"}

# Rules whose finding itself says that every N steps will do: the result is written, saved or looked at.
RARER = ("io.blocking_in_step", "host.evaluation_in_step", "host.model_copied_in_step", "host.logging")
# Rules for whose work that has to be decided: with --every N it is.
MAYBE_RARER = ("host.python_on_critical_path", "sync.host_waits")
NOTHING_THERE = "the lines of the finding hold no call that could just be left out"

MEANS = {
    "loader.num_workers": "where workers are not forked (Python 3.14 on), the script has to train under "
    "`if __name__ == '__main__':`",
    "amp.dtype": "forward pass and loss are computed in the shorter type: compare the losses",
    "optimizer.fused": "results differ in the last digits",
    "compile": "the first steps take longer, and results differ in the last digits",
    "matmul_precision": "products of matrices are computed in fewer digits: compare the losses",
    "cudnn.allow_tf32": "convolutions are computed in fewer digits: compare the losses",
}

DECIDE = {
    "host.per_item_loop": "which operators on whole tensors do what the loop does item by item",
    "host.python_on_critical_path": "whether every step needs this work, and what may take its place",
    "host.evaluation_between_steps": "how often evaluation is needed",
    "host.step_drift": "what grows from step to step, and how much of it has to be kept",
    "host.model_copied_in_step": "how old the copy may be, and with which decay an average then goes on",
    "sync.host_waits": "whether every step needs the value, or the decision that is made by it",
    "system.children_hold_cores": "when and where the work of the other processes is done",
    "system.other_processes": "who else may use this machine",
    "communication.straggler": "how the work of the ranks is made equal",
    "communication.unbalanced_work": "how the work of the ranks is made equal",
    "communication.many_small_collectives": "in which buffer small tensors are exchanged together",
    "compute.small_batch": "which batch size the training may have: convergence and memory depend on it",
    "compute.recompute": "what may stay in memory in place of being computed again",
    "compute.double_precision": "which tensors may be float32",
}


class Recipe(Struct):
    """What goes into the edits of one finding: the analysis, the files, and the interval that the user named."""

    analysis: Analysis
    sources: Sources
    finding: Finding
    every: int | None
    touched: dict[str, Source]
    knobs: list[Try]
    notes: list[str]

    def open(self, file: str) -> Tree:
        source = self.sources.open(file)
        tree: Tree = source.tree
        tree.option_of = self._option
        tree.notes = self.notes
        self.touched[source.path] = source
        return tree

    def make(self) -> bool:
        """Plan all edits; False where there is nothing left to do, raises `NotMechanical` with the reason."""
        ways = [*_of_rule(self.finding)]
        family = tuple(one for one in self.finding.try_ if one.knob.startswith(LOADER))
        if family:
            ways.append(lambda recipe: recipe._loader(family))
        ways += [partial(Recipe._knob, one=one) for one in self.finding.try_ if one not in family]
        reasons = []
        for way in ways:
            try:
                return way(self)
            except NotMechanical as error:
                reasons.append(str(error))
                self._begin_anew()
        told = [reason for reason in dict.fromkeys(reasons) if reason != NOTHING_THERE] or reasons[:1]
        raise NotMechanical("; ".join(told) or self.decide())

    def _begin_anew(self) -> None:
        """Forget what was planned on a way that led nowhere."""
        for source in self.touched.values():
            source.forget()
        self.touched.clear()
        self.knobs.clear()
        self.notes.clear()

    def decide(self) -> str:
        told = DECIDE.get(self.finding.rule)
        if told is None:
            return "no edit of a line follows from this finding; its fix says what to look at"
        return f"a person has to decide {told}"

    # --- places

    def _files(self) -> list[str]:
        """Of the places of the finding, then where something was constructed: the file that trains before others."""
        made = [site.place.file for site in self.analysis.sites if site.place is not None]
        return [*dict.fromkeys([*(place.file for place in self.finding.where), *made])]

    def _trees(self, holding: bytes) -> list[Tree]:
        """The file that the finding names first, and others of the user's that hold this word."""
        found, reason = [], None
        for number, source in enumerate(self.sources.all(self._files())):
            if number and holding not in source.data:
                continue
            try:
                found.append(self.open(source.path))
            except NotMechanical as error:
                reason = reason or error
        if not found:
            files = self._files()
            if files:
                self.sources.open(files[0])  # says what is wrong with it
            raise reason or NotMechanical("no file of yours is named by the recording")
        return found

    def _place(self) -> Place:
        place = next(iter(self.finding.where), None)
        if place is None or place.line is None:
            raise NotMechanical(f"the finding names no line; {self.decide()}")
        return place

    def _option(self, name: str) -> str | None:
        """The option `--workers` that fills `args.workers`, where one file of the user's declares it."""
        for source in self.sources.all(self._files()):
            for option in re.findall(rb"""add_argument\([^)]*?["'](--[\w-]+)["']""", source.data):
                if option.decode().lstrip("-").replace("-", "_") == name:
                    return str(option.decode())
        return None

    # --- arguments of constructors

    def _loader(self, family: Sequence[Try]) -> bool:
        done = [self._knob(one) for one in family]
        if self.finding.rule.startswith("transfer.") and "non_blocking" in self.finding.fix:
            done.append(self._non_blocking(optional=True))
        return any(done)

    def _knob(self, one: Try) -> bool:
        edit, own = edit_of(one.knob, self.analysis.settings)
        if edit is None:
            raise NotMechanical(f"{one.knob} cannot be written into a script here")
        if own and edit.call is None:
            raise NotMechanical(f"write it where the framework is set up: {edit.text(one.value)}")
        if own:
            changed = self._in_settings(edit.argument(one.value), edit.call or "")
        elif one.knob.startswith(LOADER):
            changed = self._in_loader(edit.argument(one.value))
        elif one.knob in SETTINGS or one.knob in ASSIGNED:
            changed = self._setting(one)
        else:
            recipe = _KNOBS.get(one.knob)
            if recipe is None:
                raise NotMechanical(f"it is no edit of a line: {edit.text(one.value)}")
            changed = recipe(self, one.value)
        self.knobs.append(one)
        if changed and one.knob in MEANS:
            self.notes.append(MEANS[one.knob])
        return changed

    def _in_settings(self, arguments: str, name: str) -> bool:
        place = self.analysis.settings.place if self.analysis.settings is not None else None
        if place is None:
            raise NotMechanical(f"where the framework is told its settings was not recorded: {name}(..., {arguments})")
        tree = self.open(place.file)
        # a class of the framework's own may be a child of it: NeuralNetClassifier
        named = [call for call in tree.on(cst.Call, place.line) if _last(tree, call).startswith(name)]
        if not named:
            raise NotMechanical(f"no call of {name} is on line {place.line} of {tree.name}")
        return _arguments(tree, named[0], arguments)

    def _in_loader(self, arguments: str) -> bool:
        sites = {site.place: site for site in self.analysis.sites if site.what == "DataLoader" and site.place}
        spots = {(place.file, place.line) for place in sites}
        place = next((one for one in self.finding.where if (one.file, one.line) in spots), None)
        loader = self.analysis.loader
        place = place or (loader.site if loader is not None else None)
        if place is None:
            found = [(tree, call) for tree in self._trees(b"DataLoader") for call in tree.calls(*LOADERS)]
            if len(found) != 1:
                named = ", ".join(f"{tree.name}:{tree.line(call)}" for tree, call in found) or "none is in your files"
                raise NotMechanical(
                    f"which DataLoader feeds the training was not recorded ({named}): add {arguments} to it"
                )
            return _arguments(found[0][0], found[0][1], arguments)
        tree = self.open(place.file)
        calls = [call for call in tree.on(cst.Call, place.line) if _is_loader(tree, call)]
        if len(calls) > 1:
            raise NotMechanical(f"{tree.name}:{place.line} makes several loaders: choose to which {arguments} belongs")
        if not calls:
            calls = tree.calls(*LOADERS) if self.sources.open(place.file).changed else []
            calls = calls if len(calls) == 1 else []
        if not calls:
            made = [call for call in tree.on(cst.Call, place.line) if _is_loader_class(tree, call)]
            if not made:
                raise NotMechanical(
                    f"{tree.name}:{place.line} makes the DataLoader by a call of its own: hand on {arguments} there"
                )
            calls = made
        recorded = next((site.arguments for spot, site in sites.items() if spot.line == place.line), {})
        of_workers = {"persistent_workers", "prefetch_factor"} & set(recorded)
        if "num_workers=0" in arguments and of_workers:  # torch refuses both
            told = " and no ".join(sorted(of_workers))
            raise NotMechanical(f"without workers a DataLoader takes no {told}: take it out")
        return _arguments(tree, calls[0], arguments, recorded)

    # --- the process

    def _setting(self, one: Try) -> bool:
        literal = repr(one.value) if not re.fullmatch(r"\d+|true|false", one.value) else one.value.capitalize()
        called = one.knob in SETTINGS
        name = SETTINGS[one.knob] if called else ASSIGNED[one.knob]
        full, word = f"torch.{name}", name.rsplit(".", 1)[-1]
        trees = self._trees(word.encode())
        found: list[tuple[Tree, Any]] = [
            (tree, node)
            for tree in trees
            for node in tree.all(cst.Call if called else cst.Assign)
            if full in tree.names(node.func if called else node.targets[0].target)
        ]
        where = {(place.file.rsplit("/", 1)[-1], place.line) for place in self.finding.where}
        found = [pair for pair in found if (pair[0].name, pair[0].line(pair[1])) in where] or found
        if not found:
            return _insert(trees[0], f"{{torch}}.{name}({literal})" if called else f"{{torch}}.{name} = {literal}")
        if len(found) > 1:
            named = ", ".join(f"{tree.name}:{tree.line(node)}" for tree, node in found)
            raise NotMechanical(f"{word} is set at {named}: choose which of them holds")
        tree, node = found[0]
        if called and len(node.args) != 1:
            raise NotMechanical(f"{word} at line {tree.line(node)} is not given one value")
        was = next((site.arguments.get("argument_0") for site in self.analysis.sites if site.what == word), None)
        return tree.set_value(node.args[0].value if called else node.value, literal, word, _same(was))

    def _optimizer(self, argument: str, other: str) -> bool:
        spots = {(s.place.file, s.place.line) for s in self.analysis.sites if s.place is not None}
        changed, seen = False, False
        for source in [source for source in self.sources.all(self._files()) if b"optim" in source.data]:
            tree = self.open(source.path)
            for call in tree.all(cst.Call):
                names = tree.names(call.func)
                if not any(
                    re.fullmatch(r"torch\.optim(\.\w+)?\.[A-Z]\w+", n) and "lr_scheduler" not in n for n in names
                ):
                    continue
                first, last = tree.span(call)
                if any(os.path.realpath(file) == source.path and first <= (line or 0) <= last for file, line in spots):
                    seen = True
                    if any(one.keyword is not None and one.keyword.value == other for one in call.args):
                        tree.remove_argument(call, other)
                    changed |= _arguments(tree, call, argument)
        if not seen:
            raise NotMechanical(
                f"the line that makes the optimizer was not recorded, or is none of torch.optim: {argument}"
            )
        return changed

    def _set_to_none(self, _value: str) -> bool:
        changed, seen = False, 0
        for tree in self._trees(b"zero_grad"):
            for call in tree.all(cst.Call):
                if isinstance(call.func, cst.Attribute) and call.func.attr.value == "zero_grad":
                    seen += 1
                    if call.args:
                        changed |= tree.set_argument(call, "set_to_none", "True")
            read = next((node for node in tree.all(cst.Attribute) if node.attr.value == "grad"), None)
            if read is not None:
                raise NotMechanical(f"{tree.name}:{tree.line(read)} reads .grad, which may be None then: decide there")
        if not seen:
            raise NotMechanical("no zero_grad is in your files: gradients are set to zero by a call of your own")
        return changed

    def _autocast(self, value: str) -> bool:
        device = next((name.split(":")[0] for name in self.analysis.devices), "cpu")
        if not device.isalpha():  # it is written into the source
            raise NotMechanical("which kind of device trains was not recorded")
        return self._in_training(lambda tree: loops.autocast(tree, _torch(tree), device, value))

    def _compile(self, value: str) -> bool:
        mode = "" if value in ("true", "default") else f"mode={value!r}"
        return self._in_training(lambda tree: loops.compile_model(tree, mode))

    def _compile_argument(self, argument: str) -> bool:
        calls = [(tree, call) for tree in self._trees(b"compile") for call in tree.calls("torch.compile")]
        if len(calls) != 1:
            raise NotMechanical(
                f"torch.compile is called at {len(calls)} places of your files: add {argument} to the right one"
            )
        return _arguments(*calls[0], argument)

    def _in_training(self, change: Callable[[Tree], bool]) -> bool:
        trees = [tree for tree in self._trees(b"backward") if loops.training_loops(tree)]
        if len(trees) != 1:
            raise NotMechanical(f"{len(trees)} of your files hold a loop that trains: choose where the change belongs")
        return change(trees[0])

    # --- rules

    def _removed(self) -> bool:
        """A call that a step needs not, on a line of the finding, else the only one of its kind in a training loop."""
        place = self._place()
        tree = self.open(place.file)
        calls = [call for call in tree.on(cst.Call, place.line) if tree.names(call.func) & set(REMOVABLE)]
        if not calls:
            named = [name for name in REMOVABLE if name.endswith("empty_cache") and "empty_cache" in self.finding.fix]
            inside = [call for loop in loops.training_loops(tree) for call in tree.all(cst.Call, loop)]
            calls = [call for call in inside if tree.names(call.func) & set(named)]
            if not calls and self.sources.open(place.file).changed:
                return False
            if len(calls) != 1:
                raise NotMechanical(NOTHING_THERE)
        tree.remove(calls[0])
        if "torch.cuda.synchronize" in tree.names(calls[0].func):
            self.notes.append("times that the script takes behind it then tell when work is launched, not done")
        return True

    def _rarer(self) -> bool:
        place = self._place()
        train = train_steps(self.analysis)
        run = train.series[-1][0] + 1 if train is not None and train.series else loops.INTERVALS[-1] * 2
        steps = self.every or loops.interval(self.finding.share, run)
        tree = self.open(place.file)
        changed = loops.every(tree, place.line, steps)
        self.notes.append(
            f"done every {steps} steps only, so perhaps not behind the last one; --every N chooses another interval"
        )
        return changed

    def _non_blocking(self, *, optional: bool = False) -> bool:
        changed, seen = False, False
        for place in self.finding.where:
            tree = self.open(place.file)
            for call in tree.on(cst.Call, place.line):
                if isinstance(call.func, cst.Attribute) and call.func.attr.value in ("to", "cuda"):
                    seen = True
                    changed |= tree.set_argument(call, "non_blocking", "True")
        if not seen and not optional:
            raise NotMechanical("no .to(...) or .cuda() is on the lines that the finding names")
        return changed

    def _float32(self) -> bool:
        """Of all float64 that is written the whole or nothing: operators take no two types."""
        doubles = {"torch.float64": "float32", "torch.double": "float", "numpy.float64": "float32"}
        lines = [(self.open(place.file), place.line) for place in self.finding.where]
        trees = dict.fromkeys([*(tree for tree, _ in lines), *self._trees(b"float64"), *self._trees(b"double")])
        found = [
            (tree, node, new)
            for tree in trees
            for node in tree.all(cst.Attribute)
            for full, new in doubles.items()
            if full in tree.names(node)
        ]
        found += [
            (tree, call.func, "float")
            for tree in trees
            for call in tree.all(cst.Call)
            if isinstance(call.func, cst.Attribute) and call.func.attr.value == "double" and not call.args
        ]
        if not found and any(self.sources.open(place.file).changed for place in self.finding.where):
            return False
        if len(found) != 1 and not (found and all((tree, tree.line(node)) in lines for tree, node, _ in found)):
            raise NotMechanical(f"float64 is written at {len(found)} places of your files; {self.decide()}")
        for tree, node, new in found:
            if "numpy.float64" not in tree.names(node) and re.search(r"\bnumpy\b", tree.module.code):
                raise NotMechanical(
                    f"arrays of NumPy in {tree.name} are float64 unless told otherwise; {self.decide()}"
                )
            tree.change(node, methodcaller("with_changes", attr=cst.Name(new)))
        return True


_KNOBS: dict[str, Callable[[Recipe, str], bool]] = {
    "optimizer.fused": lambda self, value: self._optimizer(f"fused={value.capitalize()}", "foreach"),
    "optimizer.foreach": lambda self, value: self._optimizer(f"foreach={value.capitalize()}", "fused"),
    "zero_grad.set_to_none": Recipe._set_to_none,
    "amp.dtype": Recipe._autocast,
    "compile": Recipe._compile,
    "compile.mode": lambda self, value: self._compile_argument(f"mode={value!r}"),
    "compile.dynamic": lambda self, value: self._compile_argument(f"dynamic={value.capitalize()}"),
}


def _of_rule(finding: Finding) -> Iterator[Callable[[Recipe], bool]]:
    """The recipes of a rule that need no knob, in the order in which to try them."""
    rule, fix = finding.rule, finding.fix
    if rule in ("system.garbage_collection", "sync.host_waits") or "empty_cache" in fix:
        yield Recipe._removed
    if rule in RARER and ("every N steps" in fix or "less often" in fix) and "update_parameters" not in fix:
        yield Recipe._rarer
    elif rule in (*RARER, *MAYBE_RARER):
        yield _decided_rarer
    if rule == "compute.double_precision":
        yield Recipe._float32
    if rule.startswith("compile.") and "dynamic=True" in fix:
        yield lambda recipe: recipe._compile_argument("dynamic=True")
    if rule.startswith("transfer.") and not finding.try_ and "non_blocking=True" in fix:
        yield Recipe._non_blocking


def _decided_rarer(recipe: Recipe) -> bool:
    if recipe.every is None:
        raise NotMechanical(f"{recipe.decide()}; if every N steps will do, say so: --every N")
    return recipe._rarer()


def _arguments(tree: Tree, call: cst.Call, arguments: str, recorded: Any = None) -> bool:
    """Give a call the arguments of a text, "num_workers=2, pin_memory=True"."""
    given: Sequence[cst.Arg] = cst.ensure_type(cst.parse_expression(f"f({arguments})"), cst.Call).args
    changed = False
    for one in given:
        name = one.keyword.value if one.keyword is not None else ""
        was = (recorded or {}).get(name)
        changed |= tree.set_argument(call, name, tree.code(one.value), _same(was))
    return changed


def _same(recorded: object) -> Held | None:
    """Whether a value of the source is the one that was recorded, as a text."""
    return None if recorded is None else lambda value: str(value) == str(recorded)


def _last(tree: Tree, call: cst.Call) -> str:
    full = next(iter(sorted(tree.names(call.func))), tree.code(call.func))
    return full.rsplit(".", 1)[-1]


def _is_loader(tree: Tree, call: cst.Call) -> bool:
    """Whether a call on the line that made a DataLoader is that of the class; a star import tells no full name."""
    names = tree.names(call.func)
    return bool(names & set(LOADERS)) or (not names and tree.code(call.func) == "DataLoader")


def _is_loader_class(tree: Tree, call: cst.Call) -> bool:
    """Whether a call makes a child of DataLoader that has the arguments of its parent."""
    if not isinstance(call.func, cst.Name):
        return False
    for held in tree.all(cst.ClassDef):
        if held.name.value == call.func.value and any(tree.names(base.value) & set(LOADERS) for base in held.bases):
            return not any(one.name.value == "__init__" for one in tree.all(cst.FunctionDef, held))
    return False


def _imports(tree: Tree) -> list[Any]:
    """The imports at the head of a file, to the end of those among which torch is first: what stands between imports,
    such as a variable of the environment, is often there to hold before the next of them."""
    found: list[Any] = []
    seen = False
    for line in tree.module.body:
        small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
        if isinstance(small, cst.Import | cst.ImportFrom):
            found.append(line)
            seen = seen or re.match(r"\s*(import|from)\s+torch\b", tree.code(small)) is not None
        elif seen or isinstance(line, cst.FunctionDef | cst.ClassDef | cst.For | cst.While | cst.With):
            break
    return found


def _torch(tree: Tree) -> str:
    """What torch is called in a file; it is imported behind the other imports where it is not."""
    for line in _imports(tree):
        if isinstance(line.body[0], cst.Import):
            for alias in line.body[0].names:
                name = tree.code(alias.name)
                if name == "torch" or (name.startswith("torch.") and alias.asname is None):
                    return tree.code(alias.asname.name) if alias.asname is not None else "torch"
    lines = _imports(tree)
    if not lines:
        raise NotMechanical(f"{tree.name} begins with no imports: put the line into the file that starts the training")
    tree.after(lines[-1], "import torch")
    return "torch"


def _insert(tree: Tree, code: str) -> bool:
    """A line behind the imports of a file."""
    torch = _torch(tree)
    tree.after(_imports(tree)[-1], code.format(torch=torch))
    return True
