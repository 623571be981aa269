"""The head's part of a cast: it starts a peer on each node, gives each piece once, and waits until all nodes are whole.

Threads: the caller of `Cast.run` waits and notices lost nodes; a few givers send pieces; the reader threads of the
sessions receive messages of peers. One lock guards the state, and no thread holds it while it uses the disk or network.
The caller waits for `_changed`. The givers wait for `_may_give`, because most messages of peers concern neither.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from clusterctl.agent.protocol import pieces
from clusterctl.agent.protocol.command_payload_types import CastAnswer, PeerReport
from clusterctl.agent.protocol.frames import FrameError, StreamData
from clusterctl.agent.protocol.pieces import CastPlan, Kind, PieceMap
from clusterctl.agent.protocol.validators import ValidationError
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import AgentError, ClusterctlError, ConnectError, RefusedError, SourceUnreachableError
from clusterctl.formatting import format_duration
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.run.nodes.uploads import Upload, wait_for_answer
from clusterctl.run.rules.piece_giving import PieceGiving
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import CAST, convert_error_answer
from clusterctl.validation.derived_validators import derive_object_validator

_MAX_GIVERS = 64
_POLL_S = 0.5
_END_S = 10.0
_SILENCE_S = 1800.0
"""A node without a message of its peer for so long is given up. To put many files in place may take minutes."""
_STUCK_S = 120.0
"""If the head has no files and no node gets a piece for so long, the cast fails."""
_CUT_S = 10.0
"""The same, if a node could not connect to a node that has all files."""
_REPORT = derive_object_validator(PeerReport)


class CastFiles:
    """The contents of a cast, and the hashes of its pieces.

    Args:
        files: The files.
        needed: The SHA-256 of each content that a node needs.

    Attributes:
        contents: SHA-256 and size of each content.
        map: The places of the pieces in the contents.
        piece_hashes: The SHA-256 of each piece. `hash_pieces` fills the list.
    """

    def __init__(self, files: Upload, needed: Iterable[str]) -> None:
        wanted, numbers = set(needed), dict[str, int]()
        for number, (_, size, _, digest) in enumerate(files.entries):
            if size and digest in wanted:
                numbers.setdefault(digest, number)
        self._files, self._numbers = files, list(numbers.values())
        self.contents = [(digest, files.entries[number][1]) for digest, number in numbers.items()]
        self.map = PieceMap([size for _, size in self.contents])
        self.piece_hashes: list[bytes] = []

    def list_pieces(self, digests: Iterable[str]) -> set[int]:
        """Return the pieces that contain bytes of these contents."""
        wanted = set(digests)
        return {
            piece
            for number, (digest, _) in enumerate(self.contents)
            if digest in wanted
            for piece in self.map.list_pieces(number)
        }

    def hash_pieces(self) -> None:
        """Read all contents of this machine once, and hash their pieces.

        Raises:
            RefusedError: A file cannot be read, or has changed since it was listed.
        """
        hasher, missing = hashlib.sha256(), pieces.PIECE_BYTES
        for (digest, size), number in zip(self.contents, self._numbers, strict=True):
            whole = hashlib.sha256()
            for chunk in self._files.read_range(number, 0, size):
                whole.update(chunk)
                for part in (chunk[:missing], chunk[missing:]):
                    hasher.update(part)
                    missing -= len(part)
                    if missing <= 0:
                        self.piece_hashes.append(hasher.digest())
                        hasher, missing = hashlib.sha256(), pieces.PIECE_BYTES
            if whole.hexdigest() != digest:
                raise self._make_changed_error(number)
        if missing < pieces.PIECE_BYTES:
            self.piece_hashes.append(hasher.digest())

    def read_piece(self, piece: int) -> bytes:
        """Return a piece from the files of this machine.

        Raises:
            RefusedError: A file cannot be read, or has changed since it was listed.
        """
        parts = list(self.map.list_parts(piece))
        data = b"".join(
            chunk
            for content, offset, length in parts
            for chunk in self._files.read_range(self._numbers[content], offset, length)
        )
        if hashlib.sha256(data).digest() != self.piece_hashes[piece]:
            raise self._make_changed_error(self._numbers[parts[0][0]])
        return data

    def _make_changed_error(self, number: int) -> RefusedError:
        path = self._files.paths[number]
        return RefusedError(
            f"{path} has changed while it was cast", hint="repeat the command when the file is complete"
        )


def make_certificate() -> tuple[str, str]:
    """Return a new self-signed certificate and its private key, as PEM. No clock of a node finds it invalid."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "clusterctl cast")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc))
    builder = builder.not_valid_after(datetime.datetime(2200, 1, 1, tzinfo=datetime.timezone.utc))
    pem = serialization.Encoding.PEM
    text = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return builder.sign(key, hashes.SHA256()).public_bytes(pem).decode(), text.decode()


