"""Never imports torch."""

import sys

print("sum", sum(range(100_000)), "torch" in sys.modules)
