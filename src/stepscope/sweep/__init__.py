"""A search over knobs for the best value of a metric, and what of them matters."""
