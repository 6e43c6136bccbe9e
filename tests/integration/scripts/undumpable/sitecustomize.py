"""A user's own sitecustomize: only CAP_SYS_PTRACE may attach to the Python processes it runs in."""

import ctypes

PR_SET_DUMPABLE = 4

ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
