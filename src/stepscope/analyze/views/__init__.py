"""The views of profiler traces: what the TensorBoard plugin showed, under the names its users know, and more.

`build.build` makes all of them as the report shows them; `select.rows` makes one table in full, as it was asked for.
"""
