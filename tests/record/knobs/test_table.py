"""The table of knobs: every line can be loaded, values are judged without torch, and the documentation names all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import UsageError
from stepscope.record.agent.knobs import KNOBS, check_all, cpu_list, cpu_text, masked, parse
from stepscope.record.agent.knobs.base import KnobBase, load
from stepscope.record.host.options import RecordOptions
from stepscope.schema import Knob
from tests.record.agent.fake_agent import FakeAgent

DOCUMENT = Path(__file__).parents[3] / "docs" / "knobs.md"


@pytest.mark.parametrize("name", list(KNOBS))
def test_every_line_of_the_table_can_be_loaded(name: str) -> None:
    line = KNOBS[name]
    agent: Any = FakeAgent()
    knob = load(name)(agent, name, "", {})
    assert isinstance(knob, KnobBase)
    knob.uninstall()  # as after a failure at the very beginning of `install`
    knob.uninstall()
    assert agent.reports == []
    assert line.where in ("agent", "launch")
    assert line.summary
    assert not line.summary.endswith(".")


def test_the_documentation_has_the_same_table() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    shown = {name: (takes.strip(), what.strip()) for name, takes, what in rows}
    assert shown == {name: (line.values, line.summary) for name, line in KNOBS.items()}


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("loader.num_workers=0", "loader.num_workers", "0"),
        ("loader.pin_memory=false", "loader.pin_memory", "false"),
        ("gc=off", "gc", "off"),
        ("gc=50000", "gc", "50000"),
        ("cpu.affinity=0-3,8", "cpu.affinity", "0-3,8"),
        ("env:PYTORCH_ALLOC_CONF=max_split_size_mb:64,a=b", "env:PYTORCH_ALLOC_CONF", "max_split_size_mb:64,a=b"),
        ("env:EMPTY=", "env:EMPTY", ""),
        ('arg:--text=it\'s "two words"', "arg:--text", 'it\'s "two words"'),
        ("arg:-j=4", "arg:-j", "4"),
        ("arg:--amp", "arg:--amp", ""),
        ("arg:+model.width=64", "arg:+model.width", "64"),
    ],
)
def test_a_knob_is_read_as_it_was_meant(text: str, name: str, value: str) -> None:
    knob = parse(text)
    assert (knob.knob, knob.value) == (name, value)
    assert parse(f"{knob.knob}={knob.value}") == knob


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loader.num_workers", "KNOB=VALUE"),
        ("loader.num_worker=2", "did you mean loader.num_workers"),
        ("flux=1", "there are loader.num_workers"),
        ("loader.num_workers=-1", "a whole number, 0 for none"),
        ("loader.num_workers=2.5", "a whole number"),
        ("loader.num_workers=\u0662", "a whole number"),
        ("loader.prefetch_factor=0", "a whole number from 1"),
        ("loader.pin_memory=yes", "true or false"),
        ("gc=on", "freeze, off or"),
        ("cpu.affinity=3-1", "CPUs"),
        ("cpu.affinity=0-99999", "CPUs"),
        ("cpu.worker_affinity=", "CPUs"),
        ("torch.num_threads=0", "from 1"),
        ("env:=1", "a variable's name"),
        ("env:9X=1", "a variable's name"),
        ("env:STEPSCOPE_RECORD={}", "a variable's name"),
        ("arg:=1", "a flag after arg:"),
        ("arg:--=1", "a flag after arg:"),
        ("arg:--two words=1", "a flag after arg:"),
        ("env:NAME=a\0b", "takes any text"),
    ],
)
def test_what_is_no_knob_or_no_value_is_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.sets(st.integers(0, 200), min_size=1))
def test_cpu_lists_there_and_back(cpus: set[int]) -> None:
    assert cpu_list(cpu_text(cpus)) == cpus


def test_options_of_a_recording_take_each_knob_once() -> None:
    twice = (Knob("gc", "off"), Knob("gc", "freeze"))
    with pytest.raises(UsageError, match="twice"):
        check_all(twice)
    with pytest.raises(UsageError, match="twice"):
        RecordOptions(command=("x",), knobs=twice)
    with pytest.raises(UsageError, match="--seed"):
        RecordOptions(command=("x",), seed=-1)


def test_secrets_are_not_written_down() -> None:
    assert masked("env:WANDB_API_KEY", "abc") == "***"
    assert masked("arg:--password", "abc") == "***"
    assert masked("arg:--num-tokens", "12") == "12"
    options = RecordOptions(command=("x",), knobs=(Knob("env:API_TOKEN", "abc"), Knob("gc", "off")))
    assert options.for_manifest()["knobs"] == [["env:API_TOKEN", "***"], ["gc", "off"]]
