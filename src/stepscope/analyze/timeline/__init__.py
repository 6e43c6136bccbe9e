"""What ran when: steps, phases, host threads, device streams and sampled workers on one axis, in windows of any width.

`index.py` sorts every slice of a run once, by track, depth and start, and keeps coarser and coarser copies of it; a
window of a trace of ten million slices is then cut out of the copy that fits it. `window.py` thins it to what can be
drawn, `detail.py` tells all about one slice, `search.py` finds slices by name.
"""
