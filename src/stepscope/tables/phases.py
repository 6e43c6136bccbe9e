"""What one frame of a sampled stack says of its thread: the phase it opens, whether it waits, imports or compiles.

Functions are matched by the last part of their name and the end of their file, as samplers write qualified names or
bare ones and full or shortened paths. Frames that compiled code passes through on every call are no marks of compiling.
"""

from __future__ import annotations

from stepscope.read.raw import Frame

DATA_WAIT, FORWARD, BACKWARD = "data_wait", "forward", "backward"
OPTIMIZER, OTHER, STARTUP = "optimizer", "other", "startup"

# (last part of the function's name, end of the file) -> phase
_MARKS: dict[str, tuple[tuple[str, str], ...]] = {
    "__next__": (("torch/utils/data/dataloader.py", DATA_WAIT),),
    "backward": (("torch/_tensor.py", BACKWARD), ("torch/autograd/__init__.py", BACKWARD)),
    "wrapper": (("torch/optim/optimizer.py", OPTIMIZER),),
    "_call_impl": (("torch/nn/modules/module.py", FORWARD),),
    "_wrapped_call_impl": (("torch/nn/modules/module.py", FORWARD),),
}
_OPTIMIZERS = "torch/optim/"
_SCHEDULERS = "lr_scheduler.py"

# Leaf frames in which a thread waits for something, whatever the sampler calls idle.
_WAITS: dict[str, tuple[str, ...]] = {
    "wait": ("threading.py", "multiprocessing/connection.py", "multiprocessing/synchronize.py", "asyncio/locks.py"),
    "select": ("selectors.py",),
    "poll": (
        "multiprocessing/connection.py",
        "multiprocessing/popen_fork.py",
        "multiprocessing/popen_forkserver.py",
        "multiprocessing/popen_spawn_posix.py",
    ),
    "_poll": ("multiprocessing/connection.py",),
    "accept": ("socket.py", "multiprocessing/connection.py"),
    "_recv": ("multiprocessing/connection.py",),
    "_wait_for_tstate_lock": ("threading.py",),
    "join": ("threading.py",),
    "get": ("queue.py", "multiprocessing/queues.py"),
    "put": ("queue.py", "multiprocessing/queues.py"),
    "_worker": ("concurrent/futures/thread.py",),
    "_try_wait": ("subprocess.py",),
    "result": ("concurrent/futures/_base.py",),
    "synchronize": ("torch/cuda/__init__.py", "torch/cuda/streams.py"),
}
# With a device, backward waits here for the engine's own threads.
_DEVICE_WAITS: dict[str, tuple[str, ...]] = {"_engine_run_backward": ("torch/autograd/graph.py",)}


def last_part(function: str) -> str:
    """`Optimizer.profile_hook_step.<locals>.wrapper` → `wrapper`."""
    return function.rpartition(".")[2] or function


def in_file(file: str, ending: str) -> bool:
    """Whether `file` is `ending` or ends in it at a path boundary."""
    file = file.replace("\\", "/")
    return file.endswith(ending) and (len(file) == len(ending) or file[-len(ending) - 1] == "/")


def phase_mark(frame: Frame) -> str | None:
    """The phase that this frame opens, None where it opens none."""
    name = last_part(frame.function)
    for ending, phase in _MARKS.get(name, ()):
        if in_file(frame.file, ending):
            return phase
    if name == "step" and _OPTIMIZERS in frame.file and not frame.file.endswith(_SCHEDULERS):
        return OPTIMIZER
    return None


def imports(frame: Frame) -> bool:
    return "importlib._bootstrap" in frame.file


def is_wait(leaf: Frame, *, on_device: bool) -> bool:
    """Whether a thread whose innermost frame this is waits; `on_device` when the process trains on a GPU."""
    name = last_part(leaf.function)
    endings = _WAITS.get(name, ())
    if on_device:
        endings += _DEVICE_WAITS.get(name, ())
    return any(in_file(leaf.file, ending) for ending in endings)


IMPORT, COMPILE = "import", "compile"

