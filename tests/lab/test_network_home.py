"""A home on a server: what is shared, what is seen late, what is refused, and what never answers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.lab.network import waits
from tests.lab.places import HOME, Network, Place
from tests.lab.spec import NodeSpec
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab
    from tests.lab.node import Node

if not os.path.exists("/dev/fuse"):
    pytest.skip("there is no /dev/fuse", allow_module_level=True)

CACHE_S = 2.0


def home(user: str = "root", **network: object) -> NodeSpec:
    return NodeSpec(user=user, places={HOME: Place(network=Network(**network))})  # type: ignore[arg-type]


def sh(node: Node, command: str, **more: object) -> subprocess.CompletedProcess[str]:
    return node.run(["sh", "-c", command], user=node.spec.user, **more)  # type: ignore[arg-type]


def says(node: Node, command: str) -> str:
    done = sh(node, command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def begin(node: Node, command: str) -> subprocess.Popen[bytes]:
    return node.start(["sh", "-c", command], user=node.spec.user)


def test_all_nodes_see_one_home_and_users_own_what_they_make(lab: Lab, nodes: NodeFactory) -> None:
    first, second = nodes([home("train")] * 2)
    assert lab.ssh(first, "mkdir -p a/b && echo one > a/b/c && ln -s b a/d && chmod 640 a/b/c && id -u").returncode == 0
    assert lab.ssh(second, "stat -c '%u %a %s %F' a/d/c; cat a/d/c").stdout == "2000 640 4 regular file\none\n"
    says(second, "mv a/b/c a/e; rm a/d; rmdir a/b; echo two >> a/e")
    assert says(first, "ls a; cat a/e") == "e\none\ntwo\n"
    assert "fuse.glusterfs" in says(first, "grep ' /home/train ' /proc/mounts")
    assert {path.name for path in first.mounts[HOME].folder.iterdir()} == {".ssh", "a"}


def test_users_are_refused_what_the_server_refuses(nodes: NodeFactory) -> None:
    (node,) = nodes([home("train")])
    (node.mounts[HOME].folder / "of root").mkdir(mode=0o700)
    assert "Permission denied" in sh(node, "ls 'of root'").stderr
    assert "Permission denied" in sh(node, "mkdir 'of root/mine'").stderr
    assert node.run(["ls", "/home/train/of root"]).returncode == 0


def test_root_is_nobody_where_it_is_squashed(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes([home(root_squash=True)])
    assert "Permission denied" in lab.ssh(node, "touch ~/mine").stderr
    (node.mounts[HOME].folder / "open").mkdir()
    (node.mounts[HOME].folder / "open").chmod(0o777)
    assert says(node, "touch open/mine; stat -c %u open/mine") == "65534\n"
    assert "not permitted" in sh(node, "chown 0 open/mine").stderr


def test_what_another_node_does_is_seen_when_the_cache_is_old(nodes: NodeFactory) -> None:
    first, second = nodes([home(cache_s=CACHE_S)] * 2)
    says(first, "echo old > file; echo gone > old-name")
    assert says(second, "cat file old-name; cat new || true") == "old\ngone\n"
    says(first, "echo new > new; mv old-name renamed; echo longer >> file")
    assert sh(second, "cat new").returncode == 1
    assert says(second, "stat -c %s file old-name") == "4\n5\n"
    assert "renamed" in says(first, "ls")
    assert says(second, "cat file") == "old\nlonger\n", "an open asks the server"
    second.wait_for(lambda: sh(second, "cat new").stdout == "new\n", CACHE_S + 5, what="the new file")
    second.wait_for(lambda: sh(second, "cat old-name").returncode == 1, CACHE_S + 5, what="the old name to be gone")


def test_a_file_that_is_open_is_as_long_as_it_was(nodes: NodeFactory) -> None:
    first, second = nodes([home(cache_s=CACHE_S)] * 2)
    says(first, "echo 1 > log")
    follow = "f = open('log')\nlines = ''\nwhile '2' not in lines:\n  lines += f.read() or '.'\n"
    follow += "  open('/tmp/' + lines[:1] + 'x', 'w')\nprint(lines.count('.'))"
    with subprocess.Popen(second.inside(["python3", "-c", follow]), stdout=subprocess.PIPE, text=True) as reader:
        second.wait_for(lambda: second.path("/tmp/1x").exists(), what="the first line")
        says(first, "echo 2 >> log")
        said, _ = reader.communicate(timeout=CACHE_S + 10)
    assert int(said) > 10


@pytest.mark.parametrize("locks", ["ENOLCK", "ENOSYS"])
def test_locks_can_be_impossible(nodes: NodeFactory, locks: str) -> None:
    (node,) = nodes([home(locks=locks)])
    program = "import fcntl\nf = open('lock', 'w')\nfor lock in fcntl.flock, fcntl.lockf:\n"
    program += "  try: lock(f, fcntl.LOCK_EX)\n  except OSError as e: print(e.errno)"
    done = node.run(["python3", "-c", program], user="root")
    number = {"ENOLCK": 37, "ENOSYS": 38}[locks]
    assert done.stdout == f"{number}\n{number}\n", done.stderr


@contextlib.contextmanager
def lock_held(node: Node) -> Iterator[None]:
    """Let a process of the node hold a lock, until the end of the block at the latest."""
    holder = begin(node, "exec flock lock sh -c 'echo > /tmp/held; exec sleep 1000'")
    node.wait_for(lambda: node.path("/tmp/held").exists(), what="the lock")
    yield
    for pid in node.pids_of("^(flock lock|sleep 1000)"):
        node.signal(pid, signal.SIGKILL)
    holder.wait(10)


@pytest.mark.parametrize(("locks", "elsewhere"), [("shared", 1), ("local", 0)])
def test_locks_hold_between_nodes_or_on_one(nodes: NodeFactory, locks: str, elsewhere: int) -> None:
    first, second = nodes([home(locks=locks)] * 2)
    with lock_held(first):
        assert sh(first, "flock -n lock true").returncode == 1
        assert sh(second, "flock -n lock true").returncode == elsewhere
        waiter = begin(second, "exec flock lock true")
        if elsewhere:
            second.wait_for(lambda: second.pid_of("^flock lock true"), what="the waiter")
            assert waiter.poll() is None
    assert waiter.wait(10) == 0


def test_whoever_waits_for_a_lock_can_be_killed(nodes: NodeFactory) -> None:
    first, second = nodes([home()] * 2)
    with lock_held(first):
        waiter = begin(second, "exec flock lock true")
        pid = second.wait_for(lambda: second.pid_of("^flock lock true"), what="the waiter")
        second.signal(pid, signal.SIGTERM)
        assert waiter.wait(10) != 0


def test_a_lock_for_writing_needs_a_file_that_can_be_written(nodes: NodeFactory) -> None:
    (node,) = nodes([home()])
    says(node, "echo > lock")
    program = "import fcntl; f = open('lock'); fcntl.flock(f, fcntl.LOCK_SH); fcntl.flock(f, fcntl.LOCK_EX)"
    assert "Bad file descriptor" in node.run(["python3", "-c", program], user="root").stderr


def test_a_file_that_another_node_removes_is_stale(nodes: NodeFactory) -> None:
    first, second = nodes([home()] * 2)
    says(first, "echo some > file; mkdir folder")
    reader = (
        "import os, sys\nf = os.open('file', 0); os.chdir('folder'); print('open', flush=True); sys.stdin.readline()\n"
    )
    reader += "for ask in lambda: os.read(f, 9), lambda: os.listdir('.'):\n  try: print(ask())\n  except OSError as e: print(e.errno)"
    argv = second.inside(["python3", "-c", reader])
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        says(first, "rm file; rmdir folder")
        assert process.communicate("\n")[0].split() == ["116", "116"]


def test_a_file_that_the_node_itself_removes_is_only_hidden(nodes: NodeFactory) -> None:
    (node,) = nodes([home()])
    done = says(
        node, "mkdir d; echo kept > d/file; exec 3< d/file; rm d/file; ls -A d | cut -c -4; rmdir d || cat <&3; ls -A d"
    )
    assert done.splitlines()[:2] == [".nfs", "kept"]
    assert says(node, "ls -A d") == ""


def test_every_handle_is_forgotten_on_command(nodes: NodeFactory) -> None:
    (node,) = nodes([home()])
    says(node, "mkdir d; echo some > d/file")
    program = "import os, sys\nf = open('d/file'); os.chdir('d'); print('open', flush=True); sys.stdin.readline()\n"
    program += "for ask in f.read, os.listdir, lambda: open(os.path.expanduser('~/d/file')).read():\n"
    program += "  try: print(ask())\n  except OSError as e: print(e.errno)"
    argv = node.inside(["python3", "-c", program])
    env = {"HOME": node.spec.home, "PATH": os.defpath}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        node.mounts[HOME].forget_handles()
        assert process.communicate("\n")[0].split() == ["116", "116", "some"]


def test_what_is_asked_is_refused_on_command(nodes: NodeFactory) -> None:
    (node,) = nodes([home()])
    node.mounts[HOME].refuse(WRITE="EDQUOT")
    assert "quota exceeded" in sh(node, "head -c 5 /dev/zero > file").stderr
    node.mounts[HOME].refuse()
    assert says(node, "echo much > file; cat file") == "much\n"


def test_a_server_that_is_silent_answers_later(nodes: NodeFactory) -> None:
    (node,) = nodes([home()])
    node.mounts[HOME].hang(1.0)
    asking = begin(node, "ls")
    waits(node.mounts[HOME])
    assert asking.poll() is None
    assert asking.wait(10) == 0


@pytest.mark.parametrize("killable", [True, False])
def test_whoever_waits_for_a_dead_server_can_be_killed_or_not(nodes: NodeFactory, killable: bool) -> None:
    (node,) = nodes([home("train")])
    mount = node.mounts[HOME]
    mount.hang(killable=killable)
    asking = node.start(["stat", "/home/train/file"])
    waits(mount)
    pid = node.wait_for(lambda: node.pid_of("^stat /home/train/file"), what="who asks")
    node.signal(pid, signal.SIGKILL)
    if killable:
        assert asking.wait(10) != 0
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            asking.wait(0.5)
        assert node.path(f"/proc/{pid}/stat").read_text().split()[2] == "D"
    mount.answer()
    assert asking.wait(10) != 0
    assert sh(node, "ls -A").stdout == ".ssh\n"


def test_a_node_dies_whatever_its_server_does(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes([home("train")])
    node.mounts[HOME].hang(killable=False)
    asking = node.start(["stat", "/home/train/file"])
    waits(node.mounts[HOME])
    node.kill()
    assert asking.wait(10) != 0
    node.boot()
    assert lab.ssh(node, "ls -A ~").stdout == ".ssh\n"


def test_the_head_can_have_it_too(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes([home()])
    place = lab.root / "mine"
    place.mkdir()
    mounted = lab.mount(place, Network())
    says(node, "echo here > file")
    assert (place / "file").read_text() == "here\n"
    mounted.unmount(place)
    wait_for(lambda: not (place / "file").exists(), what="the mount to be gone")
