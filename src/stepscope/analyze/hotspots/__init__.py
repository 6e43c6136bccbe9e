"""The deepest functions by sampled time, and what the samples stand on."""
