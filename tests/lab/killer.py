"""The random killer: one process of a run dies at a random moment, then `down` must leave nothing and lose nothing.

    KILLER_RUNS=200 KILLER_SEED=7 python -m tests.lab.killer     # each round can be repeated: KILLER_FIRST=113

A round starts a run on two nodes, kills a process of a random kind (also while the run is still being started), waits a
moment and ends the run. Around it live decoys that look like the run and must not be touched: a run of another name on
the same nodes, the same script started by hand, the user's own `sleep`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.head_cli import Head
from tests.lab.lab import Lab
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.node import Node

SCRIPT = """\
import os, signal, sys, time
rank = os.environ.get("RANK", "decoy")
if rank == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == "2" and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        os.execve("/bin/sleep", ["stray-of-a-rank", "86400"], {})
    os._exit(0)
copy = os.open(os.path.expanduser("~/copy.%s.%s" % (os.environ.get("CLUSTERCTL_RUN_ID"), rank)), os.O_WRONLY | os.O_CREAT)
number = 0
while True:
    line = b"rank %s line %d \\xff\\n" % (rank.encode(), number)
    os.write(copy, line)
    os.write(1, line)
    number += 1
    time.sleep(0.003)
"""
KINDS = ("controller", "supervisor", "waiter", "serve", "worker", "sshd")
GONE_WITHIN = 20.0


@dataclass
class Round:
    """What was done, and what was found wrong."""

    number: int
    kind: str = ""
    victim: str = ""
    after: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = "; ".join(self.problems) or "ok"
        return (
            f"round {self.number}: {self.kind} ({self.victim}) at {self.after:.2f} s, {self.seconds:.1f} s: {verdict}"
        )


class Killer:
    """Kills on two nodes, round after round.

    Args:
        made: The nodes; they stay the same.
        env: Environment of the head's commands.
        folder: For cluster files and state.
        seed: Tells every round's choices.
    """

    def __init__(self, made: Sequence[Node], env: dict[str, str], folder: Path, seed: int) -> None:
        self.made, self.env, self.folder, self.seed = made, env, folder, seed
        self._decoys: list[subprocess.Popen[bytes]] = []
        self._untouched: list[set[tuple[int, str]]] = []
        self._neighbour = self._head("neighbour")
        self._neighbour_run = ""

    def begin(self) -> None:
        """Start the decoys."""
        self._neighbour_run = str(self._neighbour.json("up", "-d", "--no-health")["run"])
        for node in self.made:
            script = node.path(f"{self._neighbour.workdir('neighbour')}/count.py")
            wait_for(script.exists, what="the synced script")
            inside = "/" + str(script).split("/root/", 1)[1]
            self._decoys += [node.start(["sleep", "86400"]), node.start(["python3", inside, "decoy"])]
            wanted = ("^sleep 86400", "count.py decoy", "count.py$")
            wait_for(lambda node=node, wanted=wanted: all(node.pids_of(w) for w in wanted), what="the decoys")  # type: ignore[misc]
        wait_for(lambda: self.made[1].pids_of("^stray-of-a-rank"), what="what rank 2 of the neighbour leaves behind")
        self._untouched = [self._processes(node) for node in self.made]

    def end(self) -> None:
        """End the decoys."""
        self._neighbour.run("down", self._neighbour_run)
        for decoy in self._decoys:
            decoy.kill()
            decoy.wait()

    def round(self, number: int) -> Round:
        """Start, kill, end, and look."""
        dice = random.Random(f"{self.seed}-{number}")
        result = Round(number)
        began = time.monotonic()
        head = self._head(f"round-{number}")
        with (head.folder / "up.err").open("wb") as said:
            argv = [sys.executable, "-m", "clusterctl", "up", "-d", "--no-health"]
            null = subprocess.DEVNULL
            up = subprocess.Popen(argv, cwd=head.folder, env=dict(head.env), stdin=null, stdout=null, stderr=said)
        run = wait_for(lambda: self._run_of(head), 60.0, what="the run's directory")
        appeared = time.monotonic()
        self._until(appeared + dice.uniform(0.0, 2.5))
        result.kind = dice.choice(KINDS)
        result.victim = self._kill(dice, result.kind, head, run)
        result.after = time.monotonic() - appeared
        self._until(time.monotonic() + dice.choice((0.0, dice.uniform(0.0, 1.0))))
        ended = head.run("down", run, timeout=90)
        up.wait(timeout=60)
        self._look(result, head, run, ended)
        result.seconds = time.monotonic() - began
        return result

    def account(self, number: int) -> str:
        """What the run of a round wrote about itself, for a person who looks for a fault."""
        folder = self.folder / f"round-{number}"
        paths = [folder / "up.err", *folder.glob("state/clusterctl/runs/*/controller.log")]
        paths += [
            *folder.glob("state/clusterctl/runs/*/events.jsonl"),
            *folder.glob("state/clusterctl/runs/*/nodes/*/journal*"),
        ]
        run = next(folder.glob("state/clusterctl/runs/*")).name
        for node in self.made:
            paths += node.path(".local/state/clusterctl/nodes").glob(f"{run}/*/supervisor.log")
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-6000:]}" for path in paths)

    # --- one round's parts

    def _head(self, name: str) -> Head:
        folder = self.folder / name
        folder.mkdir()
        (folder / "count.py").write_text(SCRIPT)
        head = Head(folder, {**self.env, "XDG_STATE_HOME": str(folder / "state")})
        title = "neighbour" if name == "neighbour" else "victim"
        head.write(
            {n.name: 2 for n in self.made},
            {"script": "count.py", "grace": "1s"},
            name=title,
            sync={"exclude": ["state", "*.err"]},
        )
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

    def _kill(self, dice: random.Random, kind: str, head: Head, run: str) -> str:
        """Kill one process of that kind as soon as there is one; return who it was."""

        def find() -> tuple[Node | None, int] | None:
            found = self._of_kind(kind, head, run)
            return dice.choice(found) if found else None

        try:
            node, pid = wait_for(find, 5.0, what=f"a {kind}")
        except (TimeoutError, AssertionError):
            return "none was there"
        if node is None:
            os.kill(pid, signal.SIGKILL)
            return f"{pid} on the head"
        listener = kind == "sshd" and pid == node.sshd_listener()
        node.signal(pid, signal.SIGKILL)
        if listener:
            threading.Timer(dice.uniform(0.0, 1.5), node.restart_sshd).start()
            return f"the listener on {node.name}"
        return f"{pid} on {node.name}"

    def _of_kind(self, kind: str, head: Head, run: str) -> list[tuple[Node | None, int]]:
        if kind == "controller":
            pid = lock_holder(self._run_dir(head, run) / "lock")
            return [] if pid is None else [(None, pid)]
        if kind == "sshd":
            return [(n, pid) for n in self.made for pid in n.sshd_pids()]
        patterns = {
            "supervisor": f"supervise {run}",
            "waiter": f"clusterctl-agent wait .*{run}",
            "serve": "agent serve",
        }
        if kind in patterns:
            return [(n, pid) for n in self.made for pid in n.pids_of(patterns[kind])]
        return [
            (n, pid)
            for n in self.made
            for pid in n.pids_of(r"count\.py$")
            if n.environ(pid).get("CLUSTERCTL_RUN_ID") == run
        ]

    # --- looking

    def _look(self, result: Round, head: Head, run: str, ended: subprocess.CompletedProcess[str]) -> None:
        if ended.returncode != 0:
            result.problems.append(f"`down` exited with {ended.returncode}: {ended.stderr[-500:]}")
        try:
            wait_for(lambda: not self._survivors(run), GONE_WITHIN, what="survivors to be gone")
        except (TimeoutError, AssertionError):
            result.problems.append(f"left: {self._survivors(run)}")
        if lock_holder(self._run_dir(head, run) / "lock") is not None:
            result.problems.append("a controller is left")
        for node, before in zip(self.made, self._untouched, strict=True):
            missing = before - self._processes(node)
            if missing:
                result.problems.append(f"decoys touched on {node.name}: {sorted(missing)}")
        for node in self.made:
            self._compare(result, node, self._run_dir(head, run) / "nodes" / node.name, run)

    def _survivors(self, run: str) -> list[tuple[str, int, str]]:
        """What of the run is there: by its marks as this test reads them, not as the product does."""
        found = []
        for node in self.made:
            for process in node.leftovers():
                mine = node.environ(process.pid).get("CLUSTERCTL_RUN_ID") == run or run in process.command
                stray = "stray-of-a-rank" in process.command and not self._known(node, process.pid)
                if mine or stray:
                    found.append((node.name, process.pid, process.command))
        return found

    def _known(self, node: Node, pid: int) -> bool:
        return any(pid == known for known, _ in self._untouched[list(self.made).index(node)])

    def _processes(self, node: Node) -> set[tuple[int, str]]:
        """The decoys and the neighbour's own processes; its connections may come and go."""
        ours = ("count.py", "sleep 86400", "stray-of-a-rank", "clusterctl-agent wait", "clusterctl-agent supervise")
        return {(p.pid, p.command) for p in node.leftovers() if any(word in p.command for word in ours)}

    def _compare(self, result: Round, node: Node, replicas: Path, run: str) -> None:
        for rank in range(4):
            theirs = next(
                node.path(".local/state/clusterctl/nodes").glob(f"{run}/{node.name}/attempt-0/rank-{rank}.log"), None
            )
            if theirs is None:
                continue
            written = theirs.read_bytes()
            replica = replicas / "attempt-0" / f"rank-{rank}.log"
            ours = replica.read_bytes() if replica.exists() else b""
            if ours != written:
                result.problems.append(f"rank {rank}: {len(ours)} bytes here, {len(written)} there")
            copy = node.path(f"copy.{run}.{rank}")
            said = copy.read_bytes() if copy.exists() else b""
            if not said.startswith(written) or said[len(written) :].count(b"\n") > 1:
                result.problems.append(f"rank {rank} wrote {len(said)} bytes, its file holds {len(written)}")


