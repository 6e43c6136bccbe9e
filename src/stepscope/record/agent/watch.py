"""Monitors: norms of gradients, weights and updates, and figures of activations, in few steps and within a budget.

A monitor is in place from one boundary to the next and changes nothing: it reads, on the devices, and what it read is
copied like other metrics. The steps that carried one are marked (`monitor` events) and count for no statistics. How
many steps lie between two of them follows from what they cost, counted as the longer of our own time and how much
longer the step took than steps usually do; a monitor waits where all of them together would take more than their share
of the run's time.

Once anything is compiled no module is listened to: a hook would make Dynamo compile anew. While a profiler is on, and
where a graph is captured, there is no monitor.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import partial
from threading import get_ident
from typing import Any, Callable, Iterator, Sequence

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.models import NAME as ROOTS
from stepscope.record.agent.models import (
    Numbers,
    RootFinder,
    Updates,
    activation,
    first_tensor,
    measurable,
    named,
    norms,
    obstacle,
    quietly,
)
from stepscope.record.agent.patches import ModuleHook
from stepscope.record.agent.segments import StepRow

NAME = "watch"
FIRST_EVERY = 50  # steps before the first monitor: by then a run is warm, and its steps' usual time is known
LEAST_EVERY = 10  # however cheap: closer together they tell nothing new
# Monitors, from one with activations to the next, so that these take half of all the time, or less: one reduction per
# module and figure may cost ten times what all norms cost, or as much in a small model.
ACTIVATIONS_EVERY = 2, 10
RARER = 1_000  # one monitor per thousandth of the steps so far: some thousands in a run of any length
UNKNOWN_NS = 5_000_000  # what a monitor is taken to cost before there was one; the first one of a process is slow
WALLS = 16  # steps whose median is the usual time
COSTS = 5  # monitors whose median is the usual cost
MODULES_LIMIT = 200
PARAMETERS_LIMIT = 1_000  # of more, blocks alone are written
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module", "_checkpoint_wrapped_module")


def attach(agent: Agent) -> None:
    """Add monitors to `agent`."""
    watch = Watch(agent)
    # On switches of their own: the search ends whatever becomes of the monitors.
    agent.add_step_listener(watch.end_search, ROOTS)
    agent.add_step_listener(watch, NAME, lambda: watch.is_open)
    agent.add_finish_hook(watch.finish, NAME)


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]


class Schedule:
    """Which steps carry a monitor. It is told of training steps and of costs, and answers."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.every = FIRST_EVERY
        self.spent_ns = 0
        self.monitored = 0
        self.elapsed_ns = 0  # since the first step began
        self._walls: deque[int] = deque(maxlen=WALLS)
        self._costs: dict[bool, deque[int]] = {kind: deque(maxlen=COSTS) for kind in (False, True)}
        self._began: tuple[int, int] | None = None  # the first step, and when
        self._last = 0
        self._activations_from = (
            1  # the number of the next monitor that measures them; then it is known what norms cost
        )

    def passed(self, row: StepRow, now_ns: int, usual: bool) -> None:
        """A training step is over; `usual`: nothing of ours was in it."""
        if self._began is None:
            self._began, self._last = (row.step, row.start_ns), row.step
        self.elapsed_ns = now_ns - self._began[1]
        if usual and not row.in_window:  # a first batch may wait for the loader's start
            self._walls.append(row.wall_ns - (row.data_wait_ns or 0) if row.first_batch else row.wall_ns)

    def due(self, step: int) -> bool | None:
        """None where step `step` carries no monitor, else whether activations are measured as well."""
        if self._began is None or not self._walls or step - self._last < self.every:
            return None
        activations = self.monitored >= self._activations_from
        if self.spent_ns + self._expected(activations) > self.share * self.elapsed_ns:
            return None
        return activations

    def excess_ns(self, row: StepRow) -> int:
        """How much longer a step took than usual."""
        return max(0, row.wall_ns - _median(self._walls))

    @property
    def activations_every(self) -> int:
        """Of so many monitors one measures activations."""
        least, most = ACTIVATIONS_EVERY
        return min(most, max(least, -(-self._expected(True) // max(1, self._expected(False)))))

    def missed(self, step: int) -> None:
        """In step `step` there was nothing to measure."""
        self._last = step

    def charge(self, step: int, cost_ns: int, activations: bool) -> bool:
        """A monitor has cost so much. Returns whether the distance of monitors has changed."""
        self.spent_ns += cost_ns
        self.monitored += 1
        self._last = step
        self._costs[activations].append(cost_ns)
        if activations:
            self._activations_from = self.monitored - 1 + self.activations_every
        each = self._expected(False) + self._expected(True) / self.activations_every
        first = self._began[0] if self._began is not None else 0
        wanted = max(LEAST_EVERY, each / (self.share * max(1, _median(self._walls))), (step - first) / RARER)
        before, self.every = self.every, 1
        while self.every < wanted:
            self.every *= 2
        return self.every != before

    def _expected(self, activations: bool) -> int:
        known = self._costs[activations]
        if known:
            return _median(known)
        return 2 * self._expected(False) if activations else UNKNOWN_NS


class _Parameter:
    """One that has a gradient in the step; where its norms are among the numbers."""

    gradient: int | None = None
    weight = 0
    update: Sequence[int] = ()

    def __init__(self, name: str, tensor: Any, group: dict[str, Any]) -> None:
        self.name = name
        self.tensor = tensor
        self.group = group


class _Reading:
    """What one step's monitors measure."""

    def __init__(self, activations: bool) -> None:
        self.activations = activations
        self.time_ns = 0  # of the first measurement
        self.step: int | None = None
        self.own_ns = 0
        self.numbers = Numbers()
        self.parameters: list[_Parameter] = []
        self.updates: dict[int, tuple[Updates, list[_Parameter]]] = {}  # by optimizer, between its hooks
        self.optimizers: set[int] = set()
        self.incomplete: set[str] = set()  # blocks with a gradient that cannot be measured
        self.outputs: dict[str, Callable[[list[float]], dict[str, float]]] = {}


class Watch:
    """The monitors of a process: a step listener, and what optimizers and modules call in a step that carries them."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.schedule = Schedule(agent.config.watch)
        self._finder = RootFinder(self)
        self._reading: _Reading | None = None
        self._modules: dict[int, str] = {}  # id of a module whose next call is measured -> name
        self._names: dict[int, str] = {}  # id of a parameter -> name, in a step that carries a monitor
        self._said: set[str] = set()  # what is not measured, and why
        self._new: list[str] = []
        self._hook = ModuleHook(agent.guard.wrap(NAME, self._called), after=True)
        self._around = agent.guard.wrap(NAME, self._before_update), agent.guard.wrap(NAME, self._after_update)
        self._tell_guarded = agent.guard.wrap(NAME, self._tell)
        agent.before_compile.append(self._hook.remove)

    @property
    def is_open(self) -> bool:
        """Whether the step that runs carries a monitor."""
        return self._reading is not None

    def end_search(self, row: StepRow | None, _now_ns: int) -> None:
        """Once the first training step is over, no module call is listened to any more."""
        if row is not None and row.kind == "train":
            self._finder.close()

    def __call__(self, row: StepRow | None, now_ns: int) -> None:
        """The step listener."""
        try:
            was_open = self._reading is not None
            if row is not None and row.kind == "train":
                self.schedule.passed(row, now_ns, usual=not was_open)
            if was_open:
                self._close(row)
            agent = self.agent
            if row is None or row.kind != "train" or agent.own_profiler_active or agent.user_profiler_active:
                return
            due = self.schedule.due(row.step + 1)
            if due is not None:
                self._open(due)
        except BaseException:
            self._let_go()
            raise

    def finish(self) -> None:
        """Say what all monitors cost. Called at the end."""
        self._let_go()
        if not self.schedule.monitored:
            self._not_measured("the run had too few steps, or was too short, for a monitor")
        self._say("the end", final=True)

    def _open(self, activations: bool) -> None:
        agent = self.agent
        began = agent.clock.now()
        self._reading = reading = _Reading(activations)
        roots = self._finder.close()
        if not roots:
            self._not_measured("no module was called before the first step's end: parameters have numbers for names")
        self._names = {id(one): name for name, one in named(roots, "named_parameters")}
        if activations:
            # A recording from code may begin after torch.compile was called.
            counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
            if agent.compile_used or counters.get("frames"):
                self._not_measured("activations: code is compiled, and a hook would make it compile anew")
            elif roots:
                self._modules = dict(_chosen(roots))
                self._hook.add()
        agent.around_update = self._around
        reading.own_ns = agent.clock.now() - began

    def _close(self, row: StepRow | None) -> None:
        agent, schedule, reading = self.agent, self.schedule, self._reading
        began = agent.clock.now()
        self._let_go()
        if reading is None or not reading.time_ns:
            if row is not None and row.kind == "train":
                schedule.missed(row.step)
                self._not_measured("an optimizer's step was expected and not seen: it is compiled, or steps elsewhere")
            return
        reading.updates.clear()
        for one in reading.parameters:
            one.tensor = one.group = None  # type: ignore[assignment]
        with quietly(sys.modules["torch"]):
            reading.numbers.read(agent.metrics, partial(self._tell_guarded, reading))
        whole = row is not None and row.start_ns <= reading.time_ns <= row.start_ns + row.wall_ns
        step = row.step if whole else reading.step  # type: ignore[union-attr]
        own_ns = reading.own_ns + agent.clock.now() - began
        cost_ns = max(own_ns, schedule.excess_ns(row) if whole else 0)  # type: ignore[arg-type]
        measured = ["norms"] * bool(reading.parameters) + ["activations"] * bool(reading.outputs)
        agent.journal.write("monitor", reading.time_ns, own_ns, step=step, measured=measured, cost_ns=cost_ns)
        if schedule.charge(step or 0, cost_ns, reading.activations) or self._new:
            self._say(f"the last one cost {cost_ns / 1e6:.3g} ms")

    def _let_go(self) -> None:
        self._reading = None
        self.agent.around_update = None
        self._hook.remove()
        self._modules, self._names = {}, {}

    def _not_measured(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            self._new.append(why)

    def _say(self, why: str, final: bool = False) -> None:
        schedule, (new, self._new) = self.schedule, (self._new, [])
        self.agent.journal.write(
            NAME,
            step=None,
            every=schedule.every,
            activations_every=schedule.every * schedule.activations_every,
            share=schedule.share,
            steps=schedule.monitored,
            spent_ns=schedule.spent_ns,
            elapsed_ns=schedule.elapsed_ns,
            why=why,
            not_measured=new,
            final=final,
        )

    def _measure(self, work: Callable[[_Reading], None]) -> None:
        """Have `work` done on the step's reading, where something can be measured now; its time is our own."""
        reading, began = self._reading, self.agent.clock.now()
        if reading is None:
            return
        torch: Any = sys.modules["torch"]
        try:
            why = obstacle(torch, self.agent.device.in_use)
            if why is not None:
                self._not_measured(why)
                return
            if not reading.time_ns:
                reading.time_ns, reading.step = began, self.agent.steps.current_step()
            with quietly(torch):
                work(reading)
            reading.own_ns += self.agent.clock.now() - began
        except BaseException:
            self._let_go()
            raise

    def _before_update(self, optimizer: Any) -> None:
        reading = self._reading
        if reading is not None and id(optimizer) not in reading.optimizers:
            self._measure(lambda reading: self._norms(reading, optimizer))

    def _after_update(self, optimizer: Any) -> None:
        def sizes(reading: _Reading) -> None:
            updates, parameters = reading.updates.pop(id(optimizer), (None, []))
            if updates is None:
                return
            for one in parameters:
                one.update = [reading.numbers.put(part) for part in updates.of(one.group, one.tensor)]
            if not all(one.update for one in parameters):
                name = type(optimizer).__name__
                self._not_measured(f"updates by {name}: its state does not tell them, and not all weights are copied")

        self._measure(sizes)

    def _norms(self, reading: _Reading, optimizer: Any) -> None:
        torch: Any = sys.modules["torch"]
        reading.optimizers.add(id(optimizer))
        own: list[_Parameter] = []
        gradients, weights = [], []
        for place, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if self._names and id(parameter) not in self._names:
                    self._not_measured("names of parameters whose module was not called in the first step: numbers")
                shape = "x".join(map(str, parameter.shape))
                name = self._names.get(id(parameter)) or f"{place}.{index}[{shape}]"
                gradient, weight = measurable(parameter.grad), measurable(parameter)
                if gradient is None or weight is None:
                    self._not_measured("gradients that are sparse, complex or on devices of other kinds")
                    reading.incomplete.add(_block(name))
                    continue
                if hasattr(parameter, "_local_tensor"):
                    self._not_measured("the parts of parameters that other ranks hold: norms are of this rank's")
                own.append(_Parameter(name, parameter, group))
                gradients.append(gradient)
                weights.append(weight)
        if not own:
            return
        found = norms(torch, gradients + weights)
        # A fused optimizer divides by the scale itself.
        scale = getattr(optimizer, "grad_scale", None)
        is_scaled = scale is None and self.agent.metrics.is_scaled
        if is_scaled:
            self._not_measured("gradients: the script's scaler had not divided them when the optimizer stepped")
        for one, gradient, weight in zip(own, found, found[len(own) :]):
            one.weight = reading.numbers.put(weight)
            if not is_scaled:
                one.gradient = reading.numbers.put(gradient if scale is None else gradient / scale)
        reading.parameters += own
        reading.updates[id(optimizer)] = Updates(torch, optimizer, [one.tensor for one in own]), own

    def _called(self, module: Any, _inputs: Any, output: Any) -> None:
        if id(module) not in self._modules or get_ident() != self.agent.training_thread:
            return
        torch: Any = sys.modules["torch"]
        if not module.training or not torch.is_grad_enabled():
            return
        name = self._modules.pop(id(module))

        def ends(reading: _Reading) -> None:
            tensor = first_tensor(output)
            if tensor is not None:
                reading.outputs[name] = activation(torch, reading.numbers, tensor)

        self._measure(ends)

    def _tell(self, reading: _Reading, values: list[float]) -> None:
        """Write what was read, which is the training's time as well."""
        began = self.agent.clock.now()
        found: dict[str, float] = {}
        if len(reading.parameters) > PARAMETERS_LIMIT:
            self._not_measured(f"single parameters: there are more than {PARAMETERS_LIMIT}, blocks are told")
        blocks: dict[str, dict[str, list[float | None]]] = {}
        for one in reading.parameters:
            update = [values[place] for place in one.update]
            sizes = {
                "grad_norm": None if one.gradient is None else values[one.gradient],
                "weight_norm": values[one.weight],
                "update_norm": sum(part * part for part in update) ** 0.5 if update else None,
            }
            if len(reading.parameters) <= PARAMETERS_LIMIT:
                found.update(_figures(sizes, "", one.name))
            block = blocks.setdefault(_block(one.name), {kind: [] for kind in sizes})
            for kind, size in sizes.items():
                block[kind].append(size)
        for name, own in blocks.items():
            if name in reading.incomplete:
                continue
            whole: dict[str, float | None] = {}
            for kind, sizes_of in own.items():  # the norm of what has parts of these norms, where all are known
                known = [size for size in sizes_of if size is not None]
                whole[kind] = sum(size * size for size in known) ** 0.5 if len(known) == len(sizes_of) else None
            found.update(_figures(whole, "_block", name))
        for name, output in reading.outputs.items():
            for kind, figure in output(values).items():
                found[f"{NAME}/{kind}/{name}"] = figure
        self.agent.metrics.tell_all(NAME, reading.time_ns, found)
        self.schedule.spent_ns += self.agent.clock.now() - began


def _figures(sizes: dict[str, float | None], suffix: str, name: str) -> Iterator[tuple[str, float]]:
    """The norms that are known, and the ratio of update and weight where there is a weight."""
    for kind, size in sizes.items():
        if size is not None:
            yield f"{NAME}/{kind}{suffix}/{name}", size
    update, weight = sizes["update_norm"], sizes["weight_norm"]
    if update is not None and weight:
        yield f"{NAME}/update_ratio{suffix}/{name}", update / weight


def _block(name: str) -> str:
    """The layer that a parameter is of: up to the first number, or else the first part of its name."""
    parts = name.split(".")
    head = 0
    while head < len(parts) - 1 and parts[head] in WRAPPERS:
        head += 1
    for index in range(head, len(parts) - 1):
        if parts[index].isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[: head + 1]) if len(parts) - head > 1 else "model"


def _chosen(roots: list[Any]) -> Iterator[tuple[int, str]]:
    """The modules that are measured: all that have none inside, or of too many the blocks, evenly spaced."""
    every = list(named(roots, "named_modules"))
    modules = [(name, one) for name, one in every if not any(True for _ in one.children())]
    if len(modules) > MODULES_LIMIT:
        modules = [(name, one) for name, one in every if name.rsplit(".", 1)[-1].isdigit()] or modules
    for index in range(min(len(modules), MODULES_LIMIT)):
        name, one = modules[index * len(modules) // min(len(modules), MODULES_LIMIT)]
        yield id(one), name
