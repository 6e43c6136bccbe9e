"""Which frames tell that a thread imports or compiles, and which only look like it."""

from __future__ import annotations

import pytest

from stepscope.read.raw import Frame
from stepscope.tables.phases import compiles

# Sampled with py-spy while torch 2.13 compiled a model (inductor and aot_eager), and while the compiled model trained.
COMPILING = [
    ("ConvertFrame.__call__", "torch/_dynamo/convert_frame.py"),
    ("_compile.<locals>.compile_inner", "torch/_dynamo/convert_frame.py"),
    ("InstructionTranslatorBase.step", "torch/_dynamo/symbolic_convert.py"),
    ("OutputGraph.call_user_compiler", "/opt/venv/lib/python3.11/site-packages/torch/_dynamo/output_graph.py"),
    ("aot_module_simplified", "torch/_functorch/aot_autograd.py"),
    ("_AutogradBackwardCompiler.get_or_compile", "torch/_functorch/_aot_autograd/runtime_wrappers.py"),
    ("_compile_fx_main.<locals>.fw_compiler_base", "torch/_inductor/compile_fx.py"),
    ("compile_fx_inner", "C:\\venv\\Lib\\site-packages\\torch\\_inductor\\compile_fx.py"),
    ("Scheduler.codegen", "torch/_inductor/scheduler.py"),
    ("CachingAutotuner.precompile", "torch/_inductor/runtime/triton_heuristics.py"),
    ("ASTSource.make_ir", "triton/compiler/compiler.py"),
    ("_jit_compile", "torch/utils/cpp_extension.py"),
]
RUNNING = [
    ("_TorchDynamoContext.__call__.<locals>.compile_wrapper", "torch/_dynamo/eval_frame.py"),
    ("DisableContext.__call__.<locals>._fn", "torch/_dynamo/eval_frame.py"),
    ("GuardBuilder.AUTOGRAD_SAVED_TENSORS_HOOKS.<locals>.fn", "torch/_dynamo/guards.py"),
    ("aot_module_simplified.<locals>.forward", "torch/_functorch/aot_autograd.py"),
    ("_create_runtime_wrapper.<locals>.runtime_wrapper", "torch/_functorch/_aot_autograd/runtime_wrappers.py"),
    ("CompiledFunction.backward", "torch/_functorch/_aot_autograd/jit_compile_runtime_wrappers.py"),
    ("CompiledFxGraph.__call__", "torch/_inductor/output_code.py"),
    ("cudagraphify.<locals>.run", "torch/_inductor/compile_fx.py"),
    ("CachingAutotuner.run", "torch/_inductor/runtime/triton_heuristics.py"),
    ("JITFunction.run", "triton/runtime/jit.py"),
    ("CompiledKernel.launch_metadata", "triton/compiler/compiler.py"),
    ("Runner.call", "cbjasnbqreg52zebzcuno7peivyieghymsuwo2ihwkmi74mdgv54.py"),
    ("boxed_nop.<locals>.run", "torch/_dynamo/backends/debugging.py"),
    ("compile", "myproject/compiler.py"),
    ("step", "mytorch/_dynamo/symbolic_convert.pyc"),
    ("__call__", "nottorch/_dynamo/convert_frame.py"),
    ("<module>", "torch/_inductor/scheduler.py"),
    ("<module>", "train.py"),
    ("", ""),
]


@pytest.mark.parametrize(
    ("function", "file", "expected"), [*((*one, True) for one in COMPILING), *((*one, False) for one in RUNNING)]
)
def test_compilers_are_told_from_what_compiled_code_passes_through(function: str, file: str, expected: bool) -> None:
    assert compiles(Frame(function, file, None)) is expected
