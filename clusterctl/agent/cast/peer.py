"""The peer: a process of a node during a cast, which gets the pieces that the node lacks and serves those that it has.

A peer is a fork of the agent, but outlives the connection to the head: if the head dies, the peers go on among
themselves. A peer ends when the head says so; without the head, after `_IDLE_S` in which it neither got nor served a
piece.

Threads:
    main: reads the messages of the head, starts pullers, installs the files, and ends the process.
    acceptor: accepts connections, and starts a server for each.
    server: answers the requests of one neighbour on one connection.
    puller: requests pieces from one neighbour on one connection. The node trusts only the hashes from the head.

A connection belongs to one thread. `_changed` guards the fields below it in `__init__`. No thread holds it while it
uses the disk or the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

from clusterctl.agent.cast.piece_choice import PieceChoice, list_neighbours
from clusterctl.agent.cast.piece_store import PieceStore, SpoolBusyError
from clusterctl.agent.linux import spawn, syscalls
from clusterctl.agent.protocol import command_messages, frames, pieces
from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass
from clusterctl.agent.protocol.pieces import CastPlan, Kind
from clusterctl.agent.workdir.file_tree import make_write_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any, Callable, NoReturn

    Message = tuple[Kind, list[int], bytes]
    Installer = Callable[[Callable[[str, str], None]], None]
    """Function that puts the files in place. Its argument is `PieceStore.take_content`."""

_IDLE_S = 60.0
_CONNECT_S = 5.0
_SILENCE_S = 15.0
"""A connection on which no byte moves for so long is closed, and its requests go to other neighbours."""
_WAIT_S = 1.0
"""A server answers WAIT at the latest after this time, so that the puller can choose again."""
_RETRY_S = 30.0
"""After this time, a peer tries again to reach a neighbour that it could not reach."""
_MAX_CONNECTIONS = 128
_CHUNK_BYTES = 1 << 16
_HEAD_READ_BYTES = 1 << 17
_RECORD_BYTES = 1 << 14
"""The largest record of TLS. A read returns one record, and a larger buffer would cost more than the record."""


@frozen_dataclass(frozen=True)
class Assignment:
    """The task of a peer.

    Attributes:
        stream: The number of the stream between the head and the peer. The next number carries reports.
        folder: The target folder.
        present: The paths of the contents that the node has, by SHA-256.
        names: The path of a file of each content, by SHA-256, for errors.
        install: Puts the files in place; `None` if the node lacks no file.
    """

    stream: int
    folder: str
    present: Mapping[str, str]
    names: Mapping[str, str]
    install: Installer | None


def fork_peer(assignment: Assignment, plan: bytes, keep: Iterable[int]) -> int:
    """Fork a peer that outlives this process; return a descriptor of its frames. The process must have one thread.

    Args:
        assignment: The task of the peer.
        plan: The encoded plan of the cast.
        keep: Descriptors that stay open in the peer.

    The first message of the peer is a `result` or an `error`, as from a helper process. The result is `port` (0: the
    peer does not listen) or `busy` (the id of another cast in the folder). Later messages are reports.
    """
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                _run_peer(theirs, assignment, plan, keep)
        finally:
            os._exit(0)
    theirs.close()
    return ours.detach()


def _run_peer(head: socket.socket, assignment: Assignment, plan: bytes, keep: Iterable[int]) -> NoReturn:
    link = _HeadLink(head, assignment.stream)
    try:
        os.chdir("/")
        spawn.reset_signals()
        spawn.redirect_stdio()
        spawn.close_descriptors({head.fileno(), *keep})
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        spawn.disable_own_core_dumps()
        syscalls.set_process_name("clusterctl-peer")
        syscalls.set_process_title("clusterctl-agent peer")
        Peer(link, assignment, CastPlan.decode(plan)).run()
    except SpoolBusyError as busy:
        link.send_report({"result": {"port": 0, "busy": str(busy)}})
    except BaseException as error:
        reason = error if isinstance(error, Exception) else RuntimeError(type(error).__name__)
        link.send_report({"error": command_messages.convert_to_request_error(reason).make_answer(0)["error"]})
    finally:
        os._exit(0)


class _HeadLink:
    """The connection to the head through the agent. Any thread may send; the main thread reads."""

    def __init__(self, sock: socket.socket, stream: int) -> None:
        self._sock, self._stream = sock, stream
        self._lock = threading.Lock()
        self._decoder = frames.FrameDecoder()
        self.is_open = True

    @property
    def descriptor(self) -> int:
        return self._sock.fileno()

    def read(self) -> bytes:
        """Return received bytes of messages; clear `is_open` if the head is gone."""
        try:
            data = self._sock.recv(_HEAD_READ_BYTES)
        except OSError:
            data = b""
        self.is_open = bool(data)
        return b"".join(frame.payload for frame in self._decoder.feed(data) if isinstance(frame, frames.StreamData))

    def send_have(self, numbers: Iterable[int]) -> None:
        self._send(frames.encode_data(self._stream, 0, pieces.encode_numbers(Kind.HAVE, numbers)))

    def send_report(self, report: Mapping[str, Any]) -> None:
        self._send(frames.encode_message(report))

    def _send(self, frame: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(frame)


class Peer:
    """The state of a peer, and its threads.

    Raises:
        SpoolBusyError: Another cast uses the target folder.
        OSError: The spool cannot be made.
    """

    def __init__(self, link: _HeadLink, assignment: Assignment, plan: CastPlan) -> None:
        self._link, self._task, self._plan = link, assignment, plan
        self._store = PieceStore(assignment.folder, plan, assignment.present)
        self._map = self._store.map
        self._listener, self._contexts = self._listen()
        self._is_installed = assignment.install is None
        self._awake, self._wake = os.pipe()

        self._changed = threading.Condition()
        self._complete = set(self._store.complete)
        self._order = sorted(self._complete)
        """The complete pieces in the order of their arrival."""
        self._choice = PieceChoice(set(range(self._map.count)) - self._complete)
        self._own = 0
        self._peers: list[tuple[str, int] | None] = []
        self._pulling: set[int] = set()
        self._unreachable: dict[int, float] = {}
        """The neighbours that could not be reached, and the time of the next try."""
        self._liars: set[int] = set()
        self._connections = 0
        self._sent_bytes = self._received_bytes = 0
        self._receive_limit = pieces.RateLimit(plan.limit)
        self._send_limit = pieces.RateLimit(plan.limit)
        self._active_at = time.monotonic()
        self._error: Exception | None = None
        self._is_ended = False

    def run(self) -> None:
        """Take part in the cast until its end.

        Raises:
            RequestError: The files cannot be written, or cannot be put in place.
        """
        port = self._listener.getsockname()[1] if self._listener else 0
        self._link.send_report({"result": {"port": port}})
        self._link.send_have(self._order)
        if self._listener is not None:
            self._start(self._accept, self._listener)
        decoder = pieces.MessageDecoder(self._map.count, {Kind.PEERS, Kind.PIECE, Kind.END})
        try:
            while not self._is_ended and (self._link.is_open or time.monotonic() - self._active_at < _IDLE_S):
                self._install_if_complete()
                self._start_pullers()
                links = [self._link.descriptor] if self._link.is_open else []
                for fd in select.select([*links, self._awake], [], [], _WAIT_S)[0]:
                    if fd == self._awake:
                        os.read(fd, 1)
                        continue
                    for message in decoder.feed(self._link.read()):
                        self._handle_head(message)
            if self._error is not None:
                raise self._error
        finally:
            cause = self._error.__cause__ if self._error else None
            is_full = isinstance(cause, OSError) and syscalls.is_disk_full(cause)
            self._store.close(remove=self._is_installed or is_full)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    # --- the head

    def _handle_head(self, message: Message) -> None:
        kind, numbers, data = message
        if kind is Kind.PEERS:
            introduction = json.loads(data)
            with self._changed:
                self._own = int(introduction["own"])
                self._peers = [peer and (str(peer[0]), int(peer[1])) for peer in introduction["peers"]]
        elif kind is Kind.PIECE:
            with self._changed:
                # Pieces of the head use up the limit too. The pullers wait for it.
                self._receive_limit.spend(len(data), time.monotonic())
            if not self._take_piece(numbers[0], data, None):
                raise command_messages.make_failed_error("a piece from the head is damaged")
        else:
            self._end()

    def _end(self, error: Exception | None = None) -> None:
        with self._changed:
            self._is_ended = True
            self._error = error if self._error is None else self._error
            self._changed.notify_all()
        os.write(self._wake, b"\0")

    def _install_if_complete(self) -> None:
        if self._is_installed or self._choice.missing or self._task.install is None:
            return
        self._task.install(self._store.take_content)
        self._is_installed = True
        self._report({"installed": True})

    def _report(self, news: Mapping[str, Any]) -> None:
        with self._changed:
            report = {
                **news,
                "reached": len(self._pulling),
                "unreached": sorted(self._unreachable),
                "liars": sorted(self._liars),
                "received": self._received_bytes,
                "sent": self._sent_bytes,
            }
        self._link.send_report(report)

    def _take_piece(self, piece: int, data: bytes, neighbour: int | None) -> bool:
        """Check and store a piece; return whether its bytes are correct."""
        if len(data) != self._map.get_length(piece) or not self._store.is_correct(piece, data):
            return False
        with self._changed:
            self._received_bytes += len(data)
            is_new = piece in self._choice.missing
        try:
            if is_new:
                self._store.write(piece, data)
        except OSError as error:
            number = next(number for number, _, _ in self._map.list_parts(piece))
            name = self._task.names.get(self._plan.contents[number][0], "")
            missing_bytes = sum(map(self._map.get_length, list(self._choice.missing)))
            failure = make_write_error(self._task.folder, name, error, missing_bytes)
            failure.__cause__ = error
            self._end(failure)
            return True
        with self._changed:
            self._active_at = time.monotonic()
            self._choice.finish_piece(piece, neighbour, self._active_at)
            if piece not in self._complete:
                self._complete.add(piece)
                self._order.append(piece)
                self._changed.notify_all()
            is_last = not self._choice.missing
        self._link.send_have([piece])
        if is_last:
            os.write(self._wake, b"\0")
        return True

    # --- connections

    def _listen(self) -> tuple[socket.socket | None, dict[bool, Any]]:
        """Return a listening socket, and the TLS contexts of servers (`True`) and pullers (`False`)."""
        if not self._plan.address:
            return None, {}
        family = socket.AF_INET6 if ":" in self._plan.address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((self._plan.address, 0))
            listener.listen(_MAX_CONNECTIONS)
        except OSError:
            listener.close()
            return None, {}
        return listener, {is_server: _make_context(self._plan, is_server=is_server) for is_server in (True, False)}

    def _secure(self, sock: socket.socket, *, is_server: bool) -> Any:
        """Return the TLS connection over a socket, if the other side has the certificate of the cast.

        Raises:
            OSError: The handshake failed.
        """
        sock.settimeout(_SILENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = self._contexts[is_server].wrap_socket(sock, server_side=is_server)
        if tls.getpeercert(binary_form=True) != ssl.PEM_cert_to_DER_cert(self._plan.certificate):
            tls.close()
            raise OSError(0, "another certificate")
        return tls

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_ended:
            try:
                sock = listener.accept()[0]
            except OSError:
                time.sleep(_WAIT_S)  # No descriptor is free.
                continue
            with self._changed:
                is_full = self._connections >= _MAX_CONNECTIONS
                self._connections += not is_full
            if is_full:
                sock.close()
            else:
                self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        """Answer the requests of a neighbour, until it closes the connection, is silent or breaks the protocol."""
        try:
            with sock, self._secure(sock, is_server=True) as tls:
                self._answer_requests(tls)
        except (OSError, frames.FrameError):
            pass
        finally:
            with self._changed:
                self._connections -= 1

    def _answer_requests(self, tls: Any) -> None:
        known = 0
        for kind, numbers, _ in _read_messages(tls, pieces.MessageDecoder(self._map.count, {Kind.WANT, Kind.WAIT})):
            answer = b""
            if kind is Kind.WANT:
                with self._changed:
                    if numbers[0] not in self._complete:
                        raise frames.FrameError("a request for a piece that was not offered")
                    self._active_at = time.monotonic()
                    self._sent_bytes += self._map.get_length(numbers[0])
                    wait_s = self._send_limit.spend(self._map.get_length(numbers[0]), self._active_at)
                syscalls.sleep_interval(wait_s)
                answer = pieces.encode_numbers(Kind.PIECE, numbers, self._store.read(numbers[0]))
            with self._changed:
                if kind is Kind.WAIT:
                    self._changed.wait_for(lambda known=known: len(self._order) > known or self._is_ended, _WAIT_S)  # type: ignore[misc]
                news = self._order[known:]
            known += len(news)
            answer += pieces.encode_numbers(Kind.HAVE, news)
            with memoryview(answer) as view:
                for start in range(0, len(view), _CHUNK_BYTES):  # The timeout holds for each chunk.
                    tls.sendall(view[start : start + _CHUNK_BYTES])

    def _start_pullers(self) -> None:
        with self._changed:
            if not self._choice.missing or not self._peers or not self._contexts:
                return
            now = time.monotonic()
            usable = [
                number
                for number, peer in enumerate(self._peers)
                if peer is not None
                and number not in self._liars | {self._own}
                and self._unreachable.get(number, now) <= now
            ]
            new = [number for number in list_neighbours(self._own, usable) if number not in self._pulling]
            self._pulling.update(new)
        for number in new:
            self._start(self._pull, number, self._peers[number])

    def _pull(self, neighbour: int, place: tuple[str, int]) -> None:
        """Get pieces from a neighbour, until no piece is missing or the neighbour fails."""
        try:
            sock = socket.create_connection(place, timeout=_CONNECT_S)
            with sock, self._secure(sock, is_server=False) as tls:
                with self._changed:
                    self._unreachable.pop(neighbour, None)
                self._request_pieces(neighbour, tls)
        except (OSError, frames.FrameError):
            pass
        finally:
            with self._changed:
                self._choice.remove_neighbour(neighbour)
                self._pulling.discard(neighbour)
                is_failed = bool(self._choice.missing) and not self._is_ended
                if is_failed:
                    self._unreachable[neighbour] = time.monotonic() + _RETRY_S
            if is_failed:
                self._report({})
                os.write(self._wake, b"\0")

    def _request_pieces(self, neighbour: int, tls: Any) -> None:
        chance = random.Random()
        answers = _read_messages(tls, pieces.MessageDecoder(self._map.count, {Kind.PIECE, Kind.HAVE}))
        while True:
            with self._changed:
                if not self._choice.missing or self._is_ended:
                    return
                now = time.monotonic()
                piece = self._choice.choose_piece(neighbour, now, chance)
                wait_s = 0.0 if piece is None else self._receive_limit.spend(self._map.get_length(piece), now)
            syscalls.sleep_interval(wait_s)
            if piece is None:
                tls.sendall(pieces.encode_message(Kind.WAIT))
            else:
                tls.sendall(pieces.encode_numbers(Kind.WANT, [piece]))
                kind, numbers, data = next(answers, (Kind.END, [], b""))
                if kind is not Kind.PIECE or numbers != [piece]:
                    raise frames.FrameError("another answer than the requested piece")
                if not self._take_piece(piece, data, neighbour):
                    with self._changed:
                        self._liars.add(neighbour)
                    return
            kind, news, _ = next(answers, (Kind.END, [], b""))
            if kind is not Kind.HAVE:
                raise frames.FrameError("an answer without the news")
            with self._changed:
                self._choice.add_offer(neighbour, news)


def _make_context(plan: CastPlan, *, is_server: bool) -> Any:
    """Return a TLS context that has, demands and accepts the certificate of the cast alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=plan.certificate)
    # OpenSSL loads a key from a file only. This file is in memory, and has no name on any filesystem.
    fd = syscalls.create_memory_file("key")
    try:
        syscalls.write_all(fd, (plan.key + plan.certificate).encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def _read_messages(tls: Any, decoder: pieces.MessageDecoder) -> Iterator[Message]:
    while data := tls.recv(_RECORD_BYTES):
        yield from decoder.feed(data)
