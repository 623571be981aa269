"""What a run holds on a node: ports and GPUs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.ports import PortWatch
from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.supervisor.claims import ClaimError, Claims
from tests.agent.talk import Refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
    with pytest.raises(Refused, match=f"port {port} cannot be held: Address already in use"):
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
    assert PortWatch([port], set).look(0.0) is not None
    # The looks of the supervisor are more frequent than its samples.
    seen = samples(talk)
    talk.until(lambda: samples(talk) >= seen + 3)
    socket.create_connection(("127.0.0.1", port)).close()
    talk.wait_for("swept")
    assert (talk.exits()[0]["exit_code"], talk.of("alarm")) == (0, [])


def test_the_looks_at_a_port_that_nobody_uses_become_rare() -> None:
    watch, looks, now = PortWatch([1], set), 0, 0.0
    while now < 86400.0:
        if watch.due(now):
            watch.look(now)
            looks += 1
        now += 0.25
    assert looks < 250


def test_a_port_that_a_program_listens_on_is_refused(node: Node) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Refused, match=f"port {port} cannot be held"):
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
    for wanted, why in ((held, f"GPU 995 is held by run {node.run}"), ({"ports": [port]}, f"port {port} is held")):
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
    first, second, third = (Claims(run, "n1", str(tmp_path)) for run in ("first", "second", "third"))
    first.take([991])
    second.take([990])
    with pytest.raises(ClaimError, match="GPU 991 is held by run first"):
        second.take([992, 991])
    assert len(second.descriptors) == 1
    third.take([992])
    with pytest.raises(ClaimError, match="GPU 990 is held by run second"):
        third.take([990])
    for claims in (first, second, third):
        claims.release()


def us() -> list[int]:
    return [os.getpid()]


def test_two_nodes_of_one_run_on_one_machine_do_not_share_a_gpu(tmp_path: Path) -> None:
    one, again, other = (
        Claims("run", node, str(tmp_path), guards) for node, guards in (("n1", tuple), ("n1", us), ("n2", tuple))
    )
    one.take([990])
    again.take([990])
    with pytest.raises(ClaimError, match=r"GPU 990 is held by run run \(node n1\)"):
        other.take([990])
    for claims in (one, again):
        claims.release()


# --- GPUs and other users


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with one GPU of NVIDIA's, as its kernel shows it."""
    gpu = tmp_path / "machine/proc/driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t NVIDIA H100\nGPU UUID: \t GPU-0a1b2c3d-0000\n")
    return tmp_path / "machine"


def fifo(locks: Path) -> None:
    locks.mkdir(mode=0o1777)
    os.mkfifo(locks / "GPU-0a1b2c3d-0000")


def hard_link(locks: Path) -> None:
    locks.mkdir(mode=0o1777)
    (locks.parent / "precious").write_text("precious")
    os.link(locks.parent / "precious", locks / "GPU-0a1b2c3d-0000")


def symbolic_link(locks: Path) -> None:
    locks.mkdir(mode=0o1777)
    (locks.parent / "precious").write_text("precious")
    (locks / "GPU-0a1b2c3d-0000").symlink_to(locks.parent / "precious")


def foreign(locks: Path) -> None:
    locks.mkdir(mode=0o700)
    os.chown(locks, 65534, 65534)


def open_to_all(locks: Path) -> None:
    locks.mkdir()
    locks.chmod(0o777)


FOLDERS = {
    "a file": (lambda locks: locks.write_text(""), "is not a directory"),
    "another user's": (foreign, "belongs to uid 65534, who could take claims away: as root"),
    "without the sticky bit": (open_to_all, "everybody could take claims away"),
    "a FIFO for a file": (fifo, "is no plain file with one name"),
    "a hard link to a file of ours": (hard_link, "is no plain file with one name"),
    "a symbolic link to a file of ours": (symbolic_link, "cannot claim GPUs"),
}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make something for somebody else")
@pytest.mark.parametrize(("make", "why"), FOLDERS.values(), ids=FOLDERS.keys())
def test_what_lies_in_the_folder_of_claims_cannot_keep_a_run_from_a_gpu_that_the_kernel_shows(
    tmp_path: Path, machine: Path, make: Callable[[Path], object], why: str
) -> None:
    locks = tmp_path / "locks"
    make(locks)
    first, second = (Claims(run, "n1", str(locks), root=str(machine)) for run in ("first", "second"))
    first.take([0])
    with pytest.raises(ClaimError, match="GPU 0 is locked by pid|GPU 0 is held by run first"):
        second.take([0])
    first.release()
    second.take([0])
    second.release()
    if (tmp_path / "precious").exists():
        assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make something for somebody else")
@pytest.mark.parametrize(("make", "why"), FOLDERS.values(), ids=FOLDERS.keys())
def test_without_the_word_of_the_kernel_the_folder_of_claims_has_to_be_in_order(
    tmp_path: Path, make: Callable[[Path], object], why: str
) -> None:
    locks = tmp_path / "locks"
    make(locks)
    for file in locks.glob("*"):
        file.rename(locks / f"gpu-0-{proc.boot_id()}")
    (tmp_path / "dev").mkdir()
    with pytest.raises(ClaimError, match=why):
        Claims("run", "n1", str(locks), root=str(tmp_path)).take([0])
    if (tmp_path / "precious").exists():
        assert (tmp_path / "precious").read_text() == "precious"


def test_a_lock_that_no_run_says_is_its_own_is_told_by_process_and_user(tmp_path: Path, machine: Path) -> None:
    place = machine / "proc/driver/nvidia/gpus/0000:01:00.0"
    with subprocess.Popen(["flock", place, "sh", "-c", "echo; read line"], stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ClaimError, match=rf"GPU 0 is locked by pid {other.pid} of uid {os.getuid()}, and no run"):
            Claims("run", "n1", str(tmp_path / "locks"), root=str(machine)).take([0])
        other.communicate(b"\n")


def test_what_a_claim_says_of_itself_cannot_steer_a_terminal(tmp_path: Path) -> None:
    first = Claims("fir\x1b]52;c;eA==\x07st", "n1", str(tmp_path))
    first.take([990])
    with pytest.raises(ClaimError, match=r"held by run fir\?\]52;c;eA==\?st"):
        Claims("second", "n1", str(tmp_path)).take([990])
    first.release()


def test_a_lock_whose_process_has_left_it_to_a_child_names_nobody(tmp_path: Path, machine: Path) -> None:
    place = machine / "proc/driver/nvidia/gpus/0000:01:00.0"
    heir = ["flock", place, "sh", "-c", "sleep 1000 & echo"]
    with subprocess.Popen(heir, stdout=-1, start_new_session=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.wait()
        try:
            with pytest.raises(ClaimError, match="^GPU 0 is locked, and no run says that it holds it$"):
                Claims("run", "n1", str(tmp_path / "locks"), root=str(machine)).take([0])
        finally:
            os.killpg(other.pid, signal.SIGKILL)
