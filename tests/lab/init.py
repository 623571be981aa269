"""The program that becomes a node: a guard outside, and inside it PID 1.

Run as `python -m tests.lab.init`; it reads one JSON line (a `Setup`), makes the namespaces, prints the pid of
the node's PID 1, waits for `go` (the link is there), sets the machine up and prints `ready`.

The guard watches the process that owns the lab and kills the node when it ends, however it ends; PID 1 in
turn dies with the guard, and with PID 1 the kernel ends every process of the node and drops its namespaces.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from tests.lab import kernel
from tests.lab.mounts import mount_all

if TYPE_CHECKING:
    from tests.lab.setup import Setup


def main() -> None:
    setup: Setup = json.loads(sys.stdin.readline())
    owner = os.pidfd_open(setup["owner"])
    kernel.unshare(kernel.NEWNET | kernel.NEWNS | kernel.NEWPID | kernel.NEWUTS | kernel.NEWIPC)
    if setup["uptime"] is not None:
        _begin_clocks(setup["uptime"])
    child = os.fork()
    if child == 0:
        kernel.die_with_parent(signal.SIGKILL)
        os.close(owner)
        _be_init(setup)
    _say(str(child))
    _silence(keep_stderr=False)
    for place in setup["places"]:
        # They are the node's alone: a file system ends with the last one who holds it.
        for descriptor in {place["kept"], place["client"] and place["client"][0]} - {None}:
            os.close(descriptor)
    _guard(owner, child)


def _begin_clocks(uptime: float) -> None:
    """Let the clocks that count from the start of the machine say, for what is forked from now on, `uptime`."""
    kernel.unshare(kernel.NEWTIME)
    lines = [
        f"{name} {math.ceil(uptime - time.clock_gettime(clock))} 0\n"
        for name, clock in (("monotonic", time.CLOCK_MONOTONIC), ("boottime", time.CLOCK_BOOTTIME))
    ]
    with open("/proc/self/timens_offsets", "w", encoding="utf-8") as file:
        file.write("".join(lines))


def _guard(owner: int, child: int) -> None:
    inside = os.pidfd_open(child)
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.register(inside, select.POLLIN)
    poll.poll()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _be_init(setup: Setup) -> None:
    # PID 1 gets from inside only signals it has handlers for: without Python's own for SIGINT it cannot be killed.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    socket.sethostname(setup["hostname"])
    _join_cgroups(setup["cgroups"])
    mount_all(setup)
    if sys.stdin.readline() != "go\n":
        sys.exit("the lab went away")
    _bring_up_network(setup)
    start_sshd(setup["sshd"], setup["port"])
    os.setsid()
    os.chdir("/")
    _say("ready")
    _silence(keep_stderr=True)
    _reap_for_ever()


def _join_cgroups(folders: list[str]) -> None:
    """Join them alone: the guard must stay awake when the node is frozen."""
    for folder in folders:
        with open(f"{folder}/cgroup.procs", "w", encoding="utf-8") as file:
            file.write("0")
    if folders:
        # A cgroup namespace takes the group that its first process is in as its root.
        kernel.unshare(kernel.NEWCGROUP)


def _reap_for_ever() -> None:
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            continue


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _silence(*, keep_stderr: bool) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1) if keep_stderr else (0, 1, 2):
        os.dup2(null, descriptor)


def _bring_up_network(setup: Setup) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(setup["network"]), text=True, check=True)


def start_sshd(argv: list[str], port: int) -> None:
    """Start the listener (it goes to the background by itself) and return when it accepts connections."""
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    end = time.monotonic() + 20
    while not listens("/proc/net", port):
        if time.monotonic() > end:
            raise TimeoutError(f"sshd does not listen on port {port}")
        time.sleep(0.002)


def listens(folder: str, port: int) -> bool:
    """Whether the tables of a `/proc/net` hold a listening TCP socket (state 0A) on a port."""
    rows: list[list[Any]] = []
    for table in ("tcp", "tcp6"):
        with open(f"{folder}/{table}", encoding="utf-8") as file:
            rows += [line.split() for line in file.readlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


if __name__ == "__main__":
    main()
