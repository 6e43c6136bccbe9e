"""A framework of skorch's shape, for the seams in the table."""

__version__ = "0.0.1"
