"""What a world is: nodes of a kind, what the head has of it, and what happens in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lab.lab import Lab
    from tests.lab.node import Node
    from tests.lab.spec import NodeSpec


WELL, FAILS, ENDED = "well", "fails", "ended"
"""The runs that are played in every world, see `tests.lab.play`: what is meant to become of them."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ends.

    Attributes:
        code: Of `wait`.
        state: As `status` has it.
        cause: Part of the cause, as `status` has it; `node` is a node rank here.
    """

    code: int
    state: str
    cause: Mapping[str, Any] = field(default_factory=dict)


OUTCOMES: Final[Mapping[str, Outcome]] = {
    WELL: Outcome(code=0, state="succeeded"),
    FAILS: Outcome(code=100, state="failed", cause={"kind": "exit", "node": 1, "rank": 1, "exit_code": 7}),
    ENDED: Outcome(code=103, state="cancelled"),
}
"""How the runs end wherever nothing is in their way."""


@dataclass(kw_only=True)
class Scene:
    """A world that is there.

    Attributes:
        nodes: The nodes to work with.
        env: What the head's commands have in their environment beside `Lab.head_env`.
        others: Nodes that the head knows and that are of no use.
        enter: Returns what a command on a second head begins with, for the folder that it runs in.
        befall: Lets happen what happens in this world while somebody works.
    """

    nodes: list[Node]
    env: dict[str, str] = field(default_factory=dict)
    others: list[Node] = field(default_factory=list)
    enter: Callable[[Path], list[str]] | None = None
    befall: Callable[[], object] = lambda: None


Maker = Callable[["Lab", ExitStack, int], Scene]


@dataclass(frozen=True, kw_only=True)
class World:
    """A world.

    Attributes:
        name: What a test is called by.
        sentence: What is so in it.
        make: Makes it with that many nodes; what has to be undone is put on the stack.
        packages: Debian's packages that it needs beyond those of every lab.
        file: What the cluster file of a run has to say there beyond the usual; takes the run's name.
        outcomes: How each run ends, by its name.
        silent_s: For how long an agent stays whose connection died without a word to the node, in seconds.
        held_up_s: For how long what happens there holds up commands on the head, in seconds.
        refused: What `up` says where nothing can be started, as a regular expression; the exit code before it.
        unavailable: Says why it cannot be had here.
    """

    name: str
    sentence: str
    make: Maker
    packages: tuple[str, ...] = ()
    file: Callable[[str], Mapping[str, Any]] = lambda _: {}
    outcomes: Mapping[str, Outcome] = field(default_factory=lambda: OUTCOMES)
    silent_s: float = 0.0
    held_up_s: float = 0.0
    refused: tuple[int, str] | None = None
    unavailable: Callable[[], str | None] = lambda: None

    @contextlib.contextmanager
    def on(self, lab: Lab, count: int = 2) -> Iterator[Scene]:
        """Have it until the end of the block; its nodes are gone then, and what runs on the head."""
        with ExitStack() as stack:
            stack.callback(lab.forget_shared)
            stack.callback(lambda: lab.remove(list(lab.nodes)))
            stack.callback(lab.end_head_processes)
            yield self.make(lab, stack, count)


def alike(
    spec: NodeSpec | Callable[[], NodeSpec],
    *,
    first: Callable[[Node], object] | None = None,
    each: Callable[[Node], object] | None = None,
    begin: Callable[[ExitStack, Node], object] | None = None,
) -> Maker:
    """Return what makes nodes that are all alike.

    Args:
        spec: What they are, or what tells it where that takes a compiler.
        first: What befalls the first of them.
        each: What befalls all of them, one after the other.
        begin: What is done with each before anybody works.
    """

    def make(lab: Lab, stack: ExitStack, count: int) -> Scene:
        nodes = lab.add([spec() if callable(spec) else spec] * count)
        for node in nodes:
            if begin is not None:
                begin(stack, node)

        def befall() -> None:
            for node in nodes[:1] if first is not None else nodes:
                (first or each or (lambda _: None))(node)

        return Scene(nodes=nodes, befall=befall)

    return make