def lock_holder(lock: Path) -> int | None:
    """Return the pid of the controller that holds a run directory."""
    try:
        inode = lock.stat().st_ino
    except FileNotFoundError:
        return None
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        # The same number may be another file's on another file system.
        if f":{inode} " in line and fields[1] != "->" and _has_open(int(fields[4]), lock):
            return int(fields[4])
    return None


def _has_open(pid: int, file: Path) -> bool:
    try:
        return any(fd.samefile(file) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists())
    except (FileNotFoundError, PermissionError):
        return False


def main() -> int:
    """Run the rounds and tell of each; 1 where something was found wrong."""
    wanted = int(os.environ.get("KILLER_RUNS", "200"))
    first = int(os.environ.get("KILLER_FIRST", "0"))
    seed = int(os.environ.get("KILLER_SEED", str(random.SystemRandom().randrange(10**6))))
    print(f"seed {seed}, rounds {first} to {first + wanted - 1}", flush=True)
    bad: list[Round] = []
    with Lab() as lab, tempfile.TemporaryDirectory(prefix="clusterctl-killer-") as folder:
        killer = Killer(lab.add(2), lab.head_env(), Path(folder), seed)
        killer.begin()
        for number in range(first, first + wanted):
            result = killer.round(number)
            print(result, flush=True)
            if result.problems:
                bad.append(result)
                print(killer.account(number), flush=True)
        killer.end()
    print(f"seed {seed}: {wanted - len(bad)} of {wanted} rounds left nothing, touched no decoy and lost no byte")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
