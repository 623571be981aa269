"""What the random killer looks for is found where there is some: a look that sees nothing would let every round pass."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.places import HOME, Network, Place
from tests.lab.remains import CLAIMS, WORK, Watch, state_root
from tests.lab.rounds import Round, Wrong, row
from tests.lab.spec import NodeSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.lab.lab import Lab
    from tests.lab.node import Node

KINDS = [
    pytest.param(NodeSpec(), id="local home"),
    pytest.param(
        NodeSpec(user="train", places={HOME: Place(network=Network())}),
        id="network home",
        marks=pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="there is no /dev/fuse"),
    ),
]
HOLD = (
    "import fcntl, os, socket, sys, time\n"
    "what = sys.argv[1]\n"
    "file = socket.socket(socket.AF_UNIX) if what[0] == '@' else open(what, 'w')\n"
    "file.bind('\\0' + what[1:]) if what[0] == '@' else fcntl.flock(file, fcntl.LOCK_SH)\n"
    "open(sys.argv[2], 'w')\n"
    "time.sleep(86400)\n"
)


@pytest.fixture(scope="module", params=KINDS)
def node(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Node]:
    (made,) = lab.add([request.param])
    yield made
    lab.remove([made])
    lab.forget_shared()


@pytest.fixture
def fresh(node: Node) -> Iterator[Node]:
    """The node, on which nothing of a test is left after it."""
    yield node
    end(node)
    node.run(["sh", "-c", "rm -rf /tmp/* /var/tmp/* /dev/shm/* ~/.cache ~/.local ~/one"], user=node.spec.user)


def end(node: Node) -> None:
    """Kill all that a test has started there."""
    for process in node.leftovers():
        node.signal(process.pid, signal.SIGKILL)
    node.wait_for(lambda: not node.leftovers(), what="all to be gone")


def sh(node: Node, command: str) -> None:
    node.run(["sh", "-c", command], user=node.spec.user, check=True)


def begin(node: Node, argv: Sequence[str]) -> int:
    """Start a program of the user's that outlives who starts it; return its pid."""
    sh(node, f"setsid {shlex.join(argv)} > /dev/null 2>&1 &")
    return node.wait_for(lambda: node.pid_of(f"^{argv[0]} {argv[1]}"), what=argv[0])


def begin_to_hold(node: Node, what: str) -> None:
    """Let a process hold a lock or a name; return when it does."""
    begin(node, ["python3", "-c", HOLD, what, "/tmp/held"])
    node.wait_for(lambda: node.path("/tmp/held").exists(), what="the lock")


def state(node: Node) -> str:
    return "/" + str(state_root(node).relative_to(node.path("/")))


def test_of_a_clean_node_nothing_is_told(fresh: Node) -> None:
    watch = Watch(fresh, "neighbour-0000")

    assert watch.left() == []
    assert watch.touched() == []


def test_files_that_may_not_stay_are_told_of_once(fresh: Node) -> None:
    home, root = fresh.spec.home, state(fresh)
    paths = [
        "/tmp/one",
        "/var/tmp/folder/one",
        "/dev/shm/one",
        "/dev/shm/clusterctl-0-0123456789abcdef/0123456789abcdef-0",
        f"{home}/one",
    ]
    paths += [f"{home}/{WORK}/neighbour-0123", f"{home}/.cache/clusterctl/agents/.partial"]
    paths += [f"{root}/sync/.partial", f"{root}/one"]
    sh(fresh, f"mkdir -p $(dirname {' '.join(paths)})")
    watch = Watch(fresh, "neighbour-0000")
    sh(fresh, f"touch {' '.join(paths)}")

    assert watch.left() == [f"file: {path}" for path in sorted(paths)]
    watch.settle()
    assert watch.left() == []


def test_what_stays_of_every_run_is_not_told(fresh: Node) -> None:
    root = state(fresh)
    sh(fresh, f"mkdir -p ~/{WORK} {root}/nodes {root}/sync ~/.cache/clusterctl/agents {CLAIMS}0")
    watch = Watch(fresh, "neighbour-0000")
    sh(fresh, f"mkdir -p {root}/nodes/victim-1234/n1 ~/{WORK}/victim-0123abcd/folder && touch {CLAIMS}0/gpu-0")
    sh(fresh, f"touch {root}/sync/0123.lock {root}/nodes/victim-1234/n1/journal.jsonl")

    assert watch.left() == []


def test_a_process_is_told_whatever_it_is_called(fresh: Node) -> None:
    watch = Watch(fresh, "neighbour-0000")
    pid = begin(fresh, ["sleep", "1234"])

    assert watch.left() == [f"process {pid}: sleep 1234"]
    assert watch.touched() == []


@pytest.mark.parametrize("what", [f"{CLAIMS}2", "@clusterctl-port-29500"])
def test_a_claim_is_told(fresh: Node, what: str) -> None:
    sh(fresh, f"touch {CLAIMS}2")
    watch = Watch(fresh, "neighbour-0000")
    begin_to_hold(fresh, what)

    assert f"held: {what.removeprefix('/var/tmp/')}" in watch.left()


def test_a_decoy_that_is_gone_is_told_and_what_it_held(fresh: Node) -> None:
    begin_to_hold(fresh, f"{CLAIMS}0")
    pid = begin(fresh, ["sleep", "86400"])
    watch = Watch(fresh, "neighbour-0000")
    end(fresh)

    assert watch.touched() == [f"process {pid}: sleep 86400", "no longer held: clusterctl-gpus-0"]


def test_a_world_is_summed_up_in_a_line() -> None:
    played = [
        Round(0, victim="35 on n2", seconds=2.0),
        Round(1, seconds=2.6, problems=[(Wrong.LEFT, "a"), (Wrong.LEFT, "b"), (Wrong.LOST, "c")]),
        Round(None, seconds=1.0, problems=[(Wrong.TOUCHED, "a decoy")]),
    ]

    assert row("plain", played) == "plain | 2 | 1 | 1 | 1 | 1 | 0 | 6"
