"""Worlds whose machines stop, start again, are small, are full, or have other Pythons."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tests.lab import cgroups, crowd, locales, pythons, suspend
from tests.lab.spec import NodeSpec
from tests.lab.world import ENDED, FAILS, WELL, Outcome, Scene, World, alike

if TYPE_CHECKING:
    from contextlib import ExitStack

    from tests.lab.lab import Lab
    from tests.lab.node import Node

PAUSE_S: Final = 20.0
PROCESSES: Final = 48
DESCRIPTORS: Final = 64
CROWD: Final = 5000
LOST: Final = Outcome(code=105, state="lost", cause={"kind": "node_lost", "node": 0})
TERMINATED: Final = Outcome(code=100, state="failed", cause={"kind": "signal", "node": 0, "signal": "SIGTERM"})


def no_cgroups() -> str | None:
    """Why nodes cannot be limited or stopped, or None."""
    return None if cgroups.exist() else "there are no cgroups of version 1 and 2 side by side"


def pause(node: Node, seconds: float = PAUSE_S) -> None:
    """Let a node stand still for a time; returns when it goes on."""
    node.pause()
    time.sleep(seconds)
    node.resume()


def sleep(node: Node, seconds: float = PAUSE_S) -> None:
    """Let a node sleep for a time; returns when it wakes up."""
    since = suspend.suspend(node)
    time.sleep(seconds)
    suspend.wake(node, since)


def few_processes(lab: Lab, stack: ExitStack, count: int) -> Scene:
    """Each has a user of its own: the kernel counts processes by uid, on all nodes together."""
    first = 3000 + os.getpid() % 20000
    limits = {"nproc": str(PROCESSES)}
    return Scene(nodes=lab.add([NodeSpec(user="train", account=first + i, limits=limits) for i in range(count)]))


def crowded(lab: Lab, stack: ExitStack, count: int) -> Scene:
    """The first node is full of processes, the others are not."""
    nodes = lab.add([NodeSpec(user="train", expose=(crowd.folder(),))] * count)
    stack.enter_context(crowd.on(nodes[0], CROWD))
    return Scene(nodes=nodes)


def latin() -> NodeSpec:
    """Return the spec of a node whose accounts are not of this century."""
    env = locales.latin()
    return NodeSpec(env=env, expose=(env["LOCPATH"],))


MACHINES: Final = [
    World(
        name="rebooted",
        sentence="the first node starts again",
        make=alike(NodeSpec(), first=lambda node: node.reboot()),
        outcomes={WELL: LOST, FAILS: replace(LOST, cause={}), ENDED: LOST},
    ),
    World(
        name="shut down",
        sentence="the first node is told to start again, and ends its processes before",
        make=alike(NodeSpec(), first=lambda node: node.reboot(orderly=True)),
        outcomes=dict.fromkeys((WELL, FAILS, ENDED), TERMINATED),
    ),
    World(
        name="paused",
        sentence=f"the first node stands still for {PAUSE_S:g} s, and its clocks go on",
        make=alike(NodeSpec(cgroup=True), first=pause),
        unavailable=no_cgroups,
    ),
    World(
        name="suspended",
        sentence=f"the first node sleeps for {PAUSE_S:g} s, and its monotonic clock too",
        make=alike(suspend.sleeper, first=sleep),
        unavailable=no_cgroups,
    ),
    World(
        name="hidden processes",
        sentence="users see no processes but their own",
        make=alike(NodeSpec(user="train", proc="hidepid=2")),
    ),
    World(name="few processes", sentence=f"the user may have {PROCESSES} processes", make=few_processes),
    World(
        name="few descriptors",
        sentence=f"a process may have {DESCRIPTORS} files open",
        make=alike(NodeSpec(limits={"nofile": str(DESCRIPTORS)})),
    ),
    World(
        name="half a CPU",
        sentence="a cgroup of version 1 gives the node half a CPU",
        make=alike(NodeSpec(cgroup=True, cpus=0.5)),
        unavailable=no_cgroups,
    ),
    World(
        name="half a CPU, version 2",
        sentence="a cgroup gives the node half a CPU, and the files of version 2 say so",
        make=alike(NodeSpec(cgroup=True, cpus=0.5, cgroup_view="v2")),
        unavailable=no_cgroups,
    ),
    World(name="crowded", sentence=f"the first node's user has {CROWD} processes more", make=crowded),
    World(
        name="a Python without ctypes",
        sentence="the only Python has no `_ctypes`",
        make=alike(lambda: NodeSpec(python=pythons.without_ctypes(), only_python=True)),
        refused=(4, r"n\[1-2\]: no usable Python: \S+ No module named '_ctypes'.*\nhint: install Python 3.9"),
        unavailable=pythons.unavailable,
    ),
    World(
        name="a Python without ctypes first",
        sentence="the first Python has no `_ctypes`, and the system's has",
        make=alike(lambda: NodeSpec(python=pythons.without_ctypes())),
        unavailable=pythons.unavailable,
    ),
    World(
        name="a Python of old headers",
        sentence="the only Python has no `memfd_create`, `pidfd_open` and `pidfd_send_signal`",
        make=alike(lambda: NodeSpec(python=pythons.without_new_calls(), only_python=True)),
        unavailable=pythons.unavailable,
    ),
    World(
        name="Latin-1",
        sentence="the account's encoding is ISO 8859-1",
        make=alike(latin),
        packages=("locales",),
        unavailable=locales.unavailable,
    ),
]
