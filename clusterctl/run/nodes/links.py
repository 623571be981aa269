"""The controller's connections: opened all at once, watched, and opened again with back-off when they break."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.errors import AuthError, NodeError
from clusterctl.run.nodes.fan_out import each
from clusterctl.run.record.thread_ownership import ThreadOwned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from clusterctl.config.spec import HostSpec
    from clusterctl.session.inbox import Inbox
    from clusterctl.session.session import Session


_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 15.0
_AFTER_REFUSED_LOGIN = 60.0
_GOOD_SECONDS = 30.0
"""A connection that held for so long was a good one: the next is dialed at once when it breaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redialed:
    """A broken connection is there again."""

    node: str
    session: Session


class Links(ThreadOwned):
    """One session per node, kept. It belongs to one thread: others dial, and what they get comes back by the inbox.

    Args:
        dial: Opens a session to a host; raises NodeError.
        inbox: Where `Redialed` goes.

    Attributes:
        sessions: The session of each node that has one. Never changed but put in place anew, so that another thread
            that takes it has it as it was at that moment.
    """

    def __init__(self, dial: Callable[[HostSpec], Session], inbox: Inbox) -> None:
        self._dial = dial
        self._inbox = inbox
        self._closed = False
        self._hurries = 0
        self._changed = threading.Condition()
        self._dialing: set[str] = set()
        self._broken_at: dict[str, float] = {}
        self._cut_at: dict[str, float] = {}
        self._added_at: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self.sessions: Mapping[str, Session] = {}

    def add(self, host: HostSpec, session: Session) -> bool:
        """Take in a session that was opened, and return True.

        One that broke before it got here takes nobody's place: its host is dialed again if it has no other.
        """
        self.check()
        node = host.name
        self._dialing.discard(node)
        if not session.alive:
            session.close()
            if node not in self.sessions:
                self.broken(host)
            return False
        old = self.sessions.get(node)
        if old is not None:
            old.close()
        self._broken_at.pop(node, None)
        self._cut_at.pop(node, None)
        self._added_at[node] = time.monotonic()
        self.sessions = {**self.sessions, node: session}
        return True

    def broken(self, host: HostSpec, session: Session | None = None) -> None:
        """Forget a session that broke (`session`: only if it is still the one), and dial again until it answers.

        Repeating it does nothing.
        """
        self.check()
        current = self.sessions.get(host.name)
        if session is not None and current is not session:
            return
        if current is not None:
            self._broken_at[host.name] = time.monotonic() - current.silence_s
            self.sessions = {node: s for node, s in self.sessions.items() if node != host.name}
            threading.Thread(target=current.close, daemon=True).start()
        self._broken_at.setdefault(host.name, time.monotonic())
        self._cut_at.setdefault(host.name, time.monotonic())
        if host.name not in self._dialing:
            self._dialing.add(host.name)
            self._pauses[host.name] = self._pause_after(host.name)
            dialed = (host, self._hurries)
            threading.Thread(target=self._redial, args=dialed, name=f"dial {host.name}", daemon=True).start()

    def has_lost(self, node: str) -> bool:
        """Return whether a node's connection is what broke: not where it has a new one, or none was ever taken in."""
        current = self.sessions.get(node)
        return node in self._broken_at if current is None else not current.alive

    def silent(self, after: float) -> dict[str, float]:
        """Return the nodes that have not been heard for over `after` seconds, with how long that is."""
        now = time.monotonic()
        quiet = {node: s.silence_s for node, s in self.sessions.items() if s.silence_s > after}
        return quiet | {node: now - last for node, last in self._broken_at.items()}

    def cut(self) -> dict[str, float]:
        """Return the nodes without a connection, with the seconds since which nothing of ours can have reached them.

        The stretch of silence before the connection was closed does not count: our own frames may have arrived then.
        """
        now = time.monotonic()
        return {node: now - moment for node, moment in self._cut_at.items()}

    def hurry(self) -> None:
        """Dial every missing node now: a person waits for it."""
        with self._changed:
            self._hurries += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Close everything; stop dialing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        each(self.sessions, lambda _, session: session.close())

    def _pause_after(self, node: str) -> float:
        """Return how long to wait before the first try: not at all after a good connection, else more each time.

        A node that lets us in and then breaks off would otherwise be logged into again and again without a pause.
        """
        held = time.monotonic() - self._added_at.get(node, float("-inf"))
        return 0.0 if held >= _GOOD_SECONDS or node not in self._pauses else _next_pause(self._pauses[node])

    def _redial(self, host: HostSpec, hurries: int) -> None:
        pause = self._pauses[host.name]
        while self._waited(pause, hurries):
            hurries = self._hurries
            try:
                session = self._dial(host)
            except NodeError as error:
                # A server that refuses our key will do so again, and counts it: do not knock on it.
                pause = _AFTER_REFUSED_LOGIN if isinstance(error, AuthError) else _next_pause(pause)
            except Exception:
                pause = _next_pause(pause)
            else:
                if self._closed:
                    session.close()
                else:
                    self._inbox.put(Redialed(node=host.name, session=session))
                return

    def _waited(self, pause: float, hurries: int) -> bool:
        """Return when a pause is over or cut short (`hurries` were known); false where nothing is to be dialed for."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._hurries != hurries, pause)
            return not self._closed


def _next_pause(pause: float) -> float:
    return min(max(_FIRST_PAUSE, pause * 2), _LONGEST_PAUSE)
