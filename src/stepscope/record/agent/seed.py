"""`--seed`: the random number generators of Python, numpy and torch start from a given number.

Set right after torch was imported, before the script's own code goes on; a script that seeds them itself later wins.
Ranks get different seeds, as they would by chance, so that they do not all draw the same augmentations.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

from stepscope.record.agent.imports import when_imported
from stepscope.record.agent.journal import rank_identity

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent

_RANGE = 1 << 32  # what numpy takes


def attach(agent: Agent) -> None:
    """Seed the generators if the configuration says so, numpy's as soon as it is there."""
    if agent.config.seed is None:
        return
    seed = (agent.config.seed + (rank_identity()["rank"] or 0)) % _RANGE
    random.seed(seed)
    if "numpy" in sys.modules:
        _seed_numpy(seed)
    else:
        when_imported("numpy", agent.guard.wrap("seed", lambda: _seed_numpy(seed), inject=False))
    torch = sys.modules["torch"]
    torch.manual_seed(seed)
    agent.events.write("seed", value=seed, observed=int(torch.initial_seed()))


def _seed_numpy(seed: int) -> None:
    sys.modules["numpy"].random.seed(seed)
