"""A package started with `python -m pkgmod`."""
