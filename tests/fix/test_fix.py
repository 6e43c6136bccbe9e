"""From a finding and a source to the difference, or to what has to be decided. `# here` marks the named line."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.errors import StepscopeError
from stepscope.fix import Fix, apply, fix_of
from stepscope.model import Finding, Place, Settings, Site
from stepscope.model.findings import Try

pytest.importorskip("libcst")

LOADER = (("loader.num_workers", "2"), ("loader.persistent_workers", "true"))
IMPORTS = "import torch\nfrom torch.utils.data import DataLoader\n"
LOOP = """\
import torch
{imports}

def main():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    {before}
    for {target} in {over}:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        {work}
"""


def loop(work: str, *, target: str = "batch", over: str = "loader", before: str = "pass", imports: str = "") -> str:
    return LOOP.format(work=work, target=target, over=over, before=before, imports=imports)


class Case:
    """A file below the working folder, and a finding of it."""

    def __init__(self, folder: Path, source: str | bytes, name: str = "train.py") -> None:
        self.path = folder / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.data = source.encode() if isinstance(source, str) else source
        self.path.write_bytes(self.data)
        self.hashes = {str(self.path): hashlib.sha256(self.data).hexdigest()}
        lines = self.data.decode("latin-1").split("\n")
        self.line = next((number for number, line in enumerate(lines, 1) if "# here" in line), None)

    def fix(
        self,
        rule: str = "input.loader_bound",
        knobs: tuple[tuple[str, str], ...] = (),
        *,
        fix: str = "",
        what: str = "",
        arguments: dict[str, str] | None = None,
        framework: str = "",
        every: int | None = None,
        device: str = "cpu",
        share: float = 0.5,
        steps: int = 10_000,
    ) -> Fix:
        place = Place(str(self.path), self.line, "main")
        finding = Finding(
            id=f"{rule}-1",
            rule=rule,
            category=rule.partition(".")[0],
            title="",
            severity="warning",
            confidence="high",
            where=(place,),
            evidence=(),
            fix=fix,
            falsified_by="",
            try_=tuple(Try(*knob) for knob in knobs),
            cost_ms_per_step=1.0,
            share=share,
            gain_ceiling=share,
        )
        analysis = SimpleNamespace(
            sites=(Site(what, place, arguments or {}, 0),) if what else (),
            settings=Settings(framework, place, loaders=True) if framework else None,
            loader=None,
            devices=(device,),
            steps=(SimpleNamespace(kind="train", count=steps, mean_ms=1.0, series=((steps - 1, 1.0),)),),
        )
        tables = SimpleNamespace(run=SimpleNamespace(source_hashes=self.hashes))
        run: Any = SimpleNamespace(analysis=analysis, tables=tables)
        return fix_of(run, finding, every=every)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def loader_case(call: str, imports: str = IMPORTS, more: str = "") -> str:
    return f"{imports}{more}loader = {call}  # here\n"


WORKERS = "num_workers=2, persistent_workers=True"
LOADERS = {
    "a name": (loader_case("DataLoader(data)"), "DataLoader(data)", f"DataLoader(data, {WORKERS})"),
    "a module by another name": (
        loader_case("d.DataLoader(data, 4)", "import torch.utils.data as d\n"),
        "data, 4)",
        f"data, 4, {WORKERS})",
    ),
    "a name by another name": (
        loader_case("DL(data,)", "from torch.utils.data import DataLoader as DL\n"),
        "DL(data,)",
        f"DL(data, {WORKERS},)",
    ),
    "by position": (
        loader_case("DataLoader(data, 4, True, None, None, 0)"),
        "None, 0)",
        "None, 2, persistent_workers=True)",
    ),
    "a value": (loader_case("DataLoader(data, num_workers = 0)"), "= 0)", "= 2, persistent_workers=True)"),
    "on lines of their own": (
        loader_case("DataLoader(\n    data,  # here\n    batch_size=4,  # small\n    # why\n)"),
        "    batch_size=4,  # small\n",
        "    batch_size=4,  # small\n    num_workers=2,\n    persistent_workers=True,\n",
    ),
    "without a last comma": (
        loader_case("DataLoader(\n    data,  # here\n    batch_size=4  # small\n)"),
        "batch_size=4  # small\n",
        "batch_size=4,  # small\n    num_workers=2,\n    persistent_workers=True\n",
    ),
    "with tabs": (
        loader_case("make(\n\tDataLoader(\n\t\tdata,  # here\n\t\tshuffle=True,\n\t)\n)"),
        "\t\tshuffle=True,\n",
        "\t\tshuffle=True,\n\t\tnum_workers=2,\n\t\tpersistent_workers=True,\n",
    ),
    "a number of a name": (
        loader_case("DataLoader(data, num_workers=WORKERS)", more="WORKERS = 0\n"),
        "WORKERS = 0\n",
        "WORKERS = 2\n",
    ),
    "a number with other uses": (
        loader_case("DataLoader(data, num_workers=WORKERS)", more="WORKERS = 0\nprint(WORKERS)\n"),
        "num_workers=WORKERS",
        "num_workers=2",
    ),
    "the branch that held": (
        loader_case("DataLoader(data, num_workers=8 if big else 0)"),
        "8 if big else 0",
        "8 if big else 2",
    ),
    "keywords in a dict": (
        loader_case("DataLoader(data, **more)", more='more = {"shuffle": True, "num_workers": 0}\n'),
        '"num_workers": 0}',
        '"num_workers": 2}',
    ),
    "keywords that are not in a dict": (
        loader_case("DataLoader(data, **more)", more="more = dict(shuffle=True)\n"),
        "**more)",
        f"**more, {WORKERS})",
    ),
    "a child of it": (
        loader_case("Mine(data)", more="class Mine(DataLoader):\n    pass\n"),
        "Mine(data)",
        f"Mine(data, {WORKERS})",
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_is_given_its_arguments_and_nothing_else_changes(name: str, here: Path) -> None:
    source, old, new = LOADERS[name]
    assert source.count(old) == 1
    case = Case(here, source)
    fix = case.fix(knobs=LOADER, what="DataLoader", arguments={"num_workers": "0"})
    assert fix.reason == ""
    made = fix.changes[0].new.decode()
    if "persistent_workers" in new:
        assert made == source.replace(old, new)
    else:  # the other argument stands at the call
        assert new in made
        assert made.count("persistent_workers=True") == 1
    _applies_once(case, fix, lambda: case.fix(knobs=LOADER, what="DataLoader", arguments={"num_workers": "0"}))


def test_workers_are_not_taken_from_a_loader_that_keeps_what_only_workers_may_have(here: Path) -> None:
    kept = {"num_workers": "2", "persistent_workers": "True", "prefetch_factor": "2"}
    case = Case(here, loader_case(f"DataLoader(data, {', '.join(map('='.join, kept.items()))})"))
    fix = case.fix(knobs=(("loader.num_workers", "0"),), what="DataLoader", arguments=kept)
    assert (fix.changes, "no persistent_workers and no prefetch_factor: take it out" in fix.reason) == ((), True)


def _applies_once(case: Case, fix: Fix, again: Any) -> None:
    """`patch` makes of the difference what `fix` would write; then there is nothing to do."""
    told = b"".join(change.difference for change in fix.changes)
    subprocess.run(["patch", "-p1", "--binary", "-s"], input=told, cwd=fix.changes[0].base, check=True)
    assert case.path.read_bytes() == fix.changes[0].new
    compile(case.path.read_bytes(), "train.py", "exec")
    assert again().changes == ()


OPTIONS = "args = parser.parse_args()\n"
REASONS = {
    "an option": (
        loader_case("DataLoader(data, num_workers=args.n_jobs)", more=f'parser.add_argument("--n-jobs")\n{OPTIONS}'),
        "the option --n-jobs of the command line",
    ),
    "a configuration": (loader_case("DataLoader(data, num_workers=cfg['jobs'])"), "`cfg['jobs']` (line 3)"),
    "a word of the command line": (
        loader_case("DataLoader(data, num_workers=N)", more='N = 2 * ("--more" in sys.argv)\n'),
        "the option --more",
    ),
    "a parameter": (
        f"{IMPORTS}def make(jobs):\n    return DataLoader(data, num_workers=jobs)  # here\n",
        "the parameter `jobs` of `make`",
    ),
    "keywords of elsewhere": (loader_case("DataLoader(data, **more)", more="from my import more\n"), "`**more`"),
    "keywords that change": (
        loader_case("DataLoader(data, **more)", more="more = dict(a=1)\nmore.update(other)\n"),
        "it is used elsewhere too",
    ),
    "a star": (loader_case("DataLoader(*more)"), "come from `*`"),
    "a function of its own": (loader_case("build(data)"), "a call of its own"),
    "a child with arguments of its own": (
        loader_case("Mine(data)", more="class Mine(DataLoader):\n    def __init__(self, data):\n        pass\n"),
        "a call of its own",
    ),
    "no program": (loader_case("DataLoader(data").replace("\n", " )\nif\n"), "cannot be parsed"),
    "a form feed": (loader_case("DataLoader(data)") + "\x0cx = 1\n", "form feeds"),
    "two on a line": (loader_case("DataLoader(a), DataLoader(b)"), "several loaders"),
    "several values": (loader_case("DataLoader(data, num_workers=N)", more="N = 0\nN += 2\n"), "several values"),
    "no encoding": ("# coding: nonsense\n" + loader_case("DataLoader(data)"), "cannot be parsed"),
    "a generator alone": (loader_case("DataLoader(x for x in y)"), "edit it by hand"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_decides_a_value_is_named(name: str, here: Path) -> None:
    source, reason = REASONS[name]
    fix = Case(here, source).fix(knobs=LOADER, what="DataLoader")
    assert reason in fix.reason
    assert fix.changes == ()


HERE = "print(loss)  # here"
# name -> (source, what goes, what comes, the finding)
OTHERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "threads": (
        "import torch as t\n\nx = 1  # here\n",
        "import torch as t\n",
        "import torch as t\nt.set_num_threads(2)\n",
        {"knobs": (("torch.num_threads", "2"),)},
    ),
    "threads that were set": (
        "import torch\ntorch.set_num_threads(1 if small else 16)  # here\n",
        "else 16",
        "else 2",
        {"knobs": (("torch.num_threads", "2"),), "what": "set_num_threads", "arguments": {"argument_0": "16"}},
    ),
    "a setting without torch": (
        '"""Trains."""\nfrom my import x\n\nx()  # here\n',
        "from my import x\n",
        "from my import x\nimport torch\ntorch.backends.cudnn.benchmark = True\n",
        {"knobs": (("cudnn.benchmark", "true"),)},
    ),
    "threads behind what holds for torch's import": (
        "import os\n\nos.environ['A'] = '1'\nimport torch\nfrom my import x\n\nx()  # here\nimport later\n",
        "from my import x\n",
        "from my import x\ntorch.set_num_threads(2)\n",
        {"knobs": (("torch.num_threads", "2"),)},
    ),
    "precision": (
        "import torch\n# here\n",
        "import torch\n",
        "import torch\ntorch.set_float32_matmul_precision('high')\n",
        {"knobs": (("matmul_precision", "high"),)},
    ),
    "a collection": (
        loop("gc.collect()  # here\n        print(1)", imports="import gc"),
        "        gc.collect()  # here\n",
        "",
        {"rule": "system.garbage_collection"},
    ),
    "a collection that stands alone": (
        loop("if step() % 4 == 0:\n            gc.collect()  # here", imports="import gc"),
        "gc.collect()",
        "pass",
        {"rule": "system.garbage_collection"},
    ),
    "a collection beside another call": (
        loop("tell(); gc.collect()  # here", imports="import gc"),
        "tell(); gc.collect()",
        "tell()",
        {"rule": "system.garbage_collection"},
    ),
    "the cache of the device": (
        loop("torch.cuda.empty_cache()\n        print(1)  # here"),
        "        torch.cuda.empty_cache()\n",
        "",
        {"rule": "memory.allocator_in_steps", "fix": "no torch.cuda.empty_cache() in the loop"},
    ),
    "a counted loop": (
        loop("save(model)  # here", target="step, batch", over="enumerate(loader)"),
        "        save(model)  # here",
        "        if step % 50 == 0:\n            save(model)  # here",
        {"rule": "io.blocking_in_step", "fix": "Save less often"},
    ),
    "a loop without a count": (
        loop("save(model)  # here", target="batch, _"),
        "for batch, _ in loader:",
        "for step_number, (batch, _) in enumerate(loader):",
        {"rule": "io.blocking_in_step", "fix": "Save less often"},
    ),
    "a count that is given another value": (
        loop("n += 1\n        if n == 4:\n            n = 0\n        save(model)  # here", before="n = 0"),
        "        save(model)  # here",
        "        if step_number % 50 == 0:\n            save(model)  # here",
        {"rule": "io.blocking_in_step", "fix": "Save less often"},
    ),
    "an interval": (
        loop("if step % 3 == 0:\n            save(model)  # here", target="step", over="range(9)"),
        "step % 3",
        "step % 50",
        {"rule": "io.blocking_in_step", "fix": "Save less often"},
    ),
    "work in a function": (
        "def log(x):\n    print(x, flush=True)  # here\n\n" + loop("log(loss)", target="step", over="range(9)"),
        "        log(loss)",
        "        if step % 20 == 0:\n            log(loss)",
        {"rule": "host.python_on_critical_path", "every": 20},
    ),
    "a wait": (
        loop("torch.cuda.synchronize()  # here\n        print(1)"),
        "        torch.cuda.synchronize()  # here\n",
        "",
        {"rule": "sync.host_waits"},
    ),
    "autocast": (
        loop("pass  # here"),
        "        loss = model(batch).sum()\n",
        '        with torch.autocast("cpu", dtype=torch.bfloat16):\n            loss = model(batch).sum()\n',
        {"knobs": (("amp.dtype", "bf16"),)},
    ),
    "compile": (
        loop("pass  # here"),
        "lr=0.1)\n",
        "lr=0.1)\n    model.compile()\n",
        {"knobs": (("compile", "true"),)},
    ),
    "compile where an optimizer is returned": (
        "import torch\n\ndef make(net):\n    return torch.optim.SGD(net.parameters())\n\n"
        "while True:\n    net(x).backward()\n    opt.step()  # here\n",
        "    return torch",
        "    net.compile()\n    return torch",
        {"knobs": (("compile", "true"),)},
    ),
    "a fused optimizer": (
        "import torch\nopt = torch.optim.Adam(params, lr=1, foreach=True)  # here\n",
        "lr=1, foreach=True)",
        "lr=1, fused=True)",
        {"knobs": (("optimizer.fused", "true"),), "what": "Adam"},
    ),
    "gradients": (
        loop("optimizer.zero_grad(set_to_none=False)  # here"),
        "set_to_none=False",
        "set_to_none=True",
        {"knobs": (("zero_grad.set_to_none", "true"),)},
    ),
    "copies": (
        "x = x.to(device)  # here\n",
        "to(device)",
        "to(device, non_blocking=True)",
        {"rule": "transfer.host_to_device", "fix": "non_blocking=True"},
    ),
    "double precision": (
        "import numpy as np\nx = x.astype(np.float64)  # here\n",
        "np.float64",
        "np.float32",
        {"rule": "compute.double_precision"},
    ),
    "shapes": (
        "import torch\n\n\n@torch.compile\ndef f(x):\n    return x\n\n\ng = torch.compile(f, dynamic=False)  # here\n",
        "dynamic=False",
        "dynamic=True",
        {"rule": "compile.same_cause", "fix": "torch.compile(..., dynamic=True)"},
    ),
    "settings of a framework": (
        "from transformers import TrainingArguments as TA\nargs = TA('out', max_steps=3)  # here\n",
        "max_steps=3)",
        "max_steps=3, dataloader_num_workers=2)",
        {"knobs": (("loader.num_workers", "2"),), "framework": "transformers", "what": "TrainingArguments"},
    ),
    "a trainer": (
        "import lightning as L\ntrainer = L.Trainer(max_epochs=1)  # here\n",
        "max_epochs=1)",
        "max_epochs=1, precision='bf16-mixed')",
        {"knobs": (("amp.dtype", "bf16"),), "framework": "lightning"},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_changes(name: str, here: Path) -> None:
    source, old, new, about = OTHERS[name]
    case = Case(here, source)
    fix = case.fix(**about)
    assert fix.reason == ""
    made = fix.changes[0].new.decode()
    if "count" in name and name != "a counted loop":
        assert "for step_number, " in made
        assert "        if step_number % 50 == 0:\n            save(model)  # here" in made
        assert new in made
    else:
        assert made == source.replace(old, new, 1)
    _applies_once(case, fix, lambda: case.fix(**about))


def test_float16_scales_the_loss(here: Path) -> None:
    made = Case(here, loop("pass  # here")).fix(knobs=(("amp.dtype", "fp16"),), device="cuda:0").changes[0].new.decode()
    assert '    scaler = torch.amp.GradScaler("cuda")\n    for batch in loader:\n' in made
    assert '        with torch.autocast("cuda", dtype=torch.float16):\n            loss = model(batch).sum()\n' in made
    assert "        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()\n" in made


UNDECIDED = {
    "used by another name": (loop("print(y := save(model))  # here\n        use(y)"), "`y`"),
    "another module's": (
        "class Log:\n    def save(self):\n        write()  # here\n\n" + loop("torch.save(x)"),
        "no loop",
    ),
    "a step of its own": (
        "def update(x):\n    model(x).backward()\n    save(x)  # here\n\nfor x in loader:\n    update(x)\n",
        "in `update`, which trains",
    ),
    "averaged": (
        loop(
            "for k, v in model.state_dict().items():  # here\n            ema[k] = 0.9 * ema[k] + v", before="ema = {}"
        ),
        "adds up over all steps",
    ),
    "averaged in place": (loop("ema[0].lerp_(w, 0.1)  # here", before="ema = [w]"), "adds up over all steps"),
    "summed up": (loop("total += measure(model)  # here", before="total = 0"), "adds up over all steps"),
    "used": (loop("kept = copy(model)  # here\n        use(kept)"), "`kept`"),
    "the update": (loop("pass").replace("optimizer.step()", "optimizer.step()  # here"), "it has to run in every step"),
    "the end": (loop("if bad(loss): break  # here"), "decides what runs next"),
    "no loop": ("save(model)  # here\n", "holds no loop that trains"),
    "two ways": ("def f():\n    save()  # here\n\n" + loop("f()\n        f()"), "from several places"),
    "no count": (loop("save(model)  # here").replace("for batch in loader", "while True"), "counts no steps"),
    "an interval that trains": (
        loop("if (n + 1) % 4 == 0:\n            o.step()\n            save()  # here", target="n", over="range(9)"),
        "`if (n + 1) % 4 == 0` holds more than this work",
    ),
    "the best of all": (
        loop("if loss < best:\n            best = loss\n            save(model)  # here", before="best = 9"),
        "`if loss < best` (line 12) decides by what a step gave",
    ),
    "an option": (
        loop("if step % args.every == 0:\n            save(model)  # here", target="step", over="range(9)"),
        "`args.every`",
    ),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_work_that_cannot_be_made_rarer(name: str, here: Path) -> None:
    source, reason = UNDECIDED[name]
    assert reason in Case(here, source).fix("io.blocking_in_step", fix="Save less often").reason


def test_a_person_decides_what_a_rule_cannot(here: Path) -> None:
    case = Case(here, loop(HERE))
    assert "--every N" in case.fix("host.python_on_critical_path").reason
    assert "operators on whole tensors" in case.fix("host.per_item_loop").reason
    assert "start the command with" in case.fix("memory.page_faults", (("host.allocator", "keep"),)).reason


def test_what_would_meet_another_kind_of_value_is_left_to_a_person(here: Path) -> None:
    """Gradients that are None, bfloat16, which NumPy does not know, and float32 where something else stays float64."""
    for more, reason in (("y = y.double()", "at 2 places"), ("y = numpy.ones(3)", "arrays of NumPy")):
        case = Case(here, f"import numpy\nnet = net.double()  # here\n{more}\n")
        assert reason in case.fix("compute.double_precision").reason
    source = loop("optimizer.zero_grad(set_to_none=False)  # here\n        seen(p.grad, loss.numpy())")
    case = Case(here, source)
    assert "reads .grad, which may be None" in case.fix(knobs=(("zero_grad.set_to_none", "true"),)).reason
    assert "to NumPy, which knows no bf16" in case.fix(knobs=(("amp.dtype", "bf16"),)).reason


def test_an_argument_is_given_to_no_other_class_than_takes_it(here: Path) -> None:
    """The recorder names the line of fastai's Learner, and DataLoaders take the number of workers."""
    case = Case(here, "from fastai.learner import Learner\nlearn = Learner(dls, net)  # here\n")
    assert "no call of DataLoaders" in case.fix(knobs=LOADER, framework="fastai", what="Learner").reason


