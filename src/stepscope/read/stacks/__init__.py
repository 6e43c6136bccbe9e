"""Files of sampled stacks: one file per format behind `StackSource`, read as a stream in bounded memory.

`sampled_files` has the table of formats, and makes a run of files that others recorded; `run_folder` reads those of our
own recordings.
"""

from __future__ import annotations

from stepscope.read.stacks.sampled_files import FORMATS, is_stack_file, open_stacks, read_stack_files
from stepscope.read.stacks.source import FileSource

__all__ = ["FORMATS", "FileSource", "is_stack_file", "open_stacks", "read_stack_files"]
