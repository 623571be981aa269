"""The command line of the agent. The head and the agent start processes of the agent with this command line."""

from __future__ import annotations

import importlib
import sys

_MODULES = {
    "sampler": "facts.machine_sampler",
    "gpu-memory-wait": "facts.gpu_memory_wait",
    "environment": "environment.maker",
    "container": "environment.container_maker",
    "enter": "environment.container_entry",
}
"""The modules whose function `main` runs a command, by command."""


def main(argv: list[str] | None = None) -> int:
    """Run the command in `argv` and return its exit code."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if command == "serve":
        from clusterctl.agent.serve import main as serve

        serve.main(arguments)
    if command == "facts":
        from clusterctl.agent import facts

        facts.main(sys.stdin, sys.stdout)
        return 0
    if command in _MODULES:
        return int(importlib.import_module(f"clusterctl.agent.{_MODULES[command]}").main(arguments))
    if command == "wait":
        from clusterctl.agent.supervisor import waiter

        waiter.main(arguments)
    sys.stderr.write(
        "usage: serve | facts | environment | container | enter FILE | sampler SECONDS"
        " | gpu-memory-wait GPUS SECONDS RUN | wait NUMBERS\n"
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
