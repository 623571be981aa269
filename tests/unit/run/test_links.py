"""The controller's connections: dialed again at once after a good one, with growing pauses after bad ones."""

from __future__ import annotations

import itertools
import queue
import time
from typing import Any, cast

from clusterctl.config.spec import HostSpec
from clusterctl.run.links import Links, Redialed
from clusterctl.session import Session


class Stub:
    """A session that says nothing and can be closed."""

    silence_s = 0.0

    def close(self) -> None:
        pass


def dialing() -> tuple[Links, HostSpec, queue.SimpleQueue[Any], list[float]]:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    moments: list[float] = []

    def dial(_: HostSpec) -> Session:
        moments.append(time.monotonic())
        return cast("Session", Stub())

    return Links(dial, inbox), HostSpec(name="n1", host="n1"), inbox, moments


def test_a_node_that_lets_us_in_and_breaks_off_is_dialed_with_growing_pauses() -> None:
    links, host, inbox, moments = dialing()
    began = time.monotonic()

    for _ in range(3):
        links.broken(host)
        back: Redialed = inbox.get(timeout=10)
        links.add("n1", back.session)

    assert moments[0] - began < 0.9
    assert [round(later - earlier) for earlier, later in itertools.pairwise(moments)] == [1, 2]
    links.close()


def test_a_person_who_waits_cuts_the_pause_short() -> None:
    links, host, inbox, moments = dialing()
    for _ in range(4):
        links.broken(host)
        links.hurry()
        links.add("n1", inbox.get(timeout=10).session)

    assert moments[-1] - moments[0] < 1.0
    links.close()


def test_a_node_without_a_connection_is_cut_from_the_moment_of_the_close_and_silent_from_the_last_sign() -> None:
    links, host, inbox, _ = dialing()
    session = Stub()
    session.silence_s = 15.0
    links.add("n1", cast("Session", session))
    assert links.cut() == {}

    links.broken(host)

    assert links.silent(0.0)["n1"] >= 15.0
    assert links.cut()["n1"] < 5.0
    links.add("n1", inbox.get(timeout=10).session)
    assert links.cut() == {}
    links.close()
