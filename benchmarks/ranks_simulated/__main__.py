"""Write a simulated run.

PYTHONPATH=benchmarks python -m ranks_simulated OUT --layout 3d --hosts 8 --plant slow_gpu:0.1 --seed 3
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ranks_simulated import simulate
from ranks_simulated.scenario import LAYOUTS, PLANTS, Clocks, Plant, Scenario


def _plant(text: str) -> Plant:
    """NAME[:SIZE[:unrecorded]]"""
    name, _, rest = text.partition(":")
    size, _, recorded = rest.partition(":")
    if name not in PLANTS or recorded not in ("", "unrecorded"):
        raise argparse.ArgumentTypeError(f"{text!r}: NAME[:SIZE[:unrecorded]] with a name of {', '.join(PLANTS)}")
    return Plant(name, float(size or 0.1), recorded=not recorded)


def main() -> None:
    default = Scenario()
    parser = argparse.ArgumentParser(description="Write a simulated run of many ranks, and the truth beside it.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layout", choices=LAYOUTS, default=default.layout)
    for name in ("hosts", "per_host", "tp", "pp", "shard", "microbatches", "steps", "windows", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    parser.add_argument("--missing", type=float, default=0.0, help="share of the ranks, 0 to 1")
    parser.add_argument("--whole-hosts", action="store_true", help="half of them are whole hosts")
    parser.add_argument("--clock-step-ms", type=float, default=0.0, help="a clock that is set by so much")
    parser.add_argument("--ahead", action="store_true", help="hosts launch ahead of their devices")
    parser.add_argument("--no-small-calls", dest="small_calls", action="store_false")
    parser.add_argument("--places-untold", dest="places_told", action="store_false")
    parser.add_argument("--plant", type=_plant, action="append", default=[], help="NAME[:SIZE[:unrecorded]]")
    args = vars(parser.parse_args())
    out, plants, step_ms = args.pop("out"), tuple(args.pop("plant")), args.pop("clock_step_ms")
    out.mkdir(parents=True, exist_ok=True)
    try:
        simulate(Scenario(plants=plants, clocks=Clocks(step_ms=step_ms), **args), out)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
