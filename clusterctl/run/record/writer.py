"""The run directory on the head: the whole interface for reading. One writer at a time, any number of readers.

RUN/spec.json            what the run was started with (no secrets)
RUN/plan-A.json          the launch plan of attempt A (no secrets)
RUN/events.jsonl         the controller's own journal
RUN/lock                 held (flock) while a controller is alive; says on which machine, and its pid
RUN/control              by which name that controller is asked
RUN/epoch                the highest epoch that a controller of this head has used
RUN/outline.json         of a run that has ended: what lists show of it
RUN/manifest.json        what was synced; the content is under RUN/content/SHA256
RUN/nodes/NODE/          replicas, under the node's own names; their size is the cursor
RUN/stall-N/             evidence of a stall
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux.syscalls import write_whole
from clusterctl.agent.protocol import files, frames
from clusterctl.door import samples
from clusterctl.door.bounds import MOST_JOURNAL
from clusterctl.door.journal import MOST_LINE
from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.run.record import lock as locking
from clusterctl.run.record import outline
from clusterctl.run.record.linefile import LineFile, is_short, punch
from clusterctl.run.record.private import make_private
from clusterctl.run.record.reader import LineTail, load_state
from clusterctl.run.record.replica_files import ReplicaFiles
from clusterctl.run.rules import events as head
from clusterctl.run.rules.state import RunPhase, RunState

if TYPE_CHECKING:
    from collections.abc import Iterator

_DURABLE = (head.Attempt, head.Decided, head.Restarting, head.Ended)
_EVENTS_RESERVE = 1024 * 1024
_JOURNAL_RESERVE = 128 * 1024
SAMPLES_KEPT = 16 * 1024 * 1024
"""Bytes of a node's samples that are kept here at most: many times what any reader looks back."""
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


def runs_root() -> Path:
    """Return where all runs of this user lie on this head."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "clusterctl" / "runs"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Every path of a run on the head."""

    path: Path

    @property
    def run(self) -> str:
        """The run id."""
        return self.path.name

    @property
    def spec(self) -> Path:
        """What the run was started with."""
        return self.path / "spec.json"

    @property
    def events(self) -> Path:
        """The controller's own journal."""
        return self.path / "events.jsonl"

    @property
    def lock(self) -> Path:
        """Held while a controller is alive."""
        return self.path / "lock"

    @property
    def epoch(self) -> Path:
        """The highest epoch that was used from here."""
        return self.path / "epoch"

    @property
    def outline(self) -> Path:
        """What lists show of the run once it has ended."""
        return self.path / "outline.json"

    @property
    def log(self) -> Path:
        """The controller's stderr, with the tracebacks of our bugs."""
        return self.path / "controller.log"

    @property
    def manifest(self) -> Path:
        """What was synced at the start."""
        return self.path / "manifest.json"

    @property
    def content(self) -> Path:
        """What was synced at the start, by content hash."""
        return self.path / "content"

    def plan(self, attempt: int) -> Path:
        """Return where the launch plan of an attempt lies."""
        return self.path / f"plan-{attempt}.json"

    def node(self, node: str) -> Path:
        """Return where the replicas of a node lie."""
        return self.path / "nodes" / node

    @property
    def control(self) -> Path:
        """Where the controller says by which name it is asked."""
        return self.path / "control"

    def control_address(self) -> str:
        """Return the abstract unix address on which the controller of this run listens."""
        try:
            word = self.control.read_text()
        except OSError:
            word = ""
        if not re.fullmatch("[0-9a-f]{32}", word):
            word = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:24]
        return f"\0clusterctl-{os.getuid()}-{word}"

    def new_control_address(self) -> str:
        """Return an address for a new controller, which nobody could have taken before, and write it down.

        Where there is no room for that, it is the one that everybody can work out, and can take.
        """
        try:
            write_atomically(self.control, secrets.token_hex(16).encode())
        except OSError as error:
            if not is_short(error):
                raise
            with contextlib.suppress(OSError):
                self.control.unlink()
        return self.control_address()

    @property
    def attended(self) -> bool:
        """A controller is alive."""
        return locking.is_held(self.lock)

    @property
    def controller(self) -> locking.Holder | None:
        """The controller that is alive, or was last; `None` where none has said so."""
        return locking.holder(self.lock)


