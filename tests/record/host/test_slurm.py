"""Batch scripts with recording switched on: what is changed, what is not, and that they still do the same."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.record.host.slurm import SwitchedOn, switch_on

CALL = "stepscope run -- "
# «@» marks where the recorder goes
SWITCHED = {
    "srun": "srun @python train.py",
    "srun with options": "srun --ntasks=8 -N2 -c 4 --gres gpu:4 --cpu-bind=none -u -l @python -u train.py --lr 0.1",
    "srun with an option from the future": "srun --brand-new 7 @python train.py",
    "srun with a flag from the future": "srun --brand-new @python train.py",
    "srun with its options in a variable": "srun $SRUN_ARGS @python train.py",
    "srun with its options in an array": 'O=(--gpus 4 -l)\nsrun "${O[@]}" @python train.py',
    "srun for a module": "srun @python3.11 -m mypackage.train",
    "full path": "/usr/bin/srun @/opt/env/bin/python train.py",
    "torchrun": "@torchrun --nproc-per-node=4 train.py",
    "torchrun per node": 'srun @torchrun --nnodes $SLURM_NNODES --rdzv-endpoint "$HEAD:29500" train.py',
    "torch.distributed": "@python -m torch.distributed.run --nproc-per-node 4 train.py",
    "accelerate": "@accelerate launch --num_processes 4 train.py",
    "deepspeed": "@deepspeed --num_gpus 4 train.py --deepspeed config.json",
    "mpirun": "mpirun -np 4 --mca pml ob1 -x PATH --bind-to none @python train.py",
    "mpiexec": "mpiexec -n 4 -genv OMP_NUM_THREADS 1 -ppn 2 @python train.py",
    "continued lines": "srun \\\n    --nodes=2 \\\n    --ntasks-per-node 1 \\\n    @python train.py \\\n    --epochs 3",
    "shell in a step": "srun bash -c 'source env.sh; @python train.py --id $SLURM_PROCID'",
    "double quotes": 'srun bash -c "cd \\"$DIR\\" && @torchrun --node_rank \\$SLURM_PROCID train.py"',
    "lines in quotes": "srun bash -c '\n  module load CUDA\n  # python old.py\n  @python train.py \\\n    --x 1\n'",
    "shells in shells": """srun bash -c "bash -c '@python train.py'" """.rstrip(),
    "container": "srun singularity exec --nv -B /data:/data image.sif @python train.py",
    "container with options": "srun apptainer --quiet exec --nv --env A=1 --bind /a image.sif @torchrun train.py",
    "container and shell": "srun apptainer exec image.sif bash -c '@python train.py'",
    "container of srun": "srun --container-image=nvcr.io#nvidia/pytorch --container-mounts /d:/d @python train.py",
    "environment": "CUDA_VISIBLE_DEVICES=0,1 OMP_NUM_THREADS=4 @python train.py",
    "env": "srun env -u FOO BAR=1 @python train.py",
    "exec": "exec @python train.py",
    "time": "time @python train.py",
    "limits": "timeout -k 30 3h srun @python train.py",
    "binding stays inside": "srun @numactl --cpunodebind=0 --membind 0 python train.py",
    "taskset": "@taskset -c 0-3 python train.py\n@taskset 0xff python train.py",
    "background": "CUDA_VISIBLE_DEVICES=0 @python a.py > a.log 2>&1 &\nCUDA_VISIBLE_DEVICES=1 @python b.py &\nwait",
    "loop": 'for lr in 0.1 0.01; do srun @python train.py --lr "$lr"; done',
    "condition": "if [ -f ckpt.pt ]; then @python train.py --resume; else @python train.py; fi",
    "test": "[[ ${A:-x} =~ (x|y) && -d src ]] && srun @python train.py || exit 1",
    "case": 'case "$MODE" in\n  python|b) srun @python train.py ;;\n  *) srun @python other.py;;\nesac',
    "function": "launch() {\n  srun @python train.py\n}\nlaunch",
    "group": "(cd src && srun @python train.py)",
    "pipe": "srun @python train.py 2>&1 | tee train.log",
    "variable": 'PYTHON=/opt/env/bin/python\nsrun "$PYTHON" train.py'.replace('srun "', 'srun @"'),
    "default of a variable": "srun @${PYTHON:-python3} train.py",
    "program in a variable": 'CMD="python train.py --x 1"\nsrun @$CMD',
    "program in an array": 'CMD=(python train.py  # it\'s the one\n  --x 1)\nsrun @"${CMD[@]}"',
    "variables in variables": 'L="python -m torch.distributed.run"\nCMD="$L train.py"\nsrun @$CMD',
    "launcher and program": 'export L="torchrun -n $GPUS"\nsrun bash -c "@$L --rank \\$SLURM_PROCID a.py"',
    "heterogeneous": "srun --het-group=0 @python a.py : --het-group=1 -n2 @python b.py",
    "script in a step": "srun @./train.sh --x\nsrun @bash train.sh",
    "runner": "@uv run --with x train.py\nsrun @conda run -n env python train.py",
    "own script": "chmod +x train.py\nsrun @./train.py",
}
UNTOUCHED = {
    "comments": "# srun python train.py",
    "directives": "#SBATCH --wrap='python train.py'",
    "here-document": "cat > run.py <<EOF\npython train.py\nEOF",
    "quoted here-document": "cat <<-'END' > x\n\tsrun python train.py\n\tEND\necho done",
    "substitution": 'PORT=$(python -c "import socket")\nHOST=`python host.py`\nX=${Y:-$(python z.py)}',
    "environments": "module load Python\nconda activate env\nsource venv/bin/activate\npip install -r requirements.txt",
    "words": "echo python train.py\nwhich python\ncommand -v python\nls *.py\ncp train.py $TMPDIR/",
    "short programs": "python -c 'import torch'\npython --version\nsrun python -V\npython -m pip install .\npython",
    "programs of a login shell": "srun bash -l",
    "other steps": "srun hostname\nsrun nvidia-smi -L\nsrun --pty bash",
    "assignment": 'CMD="srun python train.py"',
    "other words of launchers": "accelerate config default\nconda run\nsingularity pull image.sif docker://x",
}  # fmt: skip
LEFT = {
    "profiler": ("nsys profile -o x python train.py", "nsys"),
    "profiler in a step": ("srun py-spy record -o x -- python train.py", "py-spy"),
    "profiler module": ("python -m cProfile train.py", "cProfile"),
    "unknown variable": ("srun $CMD", "$CMD"),
    "whole launch in a variable": ('RUN="srun python"\n$RUN train.py', "before python where $RUN is set"),
    "two values": ("P=python\nP=ls\nsrun $P train.py", "$P"),
    "own start script of an image": ("singularity run --nv image.sif train.py", "run"),
    "other container": ("docker run --rm image python train.py", "docker"),
    "programs in a file": ("srun --multi-prog programs.conf", "--multi-prog"),
    "ssh": ("ssh node1 'python train.py'", "ssh"),
    "script": ("bash train.sh", "another script"),
    "program as here-document": ("srun python - <<EOF\nimport torch\nEOF", "here-document"),
    "unquoted commands": ("bash -c python\\ train.py", "quoted"),
    "reader of a pipe": ("cat x | python filter.py", "pipe"),
}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHED)
def test_the_recorder_goes_in_front_of_what_trains(name: str) -> None:
    marked = SWITCHED[name]
    switched = switch_on(without_marks(marked))
    assert switched.text == with_marks(marked)
    assert switched.left == ()
    assert_valid(switched.text)
    again = switch_on(switched.text)
    assert (again.text, again.lines, again.left) == (switched.text, (), ())
    assert len(again.recorded) >= len(switched.lines)


@pytest.mark.parametrize("name", UNTOUCHED)
def test_everything_else_stays_and_is_not_talked_about(name: str) -> None:
    switched = switch_on(UNTOUCHED[name])
    assert switched == SwitchedOn(UNTOUCHED[name], (), (), (), ())


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_understood_is_left_alone_and_named(name: str) -> None:
    script, word = LEFT[name]
    switched = switch_on(script)
    assert switched.text == script
    ((_, reason),) = switched.left
    assert word in reason


def test_lines_are_counted_as_an_editor_does() -> None:
    script = "#!/bin/bash\r\n\r\nsrun \\\r\n  python train.py\r\nnsys profile python x.py\r\n"
    switched = switch_on(script)
    assert switched.lines == (4,)
    assert [line for line, _ in switched.left] == [5]
    assert switched.text.count("\r\n") == script.count("\r\n")


def test_a_container_needs_stepscope_inside() -> None:
    for line in (SWITCHED["container"], SWITCHED["container of srun"], SWITCHED["container and shell"]):
        ((_, remark),) = switch_on(without_marks(line)).remarks
        assert "inside" in remark


def test_the_program_can_be_called_by_its_path() -> None:
    assert switch_on("srun python t.py", program="/opt/s/bin/stepscope").text == (
        "srun /opt/s/bin/stepscope run -- python t.py"
    )
    with pytest.raises(UsageError, match="--stepscope"):
        switch_on("srun python t.py", program="a b")


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("#!/bin/csh\nsrun python t.py", "csh"),
        ("#!/usr/bin/env python3\nimport os", "python3"),
        ("echo ok\nsrun python 't.py", "line 2"),
        ('srun bash -c "python t.py', "bash -n"),
        ("A=$(ls\npython t.py", "bracket"),
        ("python t.py " + '"$(' * 3000, "nested"),
    ],
)
def test_scripts_that_cannot_be_understood_are_refused(script: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        switch_on(script)


def test_what_is_no_text_is_unreadable_input() -> None:
    with pytest.raises(UnreadableInputError, match="batch script"):
        switch_on("python t.py\0")


PIECES = [
    "srun", "python", "train.py", "torchrun", "bash", "-c", "'", '"', "\\", "\n", ";", "&", "|", "(", ")", "{", "}",
    "$", "$(", "`", "<<EOF", "\nEOF\n", "<", ">", "#", "=", "A=(", "[[", "]]", "((", "))", "case x in", "esac", " ",
    ":", "$A", '"$A"', "é", "\udc80", "-n", "4", "singularity", "exec", "stepscope run --", "for", "do", "done",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from([" ", ""]))))
def test_any_text_is_understood_or_refused_and_only_added_to(pieces: list[tuple[str, str]]) -> None:
    script = "".join(word + gap for word, gap in pieces)
    try:
        switched = switch_on(script)
    except UsageError:
        return
    marked = switch_on(script, program="RECORDER").text
    assert marked.replace("RECORDER run -- ", "") == script
    assert switched.text == marked.replace("RECORDER", "stepscope")


def with_marks(marked: str) -> str:
    return marked.replace("[@]", "\1").replace("@", CALL).replace("\1", "[@]")


def without_marks(marked: str) -> str:
    return marked.replace("[@]", "\1").replace("@", "").replace("\1", "[@]")


def assert_valid(script: str) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-n"], input=script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