def test_that_a_list_gets_shorter_is_said(here: Path) -> None:
    fix = Case(here, loop("seen.append(f(x))  # here", before="seen = []")).fix("host.logging", fix="log every N steps")
    assert "`seen` then gets fewer entries" in fix.notes


def test_no_name_of_a_recording_is_written_into_a_source(here: Path) -> None:
    case = Case(here, loop("pass  # here"))
    assert "was not recorded" in case.fix(knobs=(("amp.dtype", "bf16"),), device='cpu"); import os; ("').reason


def test_rarer_the_more_it_costs(here: Path) -> None:
    made = Case(here, loop(HERE)).fix("host.logging", fix="log every N steps only", share=0.9).changes[0].new
    assert b"% 500 == 0" in made
    about: dict[str, Any] = {"rule": "host.logging", "fix": "log every N steps only", "share": 0.9}
    assert b"% 100 == 0" in Case(here, loop(HERE)).fix(**about, steps=300).changes[0].new
    assert "has 60 steps only" in Case(here, loop(HERE)).fix(**about, steps=60).reason


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbffrom torch.utils.data import DataLoader\r\nloader = DataLoader(data)  # here\r\n\r\n",
        b"# coding: latin-1\nfrom torch.utils.data import DataLoader\nname = '\xe9'\nloader = DataLoader(data)  # here",
    ],
    ids=["mark and carriage returns", "another encoding, no last line end"],
)
def test_bytes_stay(data: bytes, here: Path) -> None:
    case = Case(here, data)
    fix = case.fix(knobs=LOADER, what="DataLoader")
    assert fix.changes[0].new == data.replace(b"(data)", f"(data, {WORKERS})".encode())
    _applies_once(case, fix, lambda: case.fix(knobs=LOADER, what="DataLoader"))


