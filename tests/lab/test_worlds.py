"""What is promised of runs, in every world: see "In every world" in docs/guarantees.md.

Some worlds are enough for every day; `CLUSTERCTL_LONG` (`make worlds`) plays all of them, and lets the healthy run go on
for longer than a false alarm takes.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from tests.lab.play import ENDED, FAILS, RUNS, WELL, Play, play, written
from tests.lab.worlds import EVERYDAY, WORLDS, World

if TYPE_CHECKING:
    from tests.lab.lab import Lab

pytestmark = pytest.mark.timeout(400)

LONG = "CLUSTERCTL_LONG" in os.environ
QUIET_S = 40.0 if LONG else 0.0
DOWN_S = 45.0
"""Whatever a node does."""


def which(worlds: list[World]) -> list[object]:
    rare = pytest.mark.skipif(not LONG, reason="`make worlds`")
    return [pytest.param(w, id=w.name, marks=() if w.name in EVERYDAY else rare) for w in worlds]


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> World:
    here: World = request.param
    reason = here.unavailable()
    if reason:
        pytest.skip(reason)
    return here


@pytest.fixture(scope="module")
def seen(lab: Lab, world: World, tmp_path_factory: pytest.TempPathFactory) -> Play:
    return play(lab, world, tmp_path_factory.mktemp("world"), quiet=QUIET_S)


in_all_that_work = pytest.mark.parametrize("world", which([w for w in WORLDS if not w.refused]), indirect=True)
in_all_that_do_not = pytest.mark.parametrize("world", which([w for w in WORLDS if w.refused]), indirect=True)


def ends_as_it_should(seen: Play, world: World, name: str) -> None:
    outcome, status = world.outcomes[name], seen.after[name]
    cause = {key: (status["cause"] or {}).get(key) for key in outcome.cause}
    wanted = {key: seen.nodes[value] if key == "node" else value for key, value in outcome.cause.items()}
    assert (seen.waited[name].code, status["state"], cause) == (outcome.code, outcome.state, wanted), status
    assert status["remaining"] == []


@in_all_that_work
def test_a_run_ends_well_and_the_head_has_every_byte(seen: Play, world: World) -> None:
    assert {name: done.code for name, done in seen.started.items()} == dict.fromkeys(RUNS, 0), seen.started
    ends_as_it_should(seen, world, WELL)
    for rank, output in seen.output.items():
        count = re.search(r"^(\d+) lines\Z", output, re.MULTILINE)
        lines = output.count("\n")
        whole = written(rank, lines)
        assert output == whole if count else (whole.startswith(output) and world.outcomes[WELL].code), output[-200:]


@in_all_that_work
def test_a_run_that_is_well_is_never_called_anything_else(seen: Play, world: World) -> None:
    said = {
        event.get("text") or event.get("phase") for event in seen.events[WELL] if event["kind"] in ("stall", "note")
    }
    assert said == set()


@in_all_that_work
def test_ps_and_status_tell_the_truth(seen: Play, world: World) -> None:
    listed = {entry["run"]: (entry["state"], entry["attended"]) for entry in seen.listed}
    assert listed == dict.fromkeys(seen.runs.values(), ("running", True))
    for status in seen.before.values():
        assert (status["state"], status["cause"], status["stall"]) == ("running", None, None)
        assert [(w["node"], w["state"]) for w in status["workers"]] == [(node, "running") for node in seen.nodes]
    for status in seen.after.values():
        assert {w["state"] for w in status["workers"]} <= {"exited", "lost"}, status


@in_all_that_work
def test_down_returns_soon_and_leaves_nothing(seen: Play, world: World) -> None:
    assert seen.down is not None
    assert seen.down.code == 0, seen.down
    assert seen.down.seconds < DOWN_S + world.held_up_s
    assert seen.survivors == []
    ends_as_it_should(seen, world, ENDED)
    assert seen.left == []


@in_all_that_work
def test_a_worker_that_fails_is_named_with_its_code(seen: Play, world: World) -> None:
    ends_as_it_should(seen, world, FAILS)


@in_all_that_do_not
def test_what_cannot_be_started_is_refused_by_its_place_and_leaves_nothing(seen: Play, world: World) -> None:
    assert world.refused is not None
    for done in seen.started.values():
        assert done.code == world.refused[0]
        assert re.search(world.refused[1], done.err), done.err
    assert seen.left == []
