"""Peers of a cast: real processes on this machine, which the test commands as the head, and meets as a neighbour."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.protocol import pieces
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.protocol.file_list import encode_file_list
from clusterctl.agent.protocol.pieces import PIECE_BYTES, CastPlan, Kind, MessageDecoder
from clusterctl.run.nodes.cast import make_certificate
from tests.agent.talk import Refused, Talk
from tests.lab.waiting import wait_for

CONTENT = random.Random(7).randbytes(3 * PIECE_BYTES + 1000)
SMALL = b"small"
FILES = {"big": CONTENT, "folder/small": SMALL, "folder/same": SMALL, "empty": b""}
WHOLE = CONTENT + SMALL
PIECES = [WHOLE[start : start + PIECE_BYTES] for start in range(0, len(WHOLE), PIECE_BYTES)]


def entries() -> list[tuple[str, int, int, str]]:
    return [(name, len(data), 0o640, hashlib.sha256(data).hexdigest()) for name, data in FILES.items()]


class Cluster:
    """A cast to nodes on this machine. `certificate` and `key` are those of the cast."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.certificate, self.key = make_certificate()
        self.talks: list[Talk] = []
        self.nodes: list[CastNode] = []

    def plan(self, **changes: Any) -> CastPlan:
        contents = {hashlib.sha256(data).hexdigest(): len(data) for data in FILES.values() if data}
        fields = {
            "cast": "first",
            "contents": list(contents.items()),
            "piece_hashes": [hashlib.sha256(piece).digest() for piece in PIECES],
            "certificate": self.certificate,
            "key": self.key,
            "address": "127.0.0.1",
            "limit": None,
        }
        return CastPlan(**{**fields, **changes})  # type: ignore[arg-type]

    def add(self, name: str, **changes: Any) -> CastNode:
        talk = Talk(self.root / name / "state")
        self.talks.append(talk)
        node = CastNode(talk, self.root / name / "target", self.plan(**changes))
        self.nodes.append(node)
        return node

    def introduce(self, *ports: int | None) -> None:
        """Tell all peers of one another; `ports` are more peers."""
        peers = [["127.0.0.1", port] for port in (*(node.port for node in self.nodes), *ports)]
        for own, node in enumerate(self.nodes):
            node.send(pieces.encode_message(Kind.PEERS, json.dumps({"own": own, "peers": peers}).encode()))


class CastNode:
    """A node with its agent and its peer."""

    def __init__(self, talk: Talk, folder: Path, plan: CastPlan) -> None:
        self.talk, self.folder = talk, folder
        listing, body = encode_file_list(entries()), plan.encode()
        copy = {"folder": str(self.folder), "target": ".", "inside": True}
        asked = self.talk.post(Command.COPY, **copy, stream=1, size=len(listing))
        self.talk.data_frame(1, 0, listing)
        self.need = self.talk.answer(asked)["need"]
        asked = self.talk.post(Command.CAST, manifest=1, stream=2, size=len(body))
        self.talk.data_frame(2, 0, body)
        self.answer = self.talk.answer(asked)
        self.port = self.answer["port"]
        self.decoder = MessageDecoder(len(PIECES), {Kind.HAVE})
        self._read = 0
        self._have: set[int] = set()

    def send(self, message: bytes) -> None:
        for start in range(0, len(message), 1 << 16):
            self.talk.data_frame(2, 0, message[start : start + (1 << 16)])

    def give(self, *numbers: int, data: bytes | None = None) -> None:
        for number in numbers:
            self.send(pieces.encode_numbers(Kind.PIECE, [number], PIECES[number] if data is None else data))

    @property
    def have(self) -> set[int]:
        buffer = self.talk.data.get(2, bytearray())
        for _, numbers, _ in self.decoder.feed(bytes(buffer[self._read :])):
            self._have.update(numbers)
        self._read = len(buffer)
        return self._have

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.talk.data.get(3, b"").splitlines()]

    def until_report(self, *names: str) -> dict[str, Any]:
        def find() -> dict[str, Any] | None:
            return next((report for report in self.reports if all(report.get(name) for name in names)), None)

        found: dict[str, Any] = self.talk.until(find)
        return found

    def end(self) -> None:
        self.send(pieces.encode_message(Kind.END))
        self.until_report("ended")

    @property
    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and path.parent != self.spool
        }

    @property
    def spool(self) -> Path:
        return self.folder / f".clusterctl-cast-{os.getuid()}"

    def list_peers(self) -> list[int]:
        """The processes that have this node's socket or spool open."""
        return [
            int(path.parts[2])
            for path in Path("/proc").glob("[0-9]*/fd/*")
            if _target(path).startswith(str(self.spool))
        ]


