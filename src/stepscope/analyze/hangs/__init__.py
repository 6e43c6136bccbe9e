"""Hangs: what the last calls of all ranks, and what else is known of them, say of who is not there."""

from stepscope.analyze.hangs.verdict import blamed_ranks, judge

__all__ = ["blamed_ranks", "judge"]
