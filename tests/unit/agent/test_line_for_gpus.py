"""Runs that wait in line for GPUs of several nodes: everybody who lives is served, in order, and no GPU has two runs."""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.agent.facts.claim_files import MAX_NUMBER, PREFIX, Ticket
from clusterctl.agent.supervisor.gpu_claims import GpuClaimError, GpuClaims

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES, STEPS = 3, 4000
GPUS = ((0,), (1,), (0, 1))


@dataclass
class Request:
    """What a run wants: GPUs of so many of these nodes. It dies at a step, or never."""

    nodes: tuple[int, ...]
    gpus: tuple[int, ...]
    count: int
    begins: int
    holds: int
    dies: int | None
    claims: dict[int, GpuClaims] = field(default_factory=dict)
    asked: int | None = None
    queued: int | None = None
    granted: int | None = None
    over: bool = False

    @property
    def wish(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        return self.nodes, self.gpus, self.count


@st.composite
def requests(draw: st.DrawFn) -> Request:
    nodes = tuple(sorted(draw(st.sets(st.integers(0, NODES - 1), min_size=1))))
    return Request(
        nodes=nodes,
        gpus=draw(st.sampled_from(GPUS)),
        count=draw(st.integers(1, len(nodes))),
        begins=draw(st.integers(0, 60)),
        holds=draw(st.integers(0, 20)),
        dies=draw(st.none() | st.integers(0, 120)),
    )


class World:
    """The nodes, and the time."""

    def __init__(self, folder: Path) -> None:
        self.places = [folder / str(node) for node in range(NODES)]
        for place in self.places:
            place.mkdir()
        self.now = 0
        self.held: dict[tuple[int, int], Request] = {}

    def act(self, name: str, request: Request) -> Iterator[None]:
        """Do what a head and its agents do, one step of one node at a time."""
        request.asked = self.now
        for node in request.nodes:
            request.claims[node] = GpuClaims(name, str(node), str(self.places[node]))
        numbers = []
        for node in request.nodes:
            numbers.append(request.claims[node].survey(request.gpus).highest)
            yield
        for node in request.nodes:
            request.claims[node].take_ticket(1 + max(numbers), request.gpus, {})
            yield
        request.queued = self.now
        while True:
            ready = []
            for node in request.nodes:
                view = request.claims[node].survey(request.gpus)
                ready += [node] if not (view.holders or view.ahead) else []
                yield
            if len(ready) >= request.count and (yield from self._claim(request, ready[: request.count], numbers)):
                break
        request.granted = self.now
        for _ in range(request.holds):
            yield
        self.leave(request)

    def _claim(self, request: Request, nodes: list[int], numbers: list[int]) -> Iterator[None]:
        for node in nodes:
            try:
                request.claims[node].claim(request.gpus)
            except GpuClaimError:
                for other in nodes:
                    request.claims[other].take_ticket(1 + max(numbers), request.gpus, {})
                    self._forget(request, other)
                return False  # type: ignore[return-value]
            for gpu in request.gpus:
                assert (node, gpu) not in self.held, "two runs on a GPU"
                self.held[node, gpu] = request
            yield
        for node in request.nodes:
            if node not in nodes:
                request.claims[node].release()
        return True  # type: ignore[return-value]

    def _forget(self, request: Request, node: int) -> None:
        self.held = {place: one for place, one in self.held.items() if place[0] != node or one is not request}

    def leave(self, request: Request) -> None:
        request.over = True
        for node, claims in request.claims.items():
            self._forget(request, node)
            claims.release()

    def die(self, request: Request) -> None:
        """As SIGKILL does it: the kernel closes the descriptors, and nobody removes files."""
        request.over = True
        for node, claims in request.claims.items():
            self._forget(request, node)
            for descriptor in claims.descriptors:
                os.close(descriptor)


@given(st.lists(requests(), min_size=2, max_size=7), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_everybody_who_lives_is_served_in_order_and_never_two_on_a_gpu(wanted: list[Request], seed: int) -> None:
    choice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        acts = {name: world.act(f"run-{name}", request) for name, request in enumerate(wanted)}
        while acts and world.now < STEPS:
            world.now += 1
            for name, request in enumerate(wanted):
                if name in acts and request.dies == world.now:
                    world.die(request)
                    del acts[name]
            able = [name for name in acts if wanted[name].begins <= world.now]
            if able:
                name = choice.choice(able)
                if next(acts[name], "over") == "over":
                    del acts[name]

        assert not acts, f"not served: {[wanted[name].wish for name in acts]}"
        for early in wanted:
            for late in wanted:
                if early.wish == late.wish and None not in (early.queued, late.asked, early.granted, late.granted):
                    assert not early.queued < late.asked or early.granted < late.granted, "the later run came first"
        last = GpuClaims("last", "n", str(world.places[0]))
        for place in world.places:
            last = GpuClaims("last", "n", str(place))
            last.claim([0, 1])
            last.release()
            assert [name for name in os.listdir(place) if name.startswith(PREFIX)] == [], "a ticket is left"


@pytest.mark.parametrize(
    ("number", "run", "is_before"),
    [
        pytest.param(2, "a", True, id="an earlier number"),
        pytest.param(3, "a", True, id="equal numbers, by name"),
        pytest.param(3, "c", False, id="equal numbers, by name, later"),
        pytest.param(4, "a", False, id="a later number"),
    ],
)
def test_tickets_have_one_order_for_all(number: int, run: str, is_before: bool) -> None:
    ticket = Ticket(number, run, "n", 0, True, frozenset())

    assert ticket.is_before(3, "b", "n") is is_before
    assert ticket.is_before(None, "b", "n")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def test_a_run_that_does_not_wait_is_refused_while_others_wait(folder: str) -> None:
    waiting, other = GpuClaims("run-1", "n1", folder), GpuClaims("run-2", "n1", folder)
    waiting.take_ticket(1, [0], {})

    with pytest.raises(GpuClaimError, match=r"run run-1 waits for GPU 0; with `--wait`, this run waits behind it"):
        other.claim([0])
    other.claim([1])
    waiting.release()
    other.claim([0])
    other.release()


def test_the_supervisor_of_a_run_gets_what_its_session_holds_though_others_wait(folder: str) -> None:
    session, waiting = GpuClaims("run-1", "n1", folder), GpuClaims("run-2", "n1", folder)
    session.take_ticket(2, [0], {})
    session.claim([0])
    waiting.take_ticket(1, [0], {})
    supervisor = GpuClaims("run-1", "n1", folder)

    supervisor.claim([0])
    session.release()

    assert waiting.survey([0]).holders == ["GPU 0 is held by run run-1 (node n1)"]
    supervisor.release()
    waiting.release()


def test_a_run_that_names_a_machine_twice_does_not_wait_for_itself(folder: str) -> None:
    first, second = GpuClaims("run-1", "n1", folder), GpuClaims("run-1", "n2", folder)
    first.take_ticket(1, [0], {})
    second.take_ticket(1, [0], {})

    with pytest.raises(GpuClaimError, match="another node of this run is on this machine, and wants the same GPUs"):
        second.survey([0])
    first.release()
    second.release()


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "waiting", "number": 10**12, "wanted": ["gpu-0"]},
        {"kind": "waiting", "number": "1", "wanted": ["gpu-0"]},
        {"kind": "waiting", "number": 1, "wanted": 7},
        {"kind": "waiting", "number": True, "wanted": ["gpu-0"]},
    ],
    ids=str,
)
def test_a_file_that_is_no_ticket_blocks_nobody(folder: str, record: dict[str, object]) -> None:
    stranger, run = GpuClaims("run-1", "n1", folder), GpuClaims("run-2", "n1", folder)
    stranger.announce(record)

    assert run.survey([0]) == ([], [], 0)
    stranger.release()


def test_a_run_has_a_place_in_line_behind_the_highest_number_that_a_stranger_can_take(folder: str) -> None:
    stranger, run, later = (GpuClaims(name, "n1", folder) for name in ("run-1", "run-2", "run-3"))
    stranger.take_ticket(MAX_NUMBER, [0], {})

    run.take_ticket(1 + run.survey([0]).highest, [0], {})
    later.take_ticket(1 + later.survey([0]).highest, [0], {})

    assert later.survey([0]).ahead == ["run run-1", "run run-2"]
    for claims in (stranger, run, later):
        claims.release()


def test_where_nobody_may_wait_the_reason_is_told(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o777)
    closed.chmod(0o777)

    with pytest.raises(GpuClaimError, match="every user could remove claims in"):
        GpuClaims("run", "n", str(closed)).take_ticket(1, [0], {})