def _target(path: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for node in made.nodes:
        with contextlib.suppress(Exception):
            node.send(pieces.encode_message(Kind.END))
    for talk in made.talks:
        talk.kill()


class Neighbour:
    """The test as a neighbour of a peer: a TLS connection that asks, or a listener that answers."""

    def __init__(self, cluster: Cluster, folder: Path, *, is_server: bool = False) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        self.context.check_hostname = False
        self.context.verify_mode = ssl.CERT_REQUIRED
        self.context.load_verify_locations(cadata=cluster.certificate)
        file = folder / "own.pem"
        file.write_text(cluster.key + cluster.certificate)
        self.context.load_cert_chain(file)

    def connect(self, port: int) -> ssl.SSLSocket:
        return self.context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=10))


def read_all(tls: ssl.SSLSocket) -> list[tuple[Kind, list[int], bytes]]:
    """What the peer sends until it closes the connection."""
    decoder, found = MessageDecoder(len(PIECES), {Kind.HAVE, Kind.PIECE}), []
    with contextlib.suppress(ConnectionError):
        while data := tls.recv(1 << 16):
            found += list(decoder.feed(data))
    return found


def test_each_piece_is_given_once_and_all_nodes_end_whole_with_nothing_left(cluster: Cluster) -> None:
    nodes = [cluster.add(name) for name in "abc"]
    cluster.introduce()
    for number in range(len(PIECES)):
        nodes[number % 3].give(number)

    for node in nodes:
        node.until_report("installed")
    for node in nodes:
        node.end()
        assert node.files == FILES
        assert not node.spool.exists()
        assert {os.stat(node.folder / name).st_mode & 0o777 for name in FILES} == {0o640}
        assert os.stat(node.folder / "folder/small").st_nlink == 1, "a file must not change with its copy"
    reports = [node.until_report("installed") for node in nodes]
    assert sum(report["received"] for report in reports) == 3 * len(WHOLE)


def test_what_a_node_has_already_serves_the_others(cluster: Cluster, tmp_path: Path) -> None:
    for name, data in FILES.items():
        path = tmp_path / "a/target" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    first, second = cluster.add("a"), cluster.add("b")
    cluster.introduce()

    second.until_report("installed")
    assert (first.need, second.files) == ([], FILES)
    assert first.talk.until(lambda: first.have) == set(range(len(PIECES)))


def test_the_peers_finish_when_the_head_dies(cluster: Cluster) -> None:
    nodes = [cluster.add(name) for name in "ab"]
    cluster.introduce()
    for node, given in zip(nodes, ([0, 1], [2, 3]), strict=True):
        node.give(*given)
        node.talk.until(lambda node=node, given=given: node.have >= set(given))
    for node in nodes:
        node.talk.kill()

    for node in nodes:
        wait_for(lambda node=node: node.files == FILES)


def test_an_interrupted_cast_goes_on_with_the_pieces_that_are_there(cluster: Cluster) -> None:
    node = cluster.add("a")
    node.give(0, 2)
    node.talk.until(lambda: node.have == {0, 2})
    node.end()
    (held,) = [path for path in node.spool.iterdir() if path.stat().st_size > PIECE_BYTES]
    with held.open("r+b") as file:
        file.write(b"torn")

    again = cluster.add("a")
    again.talk.until(lambda: again.have)
    assert again.have == {2}
    again.give(0, 1, 3)
    again.until_report("installed")
    again.end()
    assert again.files == FILES
    assert not again.spool.exists()


def test_a_second_cast_to_the_folder_is_told_of_the_first(cluster: Cluster) -> None:
    first, second = cluster.add("a"), cluster.add("a", cast="second")
    assert second.answer == {"port": 0, "busy": "first"}

    first.end()
    assert cluster.add("a", cast="third").port > 0


def test_a_killed_peer_leaves_a_spool_and_its_end_is_reported(cluster: Cluster) -> None:
    node = cluster.add("a")
    node.give(1)
    node.talk.until(lambda: node.have)
    for pid in node.list_peers():
        os.kill(pid, 9)

    assert node.until_report("ended") == {"ended": True}
    again = cluster.add("a")
    again.talk.until(lambda: again.have)
    assert again.have == {1}


# --- who is not to be trusted