@pytest.mark.parametrize("name", ['my "code"/träin it.py', "code/train it.py"])
@pytest.mark.parametrize("tool", ["git apply", "patch -s -p1"])
def test_the_difference_is_taken_whatever_the_name(
    name: str, tool: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By git from any folder of its own, by patch from its root."""
    subprocess.run(["git", "init", "-q", str(here)], check=True)
    case = Case(here, loader_case("DataLoader(data)"), name)
    monkeypatch.chdir(case.path.parent)
    fix = case.fix(knobs=LOADER, what="DataLoader")
    folder = case.path.parent if tool.startswith("git") else here
    subprocess.run(tool.split(), input=fix.changes[0].difference, cwd=folder, check=True)
    assert case.path.read_bytes() == fix.changes[0].new


def test_written_whole_with_its_mode_and_only_what_ran(here: Path) -> None:
    case = Case(here, loader_case("DataLoader(data)"))
    case.path.chmod(0o751)
    fix = case.fix(knobs=LOADER, what="DataLoader")
    case.path.write_bytes(case.data + b"\n")
    with pytest.raises(StepscopeError, match="just been changed"):
        apply(fix)
    assert "was changed since it was recorded" in case.fix(knobs=LOADER, what="DataLoader").reason
    case.path.write_bytes(case.data)
    assert apply(fix) == [str(case.path)]
    assert case.path.read_bytes() == fix.changes[0].new
    assert case.path.stat().st_mode & 0o777 == 0o751
    assert [path.name for path in here.iterdir()] == ["train.py"]
    assert case.fix(knobs=LOADER, what="DataLoader").done
    case.path.write_bytes(case.data)
    case.hashes = {}
    with pytest.raises(StepscopeError, match="not kept as a hash"):
        apply(case.fix(knobs=LOADER, what="DataLoader"))


def test_a_run_names_no_file_of_others(here: Path) -> None:
    source = loader_case("DataLoader(data)")
    outside = Case(here.parent, source)
    assert "none of your folders" in outside.fix(knobs=LOADER, what="DataLoader").reason
    link = Case(here, source, "link.py")
    link.path.unlink()
    link.path.symlink_to(outside.path)
    assert "none of your folders" in link.fix(knobs=LOADER, what="DataLoader").reason
    installed = Case(here, source, "lib/site-packages/pkg/train.py")
    assert "an installed package" in installed.fix(knobs=LOADER, what="DataLoader").reason
    (here / "env").mkdir()
    (here / "env/pyvenv.cfg").touch()
    assert "an installed package" in Case(here, source, "env/train.py").fix(knobs=LOADER, what="DataLoader").reason
    assert "no Python source" in Case(here, source, "train.sh").fix(knobs=LOADER, what="DataLoader").reason
