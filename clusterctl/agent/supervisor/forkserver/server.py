"""The supervisor's end of a forkserver: a process of the workers' own Python that imports once and forks ranks.

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

from clusterctl.agent.linux import helper_process, proc, spawn, syscalls
from clusterctl.agent.supervisor.forkserver import environments

if TYPE_CHECKING:
    from clusterctl.agent.linux.event_loop import EventLoop, Timer
    from clusterctl.agent.protocol.requests import Forked
    from clusterctl.agent.supervisor.waiter import Post

_PROBE = "import sys; sys.exit(f'{sys.executable} does not look at PYTHONPATH')"
"""Is not run: our `sitecustomize` has executed the command line of a rank by then. If it does not, no script is run."""
_PATIENCE_SECONDS = 120.0
"""How long imports may take before the ranks start without it."""
_LAST_WORD_MS = 1000
_MOST_LINE = 500


class Stage(Enum):
    """How far it is."""

    BUSY = "busy"
    READY = "ready"
    OVER = "over"


class ForkServer:
    """One of them.

    Attributes:
        why: Why it cannot be used, where it is over.
        stale: What it has imported is not what lies on the disk any more, or nobody can tell: it may be replaced.
        report: What it said of itself when it was ready.
        identity: Who it is; it belongs to no attempt.
    """

    def __init__(
        self, loop: EventLoop, asked: Forked, program: spawn.Program, shim: str, settled: Callable[[], None]
    ) -> None:
        """Start it.

        Args:
            loop: Where it runs.
            asked: What the head wants of it.
            program: What a worker of the node would become.
            shim: Folder of its modules.
            settled: Called when it is ready, or over.

        Raises:
            OSError: No process or no descriptor is to be had.
        """
        self._loop, self._settled = loop, settled
        self.asked, self._program = asked, program
        self.stage, self.why, self.stale = Stage.BUSY, "", False
        self.report: dict[str, Any] = {}
        self._pending = 1
        self._last_word_ms = _LAST_WORD_MS
        self._deadline: Timer | None = None
        self._output = syscalls.create_memory_file("output")
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        with theirs:
            self.identity = self._start(theirs.fileno(), shim)
        loop.on_readable(self._sock.fileno(), self._read)
        self._wait()
        names = [*environments.RANK_NAMES, *asked.secrets]
        file = _file({"preload": asked.preload, "rank_names": names, "inject": asked.inject})
        self._send(b"s", [file])
        os.close(file)

    def matches(self, asked: Forked, program: spawn.Program) -> bool:
        """Return whether it would be started in the same way, whatever is to become of it after this start."""
        same = dataclasses.replace(asked, keep=self.asked.keep, demanded=self.asked.demanded)
        return same == self.asked and _lasting(program) == _lasting(self._program)

    def _start(self, control: int, shim: str) -> proc.ProcessIdentity:
        program, parent = self._program, os.getpid()
        env = environments.of_forkserver(program.env, control, shim)
        pid = os.fork()
        if pid == 0:
            # Python is told once more what it is: our `sitecustomize` executes that.
            argv = [program.argv[0], b"-c", _PROBE.encode(), *program.argv]
            become = spawn.Program(argv, env, program.cwd, tag=program.tag)
            _become(become, parent, self._output, control)
        return proc.read_identity(pid) or proc.ProcessIdentity(pid, 0)

    def _wait(self, seconds: float = _PATIENCE_SECONDS) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.after(seconds, functools.partial(self._overdue, seconds))

    def _overdue(self, seconds: float) -> None:
        # Another one would take as long.
        self.stale = False
        self.close(f"the imports took longer than {seconds:.0f} s")

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
        self._pending -= 1
        if said.get("cannot"):
            # Asked again meanwhile, it speaks of how things lay when it began: another one looks anew.
            self.stale = self._pending > 0
            self.close(said["cannot"])
        elif said.get("changed"):
            self.close(f"what was imported has changed: {said['changed']}")
        else:
            self.report |= said
            if not self._pending:
                self.stale = False
                self._is(Stage.READY)

    def _ended(self) -> None:
        last = self._last_line()
        self.close("the process that was to fork the ranks has ended" + (f", last saying: {last}" if last else ""))

    def _last_line(self) -> str:
        """Return the end of what it has printed, where a library may say why it ends the process."""
        try:
            size = os.fstat(self._output).st_size
            data = os.pread(self._output, _MOST_LINE, max(0, size - _MOST_LINE))
        except OSError:
            return ""
        return data.decode("utf-8", "replace").strip().rpartition("\n")[2]

    def last_word(self) -> str:
        """Return why it is over, although nobody may have looked yet; nothing where it is not.

        Where a fork has ended without a word, that of the forkserver may be under way: it is waited for, once.
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

    def check(self, asked: Forked, program: spawn.Program) -> None:
        """Serve this attempt, if what was imported is still what lies on the disk; it is busy meanwhile."""
        self.asked, self._program, self.stale = asked, program, True
        self._pending += 1
        self.stage = Stage.BUSY
        self._wait()
        self._send(b"?", [])

    def why_not(self, env: dict[bytes, bytes]) -> str | None:
        """Return why a rank with this environment cannot come of it, or `None`."""
        if self.stage is not Stage.READY:
            return self.why
        names = environments.differing(self._program.env, env, self.asked.secrets)
        return f"{', '.join(names[:4])} of the rank differs from what the imports have seen" if names else None

    def begin(self, post: Post) -> int:
        """Have a rank forked, and its waiter; return a descriptor for `workers.report`.

        Raises:
            OSError: No descriptor is to be had.
        """
        request = {
            "env": _as_text(post.program.env),
            "cgroup": post.cgroup,
            "waiter": helper_process.build_agent_command("wait"),
            # A Python of the agent may need variables of the login to start at all, such as LD_LIBRARY_PATH.
            "waiter_env": _as_text(spawn.build_base_environment()),
        }
        told = {**(post.told or {}), "supervisor": os.getpid(), "stop_after": post.stop_after, "lease": post.lease}
        told |= {"spawn_file": post.spawn_file, "exit_file": post.exit_file, "title": post.title}
        read, write = os.pipe2(os.O_CLOEXEC)
        files = [_file(request), _file(told)]
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
        os.close(self._output)
        if proc.is_alive(self.identity):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.identity.pid, signal.SIGKILL)
        self._is(Stage.OVER)


def _become(program: spawn.Program, parent: int, output: int, control: int) -> NoReturn:
    try:
        os.setsid()
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        spawn.close_descriptors({control})
        os.set_inheritable(control, True)
        spawn.exec_program(program)
    finally:
        os._exit(spawn.EXIT_NOT_EXECUTABLE)


def _lasting(program: spawn.Program) -> tuple[dict[bytes, bytes], list[bytes], bytes]:
    return environments.common(program.env), program.argv, program.cwd


def _file(value: Any) -> int:
    fd = syscalls.create_memory_file("request")
    syscalls.write_all(fd, json.dumps(value).encode())
    return fd


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _as_text(env: dict[bytes, bytes]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in env.items()}
