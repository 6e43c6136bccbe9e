"""What the training thread of a trace was doing, and when: waiting for data, synchronising, compiling, and so on.

The training thread is the one whose steps the trace marks, else the one with most operators. While it runs the backward
pass, threads of autograd work for it, so what these do counts as its own. Activities overlap (a synchronisation below
a compilation); which of them a moment counts for is decided by the order in which a partition asks for them.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from stepscope.engine import intervals, slice_tree
from stepscope.engine.collective_names import is_collective_call
from stepscope.engine.device_work import COPY, Work
from stepscope.engine.intervals import Intervals
from stepscope.engine.spans import Span, matches
from stepscope.tables import categories
from stepscope.tables.arrays import Bools, Int32, Int64

# Ranges and functions that fetch the next batch.
LOADER_RANGE = r"^enumerate\(DataLoader\)#.*\.__next__$|^enumerate\(DataPipe\)#"
_LOADER_FUNCTION = r"(^|/)torch/utils/data/dataloader\.py\(\d+\): __next__$|(^|/)torchdata/.*\.py\(\d+\): __next__$"
# Calls of a runtime or driver (CUDA and HIP) that return when the device is done, and those that get or give memory.
_SYNC = r"^(cuda|cu|hip)((Device|Ctx|Stream|Event)Synchronize|Memcpy(\w*)$)"
_ASYNC = r"(?i)async"
_ITEM = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
_ALLOCATOR = (
    r"^(cuda|cu|hip)(Ext)?(Malloc|Free|Host(Alloc|Register|Unregister|Malloc|Free)|MemPool"
    r"|Mem(Alloc|HostAlloc|Free|Create|Map|Unmap|Release|Address|SetAccess))"
)
# Building code. Of torch.compile only what compiles: its wrappers around code that is ready run in every step.
_COMPILE_CALL = r"^(cuda|cu|hip)(Module(Load|GetFunction)|Library(Load|GetKernel)|Link)|^(nvrtc|hiprtc)"
_COMPILE_RANGE = r"\(dynamo_timed\)$|^CachingAutotuner\.(benchmark|coordinate)|^Inductor compile"
_COMPILE_FUNCTION = (
    r"(^|/)torch/_dynamo/(convert_frame|symbolic_convert|output_graph)\.py\("
    r"|(^|/)torch/_inductor/compile_fx\.py\(\d+\): (_?compile_fx|_?fx_codegen|[fb]w_compiler|codegen_and_compile)"
    r"|(^|/)torch/_inductor/(async_compile|graph|scheduler|select_algorithm)\.py\("
    r"|(^|/)torch/_inductor/codecache\.py\(\d+\): (load|compile|write)"
    r"|(^|/)torch/_inductor/runtime/triton_heuristics\.py\(\d+\): (_?precompile|_make_launcher|autotune_to_one|"
    r"benchmark_all|bench$|_?coordinate_descent)"
    r"|(^|/)triton/(compiler/|runtime/build\.py|runtime/jit\.py\(\d+\): (_do_compile|compile|create_binder)"
    r"|runtime/autotuner\.py\(\d+\): (_bench|benchmark|do_bench)|testing\.py)"
    r"|(^|/)torch/utils/cpp_extension\.py\(\d+\): (load|_jit_compile|_write_ninja)"
    r"|(^|/)torch/jit/(_script|_trace)\.py\(\d+\): (script|trace)"
)
# Reading and writing files.
_IO_FUNCTION = (
    r"^<built-in (method|function) (write|writelines|flush|read|readline|readlines|readinto|close|truncate) of _io\."
    r"|^<built-in function (open|io_open|fsync|fdatasync|print|sendfile|copy_file_range|rename|replace)>"
    r"|(^|/)torch/serialization\.py\(\d+\): (save|load)$|(^|/)safetensors/torch\.py\(\d+\): (save|load)"
    r"|(^|/)(pathlib(/\w+)?|shutil|gzip|bz2|lzma|zipfile|tarfile|numpy/lib/_?npyio\w*)\.py\("
)
# Operators by kind, of a trace whose work is the host's.
OPERATOR_KINDS = {
    "convolution": r"^(aten|mkldnn|onednn|mkldnn_prepacked)::.*conv",
    "attention": r"^aten::.*(attention|scaled_dot_product)",
    "matmul": r"^(aten|mkldnn)::_?(linear|matmul|mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|einsum|tensordot|int_mm|"
    r"mkldnn_linear|mkl_linear|scaled_mm|addmm_activation)(_out|_backward|_pointwise|_)?$|^mkl::_mkl_linear$",
    "normalization": r"^aten::.*(batch_norm|layer_norm|group_norm|instance_norm|rms_norm|local_response_norm)",
    "copies": r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|pin_memory|_pin_memory|index_select|resize_)$",
    "optimizer": r"^aten::_(fused_(adam|adamw|sgd|adagrad)|foreach_)",
}
_OPTIMIZER_RANGE = r"^Optimizer\.(step|zero_grad)#"
_ENGINE = r"^autograd::engine::"
_STEP = r"^ProfilerStep#"


class HostActivity(Struct, frozen=True, dict=True):
    """Sets of times, each made when first asked for.

    `rows` are the slices of the training thread and of those that work for it.
    """

    span: Span
    rows: Int64
    own_operator: Bools  # by code of a name: what is an operator, not a range that old writers called so
    found: Work

    @cached_property
    def _codes(self) -> Int32:
        return self.span.names.codes[self.rows]

    @cached_property
    def _calls(self) -> Bools:
        return self.span.is_runtime[self.rows]

    @cached_property
    def _functions(self) -> Bools:
        return self.span.is_function[self.rows]

    @cached_property
    def _operators(self) -> Bools:
        return self.span.categories.where(categories.OPERATORS)[self.rows] & self.own_operator[self._codes]

    @cached_property
    def _ranges(self) -> Bools:
        return ~(self._calls | self._functions)

    def _named(self, pattern: str, among: Bools) -> Bools:
        """Which of the `among` rows have a name like that; each distinct name is looked at once."""
        flags = np.zeros(len(self.span.names.values) + 1, bool)
        flags[self._codes[among]] = True
        codes = np.flatnonzero(flags[:-1])
        flags[:] = False
        flags[codes] = matches(pattern, [self.span.names.values[code] for code in codes])
        return among & flags[self._codes]

    def _times(self, chosen: Bools) -> Intervals:
        return self.span.times(self.rows[chosen])

    @cached_property
    def data(self) -> Intervals:
        """Waiting for, or making, the next batch."""
        return self._times(self._named(LOADER_RANGE, self._ranges) | self._named(_LOADER_FUNCTION, self._functions))

    @cached_property
    def compiling(self) -> Intervals:
        return self._times(
            self._named(_COMPILE_CALL, self._calls)
            | self._named(_COMPILE_RANGE, self._ranges)
            | self._named(_COMPILE_FUNCTION, self._functions)
        )

    @cached_property
    def synchronizing(self) -> Intervals:
        """Calls that return when the device is done, copies to or from pageable memory, and `.item()` around them."""
        span, found = self.span, self.found
        calls = self._named(_SYNC, self._calls)
        calls &= ~self._named(_ASYNC, calls)
        # what launched a copy with pageable memory on one side waits for it
        copies = np.flatnonzero((found.kind == COPY) & (found.launch >= 0))
        if len(copies):
            copies = copies[span.names.containing("Pageable")[found.rows[copies]]]
        calls |= self._calls & np.isin(self.rows, found.launch[copies])
        chosen = slice_tree.ancestors(span.parent, self.rows[calls], span.names.where(_ITEM))
        return self._times(calls | chosen[self.rows])

    @cached_property
    def allocating(self) -> Intervals:
        return self._times(self._named(_ALLOCATOR, self._calls))

    @cached_property
    def launching(self) -> Intervals:
        """Launches, and every other call of the device's runtime or driver."""
        return self._times(self._calls)

    @cached_property
    def io(self) -> Intervals:
        return self._times(self._named(_IO_FUNCTION, self._functions))

    @cached_property
    def operators(self) -> Intervals:
        return self._times(self._operators)

    @cached_property
    def python(self) -> Intervals:
        return self._times(self._functions)

    @cached_property
    def optimizer(self) -> Intervals:
        """Operators of the optimizer's step."""
        ranges = self._times(self._named(_OPTIMIZER_RANGE, self._ranges))
        return intervals.merge(intervals.intersect(ranges, self.operators), self.kind("optimizer"))

    def kind(self, name: str) -> Intervals:
        """Operators of one of OPERATOR_KINDS, with all below them."""
        return self._times(self._named(OPERATOR_KINDS[name], self._operators))

    @cached_property
    def computing(self) -> Intervals:
        """Operators but those of collectives."""
        names = self.span.names
        collective = names.pick([is_collective_call(name) for name in names.values])[self.rows]
        return self._times(self._operators & ~collective)


