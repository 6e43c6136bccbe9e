"""The views of profiler traces: what the TensorBoard plugin showed, under the names its users know, and more."""
