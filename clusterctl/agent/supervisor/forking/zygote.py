"""The supervisor's end of a zygote: a process of the workers' own Python that imports once and forks ranks.

It ends with the supervisor: it reads the end of their connection, and the kernel kills it should it not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import select
import signal
import socket
from enum import Enum
from typing import TYPE_CHECKING, Any, Callable, NoReturn

from clusterctl.agent.linux import proc, relaunch, spawn, syscalls
from clusterctl.agent.supervisor.forking import rules

if TYPE_CHECKING:
    from clusterctl.agent.linux.loop import Loop, Timer
    from clusterctl.agent.protocol.requests import Forked
    from clusterctl.agent.supervisor.waiter import Post

_START = "import os, sys; exec(os.pread(int(sys.argv[1]), 65536, 0)); run()"
"""Names no run: others see it until the zygote has given itself a title."""
_BOOT = """\
import os, sys
os.close(int(sys.argv[1]))
if not getattr(sys.flags, "safe_path", False) and sys.path[:1] == [""]:
    del sys.path[0]  # `-c` has put the folder of the user's files there
sys.path.insert(0, {place!r})
from _clusterctl_fork import serve
sys.path.remove({place!r})
run = serve.main({control})
"""
_PATIENCE_SECONDS = 120.0
"""How long imports may take before the ranks start without it."""
_LAST_WORD_MS = 1000
_MOST_LINE = 500


class Stage(Enum):
    """How far it is."""

    BUSY = "busy"
    READY = "ready"
    OVER = "over"


class Zygote:
    """One of them.

    Attributes:
        why: Why it cannot be used, where it is over.
        stale: What it has imported is not what lies on the disk any more, or nobody can tell: it may be replaced.
        told: What it said of itself when it was ready.
        identity: Who it is; it belongs to no attempt.
    """

    def __init__(
        self, loop: Loop, asked: Forked, program: spawn.Program, place: str, title: str, settled: Callable[[], None]
    ) -> None:
        """Start it.

        Args:
            loop: Where it runs.
            asked: What the head wants of it.
            program: What a worker of the node would become.
            place: Folder of its modules.
            title: What tells it from others where everybody can see it.
            settled: Called when it is ready, or over.

        Raises:
            OSError: No process or no descriptor is to be had.
        """
        self._loop, self._settled = loop, settled
        self.asked, self._program = asked, program
        self.env = rules.environment(program.env)
        self.stage, self.why, self.stale = Stage.BUSY, "", False
        self.told: dict[str, Any] = {}
        self._owed = 1
        self._last_word_ms = _LAST_WORD_MS
        self._deadline: Timer | None = None
        self._said = syscalls.memory_file("output")
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.identity = self._start(theirs.fileno(), program, place)
        loop.on_readable(self._sock.fileno(), self._read)
        self._wait()
        late = [*rules.LATE, *rules.THREADS, *asked.secrets]
        spec = {"argv": _texts(program.argv), "preload": asked.preload, "title": title}
        self._ask(b"s", {**spec, "late": late, "changes": rules.CHANGES})

    def serves(self, asked: Forked, program: spawn.Program) -> bool:
        """Whether it would be started in the same way, whatever is to become of it after this start."""
        ours = self.asked
        same = dataclasses.replace(ours, argv=asked.argv, keep=asked.keep) == dataclasses.replace(
            asked, demanded=ours.demanded
        )
        return same and self._may_run(asked.argv) and _lasting(program) == _lasting(self._program)

    def _may_run(self, argv: list[str]) -> bool:
        """Whether the imports would be the same for this command line: of arguments they have seen nothing, mostly."""
        ours = self.asked.argv
        unread = self.stage is Stage.READY and not self.told["arguments"]
        return argv == ours or (unread and _target(argv) == _target(ours))

    def _start(self, control: int, program: spawn.Program, place: str) -> proc.Identity:
        boot = syscalls.memory_file("boot")
        parent = os.getpid()
        try:
            syscalls.write_all(boot, _BOOT.format(place=place, control=control).encode())
            pid = os.fork()
            if pid == 0:
                argv = [program.argv[0], b"-c", _START.encode(), str(boot).encode()]
                _become(
                    spawn.Program(argv, self.env, program.cwd, tag=program.tag), parent, self._said, {control, boot}
                )
        finally:
            os.close(boot)
        return proc.identify(pid) or proc.Identity(pid, 0)

    def _wait(self, seconds: float = _PATIENCE_SECONDS) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.after(seconds, functools.partial(self._overdue, seconds))

    def _overdue(self, seconds: float) -> None:
        # Another one would take as long.
        self.stale = False
        self.close(f"the imports took longer than {seconds:.0f} s")

    def _ask(self, word: bytes, value: Any) -> None:
        file = _file(value)
        self._send(word, [file])
        os.close(file)

    def _send(self, word: bytes, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._sock, [word], descriptors)
        except ConnectionError:
            self._ended()
        except OSError as error:
            self.close(f"the process that was to fork the ranks cannot be asked: {error.strerror}")

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except OSError:
            # It ended with requests unread.
            data = b""
        if not data:
            self._ended()
            return
        said = json.loads(data)
        self._owed -= 1
        if said.get("cannot"):
            # Asked again meanwhile, it speaks of how things lay when it began: another one looks anew.
            self.stale = self._owed > 0
            self.close(said["cannot"])
        elif said.get("changed"):
            self.close(f"{said['changed']} has changed since it was imported")
        else:
            self.told |= said
            if not self._owed:
                self.stale = False
                self._is(Stage.READY)

    def _ended(self) -> None:
        last = self._last_line()
        self.close("the process that was to fork the ranks has ended" + (f", last saying: {last}" if last else ""))

    def _last_line(self) -> str:
        """Return the end of what it has printed, where a library may say why it ends the process."""
        try:
            size = os.fstat(self._said).st_size
            data = os.pread(self._said, _MOST_LINE, max(0, size - _MOST_LINE))
        except OSError:
            return ""
        return data.decode("utf-8", "replace").strip().rpartition("\n")[2]

    def last_word(self) -> str:
        """Return why it is over, although nobody may have looked yet; nothing where it is not.

        Where a fork has ended without a word, that of the zygote may be under way: it is waited for, once.
        """
        if self.stage is not Stage.OVER:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if poll.poll(self._last_word_ms):
                self._read()
            self._last_word_ms = 0
        return self.why if self.stage is Stage.OVER else ""

    def _is(self, stage: Stage) -> None:
        self.stage = stage
        if self._deadline is not None:
            self._deadline.cancel()
        self._settled()

    def check(self, asked: Forked, program: spawn.Program, title: str) -> None:
        """Serve this attempt, if what was imported is still what lies on the disk; it is busy meanwhile."""
        self.asked, self._program, self.stale = asked, program, True
        self.env = rules.environment(program.env)
        self._busy()
        self._ask(b"?", {"tag": program.tag, "cwd": _text(program.cwd), "title": title, "env": _as_text(self.env)})

    def _busy(self, seconds: float = _PATIENCE_SECONDS) -> None:
        self._owed += 1
        self.stage = Stage.BUSY
        self._wait(seconds)

    def unfit(self, env: dict[bytes, bytes]) -> str | None:
        """Return why a rank with this environment cannot come of it, or `None`."""
        if self.stage is not Stage.READY:
            return self.why
        names = rules.differing(self.env, env, self.asked.secrets)
        return f"{', '.join(names[:4])} of the rank differs from what the imports have seen" if names else None

    def begin(self, post: Post) -> int:
        """Have a rank forked, and its waiter; return a descriptor for `workers.report`.

        Raises:
            OSError: No descriptor is to be had.
        """
        program = post.program
        request = {
            "argv": _texts(program.argv),
            "env": _as_text(program.env),
            "cwd": _text(program.cwd),
            "cgroup": post.cgroup,
        }
        told = {**(post.told or {}), "supervisor": os.getpid(), "stop_after": post.stop_after, "lease": post.lease}
        told |= {"spawn_file": post.spawn_file, "exit_file": post.exit_file, "title": post.title}
        read, write = os.pipe2(os.O_CLOEXEC)
        files = [_file({**request, "waiter": relaunch.command("wait")}), _file(told)]
        self._send(b"f", [*files, write, post.output, *post.keep])
        for fd in (*files, write):
            os.close(fd)
        return read

    def close(self, why: str) -> None:
        """End it."""
        if self.stage is Stage.OVER:
            return
        self.why = why
        self._loop.forget(self._sock.fileno())
        self._sock.close()
        os.close(self._said)
        if proc.alive(self.identity):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.identity.pid, signal.SIGKILL)
        self._is(Stage.OVER)


def _become(program: spawn.Program, parent: int, said: int, keep: set[int]) -> NoReturn:
    try:
        os.setsid()
        syscalls.die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (said, 1), (said, 2)):
            os.dup2(source, target)
        spawn.close_all(keep)
        for fd in keep:
            os.set_inheritable(fd, True)
        spawn.become(program)
    finally:
        os._exit(spawn.NOT_EXECUTABLE)


def _lasting(program: spawn.Program) -> tuple[dict[bytes, bytes], bytes, bytes]:
    return rules.lasting(program.env), program.argv[0], program.cwd


def _target(argv: list[str]) -> list[str]:
    """Return what of a command line tells what is run."""
    return argv[: 3 if argv[1:2] == ["-m"] else 2]


def _file(value: Any) -> int:
    fd = syscalls.memory_file("request")
    syscalls.write_all(fd, json.dumps(value).encode())
    return fd


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _texts(words: list[bytes]) -> list[str]:
    return [_text(word) for word in words]


def _as_text(env: dict[bytes, bytes]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in env.items()}
