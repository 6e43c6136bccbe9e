"""Runs at the start of every Python child of `stepscope run`; Python imports it because its folder is on PYTHONPATH.

It installs the finder that wakes the agent when torch is imported, then hands over to the `sitecustomize` Python would
have found without us, whose exceptions propagate as they would have. Nothing here may fail, print or be slow.
"""


def _prepare() -> None:
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    # Children still inherit PYTHONPATH; this process shall see the path it would have without us.
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]
    sys.path_importer_cache.pop(here, None)
    configured = os.environ.get("STEPSCOPE_RECORD", "").strip()
    if not (configured.startswith("{") and configured.endswith("}")):
        return
    from importlib.util import module_from_spec, spec_from_file_location

    agent = os.path.dirname(here)
    # Not entered into sys.modules: until torch is imported nothing of ours is visible in this process.
    spec = spec_from_file_location("_stepscope_imports", os.path.join(agent, "imports.py"))
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    finder = module.Finder(os.path.dirname(os.path.dirname(agent)), _wake)
    sys.meta_path.insert(0, finder)
    finder.start_now()


def _wake(name: str) -> None:
    from stepscope.record.agent import core

    core.imported(name)


def _chain() -> None:
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:  # noqa: SIM105 - importing contextlib would cost more than all the rest
    _prepare()
except Exception:  # noqa: BLE001 - a recorder that cannot start is no reason for the command not to
    pass
_chain()
