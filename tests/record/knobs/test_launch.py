"""Knobs on the launch side: which words of a command change, and what the process really gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.record.agent.knobs import launched
from stepscope.record.agent.knobs.launched import argument_of
from stepscope.record.host.launch import changed_by_knobs, with_argument
from stepscope.record.host.options import RecordOptions
from stepscope.schema import Knob
from tests.record.agent.fake_agent import FakeAgent

from .recorded import recorded

FLAGS = st.sampled_from(["--workers", "--lr", "-j", "model.width"])
WORDS = st.one_of(
    st.sampled_from(["--workers", "--workers=3", "--lr", "-j", "-j4", "model.width=2", "--", "-5", "data", "x=y"]),
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=6),
)
VALUES = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("words", "flag", "value", "expected"),
    [
        ([], "--workers", "4", ["--workers", "4"]),
        (["--workers", "2", "data"], "--workers", "4", ["--workers", "4", "data"]),
        (["--workers=2", "--lr", "1"], "--workers", "4", ["--workers=4", "--lr", "1"]),
        (["--workers", "1", "--workers=2"], "--workers", "4", ["--workers", "4", "--workers=4"]),
        (["--offset", "-3"], "--offset", "5", ["--offset", "5"]),
        (["--offset", "5"], "--offset", "-3", ["--offset", "-3"]),
        (["--name", "a"], "--name", "--b", ["--name=--b"]),
        (["-j", "2"], "-j", "4", ["-j", "4"]),
        (["-j2"], "-j", "4", ["-j", "4"]),
        (["--workers-per-node", "2"], "--workers", "4", ["--workers-per-node", "2", "--workers", "4"]),
        (["--amp", "data"], "--amp", "", ["--amp", "data"]),
        (["data"], "--amp", "", ["data", "--amp"]),
        (["a", "--", "--workers", "2"], "--workers", "4", ["a", "--workers", "4", "--", "--workers", "2"]),
        (["model.width=2"], "model.width", 'it\'s "6 4"', ['model.width=it\'s "6 4"']),
        (["model.depth=2"], "model.width", "64", ["model.depth=2", "model.width=64"]),
        (["--workers", "--lr", "1"], "--workers", "4", ["--workers", "4", "--lr", "1"]),
    ],
)
def test_flags_are_replaced_where_they_are_and_appended_where_not(
    words: list[str], flag: str, value: str, expected: list[str]
) -> None:
    assert list(with_argument(words, flag, value)) == expected


@given(st.lists(WORDS, max_size=8), FLAGS, VALUES)
def test_the_script_finds_the_value_whatever_the_command_is(words: list[str], flag: str, value: str) -> None:
    changed = with_argument(words, flag, value)
    assert argument_of(changed, flag) == value
    assert with_argument(changed, flag, value) == changed
    if "--" in words:
        assert list(changed[changed.index("--") :]) == words[words.index("--") :]
    other = list(with_argument(words, "--new", value))  # the others stay in order
    added = [f"--new={value}"] if f"--new={value}" in other else ["--new", value]
    end = words.index("--") if "--" in words else len(words)
    assert other == [*words[:end], *added, *words[end:]]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "train.py", "--lr", "1"], ["python", "train.py", "--lr", "2"]),
        (["python", "-X", "dev", "train.py"], ["python", "-X", "dev", "train.py", "--lr", "2"]),
        (
            ["torchrun", "--lr", "9", "train.py", "--lr=1"],
            ["torchrun", "--lr", "9", "train.py", "--lr=2"],
        ),
        (["python", "-m", "pkg.train", "--lr", "1"], ["python", "-m", "pkg.train", "--lr", "2"]),
        (["bash", "train.sh"], ["bash", "train.sh", "--lr", "2"]),
        (["env", "A=1", "python", "train.py"], ["env", "A=1", "python", "train.py", "--lr", "2"]),
    ],
)
def test_only_the_scripts_own_arguments_change(tmp_path: Path, command: list[str], expected: list[str]) -> None:
    (tmp_path / "pkg").mkdir()
    for name in ("train.py", "train.sh", "pkg/__init__.py", "pkg/train.py"):
        (tmp_path / name).write_text("")
    options = RecordOptions(command=tuple(command), knobs=(Knob("arg:--lr", "2"),))
    changed, environment = changed_by_knobs(options, {"PATH": "/usr/bin:/bin"}, tmp_path)
    assert list(changed.command) == expected
    assert environment == {"PATH": "/usr/bin:/bin"}


def test_variables_and_the_hash_seed() -> None:
    conf = Knob("allocator.conf", "expandable_segments:True")
    options = RecordOptions(command=("x",), seed=7, knobs=(conf, Knob("env:A", "b c"), Knob("env:OLD", "")))
    given_environment = {"OLD": "1", "KEPT": "2"}
    _, environment = changed_by_knobs(options, given_environment, Path("/"))
    assert environment.pop("PYTORCH_CUDA_ALLOC_CONF") == environment.pop("PYTORCH_ALLOC_CONF") == conf.value
    assert environment == {"OLD": "", "KEPT": "2", "A": "b c", "PYTHONHASHSEED": "7"}
    assert given_environment == {"OLD": "1", "KEPT": "2"}
    _, kept = changed_by_knobs(options, {"PYTHONHASHSEED": "0"}, Path("/"))
    assert kept["PYTHONHASHSEED"] == "0"


def test_the_allocator_of_the_host_is_set_before_the_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libjemalloc.so.2"
    library.write_bytes(b"")
    monkeypatch.setattr(launched, "_FOLDERS", (str(tmp_path),))

    def environment(value: str) -> dict[str, str]:
        options = RecordOptions(command=("x",), knobs=(Knob("host.allocator", value),))
        return changed_by_knobs(options, {"LD_PRELOAD": "/a.so"}, Path("/"))[1]

    keep = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
    assert environment("keep") == {"LD_PRELOAD": "/a.so", **keep}
    assert environment("keep_all")["MALLOC_MMAP_MAX_"] == "0"
    assert environment("huge_pages")["THP_MEM_ALLOC_ENABLE"] == "1"
    assert environment("jemalloc") == {"LD_PRELOAD": f"{library} /a.so"}
    assert environment("tcmalloc") == {"LD_PRELOAD": "/a.so"}  # not installed


@pytest.mark.parametrize(
    ("value", "variables", "applied", "words"),
    [
        ("keep", True, True, "MALLOC_MMAP_THRESHOLD_=33554432"),
        ("keep", False, False, "does not see"),
        ("jemalloc", False, False, "libjemalloc.so is not installed"),
    ],
)
def test_the_training_process_says_what_became_of_the_allocator(
    value: str, variables: bool, applied: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "_FOLDERS", ())
    for name, text in launched.host_allocator_variables("keep").items():
        monkeypatch.setenv(name, text) if variables else monkeypatch.delenv(name, raising=False)
    agent: Any = FakeAgent()
    launched.HostAllocator(agent, "host.allocator", value, {}).install()
    ((done, observed, reason),) = agent.reports
    assert done is applied
    assert words in (observed or reason)


SCRIPT = """
import json, os, sys
os.environ["TAKEN"] = "by the script"
import random
import torch
import numpy
from plain_sgd import PlainSGD
first = [random.random(), numpy.random.rand(), torch.rand(1).item(), hash("x")]
model = torch.nn.Linear(2, 1)
optimizer = PlainSGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
words = sys.argv[1:]
if "--amp" in words:
    sys.argv.remove("--amp")