def create(name: str, root: Path | None = None) -> RunDir:
    """Make the directory of a new run; its id is the name and four random characters."""
    base = root or runs_root()
    make_private(base if root else base.parent)
    base.mkdir(mode=0o700, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "run"
    while True:
        path = base / f"{stem}-{''.join(secrets.choice(_ALPHABET) for _ in range(4))}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            (path / "nodes").mkdir()
            return RunDir(path)


def all_runs(root: Path | None = None) -> list[RunDir]:
    """Return every run of this head, newest last."""
    base = root or runs_root()
    found = [p for p in base.iterdir() if (p / "events.jsonl").exists()] if base.is_dir() else []
    return [RunDir(p) for p in sorted(found, key=lambda p: (p.stat().st_ctime_ns, p.name))]


def find(reference: str | None, root: Path | None = None) -> RunDir:
    """Return the run that a person means.

    Args:
        reference: An id, a name, or a cluster file; `None` for the only active run, or the newest.
        root: Where runs lie; the user's own by default.

    Raises:
        NotFoundError: There is none.
        RefusedError: Several could be meant.
    """
    runs = all_runs(root)
    if reference is None:
        active = [r for r in runs if not listed(r).over]
        candidates = active or runs[-1:]
        what = "no run yet"
    else:
        candidates = [r for r in runs if r.run == reference] or _by_name_or_file(runs, reference)
        what = f"no run `{reference}`"
    if not candidates:
        raise NotFoundError(what, hint="`clusterctl ps -a` lists all runs of this head")
    if len(candidates) > 1:
        names = ", ".join(r.run for r in candidates)
        raise RefusedError(f"several runs could be meant: {names}", hint="name one of them")
    return candidates[0]


def _by_name_or_file(runs: list[RunDir], reference: str) -> list[RunDir]:
    path = Path(reference)
    wanted = os.path.realpath(path) if path.is_file() else None
    states = [(r, listed(r)) for r in runs]
    matching = [(r, s) for r, s in states if s.name == reference or (wanted and os.path.realpath(s.path) == wanted)]
    active = [r for r, s in matching if not s.over]
    return active or [r for r, _ in matching][-1:]


# --- reading


def visible_state(run: RunDir) -> tuple[RunState, bool]:
    """Return the state of a run and whether it is attended.

    A start whose controller died before any attempt began left nothing to adopt: it has failed.
    """
    attended = run.attended
    return _visible(_readable(run), attended=attended), attended


def listed_state(run: RunDir) -> tuple[RunState, bool]:
    """Return what `visible_state` does, but of a run that has ended no more than lists need (see `Outline`)."""
    attended = run.attended
    return _visible(listed(run), attended=attended), attended


def listed(run: RunDir) -> RunState:
    """Return the state of a run; of one that has ended no more than lists need."""
    known = outline.read(run.outline, run.events)
    return _readable(run) if known is None else known.state


def _readable(run: RunDir) -> RunState:
    """Return the state of a run; of one whose files say nothing, just that."""
    try:
        state = load_state(run)
    except OSError as error:
        return RunState(run=run.run, phase=RunPhase.UNREADABLE, unread=(f"{run.events.name}: {error.strerror}",))
    if state.created is None and state.unread:
        return replace(state, run=run.run, phase=RunPhase.UNREADABLE)
    return state


def _visible(state: RunState, *, attended: bool) -> RunState:
    if not attended and not state.over and state.attempt < 0 and state.created is not None:
        return _never_started(state)
    return state


def _never_started(state: RunState) -> RunState:
    return replace(state, phase=RunPhase.FAILED, exit_code=100)


def latest_samples(run: RunDir, node: str, kind: str) -> dict[str, Any] | None:
    """Return the newest sample of a kind (activity, health) that was replicated from a node."""
    path = run.node(node) / files.SAMPLES_FILE
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 256 * 1024))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    return next(samples.readable(reversed(lines), kind), None)


def latest_step(run: RunDir, state: RunState) -> int | None:
    """Return the step that the slowest rank of the newest attempt had reached, as far as the samples tell."""
    newest = [latest_samples(run, node, "activity") for node in state.nodes]
    ranks = [
        r
        for s in newest
        if s is not None and s.get("attempt") == state.attempt
        for r in (s.get("ranks") or {}).values()
    ]
    return min((step for r in ranks if (step := (r.get("inside") or {}).get("step")) is not None), default=None)


# --- writing


