"""Training runs of many ranks that were never run, with the truth about them.

A job of some layout is played step by step from the work of each rank (`work.py`, `play.py`), with whatever is planted
in it (`scenario.py`); what a recorder would have seen of it, by clocks that are wrong (`host_clocks.py`), is written as
reduced tables, and the truth beside them (`tables.py`). Nothing of it is shared with what judges such tables but their
format.
"""

from __future__ import annotations

from pathlib import Path

from ranks_simulated.run import play
from ranks_simulated.scenario import Scenario
from ranks_simulated.tables import write


def simulate(scenario: Scenario, folder: Path) -> Path:
    """Play a run and write it to `folder`; the truth is in FOLDER.truth.json. ValueError for an impossible scenario."""
    return write(play(scenario), folder)
