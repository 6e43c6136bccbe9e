"""Says what its streams are, as a progress bar would ask."""

import os
import sys

print([stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)], os.get_terminal_size(1).columns)
