"""The random killer: one process of a run dies at a random moment, then `down` must leave nothing and lose nothing.

    KILLER_RUNS=200 KILLER_SEED=7 python -m tests.lab.killer
    python -m tests.lab.killer --world "network home" --world "IPv6 only"     # half of the rounds in each
    KILLER_START=fork python -m tests.lab.killer                                # ranks are forked, and forkservers may die, too
    KILLER_START=roles python -m tests.lab.killer                               # the second node waits for the first one
    KILLER_FIRST=113 KILLER_RUNS=1 KILLER_SEED=7 python -m tests.lab.killer   # one round once more

A round starts a run on two nodes, kills a process of a random kind (also while the run is still being started), waits a
moment and ends the run. Around it live decoys that look like the run and must not be touched: a run of another name on
the same nodes, the same script started by hand, the user's own `sleep`.

A world (`tests/lab/worlds.py`) is where that happens; what befalls some of them does not happen here.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab.head_cli import Head
from tests.lab.lab import Lab
from tests.lab.locks import lock_holder
from tests.lab.remains import Watch, state_root
from tests.lab.rounds import HEADLINE, NOBODY, Round, Wrong, row
from tests.lab.spec import SHARED
from tests.lab.victims import FORKSERVER, KINDS, kill
from tests.lab.waiting import wait_for
from tests.lab.worlds import WORLDS, World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.node import Node

SCRIPT = """\
import os, signal, sys, time
rank = os.environ.get("RANK", "decoy")
if "CLUSTERCTL_RANK_OFFSET" in os.environ:
    rank = str(int(rank) + int(os.environ["CLUSTERCTL_RANK_OFFSET"]))
if rank == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == "2" and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        os.execve("/bin/sleep", ["stray-of-a-rank", "86400"], {})
    os._exit(0)
run = os.environ.get("CLUSTERCTL_RUN_ID", os.urandom(8).hex())
copy = os.open("/srv/shared/copy.%s.%s" % (run, rank), os.O_WRONLY | os.O_CREAT)
pause = float(os.environ.get("PAUSE", "0.05"))
number = 0
while True:
    line = b"rank %s line %d \\xff\\n" % (rank.encode(), number)
    os.write(copy, line)
    os.write(1, line)
    number += 1
    time.sleep(pause)
