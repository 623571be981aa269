"""Agents of ssh (`SSH_AUTH_SOCK`) that do not do what agents do."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def hung_agent(path: Path) -> Iterator[Path]:
    """Listen at `path`, take each connection and what comes on it, and never answer, as behind a laptop that sleeps."""
    held: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(listener.accept()[0])

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        try:
            yield path
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()
            path.unlink()
