"""What people ask of a controller over its control socket."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from clusterctl.run.nodes.evidence import ask

if TYPE_CHECKING:
    from clusterctl.run.controller.control import ControlRequest
    from clusterctl.run.controller.run import ControlledRun
    from clusterctl.run.controller.stalls import StallGuard


def answer(run: ControlledRun, stalls: StallGuard, item: ControlRequest) -> None:
    """Answer a request, at once or from a thread of its own."""
    match item.command:
        case "down" if item.arguments.get("stalled"):
            item.reply(stalls.end_if_stalled(kill=bool(item.arguments.get("kill"))))
        case "down":
            run.cancel(kill=bool(item.arguments.get("kill")))
            item.reply({"ok": True, "grace": run.limits.grace})
        case "evidence":
            _evidence(run, item)
        case "ping":
            item.reply({"ok": True, "run": run.folder.run})
        case _:
            item.reply({"error": f"unknown command {item.command!r}"})


def _evidence(run: ControlledRun, item: ControlRequest) -> None:
    sessions, ranks = run.sessions(), item.arguments.get("ranks")
    unseen = {n: "not connected" for n in run.state.nodes if n not in sessions}

    def collect() -> None:
        collected = ask(run.folder.run, "stacks", sessions, ranks)
        item.reply({"ranks": collected.ranks, "errors": {**collected.errors, **unseen}})

    threading.Thread(target=collect, daemon=True).start()
