"""One run that goes wrong: started, looked at until it hangs or is over, asked about, and ended."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.lab import hung_mount
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for
from tests.lab.why import frameworks
from tests.lab.why.kinds import CONTROLS, KINDS, STRAGGLES, Expected, Place, Who

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.lab.node import Node

JOB: Final = Path(__file__).with_name("job.py")
PROGRAM: Final = JOB.with_name("programs.py")
PER_NODE: Final = 2
LIMIT_S: Final = 8.0
WATCHED_S: Final = 45.0
"""For so long a healthy run is watched: several times what it takes from the last sign of life to a confirmed stall."""
GIVEN_UP_S: Final = 300.0
SURE: Final = ("certain", "likely")


@dataclass(frozen=True)
class Told:
    """What was said of one run.

    Attributes:
        verdict: What `why --json` prints; empty where it was not asked.
        stalled: The run was called stalled at some time.
    """

    kind: str
    culprit: int
    world: int
    verdict: Mapping[str, Any]
    stalled: bool = False
    trouble: str = ""
    run: str = ""
    ranks: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    at: str = ""

    @property
    def confidence(self) -> str:
        return str(self.verdict.get("confidence", "-"))

    @property
    def cls(self) -> str:
        return str(self.verdict.get("class", "-"))

    @property
    def exact(self) -> bool:
        """Those are named who did it, and nobody else."""
        wanted = self._expected.ranks(self.culprit, self.world, self.stopped)
        there = self._expected.who is not Who.LOST or self.nodes == {self.at}
        return not self.trouble and self.ranks == wanted and there

    @property
    def classed(self) -> bool:
        """What it is, is right."""
        return not self.trouble and self.cls in self._expected.classes

    @property
    def wrong_at_certain(self) -> bool:
        """It was said to be certain, and is not so."""
        return self.confidence == "certain" and not (self.exact and self.classed)

    @property
    def calm(self) -> bool:
        """Of a control: nothing was said of it that alarms anybody."""
        named = self.verdict.get("kind") != "none" and self.confidence in SURE
        if self.kind in STRAGGLES and self.cls == "SLOW" and self.ranks == {self.culprit}:
            named = False
        return not (self.trouble or self.stalled or named)

    @property
    def _expected(self) -> Expected:
        return KINDS.get(self.kind, Expected("none", ("NONE",), Who.NOBODY))

    def __str__(self) -> str:
        named = ",".join(map(str, sorted(self.ranks))) or "-"
        if self.kind in CONTROLS:
            good = "ok" if self.calm else "ALARM"
        else:
            good = "WRONG" if self.wrong_at_certain else "ok" if self.exact and self.classed else "missed"
        words = self.trouble or str(self.verdict.get("summary", ""))
        return f"{self.kind:<30} {good:<6} culprit {self.culprit} named {named:<8} {self.cls:<14} {self.confidence:<10} {words[:150]}"


def play(
    kind: str, culprit: int, folder: Path, env: Mapping[str, str], made: Sequence[Node], bundles: Path | None = None
) -> Told:
    """Play one kind on nodes that nobody else needs meanwhile; keep its evidence in `bundles`."""
    folder.mkdir(parents=True)
    head = Head(folder, env)
    for script in (JOB, PROGRAM):
        shutil.copy(script, folder / script.name)
    expected = KINDS.get(kind)
    more = dict(expected.more) if expected else {}
    if expected is not None and expected.place is Place.FRAMEWORKS:
        more["defaults"] = {"python": str(frameworks.python())}
    script, *arguments = expected.command if expected and expected.command else ("job.py", _played(kind))
    head.write(
        {node.name: PER_NODE for node in made},
        {"script": script, "args": [*arguments, str(culprit)], "grace": "1s", **more.pop("job", {})},
        name=_name(head),
        stall={"timeout": f"{LIMIT_S:g}s", "startup_timeout": f"{LIMIT_S:g}s", **more.pop("stall", {})},
        **more,
    )
    world = PER_NODE * len(made)
    refused = expected is not None and expected.kind == "refused"
    hung = contextlib.ExitStack()
    if kind == "mount_hangs":
        hung.enter_context(hung_mount.on(made[culprit // PER_NODE]))
    started = head.run("up", "-d", "--json", *([] if refused else ["--no-health"]), timeout=180.0)
    run = _run_of(started.stdout) or _refused(head)
    if refused:
        _save(head, run, bundles, f"{kind}-{culprit}")
        return _told(head, run, kind, culprit, world)
    if started.returncode or not run:
        hung.close()
        return Told(kind, culprit, world, {}, trouble=f"up ended with {started.returncode}: {started.stderr[-300:]}")
    try:
        told = replace(_watched(head, run, kind, culprit, made), at=made[culprit // PER_NODE].name)
        if kind in KINDS:
            _save(head, run, bundles, f"{kind}-{culprit}")
        return told
    finally:
        hung.close()
        for node in made:
            node.restore()
            node.unblock(*(other for other in made if other is not node))
        head.run("down", "--kill", run, timeout=120.0)


def _played(kind: str) -> str:
    return kind if f"def {kind}(" in JOB.read_text() else "control_ends"


def _run_of(text: str) -> str:
    try:
        return str(json.loads(text)["run"])
    except (ValueError, KeyError):
        return ""


def _save(head: Head, run: str, bundles: Path | None, name: str) -> None:
    if bundles is not None and run:
        head.run("why", run, "--save", str(bundles / f"{name}.tar.gz"), "--redact", timeout=120.0)


def _refused(head: Head) -> str:
    """Return the run that was refused: `up` says its id to people."""
    names = [run["run"] for run in head.json("ps", "-a") if run["name"] == _name(head)]
    return names[0] if names else ""


def _watched(head: Head, run: str, kind: str, culprit: int, made: Sequence[Node]) -> Told:
    world = PER_NODE * len(made)
    if kind.endswith(("network_is_cut", "node_is_lost")):
        _ready(head, made)
    if kind.endswith("network_is_cut"):
        made[0].block(made[1])
    if kind.endswith("node_is_lost"):
        made[culprit // PER_NODE].cut()
    after = KINDS[kind].after if kind in KINDS else WATCHED_S
    stalled = _calls_for_a_look(head, run, seconds=after or GIVEN_UP_S)
    if after and kind in KINDS:
        told = _told(head, run, kind, culprit, world)
        return told if stalled is None else replace(told, trouble=f"it is called {stalled}")
    if kind not in CONTROLS and stalled is None:
        return Told(kind, culprit, world, {}, trouble="neither stalled nor over in time", run=run)
    told = _told(head, run, kind, culprit, world, stalled=stalled == "stalled")
    if kind in CONTROLS:
        events = head.run("status", run, "--json").stdout
        return (
            told if '"state": "failed"' not in events else Told(kind, culprit, world, {}, trouble="it failed", run=run)
        )
    return told


def _ready(head: Head, made: Sequence[Node]) -> None:
    ready = [node.path(f"{head.workdir(_name(head))}/ready-{PER_NODE * i}") for i, node in enumerate(made)]
    wait_for(lambda: all(path.exists() for path in ready), 120.0, "the ranks to begin")


def _name(head: Head) -> str:
    return head.folder.name.replace("_", "-")


def _calls_for_a_look(head: Head, run: str, seconds: float) -> str | None:
    """Wait until a run is called stalled or is over; return which, `None` where it goes on."""
    pause = threading.Event()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        status = head.json("status", run)
        if status["state"] == "stalled":
            return "stalled"
        if status["ended"] is not None:
            return "over"
        pause.wait(1.0)
    return None


def _told(head: Head, run: str, kind: str, culprit: int, world: int, *, stalled: bool = False) -> Told:
    asked = head.run("why", *([run] if run else []), "--json", timeout=120.0)
    try:
        verdict = json.loads(asked.stdout)
    except ValueError:
        return Told(
            kind, culprit, world, {}, trouble=f"why ended with {asked.returncode}: {asked.stderr[-300:]}", run=run
        )
    ranks = frozenset(one["rank"] for one in verdict["culprits"] if one["rank"] is not None)
    workers = head.json("status", run)["workers"] if run else []
    stopped = frozenset(worker["rank"] for worker in workers if worker["stopped"])
    nodes = frozenset(one["node"] for one in verdict["culprits"])
    return Told(kind, culprit, world, verdict, stalled=stalled, run=run, ranks=ranks, stopped=stopped, nodes=nodes)
