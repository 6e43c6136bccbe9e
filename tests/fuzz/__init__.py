"""Thousands of damaged inputs: every one of them is read, or refused in one line, in bounded time and memory."""
