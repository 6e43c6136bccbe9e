"""The views of profiler traces: what the TensorBoard plugin showed, under the names its users know, and more.

`lazy_views.LazyViews` makes each as the report shows it when it is asked for; `select.rows` makes one table in full, in
the grouping asked for.
"""
