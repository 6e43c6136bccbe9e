"""Runs reduced near their data: what a verdict over many ranks stands on, in a few files for each host.

`run` plans what there is, has an engine reduce each trace to a small file, and then each host to its tables
(`tables.reduced`). Raw traces stay where they are.
"""
