"""The controller's connections: dialed again at once after a good one, with growing pauses after bad ones."""

from __future__ import annotations

import itertools
import queue
import time
from typing import Any, cast

from clusterctl.config.spec import HostSpec
from clusterctl.run.controller.executor import LoopExecutor
from clusterctl.run.controller.links import Links
from clusterctl.session.node_session import Session


class Stub:
    """A session that says nothing and can be closed."""

    silence_s = 0.0
    alive = True

    def close(self) -> None:
        self.alive = False


def dialing() -> tuple[Links, HostSpec, queue.SimpleQueue[Any], list[float]]:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    moments: list[float] = []

    def dial(_: HostSpec) -> Session:
        moments.append(time.monotonic())
        return cast("Session", Stub())

    links = Links(dial, LoopExecutor(lambda item: item.call()))
    links.on_dialed = lambda _node, session: inbox.put(session)
    return links, HostSpec(name="n1", host="n1"), inbox, moments


def test_a_node_that_lets_us_in_and_breaks_off_is_dialed_with_growing_pauses() -> None:
    links, host, inbox, moments = dialing()
    began = time.monotonic()

    for _ in range(3):
        links.redial(host)
        back: Session = inbox.get(timeout=10)
        links.add_session(host, back)

    assert moments[0] - began < 0.9
    assert [round(later - earlier) for earlier, later in itertools.pairwise(moments)] == [1, 2]
    links.close()


def test_a_person_who_waits_cuts_the_pause_short() -> None:
    links, host, inbox, moments = dialing()
    for _ in range(4):
        links.redial(host)
        links.redial_all_now()
        links.add_session(host, inbox.get(timeout=10))

    assert moments[-1] - moments[0] < 1.0
    links.close()


def test_a_node_without_a_connection_is_cut_from_the_moment_of_the_close_and_silent_from_the_last_sign() -> None:
    links, host, inbox, _ = dialing()
    session = Stub()
    session.silence_s = 15.0
    links.add_session(host, cast("Session", session))
    assert links.measure_unreachable_s() == {}

    links.redial(host)

    assert links.measure_silence_s(0.0)["n1"] >= 15.0
    assert links.measure_unreachable_s()["n1"] < 5.0
    links.add_session(host, inbox.get(timeout=10))
    assert links.measure_unreachable_s() == {}
    links.close()


def test_a_session_that_broke_before_it_got_here_takes_nobody_s_place_and_its_host_is_dialed_again() -> None:
    links, host, inbox, moments = dialing()
    dead, living = Stub(), cast("Session", Stub())
    dead.alive = False

    assert links.add_session(host, living)
    assert not links.add_session(host, cast("Session", dead))
    assert links.sessions == {"n1": living}
    assert moments == []

    links.redial(host)
    back: Session = inbox.get(timeout=10)
    back.close()
    assert not links.add_session(host, back)
    assert links.sessions == {}
    assert links.add_session(host, inbox.get(timeout=10))
    links.close()


def test_news_of_a_session_that_was_replaced_or_never_taken_in_is_no_loss() -> None:
    links, host, inbox, _ = dialing()
    assert not links.is_connection_broken("n1")

    session = Stub()
    links.add_session(host, cast("Session", session))
    assert not links.is_connection_broken("n1")

    session.close()
    assert links.is_connection_broken("n1")
    links.redial(host)
    assert links.is_connection_broken("n1")
    links.add_session(host, inbox.get(timeout=10))
    assert not links.is_connection_broken("n1")
    links.close()
