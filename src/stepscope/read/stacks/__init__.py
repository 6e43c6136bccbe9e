"""Files of sampled stacks: one file per format, each read as a stream in bounded memory."""
