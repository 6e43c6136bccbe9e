"""Fixes and changes are written in the words of the framework that runs the loop."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.analyze.sites import FRAMEWORKS
from stepscope.diagnose import diagnose
from stepscope.diagnose.in_script import EDITS, edit_of
from stepscope.experiment.engine import edits
from stepscope.model import Finding, Place, Settings
from stepscope.model.comparison import AppliedKnob
from stepscope.schema import Knob
from tests.analyze.device_scenes import A100, V100, Scene, repeated
from tests.analyze.scenes import TRAIN, loader_tables
from tests.diagnose.test_device import scene
from tests.records import replace

HERE = Place(TRAIN, 12, "main")


def loader_finding(settings: Settings | None, **scene: Any) -> Finding:
    analysis = analyze(loader_tables(**scene))
    assert analysis.loader is not None
    site = settings.place if settings is not None and settings.loaders else analysis.loader.site
    analysis = replace(analysis, settings=settings, loader=replace(analysis.loader, site=site))
    return next(each for each in diagnose(analysis).findings if each.rule == "input.loader_bound")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (None, "num_workers=3, persistent_workers=True in the DataLoader at train.py:75"),
        (
            Settings("transformers", HERE, loaders=True),
            "dataloader_num_workers=3, dataloader_persistent_workers=True in TrainingArguments(...) at train.py:12",
        ),
        (
            Settings("transformers", None, loaders=True),
            "dataloader_num_workers=3, dataloader_persistent_workers=True in TrainingArguments(...);",
        ),
        (  # as TRL's configurations are
            Settings("transformers", HERE, loaders=True, called={"TrainingArguments": "SFTConfig"}),
            "dataloader_num_workers=3, dataloader_persistent_workers=True in SFTConfig(...) at train.py:12",
        ),
        (
            Settings("skorch", HERE, loaders=True),
            "iterator_train__num_workers=3, iterator_train__persistent_workers=True in NeuralNet(...) at train.py:12",
        ),
        (Settings("ultralytics", HERE, loaders=True), "processes: workers=3 in model.train(...) at train.py:12"),
        (Settings("fastai", HERE, loaders=True), "num_workers=3, persistent_workers=True in DataLoaders(...)"),
        # a framework that takes the user's loader, also one that would have made its own
        (Settings("lightning", HERE), "num_workers=3, persistent_workers=True in the DataLoader at train.py:75"),
        (Settings("transformers", HERE), "num_workers=3, persistent_workers=True in the DataLoader at train.py:75"),
    ],
)
def test_the_loaders_arguments_are_those_of_who_makes_it(settings: Settings | None, words: str) -> None:
    assert words in loader_finding(settings).fix


def test_the_line_that_runs_the_trainer_is_not_where_a_knob_is_written() -> None:
    ran = [AppliedKnob("loader.num_workers", "2", True, file="/p/train.py", line=99)]
    knobs = [Knob("loader.num_workers", "2"), Knob("loader.persistent_workers", "true")]
    own = edits(knobs, ran, cwd="/p", settings=Settings("transformers", None, loaders=True))
    assert own == ("TrainingArguments(..., dataloader_num_workers=2, dataloader_persistent_workers=True)",)
    users = edits(knobs[:1], ran, cwd="/p", settings=Settings("transformers", Place("/p/train.py", 5)))
    assert users == ("train.py:99: DataLoader(..., num_workers=2)",)


def test_what_a_framework_cannot_be_told_is_said() -> None:
    (found,) = edits([Knob("loader.prefetch_factor", "4")], settings=Settings("ultralytics", None, loaders=True))
    assert "no setting" in found


def test_a_finding_says_the_frameworks_setting_before_the_plain_one() -> None:
    analysis = analyze(scene("compute.no_tensor_cores").tables(A100))
    told = {}
    for settings in (None, Settings("transformers", HERE), Settings("lightning", HERE), Settings("ignite", HERE)):
        found = diagnose(replace(analysis, settings=settings)).findings
        name = settings.framework if settings is not None else "plain"
        told[name] = next(each.fix for each in found if each.rule == "compute.no_tensor_cores")
    words = "With Hugging Face Trainer: TrainingArguments(..., tf32=True, bf16=True) at train.py:12. In plain PyTorch: "
    assert told["transformers"] == words + told["plain"]
    assert told["lightning"].startswith("With Lightning: Trainer(..., precision='bf16-mixed') at train.py:12. In plain")
    assert told["ignite"] == told["plain"]  # it has no such setting, and none is made up


@pytest.mark.parametrize("call", ["aten::is_nonzero", "aten::item"])
def test_a_loss_that_is_read_back_to_decide_a_branch_is_the_trainers_filter(call: str) -> None:
    def reads(scene: Scene) -> None:
        scene.kernel("gemm", 10, 200)
        outer = scene.op(call, 20, 195)
        copy = scene.call("cudaMemcpyAsync", 25, 186, outer)
        scene.work("Memcpy DtoH (Device -> Pageable)", 210, 2, launch=copy, op=outer, category="gpu_memcpy", bytes=1)
        scene.call("cudaStreamSynchronize", 212, 3, outer)
        scene.kernel("gemm", 315, 85)

    analysis = replace(analyze(repeated(6, 400, reads).tables(V100)), settings=Settings("transformers", HERE))
    (found,) = (each for each in diagnose(analysis).findings if each.rule == "sync.host_waits")
    told = "With Hugging Face Trainer: TrainingArguments(..., logging_nan_inf_filter=False) at train.py:12. "
    assert found.fix.startswith(told) == (call == "aten::is_nonzero")


def test_every_framework_has_a_title_and_words_that_every_value_of_a_knob_takes() -> None:
    assert set(FRAMEWORKS) == set(EDITS.frameworks)
    values = {"amp.dtype": ("bf16", "fp16", "off"), "compile": ("true", "false", "reduce-overhead")}
    for framework, words in EDITS.frameworks.items():
        for change in words.edits:
            for value in values.get(change, ("true", "false")):
                edit, own = edit_of(change, Settings(framework, None, loaders=True))
                assert own
                assert edit is not None
                assert edit.text(value)


# Where each framework takes the arguments: what is to be called, and whether it passes others on.
TAKEN = {
    ("transformers", "TrainingArguments"): "transformers.training_args:TrainingArguments",
    ("accelerate", "Accelerator"): "accelerate:Accelerator",
    ("lightning", "Trainer"): "lightning:Trainer",
    ("lightning", "ModelCheckpoint"): "lightning.pytorch.callbacks:ModelCheckpoint",
    ("fabric", "Fabric"): "lightning:Fabric",
    ("ignite", "create_supervised_trainer"): "ignite.engine:create_supervised_trainer",
    ("keras", "model.compile"): "keras:Model.compile",
    ("keras", "model.fit"): "keras:Model.fit",
}


@pytest.mark.parametrize(("framework", "call"), TAKEN)
def test_an_installed_framework_takes_the_arguments(framework: str, call: str) -> None:
    module, _, path = TAKEN[framework, call].partition(":")
    taker: Any = pytest.importorskip(module.partition(".")[0]) and import_module(module)
    for name in path.split("."):
        taker = getattr(taker, name)
    known = set(inspect.signature(taker).parameters)
    values = {"amp.dtype": "bf16", "memory_format": "channels_last"}
    for change, edit in EDITS.frameworks[framework].edits.items():
        if edit.call == call:
            names = {part.partition("=")[0] for part in edit.argument(values.get(change, "1")).split(", ")}
            assert names <= known, change
