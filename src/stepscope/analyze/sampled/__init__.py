"""What sampled stacks say: the tree of their call paths, hot lines, waits, slow steps, ranks and stages."""
