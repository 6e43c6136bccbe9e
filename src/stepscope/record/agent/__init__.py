"""The part of stepscope that runs inside the training process.

Standard library only, Python 3.8 syntax, no thread of its own: it is woken by `bootstrap/sitecustomize.py` once the
process has imported torch, and writes what it sees to the run folder one line at a time.
"""
