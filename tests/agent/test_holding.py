"""What a run holds on a node: ports and GPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.port_reservation import PortIntruderCheck
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.supervisor.gpu_claims import PREFIX, GpuClaimError, GpuClaims
from tests.agent.talk import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

LISTEN = """
import socket, sys
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("", int(sys.argv[1])))
s.listen()
print("listening")
"""


# As a job does that ends once its peers have met: whoever looks has time to see it listen.
LISTEN_AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("", int(sys.argv[1])))
s.listen()
print("listening", flush=True)
s.accept()
"""


def finish(node: Node, talk: Talk) -> None:
    talk.ask(Command.FINISH, **node.where, state="failed", exit_code=100)


def test_a_held_port_is_refused_to_a_second_holder_and_free_for_the_worker(nodes: Callable[[], Node]) -> None:
    node, other = nodes(), nodes()
    talk = node.talk()
    (port,) = node.prepare(talk, ports=[0])["ports"]
    with pytest.raises(Refused, match=f"port {port} cannot be reserved: Address already in use"):
        other.prepare(other.talk(), ports=[port])
    node.follow(talk)
    node.start(talk, ["{python}", "-c", LISTEN, str(port)])
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == 0
    finish(node, talk)
    assert other.prepare(other.talk(), ports=[port])["ports"] == [port]


def samples(talk: Talk) -> int:
    return bytes(talk.files.get("samples.jsonl", b"")).count(b"\n")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_worker_that_became_another_user_may_listen_on_its_port(node: Node) -> None:
    talk = node.talk()
    (port,) = node.prepare(talk, ports=[0], sample_seconds=0.5)["ports"]
    node.follow(talk)
    node.start(talk, ["{python}", "-c", LISTEN_AS_NOBODY, str(port)])
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log") == b"listening\n")
    # Whoever does not ask whose processes are of the run takes it for an intruder.
    assert PortIntruderCheck([port], set).find_intruder(0.0) is not None
    # The looks of the supervisor are more frequent than its samples.
    seen = samples(talk)
    talk.until(lambda: samples(talk) >= seen + 3)
    socket.create_connection(("127.0.0.1", port)).close()
    talk.wait_for("swept")
    assert (talk.exits()[0]["exit_code"], talk.of("alarm")) == (0, [])


def test_the_looks_at_a_port_that_nobody_uses_become_rare() -> None:
    watch, looks, now = PortIntruderCheck([1], set), 0, 0.0
    while now < 86400.0:
        if watch.is_due(now):
            watch.find_intruder(now)
            looks += 1
        now += 0.25
    assert looks < 250


def test_a_port_that_a_program_listens_on_is_refused(node: Node) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Refused, match=f"port {port} cannot be reserved"):
            node.prepare(node.talk(), ports=[port])


