"""Runs laid against each other: measures in, effects with intervals, verdicts and what changed out. Pure."""
