"""`make fuzz`: 10,000 damaged inputs, and what became of them.

python -m tests.fuzz                        # pipes, holes and bombs, and 10,000 cases from number 0 on
python -m tests.fuzz --first 4711 --cases 1 --keep /tmp/case   # one of them again, its files kept
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.fuzz import cases, pool, special

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cases", type=int, default=10_000)
parser.add_argument("--first", type=int, default=0, help="number of the first case")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--keep", type=Path, help="write the input of case --first into this folder, and stop")
given = parser.parse_args()
if given.keep is not None:
    given.keep.mkdir(parents=True, exist_ok=True)
    print(cases.make(given.first, given.keep, cases.Seeds(given.keep / "seeds")))
    sys.exit(0)
folder = Path(tempfile.mkdtemp(prefix="stepscope-fuzz-"))
try:
    numbers = [*range(-len(special.CASES), 0), *range(given.first, given.first + given.cases)]
    outcome = pool.run(numbers, folder, workers=given.workers, tell=print)
finally:
    shutil.rmtree(folder, ignore_errors=True)
print(outcome.text())
sys.exit(1 if outcome.bad else 0)