def test_a_fixed_port_can_be_held_again_right_after_connections_on_it(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # closes first: TIME_WAIT stays on our port
        client.recv(1)
        client.close()
    assert node.prepare(node.talk(), ports=[port])["ports"] == [port]


def test_gpus_that_another_run_holds_are_refused_by_its_name(nodes: Callable[[], Node]) -> None:
    node, other = nodes(), nodes()
    talk = node.talk()
    node.prepare(talk, gpus=[990, 991])
    with pytest.raises(Refused, match=f"GPU 991 is held by run {node.run}"):
        other.prepare(other.talk(), gpus=[991, 992])
    finish(node, talk)
    other.prepare(other.talk(), gpus=[991, 992])


def test_gpus_and_ports_stay_with_a_run_between_its_attempts(nodes: Callable[[], Node]) -> None:
    node, other = nodes(), nodes()
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    held = {"gpus": [995], "ports": [port]}
    talk = node.launch(["false"], **held)
    talk.wait_for("swept")
    for wanted, why in ((held, f"GPU 995 is held by run {node.run}"), ({"ports": [port]}, f"port {port} is reserved")):
        with pytest.raises(Refused, match=why):
            other.prepare(other.talk(), **wanted)
    assert node.prepare(talk, attempt=1, **held)["ports"] == [port]
    finish(node, talk)
    other.prepare(other.talk(), **held)


def test_gpus_stay_with_a_run_whose_supervisor_dies_between_two_attempts(nodes: Callable[[], Node]) -> None:
    node, other = nodes(), nodes()
    talk = node.launch(["false"], gpus=[997])
    talk.wait_for("swept")
    os.kill(node.supervisor(), signal.SIGKILL)
    talk.ask(Command.STOP, **node.where, grace=0.0, reason="cancelled")
    with pytest.raises(Refused, match=f"GPU 997 is held by run {node.run}"):
        other.prepare(other.talk(), gpus=[997])


def test_an_attempt_gets_another_free_port_than_the_one_before(node: Node) -> None:
    talk = node.launch(["false"], ports=[0])
    talk.wait_for("swept")
    (before,) = talk.of("prepared")[0]["ports"]
    assert node.prepare(talk, attempt=1, ports=[0])["ports"] != [before]
    with socket.create_server(("", before)):
        pass


def test_a_preparation_that_cannot_be_written_down_holds_nothing(nodes: Callable[[], Node]) -> None:
    node, other = nodes(), nodes()
    (node.folder / "prepare.json").mkdir(parents=True)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    held = {"gpus": [998], "ports": [port]}
    with pytest.raises(Refused, match="Is a directory"):
        node.prepare(node.talk(), **held)
    assert node.supervised()
    other.prepare(other.talk(), **held)


def test_gpus_stay_claimed_while_a_worker_lives_and_its_supervisor_does_not(nodes: Callable[[], Node]) -> None:
    node, other = nodes(), nodes()
    talk = node.launch(["sleep", "1000"], gpus=[993])
    talk.kill()
    os.kill(node.supervisor(), signal.SIGKILL)
    with pytest.raises(Refused, match=f"GPU 993 is held by run {node.run}"):
        other.prepare(other.talk(), gpus=[993])


def test_after_a_refused_claim_nothing_new_is_held_and_nothing_old_is_given_up(tmp_path: Path) -> None:
    first, second, third = (GpuClaims(run, "n1", str(tmp_path)) for run in ("first", "second", "third"))
    first.claim([991])
    second.claim([990])
    with pytest.raises(GpuClaimError, match="GPU 991 is held by run first"):
        second.claim([992, 991])
    assert len(second.paths) == 1
    third.claim([992])
    with pytest.raises(GpuClaimError, match="GPU 990 is held by run second"):
        third.claim([990])
    for claims in (first, second, third):
        claims.release()


def us() -> list[int]:
    return [os.getpid()]


def test_two_nodes_of_one_run_on_one_machine_do_not_share_a_gpu(tmp_path: Path) -> None:
    one, again, other = (
        GpuClaims("run", node, str(tmp_path), guards) for node, guards in (("n1", tuple), ("n1", us), ("n2", tuple))
    )
    one.claim([990])
    again.claim([990])
    with pytest.raises(GpuClaimError, match=r"GPU 990 is held by run run \(node n1\)"):
        other.claim([990])
    for claims in (one, again):
        claims.release()


# --- GPUs and other users


def planted(folder: Path) -> Path:
    """The name of a claim on GPU 990 in a folder of another user's, in one that all users share."""
    folder.mkdir()
    folder.chmod(0o1777)
    theirs = folder / f"{PREFIX}planted"
    theirs.mkdir(mode=0o777)
    os.chown(theirs, 65534, 65534)
    return theirs / f"gpu-990-{proc.read_boot_id()}"


def file_of(uid: int, mode: int) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.touch()
        path.chmod(mode)
        os.chown(path, uid, uid)

    return make


def link_to_precious(link: Callable[[Path, Path], object]) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        precious = path.parents[2] / "precious"
        precious.write_text("precious")
        link(precious, path)

    return make


def folder_is(make_it: Callable[[Path], object]) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.parent.rmdir()
        make_it(path.parent)

    return make


PLANTED = {
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "another user's file": file_of(65534, 0o644),
    "another user's file that nobody else can read": file_of(65534, 0o600),
    "a file that all can write": file_of(65534, 0o666),
    "a hard link to a file of ours": link_to_precious(os.link),
    "a symbolic link to a file of ours": link_to_precious(os.symlink),
    "a file for a folder": folder_is(file_of(65534, 0o644)),
    "a link for a folder": folder_is(lambda path: path.symlink_to("/etc")),
    "a folder that nobody else can open": folder_is(lambda path: path.mkdir(mode=0)),
}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make something for somebody else")
@pytest.mark.parametrize("make", PLANTED.values(), ids=PLANTED.keys())
def test_what_others_put_into_the_folder_of_claims_takes_no_gpu_and_costs_no_file(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    locks = tmp_path / "locks"
    make(planted(locks))
    first, second = (GpuClaims(run, "n1", str(locks)) for run in ("first", "second"))
    first.claim([990])
    with pytest.raises(GpuClaimError, match="GPU 990 is held by run first"):
        second.claim([990])
    first.release()
    second.claim([990])
    second.release()
    if (tmp_path / "precious").exists():
        assert (tmp_path / "precious").read_text() == "precious"


def foreign(locks: Path) -> None:
    locks.mkdir(mode=0o1777)
    os.chown(locks, 65534, 65534)


def open_to_all(locks: Path) -> None:
    locks.mkdir()
    locks.chmod(0o777)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make something for somebody else")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        pytest.param(foreign, "belongs to uid 65534, who could remove claims: as root", id="another user's"),
        pytest.param(open_to_all, "every user could remove claims", id="without the sticky bit"),
    ],
)
def test_a_folder_whose_files_others_could_remove_takes_no_claims(
    tmp_path: Path, make: Callable[[Path], object], why: str
) -> None:
    make(tmp_path / "locks")
    with pytest.raises(GpuClaimError, match=why):
        GpuClaims("run", "n1", str(tmp_path / "locks")).claim([990])


