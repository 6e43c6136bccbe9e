"""Knobs that mean something only on a CUDA device: what they read back and answer, with stand-ins for the device."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.record.agent.knobs.base import KnobBase, load
from stepscope.record.agent.knobs.launched import allocator_variables
from tests.record.agent.fake_agent import FakeAgent

pytestmark = pytest.mark.torch


def installed(name: str, value: str) -> tuple[KnobBase, FakeAgent]:
    agent: Any = FakeAgent(device=True)
    knob = load(name)(agent, name, value, {})
    knob.install()
    return knob, agent


@pytest.fixture
def with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


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


def test_the_library_is_set_and_the_scripts_own_choice_is_overruled(library: list[str]) -> None:
    import torch

    knob, agent = installed("cuda.linalg_library", "cusolver")
    torch.backends.cuda.preferred_linalg_library("default")
    assert torch.backends.cuda.preferred_linalg_library() == "_LinalgBackend.Cusolver"
    knob.at_first_step()
    assert agent.reports == [(True, "torch.backends.cuda.preferred_linalg_library() is _LinalgBackend.Cusolver", None)]
    knob.uninstall()
    assert library[-1] == "default"


@pytest.mark.usefixtures("library")
def test_a_library_that_is_not_there_is_refused_by_torch() -> None:
    knob, agent = installed("cuda.linalg_library", "magma")
    knob.at_first_step()
    knob.uninstall()
    assert agent.reports == [
        (False, None, "Cannot set preferred backend to MAGMA if PyTorch has not been compiled with it.")
    ]


CONF = "expandable_segments:True,max_split_size_mb:64"


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
