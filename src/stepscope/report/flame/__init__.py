"""Flame graphs as files: a page, a picture, and two formats that other viewers read."""
