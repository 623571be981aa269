"""Runs that hang, each in its own way and all at the same time: called stalled, shown, and ended; nothing else is."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab import stall_jobs
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lab.lab import Lab
    from tests.lab.node import Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

LIMIT = 8.0
CONFIRMED_AFTER = 15.0
# What looking every two seconds, a node's answer and a busy machine may add.
SLACK = 20.0


@dataclass(frozen=True)
class Job:
    """What hangs: the script, workers a node, and the function in which the culprit's stack must be found."""

    script: str
    workers: int = 2
    nodes: int = 2
    where: str | None = None
    how: str = ""
    more: dict[str, Any] = field(default_factory=dict)


JOBS = {
    "asleep": Job(stall_jobs.HANGING, where="asleep"),
    "stopped": Job(stall_jobs.HANGING),
    "spinning": Job(stall_jobs.HANGING, where="spinning"),
    "deadlock": Job(stall_jobs.HANGING, where="deadlock"),
    "pipe": Job(stall_jobs.HANGING, where="pipe"),
    "gil": Job(stall_jobs.HANGING, where="gil"),
    "loader": Job(stall_jobs.LOADER, workers=1, where="<module>"),
    "not-joined": Job(stall_jobs.NOT_JOINED, workers=1, where="never_joins"),
    "keras-fit": Job(stall_jobs.KERAS, workers=1, nodes=1, where="on_train_batch_end"),
}
HEALTHY = "none"
# What `stall.action` makes of a stalled run without anybody asking.
ACTIONS = {
    "stops": Job(stall_jobs.HANGING, workers=1, how="asleep", more={"stall": {"action": "stop"}}),
    "restarts": Job(
        stall_jobs.HANGING,
        workers=1,
        how="asleep",
        more={"stall": {"action": "restart"}, "restart": {"max_restarts": 1, "backoff": 0}},
    ),
}


@dataclass
class Outcome:
    """What became of one run."""

    run: str
    folder: Path
    culprit: int
    world: int
    status: dict[str, Any] = field(default_factory=dict)
    ps: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    stacks: Any = None
    final: dict[str, Any] = field(default_factory=dict)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    def said(self, phase: str) -> dict[str, Any]:
        return next(e for e in self.events if e["kind"] == "stall" and e["phase"] == phase)

    def evidence(self, rank: int, folder: str | None = None) -> dict[str, Any]:
        kept = self.folder / (folder or self.said("confirmed")["evidence"])
        found: dict[str, Any] = json.loads((kept / f"rank-{rank}.json").read_text())
        return found

    def output(self, rank: int) -> str:
        return next(self.folder.glob(f"nodes/*/attempt-0/rank-{rank}.log")).read_text()


@dataclass(frozen=True)
class Seen:
    """All that the tests judge, seen once."""

    runs: dict[str, Outcome]
    acted: dict[str, Outcome]
    down: Any
    left: list[str]
    healthy: dict[str, Any]


def start(folder: Path, env: dict[str, str], kind: str, job: Job, made: list[Node]) -> Outcome:
    folder.mkdir(parents=True)
    head = Head(folder, env)
    (folder / "job.py").write_text(job.script)
    world = job.workers * job.nodes
    culprit = random.randrange(world)
    head.write(
        {node.name: job.workers for node in made[: job.nodes]},
        {"script": "job.py", "args": [job.how or kind, str(culprit)], "grace": "1s"},
        name=kind,
        **{
            **job.more,
            "stall": {"timeout": f"{LIMIT:g}s", "startup_timeout": f"{LIMIT:g}s", **job.more.get("stall", {})},
        },
    )
    started = head.run("up", "-d", "--no-health", "--json", timeout=120.0)
    assert started.returncode == 0, started.stderr
    run = json.loads(started.stdout)["run"]
    return Outcome(run, folder.parents[1] / "state" / "clusterctl" / "runs" / run, culprit, world)


def look(head: Head, outcome: Outcome) -> None:
    """Wait until the head writes down that the run stalls, and keep what is said of it."""

    events = outcome.folder / "events.jsonl"
    wait_for(lambda: '"confirmed"' in events.read_text(), 90.0, f"{outcome.run} to be called stalled", every=0.5)
    outcome.status = head.json("status", outcome.run)
    outcome.text = head.run("status", outcome.run).stdout


@pytest.fixture(scope="module")
def seen(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    base = tmp_path_factory.mktemp("stalls")
    env = lab.head_env(XDG_STATE_HOME=str(base / "state"))
    made = lab.add(2)
    jobs = {**JOBS, **ACTIONS, HEALTHY: Job(stall_jobs.HANGING, workers=1)}
    head = Head(base, env)
    try:
        with ThreadPoolExecutor(4) as pool:
            begun = {k: pool.submit(start, base / "projects" / k, env, k, job, made) for k, job in jobs.items()}
        runs = {kind: future.result() for kind, future in begun.items()}
        healthy = runs.pop(HEALTHY)
        acted = {kind: runs.pop(kind) for kind in ACTIONS}
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda outcome: look(head, outcome), runs.values()))
        table = {entry["run"]: entry for entry in head.json("ps")}
        for outcome in runs.values():
            outcome.ps = table[outcome.run]
        for kind in ("deadlock", "stopped"):
            runs[kind].stacks = head.json("stacks", runs[kind].run)
        down = head.json("down", "--stalled", timeout=180.0)
        for outcome in [*runs.values(), *acted.values()]:
            outcome.final = head.json("wait", outcome.run)
        left = [p.command for n in made for p in n.leftovers() if any(f"job.py {k}" in p.command for k in JOBS)]
        yield Seen(runs, acted, down, left, head.json("status", healthy.run))
        head.run("down", healthy.run)
        wait_for(lambda: not any(n.leftovers() for n in made), what=f"{[n.leftovers() for n in made]} to be gone")
    finally:
        lab.remove(made)
        lab.end_head_processes()


