"""Names of the package that nothing in it uses: functions, classes, methods, fields, constants. `make check` runs it.

    python scripts/unused.py

vulture (https://github.com/jendrikseipp/vulture) looks for them in the package alone: what only tests use is unused. It
goes by name, so it misses a name that something else has too. What is used by its text (`TEXTS`, `COLUMNS`) counts as
used; what others call or read is in `ALLOWED`, each name with who does.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "stepscope"
LEAST_CONFIDENCE = 60  # percent: all that vulture finds

# files whose texts name functions, classes or fields: tables of names, and surfaces, which take fields by key
TEXTS = (
    *("report/**/*.py", "report/*.json", "dashboard/**/*.py", "dashboard/layout.json"),
    *("cli/__init__.py", "read/trace.py", "schema.py", "tables/schema.py", "tables/*.json"),
    *("record/agent/knobs/__init__.py", "record/agent/probes/__init__.py"),
)
COLUMNS = (
    "report/table.py",
    "report/table.json",
    "dashboard/layout.json",
    "dashboard/pages/*.py",
)  # whose texts are lists of fields: `Label: key unit; …`
ALLOWED = {
    "called by Python or IPython": (*("__getattr__", "__dir__", "load_ipython_extension", "unload_ipython_extension"),),
    "read by the parser of command lines": ("__signature__", "__annotations__"),
    "read or called by a library that it is set for": (
        *("redirect_slashes", "should_exit", "fast_dtype", "suppress_errors", "_compiled_call_impl"),
        *("on_broken_pipe", "do_GET", "log_message", "process_request", "wall_time", "simple_value", "on_leave"),
        "reducer_override",
    ),
    "called on a `stepscope.profile`, which has what `torch.profiler.profile` has": (
        *("add_metadata", "add_metadata_json", "export_memory_timeline", "export_stacks", "preset_metadata_json"),
        *("self_cpu_time_total", "toggle_collection_dynamic"),
    ),
    "of report.json, documented, and shown by no surface": (
        *("trainer", "self_samples", "attributed_share", "guessed_share", "kind_ns"),
        *("max_threads_per_multiprocessor", "warp_size", "tensor_core_plugin_pct", "algorithm_bytes_per_s"),
        *("backward_host_self_ns", "backward_device_self_ns", "peak_recorded_bytes", "total_allocations"),
        *("blocks_in_use", "most_cost_ms"),
    ),
    "how far a replay can be trusted, to which tests hold it on real traces": ("recorded_median_ns",),
    "asked for by the name of a page": ("ranks_empty", "ranks_choices", "hang_empty", "system_empty"),
    "of the arguments of a trace's entry, taken by key": ("sort_index",),
}


def _nodes(pattern: str) -> Iterator[ast.AST]:
    for path in PACKAGE.glob(pattern):
        yield from ast.walk(ast.parse(path.read_text("utf-8")))


def named() -> set[str]:
    """Names that are used by their text."""
    texts = (node.value for pattern in TEXTS for node in _nodes(pattern) if isinstance(node, ast.Constant))
    columns = (node.value for pattern in COLUMNS for node in _nodes(pattern) if isinstance(node, ast.Constant))
    keys = re.compile(r"(?:^|: |; )([a-z]\w*)")
    words = (word for text in columns if isinstance(text, str) for word in keys.findall(text))
    return {text for text in (*texts, *words) if isinstance(text, str)}


def main() -> int:
    """Print what is unused, and what is allowed for no reason; the exit status."""
    vulture = Vulture(ignore_decorators=["@rule", "@loss_rule"])  # `diagnose/rules.py` collects what has it
    vulture.scavenge([PACKAGE])
    unused = vulture.get_unused_code(min_confidence=LEAST_CONFIDENCE)
    allowed = {name for names in ALLOWED.values() for name in names}
    used = named() | allowed
    problems = [each.get_report() for each in unused if each.name not in used]
    idle = sorted(allowed - {each.name for each in unused})
    problems += [f"scripts/unused.py: {name!r} is allowed and needs no allowance" for name in idle]
    print("\n".join(problems) or "nothing is unused")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
