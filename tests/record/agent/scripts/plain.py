"""Says what it can see of stepscope: nothing, unless torch is imported."""

import sys
import threading

if "torch" in sys.argv:
    import torch  # noqa: F401 - the (fake) torch of this test

print(sorted(name for name in sys.modules if name.startswith("stepscope")) if "names" in sys.argv else "")
print([entry for entry in sys.path if "bootstrap" in entry], threading.active_count())
print(getattr(sys.modules.get("sitecustomize"), "GREETING", None))