_MODULE = "<module>"  # of a compiler's file: it is being imported
# Files of compilers, and the functions of them that are marks, by the last part of their name; without any, all are.
_COMPILER_FUNCTIONS = """
    # torch.compile: tracing, and the way from there into a backend, of the backward pass at its first run too
    torch/_dynamo/convert_frame.py
    torch/_dynamo/symbolic_convert.py
    torch/_dynamo/output_graph.py
    torch/_dynamo/bytecode_transformation.py
    torch/_dynamo/backends/common.py
    torch/_dynamo/compiled_autograd.py begin_capture end_capture
    torch/_functorch/aot_autograd.py aot_module_simplified create_aot_dispatcher_function
    torch/_functorch/aot_autograd.py _create_aot_dispatcher_function aot_export_module aot_export_joint_simple
    torch/_functorch/_aot_autograd/graph_compile.py
    torch/_functorch/_aot_autograd/jit_compile_runtime_wrappers.py aot_dispatch_base aot_dispatch_autograd
    torch/_functorch/_aot_autograd/jit_compile_runtime_wrappers.py aot_dispatch_export
    torch/_functorch/_aot_autograd/runtime_wrappers.py get_or_compile
    # inductor; `run` and the copies of misaligned inputs in compile_fx.py belong to every call
    torch/_inductor/compile_fx.py compile_fx _compile_fx_main _maybe_wrap_and_compile_fx_main compile_fx_inner
    torch/_inductor/compile_fx.py _compile_fx_inner compile_fx_aot compile_fx_forward compile_fx_backward
    torch/_inductor/compile_fx.py fx_codegen_and_compile codegen_and_compile fw_compiler fw_compiler_base
    torch/_inductor/compile_fx.py bw_compiler fw_compiler_freezing
    torch/_inductor/graph.py
    torch/_inductor/scheduler.py
    torch/_inductor/async_compile.py wait cpp cpp_pybinding triton
    torch/_inductor/cpp_builder.py
    torch/_inductor/runtime/compile_tasks.py
    torch/_inductor/runtime/triton_heuristics.py precompile _precompile_worker _precompile_config _make_launchers
    torch/_inductor/runtime/triton_heuristics.py autotune_to_one_config benchmark_all_configs
    torch/_inductor/runtime/triton_heuristics.py coordinate_descent_tuning
    # triton
    triton/compiler/code_generator.py
    triton/compiler/compiler.py compile make_ir _init_handles
    triton/runtime/jit.py _do_compile
    triton/runtime/autotuner.py _bench benchmark
    triton/runtime/build.py _build
    triton/backends/nvidia/compiler.py
    triton/backends/amd/compiler.py
    # XLA
    torch_xla/core/dynamo_bridge.py extract_compiled_graph extract_internal extract_graph_helper
    jax/_src/compiler.py compile_or_get_cached backend_compile backend_compile_and_load
    # TorchScript, extensions in C++, numba
    torch/jit/frontend.py
    torch/jit/_recursive.py create_script_module create_script_module_impl compile_unbound_method try_compile_fn
    torch/jit/_recursive.py create_methods_and_properties_from_stubs
    torch/utils/cpp_extension.py load load_inline _jit_compile _write_ninja_file_and_build_library
    numba/core/dispatcher.py compile _compile_for_args
    numba/core/compiler.py compile_extra compile_ir
"""
# last part of the file's name -> ends of files with their functions
_COMPILERS: dict[str, list[tuple[str, list[str]]]] = {}
for _file, *_functions in (line.split() for line in _COMPILER_FUNCTIONS.splitlines() if ".py" in line.split("#")[0]):
    _COMPILERS.setdefault(_file.rpartition("/")[2], []).append((_file, _functions))


def compiles(frame: Frame) -> bool:
    file, name = frame.file.replace("\\", "/"), last_part(frame.function)
    known = _COMPILERS.get(file.rpartition("/")[2], ()) if name != _MODULE else ()
    return any(in_file(file, ending) and (not functions or name in functions) for ending, functions in known)