AS_NOBODY = """
import os, sys
from clusterctl.agent.supervisor import gpu_claims
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
held = gpu_claims.GpuClaims("theirs", "n1", sys.argv[1])
try:
    held.claim([990])
except gpu_claims.GpuClaimError as error:
    print(error)
else:
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def nobody(locks: Path) -> Iterator[str]:
    """What a claim of user 65534 came to, for as long as that user may hold it."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", AS_NOBODY, locks], text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate(timeout=60)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_two_users_keep_each_other_off_a_gpu_and_see_whose_it_is() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        locks = Path(name)
        locks.chmod(0o1777)
        ours = GpuClaims("ours", "n1", name)
        ours.claim([990])
        with nobody(locks) as word:
            assert word == "GPU 990 is held by run ours of root (node n1)"
        ours.release()
        with nobody(locks) as word:
            assert word == "held"
            with pytest.raises(GpuClaimError, match=r"^GPU 990 is held by run theirs of nobody \(node n1\)$"):
                ours.claim([990])
        ours.claim([990])
        ours.release()


READ_LOCK = """
import fcntl, os, sys
os.setuid(65534)
file = open(sys.argv[1])
fcntl.lockf(file, fcntl.LOCK_SH)
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_locks_that_others_put_on_a_file_of_ours_are_no_claim() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o1777)
        folder = Path(name, f"{PREFIX}earlier")
        folder.mkdir(mode=0o711)
        file = folder / f"gpu-990-{proc.read_boot_id()}"
        file.touch(mode=0o644)
        pipe = subprocess.PIPE
        argv = [sys.executable, "-c", READ_LOCK, str(file)]
        with subprocess.Popen(argv, text=True, stdin=pipe, stdout=pipe) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "locked\n"
            claims = GpuClaims("ours", "n1", name)
            claims.claim([990])
            claims.release()
            other.communicate(timeout=60)


def test_what_a_claim_says_of_itself_cannot_steer_a_terminal(tmp_path: Path) -> None:
    first = GpuClaims("fir\x1b]52;c;eA==\x07st", "n1", str(tmp_path))
    first.claim([990])
    with pytest.raises(GpuClaimError, match=r"held by run fir\?\]52;c;eA==\?st"):
        GpuClaims("second", "n1", str(tmp_path)).claim([990])
    first.release()