@pytest.fixture(params=JOBS)
def outcome(seen: Seen, request: pytest.FixtureRequest) -> Outcome:
    return seen.runs[request.param]


@pytest.fixture
def job(outcome: Outcome, request: pytest.FixtureRequest) -> Job:
    return JOBS[request.node.callspec.params["outcome"]]


def test_it_is_called_stalled_in_time(outcome: Outcome) -> None:
    frozen = float(outcome.output(outcome.culprit).split("frozen ")[1].split()[0])
    suspected, confirmed = (outcome.said(phase) for phase in ("suspected", "confirmed"))
    assert LIMIT <= suspected["since_s"] <= LIMIT + SLACK
    assert suspected["limit_s"] == LIMIT
    assert confirmed["time"] - frozen <= LIMIT + CONFIRMED_AFTER + SLACK
    assert confirmed["time"] - suspected["time"] >= CONFIRMED_AFTER - 2.5


def test_stacks_of_every_rank_are_kept_as_plain_files(outcome: Outcome, job: Job) -> None:
    for phase in ("suspected", "confirmed"):
        folder = outcome.folder / outcome.said(phase)["evidence"]
        for rank in range(outcome.world):
            said = outcome.evidence(rank, folder.name)
            stopped = rank == outcome.culprit and job.where is None
            assert said["source"] in (("proc", "py-spy") if stopped else ("shim", "signal")), said["why"]
            assert f"rank {rank} on n" in (folder / f"rank-{rank}.txt").read_text()
            assert stopped or "most recent call first" in (folder / f"rank-{rank}.stacks").read_text()
        assert re.match(r"ranks? \d", (folder / "stacks.txt").read_text())


def test_the_evidence_tells_where_the_culprit_is(outcome: Outcome, job: Job) -> None:
    said = outcome.evidence(outcome.culprit)
    if job.where is None:
        assert said["state"] == "T"
        return
    assert f" in {job.where}" in said["stacks"]
    for rank in set(range(outcome.world)) - {outcome.culprit}:
        assert outcome.evidence(rank)["state"] == "S"


def test_ps_and_status_say_for_how_long_nothing_moves_and_what_to_do(outcome: Outcome) -> None:
    assert outcome.status["state"] == "stalled"
    assert outcome.status["stall"]["phase"] == "confirmed"
    assert outcome.status["stall"]["limit_s"] == LIMIT
    assert outcome.status["stall"]["since_s"] >= LIMIT + CONFIRMED_AFTER - 2.5
    assert outcome.ps["state"] == "stalled"
    assert outcome.ps["stall"]["phase"] == "confirmed"
    assert f"(limit {LIMIT:g} s)" in outcome.text
    assert "clusterctl.phase" in outcome.text


def test_down_stalled_ends_it_with_104_and_leaves_nothing(outcome: Outcome, seen: Seen) -> None:
    assert {"run": outcome.run, "state": "failed", "remaining": []} in seen.down
    assert (outcome.final["state"], outcome.final["exit_code"]) == ("failed", 104)
    assert seen.left == []


def test_down_stalled_ends_nothing_that_moves(seen: Seen) -> None:
    assert (seen.healthy["state"], seen.healthy["stall"]) == ("running", None)
    assert {worker["state"] for worker in seen.healthy["workers"]} == {"running"}
    assert seen.healthy["run"] not in {entry["run"] for entry in seen.down}


def test_a_run_that_shall_stop_ends_with_104_and_its_evidence_was_there_before(seen: Seen) -> None:
    outcome = seen.acted["stops"]
    decided = next(event for event in outcome.events if event["kind"] == "decided")
    assert (outcome.final["state"], outcome.final["exit_code"]) == ("failed", 104)
    assert decided["reason"] == "stalled"
    assert "no progress for" in decided["message"]
    for rank in range(outcome.world):
        written = (outcome.folder / outcome.said("confirmed")["evidence"] / f"rank-{rank}.json").stat().st_mtime
        assert written <= decided["time"]


def test_a_run_that_shall_restart_gets_a_new_attempt_and_ends_well(seen: Seen) -> None:
    outcome = seen.acted["restarts"]
    assert (outcome.final["state"], outcome.final["exit_code"]) == ("succeeded", 0)
    assert [event["why"] for event in outcome.events if event["kind"] == "restarting"] == ["stall"]


def test_stacks_folds_the_ranks_that_wait_and_shows_the_culprit_apart(seen: Seen) -> None:
    outcome = seen.runs["deadlock"]
    alone = next(entry for entry in outcome.stacks if entry["ranks"] == str(outcome.culprit))
    assert alone["frames"][0]["function"] == "deadlock"
    others = [entry for entry in outcome.stacks if entry is not alone]
    assert {entry["frames"][0]["function"] for entry in others} == {"waits_for_the_others"}
    assert {entry["source"] for entry in outcome.stacks} <= {"shim", "signal"}
    stopped = seen.runs["stopped"]
    (entry,) = [e for e in stopped.stacks if e["ranks"] == str(stopped.culprit)]
    assert entry["state"] == "T"


def test_the_stopped_data_loading_worker_is_in_the_evidence(seen: Seen) -> None:
    outcome = seen.runs["loader"]
    assert "T" in {child["state"] for child in outcome.evidence(outcome.culprit)["children"]}
