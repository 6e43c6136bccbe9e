"""What to write into a script for each change, in plain PyTorch and in the words of the framework that runs its loop.

One table for both readers: findings say it in their fix, an experiment beside a knob that won. A change is a knob's
name, or one that no knob turns (`batch_size`). Where a framework has no setting of its own the plain one holds: a
Lightning user's DataLoader is a DataLoader. Names were read in transformers 5.23, accelerate 1.15, lightning 2.6,
fastai 2.8, skorch 1.4, ignite 0.5, keras 3.15, and the sources of Composer, DeepSpeed and Ultralytics.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose.rule import shown
from stepscope.model import Analysis, Finding, Place, Risk, Settings

Told = TypeVar("Told", Finding, Risk)

TRUE = ("true", "1", "yes", "on")
FALSE = ("false", "0", "no", "off", "none")
LOADER = "loader."
FREE = "N"  # a value that the user has to choose


class Edit(Struct, frozen=True):
    """What one change comes to. `call` is written with `argument` where changes share a call, else `text` says all."""

    text: Callable[[str], str]
    call: str | None = None
    argument: Callable[[str], str] | None = None  # "num_workers=2" of a value


def literal(value: str) -> str:
    """`value` as Python writes it."""
    text = value.strip()
    if text == FREE:
        return text
    if text.lower() in TRUE[:1]:
        return "True"
    if text.lower() in FALSE[:1]:
        return "False"
    try:
        return str(int(text))
    except ValueError:
        return repr(text)


def _of_call(call: str, argument: str) -> Edit:
    return _written(call, lambda value: f"{argument}={literal(value)}")


def _by_value(call: str, values: Mapping[str, str]) -> Edit:
    """An edit of which each value is written in its own way."""
    return _written(call, lambda value: values[value.lower()])


def _written(call: str, argument: Callable[[str], str]) -> Edit:
    return Edit(lambda value: f"{call}(..., {argument(value)})", call, argument)


def _statement(template: str) -> Edit:
    return Edit(lambda value: template.format(literal(value)))


def _autocast(value: str) -> str:
    kind = {"bf16": "bfloat16", "fp16": "float16"}.get(value)
    if kind is None:
        return "no torch.autocast around the forward pass and the loss"
    text = f"with torch.autocast(DEVICE, dtype=torch.{kind}): around the forward pass and the loss, not around backward"
    return text + ("; scale the loss with torch.amp.GradScaler" if kind == "float16" else "")


def _compile(value: str) -> str:
    if value.lower() in FALSE:
        return "no torch.compile"
    mode = "" if value.lower() in TRUE or value == "default" else f", mode={value!r}"
    return f"model = torch.compile(model{mode}), once the model is on its device"


def _compile_arguments(switch: str, mode: str) -> Callable[[str], str]:
    def written(value: str) -> str:
        if value.lower() in (*TRUE, *FALSE, "default"):
            return f"{switch}={value.lower() not in FALSE}"
        return f"{switch}=True, {mode}={value!r}"

    return written


def _keras_policy(value: str) -> str:
    policy = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}.get(value, "float32")
    return f"keras.mixed_precision.set_dtype_policy({policy!r}), before the model is made"


def _collector(value: str) -> str:
    if value == "freeze":
        return "gc.collect(); gc.freeze() after the first steps"
    if value == "off":
        return "gc.disable() before the loop, and gc.collect() at the end of each epoch"
    return f"gc.set_threshold({value})"


def _taskset(value: str) -> str:
    return f"start the command with: taskset -c {shlex.quote(value)} ..."


def _workers_affinity(value: str) -> str:
    return f"DataLoader(..., worker_init_fn=...) that calls os.sched_setaffinity(0, ...) with processors {value}"


def _allocator(value: str) -> str:
    return f"start the command with PYTORCH_CUDA_ALLOC_CONF={shlex.quote(value)} in its environment"


def _host_allocator(value: str) -> str:
    trim = "MALLOC_TRIM_THRESHOLD_=4294967296"
    variables = {
        "keep": f"MALLOC_MMAP_THRESHOLD_=33554432 {trim}",
        "keep_all": f"MALLOC_MMAP_MAX_=0 {trim}",
        "huge_pages": "THP_MEM_ALLOC_ENABLE=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1",
    }.get(value, f"LD_PRELOAD=PATH/lib{value}.so")
    return f"start the command with {variables} in its environment"


# Of plain PyTorch: every knob of the table, and no other change.
EDITS: Mapping[str, Edit] = {
    **{
        f"{LOADER}{name}": _of_call("DataLoader", name)
        for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
    },
    **{f"optimizer.{name}": _of_call("torch.optim....", name) for name in ("fused", "foreach")},
    "zero_grad.set_to_none": _of_call("optimizer.zero_grad", "set_to_none"),
    "torch.num_threads": _statement("torch.set_num_threads({}), before the training loop"),
    "torch.num_interop_threads": _statement("torch.set_num_interop_threads({}), before any operator runs"),
    "cpu.affinity": Edit(_taskset),
    "cpu.worker_affinity": Edit(_workers_affinity),
    "amp.dtype": Edit(_autocast),
    "matmul_precision": _statement("torch.set_float32_matmul_precision({}), before the model is made"),
    "memory_format": Edit(
        lambda value: f"model = model.to(memory_format=torch.{value}), and the same for every batch of images"
    ),
    "compile": Edit(_compile),
    "compile.mode": _of_call("torch.compile", "mode"),
    "compile.dynamic": _of_call("torch.compile", "dynamic"),
    "cudnn.benchmark": _statement("torch.backends.cudnn.benchmark = {}"),
    "cudnn.allow_tf32": _statement("torch.backends.cudnn.allow_tf32 = {}"),
    "cuda.linalg_library": _statement("torch.backends.cuda.preferred_linalg_library({})"),
    "gc": Edit(_collector),
    "allocator.conf": Edit(_allocator),
    "host.allocator": Edit(_host_allocator),
}

_HF, _LIT, _NET = "TrainingArguments", "Trainer", "NeuralNet"
_LIGHTNING = {"bf16": "precision='bf16-mixed'", "fp16": "precision='16-mixed'", "off": "precision='32-true'"}

# Of frameworks, by the names of `analyze.sites.FRAMEWORKS`, where they have a setting of their own.
IN_FRAMEWORK: Mapping[str, Mapping[str, Edit]] = {
    "transformers": {  # TRL's configurations inherit all of it
        **{
            f"{LOADER}{name}": _of_call(_HF, f"dataloader_{name}")
            for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
        },
        "amp.dtype": _by_value(_HF, {"bf16": "bf16=True", "fp16": "fp16=True", "off": "bf16=False, fp16=False"}),
        "matmul_precision": _written(_HF, lambda value: f"tf32={value != 'highest'}"),
        "cudnn.allow_tf32": _of_call(_HF, "tf32"),
        "compile": _written(_HF, _compile_arguments("torch_compile", "torch_compile_mode")),
        "compile.mode": _of_call(_HF, "torch_compile_mode"),
        "optimizer.fused": _written(
            _HF, lambda value: f"optim={'adamw_torch' if value.lower() in FALSE else 'adamw_torch_fused'!r}"
        ),
        "batch_size": _of_call(_HF, "per_device_train_batch_size"),
        "accumulation": _of_call(_HF, "gradient_accumulation_steps"),
        "checkpointing": _of_call(_HF, "gradient_checkpointing"),
        "saving.every": _of_call(_HF, "save_steps"),
    },
    "accelerate": {
        "amp.dtype": _by_value(
            "Accelerator",
            {"bf16": "mixed_precision='bf16'", "fp16": "mixed_precision='fp16'", "off": "mixed_precision='no'"},
        ),
        "compile": _written(
            "Accelerator", lambda value: f"dynamo_backend={'no' if value.lower() in FALSE else 'inductor'!r}"
        ),
        "accumulation": _of_call("Accelerator", "gradient_accumulation_steps"),
    },
    "lightning": {
        "amp.dtype": _by_value(_LIT, _LIGHTNING),
        "cudnn.benchmark": _of_call(_LIT, "benchmark"),
        "accumulation": _of_call(_LIT, "accumulate_grad_batches"),
        "saving.every": _of_call("ModelCheckpoint", "every_n_train_steps"),
        **{
            f"optimizer.{name}": _of_call("in configure_optimizers: torch.optim....", name)
            for name in ("fused", "foreach")
        },
    },
    "fabric": {"amp.dtype": _by_value("Fabric", _LIGHTNING)},
    "fastai": {
        **{
            f"{LOADER}{name}": _of_call("DataLoaders", name)
            for name in ("num_workers", "pin_memory", "persistent_workers")
        },
        "amp.dtype": Edit(
            lambda value: {"bf16": "learn.to_bf16()", "fp16": "learn.to_fp16()"}.get(value, "learn.to_fp32()")
        ),
        "memory_format": Edit(lambda value: "learn.to_channelslast()" if value == "channels_last" else "no change"),
        "batch_size": _of_call("DataLoaders", "bs"),
        "accumulation": Edit(lambda value: f"Learner(..., cbs=GradientAccumulation(n_acc={value}))"),
    },
    "skorch": {
        **{
            f"{LOADER}{name}": _of_call(_NET, f"iterator_train__{name}")
            for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
        },
        **{f"optimizer.{name}": _of_call(_NET, f"optimizer__{name}") for name in ("fused", "foreach")},
        "compile": _written(_NET, _compile_arguments("compile", "compile__mode")),
        "compile.mode": _of_call(_NET, "compile__mode"),
        "compile.dynamic": _of_call(_NET, "compile__dynamic"),
        "batch_size": _of_call(_NET, "batch_size"),
    },
    "ignite": {
        "accumulation": _of_call("create_supervised_trainer", "gradient_accumulation_steps"),
    },
    "keras": {
        "amp.dtype": Edit(_keras_policy),
        "compile": _written("model.compile", lambda value: f"jit_compile={value.lower() not in FALSE}"),
        "batch_size": _of_call("model.fit", "batch_size"),
    },
    "composer": {
        "amp.dtype": _by_value(
            _LIT, {"bf16": "precision='amp_bf16'", "fp16": "precision='amp_fp16'", "off": "precision='fp32'"}
        ),
        "compile": _written(
            _LIT,
            lambda value: (
                "compile_config=" + ("{}" if value.lower() in (*TRUE, "default") else f"{{'mode': {value!r}}}")
            ),
        ),
        "compile.mode": _written(_LIT, lambda value: f"compile_config={{'mode': {value!r}}}"),
        "accumulation": Edit(lambda _value: "Trainer(..., device_train_microbatch_size=N), smaller than the batch"),
        "saving.every": Edit(lambda value: f"Trainer(..., save_interval='{value}ba')"),
    },
    "deepspeed": {
        "amp.dtype": Edit(
            lambda value: (
                "in DeepSpeed's configuration: "
                + (f'"{value}": {{"enabled": true}}' if value in ("bf16", "fp16") else 'no "bf16" and no "fp16"')
            )
        ),
        "batch_size": Edit(lambda value: f'in DeepSpeed\'s configuration: "train_micro_batch_size_per_gpu": {value}'),
        "accumulation": Edit(lambda value: f'in DeepSpeed\'s configuration: "gradient_accumulation_steps": {value}'),
    },
    "ultralytics": {
        f"{LOADER}num_workers": _of_call("model.train", "workers"),
        "amp.dtype": _written("model.train", lambda value: f"amp={value.lower() not in FALSE}"),
        "compile": _of_call("model.train", "compile"),
        "compile.mode": _of_call("model.train", "compile"),
        "batch_size": _of_call("model.train", "batch"),
        "saving.every": Edit(lambda value: f"model.train(..., save_period={value}), in epochs"),
    },
}
# Builds its loaders so that it has no such setting: nothing is said of it.
UNSETTABLE: Mapping[str, frozenset[str]] = {
    "fastai": frozenset(["loader.prefetch_factor"]),
    "ultralytics": frozenset(["loader.prefetch_factor", "loader.pin_memory", "loader.persistent_workers"]),
}
TITLES = {
    "transformers": "Hugging Face Trainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "fabric": "Fabric",
    "fastai": "fastai",
    "skorch": "skorch",
    "ignite": "Ignite",
    "keras": "Keras",
    "composer": "Composer",
    "deepspeed": "DeepSpeed",
    "ultralytics": "Ultralytics",
}
# Changes that findings of these rules propose and that no knob turns.
_LESS_MEMORY = (("batch_size", FREE), ("accumulation", FREE), ("checkpointing", "true"))
_MORE: Mapping[str, tuple[tuple[str, str], ...]] = {
    "compute.small_batch": (("batch_size", FREE),),
    "compute.recompute": (("checkpointing", "false"),),
    "memory.allocator_retries": _LESS_MEMORY,
    "memory.near_limit": _LESS_MEMORY,
}
_SAVES = "io.blocking_in_step"


def edit_of(change: str, settings: Settings | None) -> tuple[Edit | None, bool]:
    """(how a change is written, whether that is a setting of the framework); None where it cannot be written."""
    framework = settings.framework if settings is not None else None
    if settings is not None and change.startswith(LOADER) and not settings.loaders:
        framework = None  # the user's own DataLoader
    if framework is None:
        return EDITS.get(change), False
    if change in UNSETTABLE.get(framework, ()):
        return None, True
    own = IN_FRAMEWORK.get(framework, {}).get(change)
    return (own, True) if own is not None else (EDITS.get(change), False)


def of_loader(site: Place | None, settings: Settings | None, **values: object) -> str:
    """Arguments of the loader and where they stand: "num_workers=2 in the DataLoader at train.py:77"."""
    arguments, call = [], "DataLoader"
    for name, value in values.items():
        edit, own = edit_of(LOADER + name, settings)
        if edit is not None and edit.argument is not None:
            arguments.append(edit.argument(str(value)))
            call = f"{edit.call}(...)" if own else "DataLoader"
    return f"{', '.join(arguments)} in {'the ' if call == 'DataLoader' else ''}{call}{_at(site)}"


def in_framework(finding: Told, analysis: Analysis) -> Told:
    """The finding or risk with its fix in the framework's words first, where it has a setting for what is tried."""
    settings = analysis.settings
    if settings is None or finding.category == "input":  # the loader's rules speak by `of_loader`
        return finding
    calls: dict[str, list[str]] = {}
    alone: list[str] = []
    for change, value in _proposed(finding):
        edit, own = edit_of(change, settings)
        if edit is None or not own:
            continue
        if edit.call is not None and edit.argument is not None:
            calls.setdefault(edit.call, []).append(edit.argument(value))
        else:
            alone.append(edit.text(value))
    told = [f"{call}(..., {', '.join(dict.fromkeys(arguments))})" for call, arguments in calls.items()] + alone
    if not told:
        return finding
    text = f"With {TITLES[settings.framework]}: {' and '.join(told)}{_at(settings.place)}. In plain PyTorch: "
    return replace(finding, fix=text + finding.fix)


def _proposed(finding: Finding | Risk) -> list[tuple[str, str]]:
    """(change, value) of its knobs, and of what no knob turns."""
    saves = finding.rule == _SAVES and "save" in finding.title
    more = (("saving.every", FREE),) if saves else _MORE.get(finding.rule, ())
    return [*((each.knob, each.value) for each in finding.try_), *more]


def _at(place: Place | None) -> str:
    return f" at {shown(place)}" if place is not None else ""
