"""The four nodes of `clusterctl demo`: folders of this machine, with a way to each that can be cut.

Everything that the demo starts has the folder in its environment, and all its files are in the folder. So
`remove_demo` can remove a demo that was killed, too: its guard does so at once, and if both were killed, the next demo.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

OWN_COMMAND = (sys.executable, "-m", "clusterctl")
NODES = ("node1", "node2", "node3", "node4")
SMALL_DISK, CUT_NODE = "node3", "node2"
_SMALL_DISK_BYTES = 24 << 20
_MARK = "CLUSTERCTL_DEMO"
_CLONE_NEWNS, _CLONE_NEWUSER, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 0x10000000, 0x4000, 0x40000, 2
_PREFIX = f"clusterctl-demo-{os.getuid()}-"
_END_S = 5.0

_ENTER_NODE = """\
test ! -e "$1/is-cut" || { echo "the demo has cut this node" >&2; exit 1; }
echo $$ > "$1/connection"
export HOME="$1" XDG_STATE_HOME="$1/state" XDG_CACHE_HOME="$1/cache"
exec /bin/sh
"""
_CLUSTER = """\
version: 1
name: demo
hosts: {{"node[1-4]": {{workers: 1}}}}
defaults:
  transport: {{command: [/bin/sh, "{folder}/enter-node", "{folder}/{{host}}"]}}
  python: {python}
  workdir: ~/work
  gpus: 0
sync: none
job:
  script: train.py
  framework: none
  grace: 2s
  checkpoint: {{pattern: checkpoint.json}}
restart: {{max_restarts: 1000, backoff: 0}}
stall: {{timeout: 4s, startup_timeout: 30s, action: restart}}
network: {{node_lost_after: 30s}}
health: {{ignore: ["host.*", "run.*"]}}
logs: {{reserve: 1MiB}}
"""


def make_demo_folder() -> tuple[Path, int]:
    """Return a new folder with the cluster file, and the descriptor that holds its lock."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "enter-node").write_text(_ENTER_NODE)
    (folder / "cluster.yaml").write_text(_CLUSTER.format(folder=folder, python=sys.executable))
    return folder, lock


def make_nodes(folder: Path) -> str | None:
    """Create the nodes, one with a small disk of its own. Return the reason if the disk cannot be made.

    The disk is a tmpfs in a mount namespace of this process, so that it ends with the last process of the demo.
    """
    for node in NODES:
        (folder / node).mkdir()
    reason = _mount_small_disk(folder / SMALL_DISK)
    for node in NODES:
        (folder / node / "work").mkdir()
        shutil.copy(Path(__file__).with_name("demo_training.py"), folder / node / "work" / "train.py")
    return reason


def _mount_small_disk(path: Path) -> str | None:
    """Try in a child first, because a failure would leave a process in a namespace in which it may do little."""
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(OSError):
            _mount_in_new_namespace(path)
            status = 0
        os._exit(status)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        return "only root may mount a small disk here"
    _mount_in_new_namespace(path)
    return None


def _mount_in_new_namespace(path: Path) -> None:
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()

    def check(status: int) -> None:
        if status != 0:
            raise OSError(ctypes.get_errno(), "refused")

    if libc.unshare(_CLONE_NEWNS) != 0:
        check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    options = f"size={_SMALL_DISK_BYTES},mode=700".encode()
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    check(libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, options))


def make_environment(folder: Path) -> dict[str, str]:
    """Return the environment in which all commands keep their files in the folder."""
    homes = {f"XDG_{kind}_HOME": str(folder / "head" / kind.lower()) for kind in ("STATE", "CONFIG", "CACHE", "DATA")}
    return {**os.environ, **homes, _MARK: str(folder), "CLUSTERCTL_NO_BELL": "1"}


def cut_node(folder: Path, node: str) -> None:
    """End the connection to a node, and refuse new ones until `mend_node`."""
    (folder / node / "is-cut").touch()
    with contextlib.suppress(OSError, ValueError):
        os.killpg(int((folder / node / "connection").read_text()), signal.SIGKILL)


def mend_node(folder: Path, node: str) -> None:
    """Let new connections to a node pass, and free its disk."""
    for name in ("is-cut", "filler"):
        (folder / node / name).unlink(missing_ok=True)


def fill_disk(folder: Path, node: str) -> int:
    """Fill the disk of a node; return the number of bytes that were free."""
    written = 0
    with contextlib.suppress(OSError), (folder / node / "filler").open("wb", buffering=0) as file:
        while written < 2 * _SMALL_DISK_BYTES:
            written += file.write(bytes(4096))
    return written


@contextlib.contextmanager
def guard_demo(folder: Path) -> Iterator[list[str]]:
    """Start a process that removes the demo at the end of the context, or when this process dies.

    Yield a list that contains what `clusterctl down` printed after the context.
    """
    life, lifeline = os.pipe()
    report, answer = os.pipe()
    guard = os.fork()
    if guard == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_IGN)
            os.close(lifeline)
            os.read(life, 1)
            for line in remove_demo(folder):
                with contextlib.suppress(OSError):
                    os.write(answer, f"{line}\n".encode())
        os._exit(0)
    os.close(answer)
    lines: list[str] = []
    try:
        yield lines
    finally:
        os.close(lifeline)
        with os.fdopen(report) as printed:
            lines += printed.read().splitlines()
        os.waitpid(guard, 0)
        os.close(life)


def list_abandoned_demos() -> list[Path]:
    """Return the folders of demos that have ended without removing them."""
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / "lock").open() as lock:
            if folder.stat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(folder)
    return found


def remove_demo(folder: Path) -> Iterator[str]:
    """End the runs of a demo, kill what remains of it, and remove its folder. Yield what `clusterctl down` prints."""
    environment = make_environment(folder)
    for node in NODES:
        mend_node(folder, node)
    for run in sorted((folder / "head/state/clusterctl/runs").glob("*")):
        done = subprocess.run(
            [*OWN_COMMAND, "down", "--kill", run.name],
            env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        yield from (done.stdout + done.stderr).splitlines()
    deadline = time.monotonic() + _END_S
    while (processes := _list_processes(folder)) and time.monotonic() < deadline:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    ctypes.CDLL(None).umount2(os.fsencode(folder / SMALL_DISK), _MNT_DETACH)
    shutil.rmtree(folder, ignore_errors=True)


def _list_processes(folder: Path) -> list[int]:
    """Return the processes that have the folder in their environment, except this process."""
    mark, found = f"{_MARK}={folder}\0".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes() + b"\0":
                found.append(int(entry.name))
    return found
