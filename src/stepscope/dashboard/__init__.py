"""Runs in a browser: page documents, the server that `stepscope view` starts, and the single-file report.

`blocks.py` makes the parts that a page consists of, `pages/` lays a run out as pages of them. The front end in `web/`
draws these documents and computes nothing; neither does this package: every figure comes from the layers below.
"""
