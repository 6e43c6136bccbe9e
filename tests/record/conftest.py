"""An agent whose probes are in torch for the length of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.record.agent import marks

from .agent.fake_agent import Captured


@pytest.fixture
def captured(tmp_path: Path) -> Iterator[Captured]:
    made = Captured(tmp_path)
    marks.activate(made.agent)
    made.agent.probes.install_all()
    yield made
    made.agent.probes.uninstall_all()
    marks.deactivate()
    assert made.of("probe_error") == []