class Writer:
    """The one writer of a run directory. Holds the lock from construction to `close`.

    Raises:
        RefusedError: Another controller is alive, or the file system has no locks.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        try:
            self._lock = locking.take(run.lock)
        except locking.HeldError as error:
            raise RefusedError(
                f"{run.run} has a controller already", hint=f"`clusterctl attach {run.run}` shows it"
            ) from error
        self._seq = _last_seq(run.events)
        self._events = LineFile(run.events, _EVENTS_RESERVE)
        self._journals: dict[str, LineFile] = {}
        self._files = ReplicaFiles()

    def append(self, event: head.ControllerEvent, now: float) -> None:
        """Write an event of the controller's own; `now` is the head's clock in seconds.

        Where there is no room it waits, as do the lines of `journal`: see `flush`. What decides over the run is on the
        disk when this returns, so that a head that loses its power does not come back with another view of it.
        """
        self._seq += 1
        self._events.append((head.encode(self._seq, now, event) + "\n").encode())
        if isinstance(event, _DURABLE):
            self._events.sync()

    def journal(self, node: str, record: dict[str, Any]) -> None:
        """Append one line to the replica of a node's journal.

        Raises:
            FrameError: It would be longer than a line, or a journal, may be.
        """
        if node not in self._journals:
            self._journals[node] = LineFile(self.run.node(node) / files.JOURNAL_FILE, _JOURNAL_RESERVE)
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        if len(line) > MOST_LINE or self._journals[node].size + len(line) > MOST_JOURNAL:
            raise frames.FrameError(f"an event of {len(line)} bytes, for which its journal has no room")
        self._journals[node].append(line)

    def flush(self) -> bool:
        """Write the lines that found no room before; return whether none waits any more."""
        # Nodes first: what the controller concluded from their lines must not be seen before them.
        written = [file.flush() for file in (*self._journals.values(), self._events)]
        return all(written)

    def replicate(self, node: str, file: str, offset: int, payload: bytes) -> int:
        """Write bytes of a node's file at their own offset; return the replica's new size, which is the cursor.

        Of samples, which would be most of what a long run leaves here, only the last `SAMPLES_KEPT` bytes are kept.

        Raises:
            OSError: There is no room (`linefile.is_short`); writing the same again later makes it whole.
        """
        fd = self._descriptor(node, file)
        view, before = memoryview(payload), offset
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
        if file == files.SAMPLES_FILE:
            gone = files.first_kept(offset, SAMPLES_KEPT)
            if gone != files.first_kept(before, SAMPLES_KEPT):
                punch(fd, gone)
        return offset

    def cursors(self, node: str, whole: int = 0) -> dict[str, int]:
        """Return the size of every replica of a node, by the file's own name.

        Left out are the journal, and attempts before number `whole`.
        """
        base = self.run.node(node)
        tops = [p for p in base.iterdir() if not -1 < files.attempt_of(p.name) < whole] if base.is_dir() else []
        paths = [path for top in tops for path in (top, *top.rglob("*"))]
        found = {p.relative_to(base).as_posix(): p.stat().st_size for p in paths if p.is_file()}
        found.pop(files.JOURNAL_FILE, None)
        return found

    def close_before(self, node: str, attempt: int) -> None:
        """Keep no file of a node open that is of an attempt before that one."""
        base = self.run.node(node)
        self._files.close_where(
            lambda path: (
                path.is_relative_to(base) and -1 < files.attempt_of(path.relative_to(base).as_posix()) < attempt
            )
        )

    def restart_replica(self, node: str, file: str) -> None:
        """Throw away a replica that turned out to differ from the node's file, so that it is sent again."""
        os.ftruncate(self._descriptor(node, file), 0)

    def next_epoch(self, seen: int) -> int:
        """Return an epoch above every one used so far, and remember it; `seen` is the highest that a node knows."""
        try:
            stored = int(self.run.epoch.read_text())
        except (FileNotFoundError, ValueError):
            stored = 0
        epoch = max(stored, seen) + 1
        # The nodes remember it too: that is enough to go on with a run whose head has no space.
        with room_not_needed():
            write_atomically(self.run.epoch, str(epoch).encode())
        return epoch

    def close(self) -> None:
        """Let go of the lock and of every file; a run that has ended gets its outline."""
        for file in (*self._journals.values(), self._events):
            file.close()
        self._outline()
        self._files.close()
        os.close(self._lock)

    def _outline(self) -> None:
        with contextlib.suppress(OSError):
            state = load_state(self.run)
            if state.over:
                content = outline.encode(state, latest_step(self.run, state), self.run.events)
                write_atomically(self.run.outline, content)

    def _descriptor(self, node: str, file: str) -> int:
        if ".." in file.split("/") or file.startswith("/"):
            raise RefusedError(f"{node} names a file outside its run directory: {file!r}")
        return self._files.descriptor(self.run.node(node) / file)


@contextlib.contextmanager
def room_not_needed() -> Iterator[None]:
    """Do without a file that helps, and without which things go on, where there is no room for it."""
    try:
        yield
    except OSError as error:
        if not is_short(error):
            raise


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Put a whole file in place: readers see the old one or the new one, never a part; `durable`: after a crash too."""
    write_whole(str(path), data, durable=durable)


def _last_seq(path: Path) -> int:
    last = 0
    for line in LineTail(path).read():
        with contextlib.suppress(frames.FrameError):
            decoded = head.decode(line)
            last = decoded[0] if decoded else last
    return last


def now() -> float:
    """Return the head's wall clock as it was at import, moved on by the monotonic clock: jumps do not reach it."""
    return _WALL_AT_IMPORT + (time.monotonic() - _MONO_AT_IMPORT)


_WALL_AT_IMPORT, _MONO_AT_IMPORT = time.time(), time.monotonic()
