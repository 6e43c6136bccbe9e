"""Stands before the user's `sitecustomize` on the path of what runs beside the command: theirs runs in the command."""
