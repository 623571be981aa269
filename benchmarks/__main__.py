"""`python -m benchmarks [NAME...]`: run the measurements and print them as a table or as JSON.

Every module here that has a `measure(rounds)` is a measurement. Nothing here fails on a number: a goal that is
not met is shown as such, for a person who knows how busy the machine was.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from typing import Any

import benchmarks
from benchmarks.measures import Measure

Measurement = Callable[..., Iterable[Measure]]


def measurements() -> dict[str, Measurement]:
    """Return every measurement there is, by name."""
    modules = (importlib.import_module(f"benchmarks.{found.name}") for found in _modules())
    return {module.__name__.rpartition(".")[2]: module.measure for module in modules if hasattr(module, "measure")}


def _modules() -> Iterable[pkgutil.ModuleInfo]:
    return (found for found in pkgutil.iter_modules(benchmarks.__path__) if found.name != "__main__")


def line(measure: Measure) -> str:
    """Return the measure as one line of the table."""
    value = f"{measure.value:.2f} {measure.unit}"
    bound = "" if measure.goal is None else f"{'>=' if measure.at_least else '<='} {measure.goal:g}"
    verdict = {True: "met", False: "NOT MET", None: ""}[measure.met]
    return f"  {measure.name:<58} {value:>14}  {bound:>9}  {verdict:<7}  {measure.detail}".rstrip()


def main() -> int:
    """Run what was asked for."""
    known = measurements()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure clusterctl against its peers")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(sorted(known))}; default all")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each number (default 5)")
    parser.add_argument("--nodes", metavar="N,N", help="sizes of the simulated clusters of `scale`")
    parser.add_argument("--files", type=int, metavar="N", help="open files that the head of `scale` may have")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"no measurement named {', '.join(unknown)}")
    found = []
    for name in options.names or sorted(known):
        print(f"{name} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)", file=sys.stderr)
        more: dict[str, Any] = {}
        if name == "scale":
            more = {"files": options.files}
            more |= {"sizes": [int(size) for size in options.nodes.split(",")]} if options.nodes else {}
        for measure in known[name](options.rounds, **more):
            found.append({"measurement": name} | measure.as_json())
            print(line(measure), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
