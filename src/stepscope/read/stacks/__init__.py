"""Files of sampled stacks: one file per format behind `StackSource`, read as a stream."""
