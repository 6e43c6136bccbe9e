"""The table of knobs, judged without torch; calls that a knob changes; knobs of a device that is played."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import UsageError
from stepscope.record.agent.guard import Guard
from stepscope.record.agent.knobs import KNOBS, check_all, cpu_list, cpu_text, masked, parse
from stepscope.record.agent.knobs.base import KnobBase, load
from stepscope.record.agent.knobs.launched import allocator_variables
from stepscope.record.agent.patches import Patches, bound
from stepscope.record.agent.wrapper_importlib_bootstrap import Answer, Call
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


class Library:
    """Stands for torch."""

    def __init__(self, width: int, depth: int = 1, *, fused: bool = False) -> None:
        if fused and width > 9:
            raise RuntimeError("too wide to fuse")
        if width < 0:
            raise ValueError("negative width")
        self.made = (width, depth, fused)


@pytest.fixture
def faults() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def patches(faults: list[tuple[str, str]]) -> Any:
    guard = Guard(lambda probe, error: faults.append((probe, error)))
    made = Patches(guard, "knob.k")
    original = Library.__init__
    yield made
    made.remove()
    assert Library.__init__ is original


def fuse(*args: Any, **kwargs: Any) -> Call:
    call = bound(inspect.signature(Library.__init__), args, kwargs)
    call.arguments["fused"] = True
    call.arguments["depth"] = call.arguments.get("depth", 1) + 1
    return Call(call.args, call.kwargs, "token")


def test_arguments_change_wherever_they_were_given(patches: Patches) -> None:
    told: list[tuple[Any, Any]] = []
    assert patches.change(Library, "__init__", fuse, lambda call, result: told.append((call.token, result)))
    assert not patches.change(Library, "no_such_function", fuse)
    assert Library(3).made == (3, 2, True)
    assert Library(3, 5).made == (3, 6, True)
    assert Library(depth=7, width=3, fused=False).made == (3, 8, True)
    assert told == [("token", None)] * 3
    patches.remove()
    assert Library(3).made == (3, 1, False)


def test_what_is_refused_is_done_as_the_script_wants_it(patches: Patches) -> None:
    told: list[str] = []
    after: list[Any] = []
    patches.change(
        Library, "__init__", fuse, lambda call, _: after.append(call), lambda _, error: told.append(str(error))
    )
    assert Library(12).made == (12, 1, False)
    assert told == ["too wide to fuse"]
    assert after == []
    with pytest.raises(ValueError, match="negative width") as caught:
        Library(-1)
    assert told == ["too wide to fuse"]  # the script's own mistake is not the knob's
    assert caught.value.__context__ is None
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    if sys.version_info >= (3, 11):  # before, our frame stays in tracebacks
        assert files == [__file__, __file__]


def test_an_answer_leaves_the_call_out(patches: Patches) -> None:
    torch = SimpleNamespace(calls=[])
    torch.set_count = torch.calls.append
    original = torch.set_count
    patches.change(torch, "set_count", lambda count: Answer("kept") if count > 2 else None)
    assert (torch.set_count(1), torch.set_count(5), torch.calls) == (None, "kept", [1])
    patches.remove()
    assert torch.set_count == original


def test_a_defect_leaves_the_call_alone_and_turns_the_knob_off(patches: Patches, faults: list[tuple[str, str]]) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> Call:
        raise KeyError("defect")

    patches.change(Library, "__init__", fuse)
    patches.change(Library, "__init__", broken)
    assert Library(3).made == (3, 1, False)  # off for all wrappers of the knob
    assert Library(3).made == (3, 1, False)
    assert faults == [("knob.k", "KeyError: 'defect'")]


def installed(name: str, value: str) -> tuple[KnobBase, FakeAgent]:
    agent: Any = FakeAgent(device=True)
    knob = load(name)(agent, name, value, {})
    knob.install()
    return knob, agent


@pytest.fixture
def with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


@pytest.mark.torch
@pytest.mark.usefixtures("with_cudnn")
@pytest.mark.parametrize("flag", ["allow_tf32", "benchmark"])
@pytest.mark.parametrize("value", ["true", "false"])
def test_a_flag_of_cudnn_is_set_held_and_set_back(flag: str, value: str) -> None:
    import torch

    home, wanted = torch.backends.cudnn, value == "true"
    before = getattr(home, flag)
    knob, agent = installed("cudnn." + flag, value)
    assert getattr(home, flag) is wanted
    setattr(home, flag, not wanted)  # the script's own
    knob.at_first_step()
    assert getattr(home, flag) is wanted
    ((applied, observed, reason),) = agent.reports
    assert (applied, reason) == (True, None)
    assert observed is not None
    assert observed.startswith(f"torch.backends.cudnn.{flag} is {wanted}; the script had set it otherwise")
    knob.uninstall()
    assert getattr(home, flag) == before


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The library preferred, last; magma is not built in."""
    import torch

    chosen = ["default"]

    def preferred(backend: str | None = None) -> str:
        if backend == "magma":
            raise RuntimeError("Cannot set preferred backend to MAGMA if PyTorch has not been compiled with it.\nmore")
        if backend is not None:
            chosen.append(backend)
        return f"_LinalgBackend.{chosen[-1].capitalize()}"

    monkeypatch.setattr(torch.backends.cuda, "preferred_linalg_library", preferred)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    return chosen


@pytest.mark.torch
def test_the_library_is_set_and_the_scripts_own_choice_is_overruled(library: list[str]) -> None:
    import torch

    knob, agent = installed("cuda.linalg_library", "cusolver")
    torch.backends.cuda.preferred_linalg_library("default")
    assert torch.backends.cuda.preferred_linalg_library() == "_LinalgBackend.Cusolver"
    knob.at_first_step()
    assert agent.reports == [(True, "torch.backends.cuda.preferred_linalg_library() is _LinalgBackend.Cusolver", None)]
    knob.uninstall()
    assert library[-1] == "default"


@pytest.mark.torch
@pytest.mark.usefixtures("library")
def test_a_library_that_is_not_there_is_refused_by_torch() -> None:
    knob, agent = installed("cuda.linalg_library", "magma")
    knob.at_first_step()
    knob.uninstall()
    assert agent.reports == [
        (False, None, "Cannot set preferred backend to MAGMA if PyTorch has not been compiled with it.")
    ]


CONF = "expandable_segments:True,max_split_size_mb:64"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("environment", "settings", "row"),
    [
        (CONF, {"expandable_segments": True, "PYTORCH_CUDA_ALLOC_CONF": CONF},
         (True, "the allocator says expandable_segments is True", None)),
        (CONF, {}, (True, "PYTORCH_CUDA_ALLOC_CONF is set in the process", None)),
        ("", {}, (False, None, "the process does not see it in PYTORCH_CUDA_ALLOC_CONF")),
        (CONF, {"PYTORCH_CUDA_ALLOC_CONF": "other:1"}, (False, "the allocator has other:1", "the script sets its own")),
    ],
)  # fmt: skip
def test_the_allocator_is_asked_for_its_settings(
    monkeypatch: pytest.MonkeyPatch, environment: str, settings: dict[str, Any], row: tuple[Any, ...]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [], "allocator_settings": settings})
    for name in allocator_variables(CONF):
        monkeypatch.setenv(name, environment)
    knob, agent = installed("allocator.conf", CONF)
    knob.at_first_step()
    assert agent.reports == [row]
