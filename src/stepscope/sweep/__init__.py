"""A search over knobs: trials chosen by Optuna, each a run folder, and which parameter decides what they reach."""