"""
GONE_WITHIN = 20.0
PLAIN = next(world for world in WORLDS if world.name == "plain")


class Killer:
    """Kills on two nodes, round after round.

    Args:
        made: The nodes; they stay the same.
        env: Environment of the head's commands; the state of runs is kept apart below its XDG_STATE_HOME.
        folder: For cluster files.
        seed: Tells every round's choices.
        world: What its cluster files say besides, and how long an agent may stay; default: nothing special.
        start: The start method of the ranks; `roles` spawns them as two roles.
    """

    def __init__(
        self,
        made: Sequence[Node],
        env: dict[str, str],
        folder: Path,
        seed: int,
        world: World = PLAIN,
        start: str = "spawn",
    ) -> None:
        self.made, self.env, self.folder, self.seed, self._world = made, env, folder, seed, world
        self._start = start
        self._kinds = (*KINDS, FORKSERVER) if start == "fork" else KINDS
        self._decoys: list[subprocess.Popen[bytes]] = []
        self._watches: list[Watch] = []
        self._neighbour = self._head("neighbour", gpus=(0, 1))
        self._neighbour_run = ""

    def begin(self) -> None:
        """Start the decoys."""
        self._neighbour_run = str(self._neighbour.json("up", "-d", "--no-health")["run"])
        for node in self.made:
            path = f"{self._neighbour.workdir('neighbour')}/count.py"
            wait_for(node.path(path).exists, what="the synced script")
            script = ["python3", f"{node.spec.home}/{path}", "decoy"]
            self._decoys += [node.start(argv, user=node.spec.user) for argv in (["sleep", "86400"], script)]
            wanted = ("^sleep 86400", "count.py decoy", "count.py$")
            wait_for(lambda node=node, wanted=wanted: all(node.pids_of(w) for w in wanted), what="the decoys")  # type: ignore[misc]
        wait_for(lambda: self.made[1].pids_of("^stray-of-a-rank"), what="what rank 2 of the neighbour leaves behind")
        self._watches = [Watch(node, self._neighbour_run) for node in self.made]

    def end(self) -> Round:
        """End the neighbour and the decoys; return what became of the neighbour, as of a round of its own."""
        result = Round(None)
        began = time.monotonic()
        ended = self._neighbour.run("down", self._neighbour_run, timeout=90)
        if ended.returncode != 0:
            result.problems.append((Wrong.FAILED, f"`down` exited with {ended.returncode}: {ended.stderr[-500:]}"))
        self._compare(result, self._neighbour, self._neighbour_run)
        for decoy in self._decoys:
            if decoy.poll() is not None:
                result.problems.append((Wrong.TOUCHED, f"a decoy ended with {decoy.returncode}"))
            decoy.kill()
            decoy.wait()
        result.seconds = time.monotonic() - began
        return result

    def round(self, number: int) -> Round:
        """Start, kill, end, and look."""
        dice = random.Random(f"{self.seed}-{number}")
        result = Round(number)
        began = time.monotonic()
        head = self._head(result.name, gpus=(2, 3))
        with (head.folder / "up.err").open("wb") as said:
            argv = [sys.executable, "-m", "clusterctl", "up", "-d", "--no-health"]
            null = subprocess.DEVNULL
            up = subprocess.Popen(argv, cwd=head.folder, env=dict(head.env), stdin=null, stdout=null, stderr=said)
        try:
            self._play(result, dice, head, up)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            result.problems.append((Wrong.FAILED, str(error)))
            up.kill()
            up.wait()
        self._look(result, head, self._run_of(head))
        result.seconds = time.monotonic() - began
        return result

    def _play(self, result: Round, dice: random.Random, head: Head, up: subprocess.Popen[bytes]) -> None:
        run = wait_for(lambda: self._run_of(head), 60.0, what="the run's directory")
        appeared = time.monotonic()
        self._until(appeared + dice.uniform(0.0, 2.5))
        result.kind = dice.choice(self._kinds)
        victim, again = kill(result.kind, dice, self.made, self._run_dir(head, run)) or (NOBODY, lambda: None)
        result.victim = victim
        result.after = time.monotonic() - appeared
        self._until(time.monotonic() + dice.choice((0.0, dice.uniform(0.0, 1.0))))
        ended = head.run("down", run, timeout=90)
        if ended.returncode != 0:
            result.problems.append((Wrong.FAILED, f"`down` exited with {ended.returncode}: {ended.stderr[-500:]}"))
        started = up.wait(timeout=60)
        if victim == NOBODY and started != 0:
            result.problems.append((Wrong.FAILED, f"`up` exited with {started} before anybody was killed"))
        again()

    def account(self, played: Round) -> str:
        """What the run of a round wrote about itself, for a person who looks for a fault."""
        name = played.name
        paths = [self.folder / name / "up.err"]
        for run in Path(self.env["XDG_STATE_HOME"], name).glob("clusterctl/runs/*"):
            paths += [run / "controller.log", run / "events.jsonl", *run.glob("nodes/*/journal*")]
            for node in self.made:
                paths += state_root(node).glob(f"nodes/{run.name}/*/supervisor.log")
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-6000:]}" for path in paths if path.exists())

    # --- one round's parts

    def _head(self, name: str, gpus: Sequence[int]) -> Head:
        """A checkout of its own; no node has these GPUs, but all can be claimed."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "count.py").write_text(SCRIPT)
        head = Head(folder, {**self.env, "XDG_STATE_HOME": f"{self.env['XDG_STATE_HOME']}/{name}"})
        neighbour = name == "neighbour"
        title = name if neighbour else "victim"
        # What only has to be there takes no time from what is looked at.
        env = {} if neighbour else {"PAUSE": "0.003"}
        job: dict[str, Any] = {"script": "count.py", "grace": "1s", "start_method": self._start}
        if self._start == "roles":
            server, trainer = ({"script": "count.py", "hosts": node.name} for node in self.made)
            both = {"server": {**server, "ready": {"output": "line 9 "}}, "trainer": {**trainer, "needs": "server"}}
            job = {"roles": both, "grace": "1s"}
        more = {"env": env, "sync": {"exclude": ["*.err"]}, **self._world.file(title)}
        if self._start == "fork":
            # A forkserver is kept where a restart may follow.
            more["restart"] = {"max_restarts": 1, "on": ["stall"]}
        head.write({node.name: 2 for node in self.made}, job, gpus=gpus, name=title, **more)
        return head

    @staticmethod
    def _until(moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            threading.Event().wait(left)

    @staticmethod
    def _run_of(head: Head) -> str | None:
        root = Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs"
        return next((p.name for p in root.glob("*/") if (p / "events.jsonl").exists()), None) if root.is_dir() else None

    @staticmethod
    def _run_dir(head: Head, run: str) -> Path:
        return Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs" / run

    # --- looking

    def _look(self, result: Round, head: Head, run: str | None) -> None:
        gone_within = GONE_WITHIN + self._world.silent_s
        for watch in self._watches:
            try:
                wait_for(lambda watch=watch: not watch.left(), gone_within, what="the run to be gone", every=0.1)  # type: ignore[misc]
            except TimeoutError:
                result.problems += [(Wrong.LEFT, f"{watch.node.name}: {what}") for what in watch.left()]
            result.problems += [(Wrong.TOUCHED, f"{watch.node.name}: {what}") for what in watch.touched()]
            watch.settle()
        if run is None:
            return
        if lock_holder(self._run_dir(head, run) / "lock") is not None:
            result.problems.append((Wrong.LEFT, "a controller"))
        self._compare(result, head, run)

    def _compare(self, result: Round, head: Head, run: str) -> None:
        """Compare what the ranks wrote with what their nodes have of it, and that with what the head has."""
        for i, node in enumerate(self.made):
            for rank in (2 * i, 2 * i + 1):
                said = _bytes(node.path(f"{SHARED}/copy.{run}.{rank}"))
                log = f"{node.name}/attempt-0/rank-{rank}.log"
                written = _bytes(state_root(node) / "nodes" / run / log)
                replica = _bytes(self._run_dir(head, run) / "nodes" / log)
                if replica != written:
                    text = f"rank {rank}: {len(replica)} bytes here, {len(written)} on {node.name}"
                    result.problems.append((Wrong.LOST, text))
                # A rank that dies between its two writes has said one line more than it has printed.
                if not said.startswith(written) or said[len(written) :].count(b"\n") > 1:
                    text = f"rank {rank} wrote {len(said)} bytes, its file on {node.name} holds {len(written)}"
                    result.problems.append((Wrong.LOST, text))


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def play(world: World, numbers: range, seed: int) -> list[Round]:
    """Play rounds in a world, and tell of each."""
    with tempfile.TemporaryDirectory(prefix="clusterctl-killer-") as folder, Lab() as lab, world.on(lab, 2) as scene:
        env = {**lab.head_env(XDG_STATE_HOME=f"{folder}/state"), **scene.env}
        killer = Killer(scene.nodes, env, Path(folder), seed, world, os.environ.get("KILLER_START", "spawn"))
        killer.begin()
        played = []
        for number in numbers:
            result = killer.round(number)
            print(result, flush=True)
            if result.problems:
                print(killer.account(result), flush=True)
            played.append(result)
        neighbour = killer.end()
        print(neighbour, flush=True)
    return [*played, neighbour]


def wanted_worlds() -> list[World]:
    """Return the worlds that the command line names, else KILLER_WORLDS (with `;` between them), else the plain one."""
    worlds = {world.name: world for world in WORLDS}
    parser = argparse.ArgumentParser(prog="python -m tests.lab.killer", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--world", action="append", metavar="NAME", help="a world of tests/lab/worlds.py; repeatable")
    names = parser.parse_args().world or os.environ.get("KILLER_WORLDS", "plain").split(";")
    for name in names:
        if name.strip() not in worlds:
            parser.error(f"there is no world `{name.strip()}`; there are: {', '.join(f'`{one}`' for one in worlds)}")
        reason = worlds[name.strip()].unavailable()
        if reason:
            parser.error(f"there can be no world `{name.strip()}` here: {reason}")
    return [worlds[name.strip()] for name in names]


def main() -> int:
    """Run the rounds, an equal part in each world; 1 where something was found wrong."""
    # A plain `kill` of this process tears down as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    worlds = wanted_worlds()
    wanted = int(os.environ.get("KILLER_RUNS", "200"))
    first = int(os.environ.get("KILLER_FIRST", "0"))
    seed = int(os.environ.get("KILLER_SEED", str(random.SystemRandom().randrange(10**6))))
    print(f"seed {seed}, rounds {first} to {first + wanted - 1}", flush=True)
    table, good = [HEADLINE], True
    bounds = [first + wanted * i // len(worlds) for i in range(len(worlds) + 1)]
    for i, world in enumerate(worlds):
        print(f"world: {world.name} ({world.sentence})", flush=True)
        played = play(world, range(bounds[i], bounds[i + 1]), seed)
        good = good and not any(one.problems for one in played)
        table.append(row(world.name, played))
        print(table[-1], flush=True)
    print("\n".join([f"seed {seed}", *table]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
