"""Runs a command without a single capability, as any user but root would: `python unprivileged.py COMMAND…`."""

import ctypes
import os
import sys

PR_CAPBSET_DROP, PR_SET_SECUREBITS = 24, 28
SECBIT_NOROOT_LOCKED = 0b11  # the user id 0 regains nothing when a program is started

if os.geteuid() == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if libc.prctl(PR_SET_SECUREBITS, SECBIT_NOROOT_LOCKED, 0, 0, 0) != 0:
        sys.exit(f"securebits: {os.strerror(ctypes.get_errno())}")
os.execvp(sys.argv[1], sys.argv[1:])
