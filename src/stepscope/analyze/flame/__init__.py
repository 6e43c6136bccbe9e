"""Flame graphs: weighted trees of call paths, of samples and of the traces of windows."""
