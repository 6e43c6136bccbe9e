"""What to write into the script: for every knob of the table, at the user's line, ready to be copied."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from stepscope.diagnose.in_script import EDITS
from stepscope.experiment.engine import command_line, edits
from stepscope.model.comparison import AppliedKnob
from stepscope.record.agent.knobs import ARGUMENT_PREFIX, ENVIRONMENT_PREFIX, KNOBS
from stepscope.schema import Knob
from tests.records import some

CWD = "/home/me/project"


def applied(knob: str, value: str, line: int = 77, *, file: str = f"{CWD}/train.py", ok: bool = True) -> AppliedKnob:
    return AppliedKnob(knob, value, ok, file=file, line=line)


def test_every_knob_of_the_table_has_an_edit_and_no_other() -> None:
    inside = {name for name in KNOBS if not name.startswith((ENVIRONMENT_PREFIX, ARGUMENT_PREFIX))}

    assert set(EDITS.plain) == inside


def test_knobs_of_one_call_make_one_sentence_at_its_line() -> None:
    knobs = (Knob("loader.num_workers", "2"), Knob("loader.persistent_workers", "true"))
    told = tuple(applied(knob.knob, knob.value) for knob in knobs)

    assert edits(knobs, told, cwd=CWD) == ("train.py:77: DataLoader(..., num_workers=2, persistent_workers=True)",)


@pytest.mark.parametrize(
    ("knob", "value", "part"),
    [
        ("torch.num_interop_threads", "2", "torch.set_num_interop_threads(2)"),
        ("zero_grad.set_to_none", "false", "optimizer.zero_grad(..., set_to_none=False)"),
        ("matmul_precision", "high", "torch.set_float32_matmul_precision('high')"),
        ("cudnn.benchmark", "true", "torch.backends.cudnn.benchmark = True"),
        ("gc", "freeze", "gc.freeze()"),
        ("gc", "5000", "gc.set_threshold(5000)"),
        ("cpu.affinity", "0-3", "taskset -c 0-3"),
        ("amp.dtype", "bf16", "torch.autocast(device_type, dtype=torch.bfloat16)"),
        ("amp.dtype", "fp16", "torch.amp.GradScaler"),
        ("amp.dtype", "off", "no torch.autocast"),
        ("compile", "true", "model = torch.compile(model),"),
        ("compile", "reduce-overhead", "torch.compile(model, mode='reduce-overhead')"),
        ("compile", "false", "no torch.compile"),
        ("optimizer.fused", "true", "fused=True"),
        ("nobody.knows", "it", "set nobody.knows to it"),
    ],
)
def test_edits_are_python(knob: str, value: str, part: str) -> None:
    (text,) = edits([Knob(knob, value)])
    assert part in text


def test_variables_and_flags_are_one_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    knobs = (Knob("env:OMP_NUM_THREADS", "1"), Knob("arg:--workers", "2"), Knob("arg:--data", "my pictures/it's"))
    command = ("python", "train.py", "--workers=0", "--lr", "0.1")
    (text,) = edits(knobs, command=command, cwd=str(tmp_path))

    assert text.startswith("start it with: OMP_NUM_THREADS=1 python train.py --workers=2 --lr 0.1 --data ")
    assert shlex.split(text)[-1] == "my pictures/it's"


@pytest.mark.parametrize("value", ["two words", 'a"b', "it's", "", "$HOME;ls", "näh"])
def test_odd_values_survive_a_shell(value: str) -> None:
    line = some(command_line([Knob("env:NAME", value)], ("python", "train.py")))

    assert shlex.split(line) == [f"NAME={value}", "python", "train.py"]
