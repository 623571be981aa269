"""An SSH server that shows the key it likes, lets everybody in, and answers for whatever host lies behind it."""

from __future__ import annotations

import contextlib
import socket
import threading

import paramiko

from clusterctl.transport.ssh.known_hosts import HostKey


class _Everybody(paramiko.ServerInterface):
    def __init__(self, key: paramiko.PKey) -> None:
        self.key = key

    def get_allowed_auths(self, username: str) -> str:
        return "none,publickey"

    def check_auth_none(self, username: str) -> int:
        return paramiko.common.AUTH_SUCCESSFUL

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.common.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.common.OPEN_SUCCEEDED

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        return paramiko.common.OPEN_SUCCEEDED


class HostileServer:
    """Listens on a port of 127.0.0.1; use as a context.

    Attributes:
        seen: Cipher and digest of each connection that was secured.
    """

    def __init__(self, key: paramiko.PKey | None = None) -> None:
        self.key = key or paramiko.ECDSAKey.generate()
        self.fetch_host_key = HostKey(self.key.get_name(), self.key.asbytes())
        self.seen: list[tuple[str, str]] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._transports: list[paramiko.Transport] = []

    def __enter__(self) -> HostileServer:
        self._start(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for transport in self._transports:
            transport.close()
        for thread in self._threads:
            thread.join()

    def _start(self, target: object, *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._start(self._serve, self._socket.accept()[0])

    def _serve(self, stream: object) -> None:
        transport = paramiko.Transport(stream)  # type: ignore[arg-type]
        self._transports.append(transport)
        transport.add_server_key(self.key)
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            try:
                transport.start_server(server=_Everybody(self.key))
            finally:
                # Who has seen the key may be gone by now.
                if transport.remote_cipher:
                    self.seen.append((transport.remote_cipher, transport.remote_mac))
            while transport.is_active():
                behind = transport.accept(0.1)
                if behind is not None:
                    self._start(self._serve, behind)