def host_activity(span: Span, found: Work) -> HostActivity:
    """The activity of the training thread of the trace; empty sets where its host did nothing."""
    names = span.names
    annotation = matches(rf"{_STEP}|{LOADER_RANGE}|{_OPTIMIZER_RANGE}", names.values)
    operator = np.append(~annotation, False)
    host = ~span.on_device & (span.tracks.codes >= 0)
    main = _main_track(span, host & span.categories.where(categories.OPERATORS) & operator[names.codes])
    # threads of the autograd engine run operators of the backward pass
    backward = names.like(_ENGINE) | (span.is_operator & (span.column("forward_thread") > 0))
    helping = np.zeros(len(span.tracks.values) + 1, bool)
    helping[[*np.unique(span.tracks.codes[backward & host]), main]] = True
    helping[-1] = False
    wanted = span.is_runtime | span.is_function
    wanted |= span.categories.where([categories.ANNOTATION, *categories.OPERATORS])
    rows = np.flatnonzero(host & wanted & helping[span.tracks.codes])
    return HostActivity(span, rows, operator, found)


def _main_track(span: Span, operators: Bools) -> int:
    """Code of the track whose steps are marked, else of that with most time in operators; -1 without either."""
    marks = np.flatnonzero(span.names.like(_STEP) & ~span.on_device)
    marks = marks[~span.categories.where(["gpu_user_annotation"])[marks] & (span.tracks.codes[marks] >= 0)]
    count = len(span.tracks.values)
    if len(marks):
        return int(np.bincount(span.tracks.codes[marks], minlength=count).argmax())
    rows = np.flatnonzero(operators)
    rows = rows if len(rows) else np.flatnonzero(~span.on_device & span.is_function)
    if not len(rows):
        return -1
    tracks, lengths = intervals.union_by(span.tracks.codes[rows].astype(np.int64), span.start_ns[rows], span.ends(rows))
    return int(tracks[lengths.argmax()])
