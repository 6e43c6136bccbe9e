"""The loop over tokens is found: its line, its calls per step, and the dimensions they equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.harness import EXAMPLES, Recorded, line_of, lines_of_function

pytestmark = [pytest.mark.process, pytest.mark.torch]

TRAIN = EXAMPLES / "naive_gpt" / "train.py"


def test_first_finding_is_the_loop(naive_gpt: Recorded) -> None:
    assert naive_gpt.status == 0, naive_gpt.text
    first = naive_gpt.findings[0]
    assert first["rule"] == "host.per_item_loop"
    place = first["where"][0]
    assert Path(place["file"]).resolve() == TRAIN
    assert place["line"] in lines_of_function(TRAIN, "looped_loss")
    assert abs(place["line"] - line_of(TRAIN, "loss = loss + F.cross_entropy")) <= 1


def test_calls_per_step_and_dimension(naive_gpt: Recorded) -> None:
    loops = [loop for loop in naive_gpt.report["views"]["loops"] if "cross_entropy" in loop["callee"]]
    assert loops, naive_gpt.report["views"]["loops"]
    assert loops[0]["calls_per_step"] == pytest.approx(1024, rel=0.02)
    assert "1024 = dims 0 * 1 of (4, 256" in loops[0]["dimension"]
    assert re.search(r"1,?024", naive_gpt.text)
