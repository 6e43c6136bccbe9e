"""What compilers did to a run: compiles, recompiles, graph breaks, fallbacks and transfers, from typed tables.

`prepared` puts the events into steps once for all, measures time as a union, and says why it compiled; `xla_reports` is
what torch_xla says of itself; `backends` says what each backend did and took of the steps, when, how often and after
the limit, what was not seen, and what a check in CI asks.
"""

from stepscope.analyze.compilers.backends import CHECKS, build, checks

__all__ = ["CHECKS", "build", "checks"]
