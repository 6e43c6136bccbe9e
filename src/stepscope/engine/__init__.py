"""What all analyses stand on, one implementation of each: traces as arrays, their tree of slices, steps, code, samples.

`intervals` are sets of times, `slice_tree` the ways up in nested slices. A `Span` (`spans`) is one trace as columns,
with the work of its devices (`device_work`), what its training thread does (`host_activity`), who called it
(`host_calls`), its modules (`module_calls`) and its steps (`trace_steps`; `scene` puts these together). `origins` and
`attribution` lead from slices to the user's lines, by `user_code` and `source_lines`; `samples` are the sampled stacks.
Nothing here judges or knows of a report.
"""
