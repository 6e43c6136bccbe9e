"""Recording in this process: started once torch has been imported, followed through forks, ended.

Nothing here imports torch at module level, starts a thread or touches the device. What the agent is made of is put
together here: the probes of the table, the knobs of the configuration, the window and what else adds itself.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
from functools import partial
from importlib import import_module
from typing import Any, Callable

from stepscope.record.agent import marks
from stepscope.record.agent.agent import Agent
from stepscope.record.agent.config import ENVIRONMENT_NAME, Config, parse
from stepscope.record.agent.journal import rank_identity
from stepscope.record.agent.patches import skip_own_code
from stepscope.record.agent.probes import PROBES
from stepscope.record.agent.probes.side_events import allow_tracing

# What adds itself to an agent by its `attach`, in this order, where the configuration wants it: (module, not in a
# forked child, wanted). A forked child opens no window: the profiler's threads are the parent's, and waiting for them
# would hang it. The sampler follows a fork by itself.
_PARTS: tuple[tuple[str, bool, Callable[[Config], bool]], ...] = (
    ("window", True, lambda config: config.window.mode in ("auto", "schedule")),
    ("sampler", True, lambda _: True),
    ("watch", False, lambda config: config.watch > 0),
    ("step_readings", False, lambda _: True),
    ("frames", False, lambda _: True),
)
_SEEDS = 1 << 32  # what numpy takes

_agent: Agent | None = None


def current() -> Agent | None:
    """The agent of this process, or None (not started, or a forked child)."""
    return _agent


def start(config: Config | None = None) -> Agent | None:
    """Start the agent of this process, once. `config` defaults to the environment's; None when there is none."""
    global _agent
    if _agent is not None:
        return _agent
    config = config if config is not None else parse(os.environ.get(ENVIRONMENT_NAME, ""))
    if config is None:
        return None
    agent = _agent = Agent(config, PROBES)
    _begin(agent)
    return agent


def imported(name: str) -> None:
    """Told by the import hook that `name`, a module that something waits for, was just imported."""
    agent = _agent
    if name == "torch":
        start()
    elif agent is not None and name == "torch_xla":
        agent.probes.install_for(name)
        agent.guard.wrap("compiling", skip_own_code, inject=False)()
    elif agent is not None and name == "numpy":
        if agent.config.seed is not None:
            agent.guard.wrap("seed", _seed, inject=False)(agent, agent.config.seed, numpy_alone=True)
    elif agent is not None and not agent.probes.suspended:
        agent.probes.module_imported(name)


def stop(reason: str) -> None:
    """End recording in this process, if it records: torch is left as it was found and `start` may be called again."""
    global _agent
    agent, _agent = _agent, None
    if agent is None:
        return
    agent.finish(reason)
    marks.deactivate()
    agent.guard.stop()


def _begin(agent: Agent, forked: bool = False) -> None:
    """Announce this process, install the probes, be told of forks and of the exit."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = getattr(multiprocessing, "parent_process", lambda: None)()
    agent.announce("fork" if forked else "torch" if parent is None else "worker")
    atexit.register(agent.guard.wrap("exit", agent.finish, inject=False))
    os.register_at_fork(after_in_child=agent.guard.wrap("fork", partial(_after_fork, agent), inject=False))
    marks.activate(agent)
    agent.guard.wrap("ptracer", allow_tracing)()
    # Before the probes, which then stand outermost and can be taken out while the user's profiler runs.
    if agent.config.knobs:
        agent.knobs = agent.guard.wrap("knobs", _attach, inject=False)("knobs.base", agent)
    agent.probes.install_all()
    if agent.config.seed is not None and not forked:
        agent.guard.wrap("seed", _seed, inject=False)(agent, agent.config.seed)
    for module, at_start_only, is_wanted in _PARTS:
        if is_wanted(agent.config) and not (forked and at_start_only):
            agent.guard.wrap(module, _attach, inject=False)(module, agent)
    agent.guard.wrap("compiling", skip_own_code, inject=False)()


def _attach(module: str, agent: Agent) -> Any:
    return import_module("stepscope.record.agent." + module).attach(agent)


def _seed(agent: Agent, seed: int, numpy_alone: bool = False) -> None:
    """The random number generators of Python, torch and, as soon as it is there, numpy start from a given number.

    Before the script's own code goes on; a script that seeds them itself later wins. Ranks get different seeds, as they
    would by chance, so that they do not all draw the same augmentations.
    """
    seed = (seed + (rank_identity()["rank"] or 0)) % _SEEDS
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    else:  # told by the finder that `sitecustomize` put first
        for waiting in [getattr(finder, "waiting", None) for finder in sys.meta_path]:
            if isinstance(waiting, set):
                waiting.add("numpy")
    if numpy_alone:
        return
    random.seed(seed)
    torch = sys.modules["torch"]
    torch.manual_seed(seed)
    agent.journal.write("seed", value=seed, observed=int(torch.initial_seed()))


def _after_fork(agent: Agent) -> None:
    """In a forked child: everything off, no file of the parent's touched. One that may train is recorded anew."""
    global _agent
    _agent = None
    if not agent.abandon():
        return
    marks.deactivate()
    allow_tracing()
    if agent.making_loader:
        agent.announce("worker")
        if agent.knobs is not None:
            agent.knobs.in_loader_worker()
        agent.guard.stop()
        return
    agent.uninstall()
    agent.guard.stop()
    child = _agent = Agent(agent.config, PROBES)
    if agent.steps.optimizers_exist:
        child.steps.optimizer_created()
    _begin(child, forked=True)
    # A child of `multiprocessing` ends without `atexit`, after finalizers that its start has not cleared.
    multiprocessing = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:
        finalize = partial(multiprocessing.Finalize, None, args=("atexit",), exitpriority=-100)
        register = child.guard.wrap("fork", multiprocessing.register_after_fork, inject=False)
        register(child, lambda child: finalize(child.finish))
