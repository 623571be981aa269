"""Worlds whose nodes are hard to reach, and whose head is not alone."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Final

from tests.lab.agents import hung_agent
from tests.lab.other_head import OtherHead
from tests.lab.places import Network
from tests.lab.slurm import Slurm
from tests.lab.slurm_nodes import slurm_of
from tests.lab.spec import NodeSpec
from tests.lab.ways import WAYS
from tests.lab.world import Maker, Scene, World, alike
from tests.lab.worlds_places import CACHE_S, HANG_S, no_fuse

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from tests.lab.lab import Lab
    from tests.lab.network import Mounted

RATE, DELAY = 500_000, 0.15
OFF, SILENT = 2, 12
FORSAKEN_S = 65.0
"""A step keeps its standard input open when its `srun` is killed, and the agent leaves after 60 s without a frame."""


def no_relay() -> str | None:
    """Why links cannot be slow, or None."""
    return None if importlib.util.find_spec("tests.relay") else "there is no tests/relay.py"


def slow(lab: Lab, stack: ExitStack, count: int) -> Scene:
    """The head reaches each node by a slow link of its own; nodes reach each other as ever."""
    link = importlib.import_module("tests.relay").Relay
    nodes = lab.add(count)
    for node in nodes:
        relay = stack.enter_context(link((node.address, node.spec.port), rate=RATE, delay=DELAY))
        lab.reach(node, (relay.address, relay.port))
    return Scene(nodes=nodes)


def jump(lab: Lab, stack: ExitStack, count: int) -> Scene:
    """One host is the way to all others, of which some are without power and some take no packet."""
    (door,) = lab.add(1)
    behind = lab.add([NodeSpec(via=door.name)] * (OFF + SILENT + count))
    for node in behind[:OFF]:
        node.kill()
    for node in behind[OFF : OFF + SILENT]:
        node.firewall(node.spec.port)
    return Scene(nodes=behind[OFF + SILENT :], others=behind[: OFF + SILENT])


def hung(lab: Lab, stack: ExitStack, count: int) -> Scene:
    """The head's ssh-agent is where the user is, and that machine sleeps."""
    socket = stack.enter_context(hung_agent(lab.root / "agent.sock"))
    return Scene(nodes=lab.add(count), env={"SSH_AUTH_SOCK": str(socket)})


def state_on_server(network: Network, befall: Callable[[Mounted], object] | None = None) -> Maker:
    """The state of runs lies on a server, as the head's home does."""

    def make(lab: Lab, stack: ExitStack, count: int) -> Scene:
        state, mounted = _state(lab, stack, network)
        happens = (lambda: None) if befall is None else lambda: befall(mounted)
        return Scene(nodes=lab.add(count), env={"XDG_STATE_HOME": str(state)}, befall=happens)

    return make


def by_steps(lab: Lab, stack: ExitStack, count: int) -> Scene:
    """Each node is held by a job of Slurm, whose steps are the way to it."""
    slurm = stack.enter_context(slurm_of(lab))
    nodes = lab.add(count)

    def leave() -> None:
        lab.remove(nodes)
        slurm.remove(nodes)

    stack.callback(leave)
    slurm.add(nodes)
    return Scene(nodes=nodes)


def two_heads(lab: Lab, stack: ExitStack, count: int) -> Scene:
    """Two heads have mounted the same."""
    network = Network(export="state", cache_s=CACHE_S)
    state, _ = _state(lab, stack, network)
    other = stack.enter_context(OtherHead(lab, "login2", {state: network}))
    return Scene(nodes=lab.add(count), env={"XDG_STATE_HOME": str(state)}, enter=other.enter)


def _state(lab: Lab, stack: ExitStack, network: Network) -> tuple[Path, Mounted]:
    state = lab.root / "state"
    state.mkdir(exist_ok=True)
    mounted = lab.mount(state, network)
    stack.callback(mounted.unmount, state)
    return state, mounted


FAR: Final = [
    World(
        name="IPv6 only",
        sentence="nodes have no IPv4 addresses, and all names are in /etc/hosts",
        make=alike(NodeSpec(ipv6_only=True, names=True)),
    ),
    World(
        name="slow link",
        sentence=f"between the head and each node are {RATE // 1000} kB/s and {DELAY * 1000:g} ms",
        make=slow,
        unavailable=no_relay,
    ),
    World(name="jump host", sentence=f"nodes are behind another one, and {OFF + SILENT} dead ones too", make=jump),
    World(
        name="openssh",
        sentence="nodes are reached by the user's own `ssh` (`ssh.client: openssh`)",
        make=alike(NodeSpec()),
        file=lambda _: WAYS["openssh"].file,
    ),
    World(
        name="command",
        sentence="nodes are reached by a command of the cluster file",
        make=alike(NodeSpec()),
        file=lambda _: WAYS["command"].file,
    ),
    World(
        name="srun",
        sentence="nodes are reached by steps of Slurm, in an allocation",
        make=by_steps,
        file=lambda _: WAYS["srun"].file,
        silent_s=FORSAKEN_S,
        unavailable=Slurm.unavailable,
    ),
    World(name="hung ssh-agent", sentence="the head's ssh-agent takes requests and never answers", make=hung),
    World(
        name="head's state on a server, no locks",
        sentence="the state of runs is where flock fails with ENOLCK",
        make=state_on_server(Network(export="state", locks="ENOLCK")),
        refused=(6, r"files in \S+ cannot be locked: No locks available\nhint: set XDG_STATE_HOME"),
        unavailable=no_fuse,
    ),
    World(
        name="head's state on a server, hanging",
        sentence=f"the state of runs is on a server that is silent for {HANG_S:g} s",
        make=state_on_server(Network(export="state"), lambda mounted: mounted.hang(HANG_S)),
        held_up_s=HANG_S,
        unavailable=no_fuse,
    ),
    World(
        name="two heads",
        sentence="another head has the same state of runs, on a server, and other processes and addresses",
        make=two_heads,
        unavailable=no_fuse,
    ),
]
