"""Fixes tried on the user's own training: planned, run in turns, judged, and resumable at any moment."""