print(json.dumps({"words": words, "text": os.environ["TEXT"], "first": first}))
sys.exit(3)
"""
TEXT = 'it\'s "two words" $HOME `x` ünï; --y'


@pytest.mark.process
@pytest.mark.torch
def test_values_survive_and_the_seed_holds(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    run = recorded(
        tmp_path,
        SCRIPT,
        f"env:TEXT={TEXT}",
        "env:TAKEN=by the knob",
        f"arg:--name={TEXT}",
        "arg:--amp",
        "arg:--workers=4",
        options=("--seed", "5"),
        arguments=("--workers", "2", "data"),
    )
    assert (run.status, run.stderr) == (3, "")
    printed = run.printed()
    assert printed["words"] == ["--workers", "4", "data", "--name", TEXT, "--amp"]
    assert printed["text"] == TEXT
    for name in ("env:TEXT", "arg:--name", "arg:--amp", "arg:--workers"):
        assert run.knob(name)["applied"], name
    assert run.knob("arg:--workers")["observed"] == "4"
    taken = run.knob("env:TAKEN")
    assert (taken["applied"], taken["observed"]) == (False, "by the script")
    import random

    import numpy

    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    assert printed["first"][:3] == [random.random(), numpy.random.rand(), torch.rand(1).item()]
    fixed = {**os.environ, "PYTHONHASHSEED": "5"}
    shown = subprocess.run([sys.executable, "-c", "print(hash('x'))"], env=fixed, capture_output=True, text=True)
    assert printed["first"][3] == int(shown.stdout)
    assert [event["observed"] for event in run.events("seed")] == [5]
    options = run.manifest()["options"]
    assert options["seed"] == 5
    assert ["arg:--workers", "4"] in options["knobs"]
    assert run.manifest()["command"][2:5] == ["--workers", "4", "data"]