@dataclass
class _Node:
    """A node of a cast, as the head knows it. `number` is its position in the list of peers."""

    session: Session
    number: int
    needs_files: bool
    stream: int = 0
    port: int = 0
    has_started: bool = False
    has_listed: bool = False
    """Whether the peer has listed the pieces that it had at its start."""
    last_message_at: float = field(default_factory=time.monotonic)
    is_installed: bool = False
    is_gone: bool = False
    report: PeerReport = field(default_factory=PeerReport)


class Cast:
    """A cast to the nodes of some sessions.

    Args:
        sessions: The session of each node.
        listed: The stream that names the compared transfer of each node.
        needs: The contents that each node needs.
        addresses: The address at which each node may be reached by the others.
        files: The contents and the hashes of the pieces.
        on_bytes: A function that receives a node, and the number of bytes that the node has got.
        limit: The bytes per second that each machine may send, and receive, or `None`.
        can_give: Whether this machine has the contents.

    Attributes:
        sent_bytes: The bytes of all pieces that the head has sent.
    """

    def __init__(
        self,
        sessions: Mapping[str, Session],
        listed: Mapping[str, int],
        needs: Mapping[str, set[str]],
        addresses: Mapping[str, str],
        files: CastFiles,
        on_bytes: Callable[[str, int], None],
        *,
        limit: int | None,
        can_give: bool,
    ) -> None:
        self.sent_bytes = 0
        self._id = secrets.token_hex(16)
        self._listed, self._addresses, self._files, self._on_bytes = listed, addresses, files, on_bytes
        self._limit, self._can_give = limit, can_give
        self._send_limit = pieces.RateLimit(limit)
        lock = threading.RLock()
        self._changed, self._may_give = threading.Condition(lock), threading.Condition(lock)
        self._nodes = {
            node: _Node(session, number, bool(needs[node])) for number, (node, session) in enumerate(sessions.items())
        }
        self._giving = PieceGiving({node: files.list_pieces(needs[node]) for node in sessions}, time.monotonic())
        self._errors: dict[str, ClusterctlError] = {}
        self._progress_at = time.monotonic()
        self._busy: set[str] = set()
        """The nodes to which a giver is sending a piece. Two givers would mix their messages."""
        self._is_over = False

    def start(self) -> tuple[dict[str, ClusterctlError], list[str], list[str]]:
        """Start a peer on every node.

        Returns:
            The errors of nodes without a peer; the nodes whose folder another cast uses; the nodes whose folder is the
            folder of another node of this cast, on a shared filesystem. None of these nodes takes part in the cast.
        """
        certificate, key = make_certificate()

        def start_peer(node: str, session: Session) -> CastAnswer:
            state = self._nodes[node]
            plan = CastPlan(
                cast=self._id,
                contents=self._files.contents,
                piece_hashes=self._files.piece_hashes,
                certificate=certificate,
                key=key,
                address=self._addresses.get(node, ""),
                limit=self._limit,
            ).encode()
            decoder = pieces.MessageDecoder(self._files.map.count, {Kind.HAVE})
            state.stream = session.allocate_streams(lambda data: self._receive(node, decoder, data), count=2)
            question = {"manifest": self._listed[node], "stream": state.stream, "size": len(plan)}
            answer = CAST.call_async(session, question)  # type: ignore[arg-type]
            session.send_data(state.stream, 0, plan)
            return wait_for_answer(node, answer)

        answers, errors = call_all({name: node.session for name, node in self._nodes.items()}, start_peer)
        busy = {node: answer["busy"] for node, answer in answers.items() if answer.get("busy") is not None}
        with self._changed:
            for node in [*errors, *busy]:
                self._giving.remove_node(node)
                self._nodes[node].is_gone = True
            for node, answer in answers.items():
                self._nodes[node].has_started, self._nodes[node].port = node not in busy, answer["port"]
        return errors, [n for n, i in busy.items() if i != self._id], [n for n, i in busy.items() if i == self._id]

    def run(self) -> dict[str, ClusterctlError]:
        """Give the pieces, and return when each node has its files or has failed. Return the errors of nodes."""
        peers = [
            [self._addresses[name], node.port] if node.has_started and node.port else None
            for name, node in self._nodes.items()
        ]

        def introduce(node: str, session: Session) -> None:
            introduction = json.dumps({"own": self._nodes[node].number, "peers": peers}).encode()
            session.send_data(self._nodes[node].stream, 0, pieces.encode_message(Kind.PEERS, introduction))

        call_all({name: node.session for name, node in self._nodes.items() if node.has_started}, introduce)
        givers = [threading.Thread(target=self._give, daemon=True) for _ in range(min(_MAX_GIVERS, len(self._nodes)))]
        for giver in givers if self._can_give else ():
            giver.start()
        try:
            with self._changed:
                while self._list_waiting():
                    self._changed.wait(_POLL_S)
        finally:
            self.end()
        return self._errors

    def end(self) -> None:
        """End the peers, and wait until their processes are gone."""
        with self._changed:
            self._is_over = True
            self._may_give.notify_all()
            self._changed.wait_for(lambda: not self._busy, _END_S)
            reached = {
                name: node.session
                for name, node in self._nodes.items()
                if node.has_started and not node.is_gone and name not in self._busy
            }
        message = pieces.encode_message(Kind.END)
        call_all(reached, lambda node, session: session.send_data(self._nodes[node].stream, 0, message))
        with self._changed:
            self._changed.wait_for(
                lambda: all(self._nodes[name].is_gone or not session.alive for name, session in reached.items()), _END_S
            )

    def _list_waiting(self) -> list[str]:
        """Return the nodes that lack files and may still get them; record the errors of those that are lost."""
        waiting = []
        for name, node in self._nodes.items():
            if not node.has_started or node.is_installed or name in self._errors:
                continue
            if not node.session.alive:
                self._fail(name, ConnectError(name, "the connection was lost during the cast"))
            elif node.is_gone:
                hint = "repeat the command: it continues with the pieces that the node has"
                self._fail(name, AgentError(name, "the peer was ended before its files were complete", hint=hint))
            elif time.monotonic() - node.last_message_at > _SILENCE_S:
                self._fail(name, AgentError(name, f"its peer has made no progress for {format_duration(_SILENCE_S)}"))
            elif node.needs_files:
                waiting.append(name)
        patience_s = _CUT_S if self._is_cut_off() else _STUCK_S
        if not self._can_give and (self._is_unreachable() or time.monotonic() - self._progress_at > patience_s):
            for name in waiting:
                text = "no node that this node can reach has the rest of the files"
                self._fail(name, SourceUnreachableError(name, text))
            return []
        return waiting

    def _is_unreachable(self) -> bool:
        """Return whether no living node has some of the pieces that others lack."""
        return self._giving.has_scarce_pieces and all(
            node.has_listed or node.is_gone or not node.session.alive for node in self._nodes.values()
        )

    def _is_cut_off(self) -> bool:
        """Return whether a node could not connect to a node that has all files."""
        sources = {node.number for node in self._nodes.values() if not node.needs_files}
        return any(not sources.isdisjoint(node.report.get("unreached", ())) for node in self._nodes.values())

    def _fail(self, name: str, error: ClusterctlError) -> None:
        node = self._nodes[name]
        if node.needs_files and not node.is_installed:
            self._errors.setdefault(name, error)
        self._giving.remove_node(name)
        self._may_give.notify_all()

    # --- messages of peers, on the reader threads of the sessions

    def _receive(self, name: str, decoder: pieces.MessageDecoder, data: StreamData) -> None:
        node = self._nodes[name]
        node.last_message_at = time.monotonic()
        if data.stream == node.stream:
            for _, numbers, _ in decoder.feed(data.payload):
                self._add_pieces(name, numbers)
            return
        try:
            report: PeerReport = json.loads(data.payload)
            _REPORT(report)
        except (ValueError, ValidationError) as error:
            raise FrameError(f"its report about a cast: {error}") from None
        with self._changed:
            node.report = {**node.report, **report}
            node.is_installed = node.is_installed or report.get("installed", False)
            node.is_gone = node.is_gone or report.get("ended", False)
            if "reached" in report:
                is_isolated = not report["reached"] and bool(report.get("unreached"))
                self._giving.set_isolated(name, is_isolated=is_isolated)
                self._may_give.notify_all()
            if "error" in report:
                self._fail(name, convert_error_answer(name, dict(report["error"])))
            self._changed.notify_all()

    def _add_pieces(self, name: str, numbers: list[int]) -> None:
        with self._changed:
            self._progress_at = time.monotonic()
            is_first, self._nodes[name].has_listed = not self._nodes[name].has_listed, True
            if self._giving.is_under_way(name, numbers):
                self._may_give.notify()
            new = self._giving.add_pieces(name, numbers, self._progress_at)
        if not is_first:
            self._on_bytes(name, sum(map(self._files.map.get_length, new)))

    # --- givers

    def _give(self) -> None:
        while True:
            with self._may_give:
                gift = None if self._is_over else self._giving.choose_gift(time.monotonic(), self._busy)
                if gift is None:
                    if self._is_over:
                        return
                    self._may_give.wait(_POLL_S)
                    continue
                self._busy.add(gift[0])
                wait_s = self._send_limit.spend(self._files.map.get_length(gift[1]), time.monotonic())
                self._may_give.wait_for(lambda: self._is_over, wait_s)
            name, piece = gift
            try:
                data = self._files.read_piece(piece)
                message = pieces.encode_numbers(Kind.PIECE, [piece], data)
                self._nodes[name].session.send_data(self._nodes[name].stream, 0, message)
            except RefusedError as error:
                with self._changed:
                    for other in self._list_waiting():
                        self._fail(other, error)
            except ClusterctlError:
                pass  # `_list_waiting` notices the lost session.
            else:
                with self._changed:
                    self.sent_bytes += len(data)
            finally:
                with self._changed:
                    self._busy.discard(name)
                    self._changed.notify_all()
                    self._may_give.notify()

    def list_warnings(self) -> list[str]:
        """Return what the user should know about the nodes and their network, one sentence each."""
        names = list(self._nodes)
        alive = {node for node in names if node not in self._errors}
        liars = {names[number] for node in self._nodes.values() for number in node.report.get("liars", [])}
        lines = [f"{liar} sent wrong bytes to other nodes, which dropped them" for liar in sorted(liars)]
        cut = [
            (name, names[number])
            for name, node in self._nodes.items()
            for number in node.report.get("unreached", [])
            if names[number] in alive and name in alive
        ]
        if cut:
            origins, targets = (fold_hosts(sorted({pair[side] for pair in cut})) for side in (0, 1))
            lines.append(f"{origins} could not reach {targets}")
        if self._giving.fed and self._can_give:
            lines.append(f"this machine sent the pieces itself to {fold_hosts(sorted(self._giving.fed))}")
        return lines
