"""The ranks of one run beside each other: from their steps and stacks, and for many ranks from reduced tables."""