def test_who_lacks_the_certificate_gets_nothing(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.add("a")
    node.give(*range(len(PIECES)))
    node.until_report("installed")
    stranger = Cluster(tmp_path)
    context = Neighbour(stranger, tmp_path).context
    context.verify_mode = ssl.CERT_NONE

    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as plain:
        plain.sendall(pieces.encode_numbers(Kind.WANT, [0]))
        with contextlib.suppress(ConnectionError):
            assert len(plain.recv(1 << 16)) < 100
    with (
        contextlib.suppress(ssl.SSLError, ConnectionError),
        socket.create_connection(("127.0.0.1", node.port), timeout=10) as sock,
        context.wrap_socket(sock) as tls,
    ):
        tls.sendall(pieces.encode_numbers(Kind.WANT, [0]))
        assert tls.recv(1 << 16) == b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(pieces.encode_numbers(Kind.WANT, [3]), id="a piece that was not offered"),
        pytest.param(pieces.encode_numbers(Kind.WANT, [99]), id="a piece that does not exist"),
        pytest.param(pieces.encode_numbers(Kind.PIECE, [3], PIECES[3]), id="an answer instead of a request"),
        pytest.param(b"\1\xff\xff\xff\xff", id="a request of 4 GiB"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
    ],
)
def test_a_neighbour_that_breaks_the_protocol_is_cut_off(
    cluster: Cluster, tmp_path: Path, request_bytes: bytes
) -> None:
    node = cluster.add("a")
    node.give(0)
    node.talk.until(lambda: node.have)
    with Neighbour(cluster, tmp_path).connect(node.port) as tls:
        tls.sendall(request_bytes)
        assert read_all(tls) == []

    with Neighbour(cluster, tmp_path).connect(node.port) as tls:
        tls.sendall(pieces.encode_message(Kind.WAIT) + pieces.encode_numbers(Kind.WANT, [0]))
        decoder, found = MessageDecoder(len(PIECES), {Kind.HAVE, Kind.PIECE}), []
        while len(found) < 3:
            found += list(decoder.feed(tls.recv(1 << 16)))
        assert found == [(Kind.HAVE, [0], b""), (Kind.PIECE, [0], PIECES[0]), (Kind.HAVE, [], b"")]


def test_wrong_bytes_of_a_neighbour_are_dropped_and_it_is_named(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.add("a")
    context = Neighbour(cluster, tmp_path, is_server=True).context
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cluster.introduce(listener.getsockname()[1])
        with context.wrap_socket(listener.accept()[0], server_side=True) as tls:
            decoder = MessageDecoder(len(PIECES), {Kind.WANT, Kind.WAIT})
            requests = decoder.feed(tls.recv(1 << 10))
            assert next(requests)[0] is Kind.WAIT
            tls.sendall(pieces.encode_numbers(Kind.HAVE, range(len(PIECES))))
            ((_, wanted, _),) = decoder.feed(tls.recv(1 << 10))
            wrong = bytes(len(PIECES[wanted[0]]))
            tls.sendall(pieces.encode_numbers(Kind.PIECE, wanted, wrong) + pieces.encode_numbers(Kind.HAVE, []))
            assert read_all(tls) == []
    assert node.until_report("liars")["liars"] == [1]
    node.give(*range(len(PIECES)))
    node.until_report("installed")
    node.end()

    assert node.files == FILES


def test_a_spool_that_another_user_can_write_to_is_not_used(cluster: Cluster, tmp_path: Path) -> None:
    spool = tmp_path / f"a/target/.clusterctl-cast-{os.getuid()}"
    spool.mkdir(parents=True)
    spool.chmod(0o777)

    with pytest.raises(Refused, match="another user can write to it"):
        cluster.add("a")


def test_a_file_in_place_that_changes_is_not_copied(cluster: Cluster, tmp_path: Path) -> None:
    present = tmp_path / "a/target/folder/same"
    present.parent.mkdir(parents=True)
    present.write_bytes(SMALL)
    node = cluster.add("a")
    present.write_bytes(b"SMALL")
    node.give(*range(len(PIECES)))

    assert "cannot be written" in node.until_report("error")["error"]["message"]
    assert "folder/small" not in node.files


# --- disks


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_disk_that_fills_up_is_named_and_gets_its_space_back(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "a/target"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={len(WHOLE) + PIECE_BYTES}", "tmpfs", folder], check=True)
    try:
        node = cluster.add("a")
        (folder / "other").write_bytes(bytes(2 * PIECE_BYTES))
        node.give(*range(len(PIECES)))
        error = node.until_report("error")["error"]
        node.until_report("ended")

        assert error["kind"] == "refused"
        assert error["message"].startswith(f"`big` cannot be written to {folder}: No space left on device")
        assert [path.name for path in folder.iterdir()] == ["other"]
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_disk_that_is_too_small_is_refused_before_the_cast(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "a/target"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={PIECE_BYTES}", "tmpfs", folder], check=True)
    try:
        with pytest.raises(Refused, match="free, and the files need"):
            cluster.add("a")
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
