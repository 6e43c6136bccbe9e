"""As little of torch as the agent needs to wake up: every probe must cope with what is missing."""

__version__ = "2.1.0-fake"
