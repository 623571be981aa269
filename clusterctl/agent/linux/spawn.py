"""What a forked child does to become a program: everything that a user wrote travels as data, never as shell text."""

from __future__ import annotations

import contextlib
import os
import resource
import signal

from clusterctl.agent.linux import syscalls
from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

EXIT_NOT_FOUND = 127
EXIT_NOT_EXECUTABLE = 126
# Linux has not enforced this limit since 2.4.25, shows it in /proc/PID/limits, and hands it on through fork and exec.
_RLIMIT_LOCKS = 10

MAX_OPEN_FILES = 524288
"""Open files that a program may have: no more than systemd allows by default, since some go over all that they may."""

PYTHON_PLACEHOLDER = "{python}"
"""As `argv[0]`, the interpreter that `Prepare` found."""

_OWN_VARIABLE_PREFIXES = (b"CLUSTERCTL_",)
_SYSTEM_FOLDERS = (b"/usr/local/sbin", b"/usr/local/bin", b"/usr/sbin", b"/usr/bin", b"/sbin", b"/bin")


def encode_peer_text(text: str) -> bytes:
    """Return text of a peer as the bytes that it stood for."""
    return text.encode("utf-8", "surrogateescape")


def build_base_environment() -> dict[bytes, bytes]:
    """Return what every program of a user starts from: our own environment, less what is ours."""
    return {k: v for k, v in os.environb.items() if not k.startswith(_OWN_VARIABLE_PREFIXES)}


def prepend_program_folder(python: bytes, env: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return an environment that finds the programs beside an interpreter first, as if its `venv` was activated."""
    folder = os.path.dirname(python)
    path = env.get(b"PATH", os.defpath.encode())
    places = path.split(b":") if path else []
    if not folder or (folder in places and (folder == places[0] or folder in _SYSTEM_FOLDERS)):
        return env
    return {**env, b"PATH": b":".join([folder, *places])}


@frozen_dataclass(frozen=True)
class Program:
    """A program to run.

    Attributes:
        argv: Executed as it is.
        env: The whole environment.
        cwd: Where; it must be there.
        prologue: Text for bash that runs first, in the same process; where a command of it fails, nothing else runs.
        tag: Value of the surviving marker, or `None`.
    """

    argv: list[bytes]
    env: dict[bytes, bytes]
    cwd: bytes = b"/"
    prologue: bytes | None = None
    tag: int | None = None


_PROLOGUE_TRAP = (
    b"trap 'status=$?; echo \"the prologue failed with status $status\" >&2; exit $status' EXIT; set -eo pipefail; "
)
"""Stands before a prologue, in its first line: no program may run in half of the environment that was asked for."""


def build_command_line(program: Program) -> list[bytes]:
    """Return what is executed: the argv itself, or bash that runs the prologue and then becomes the argv."""
    if program.prologue is None:
        return program.argv
    text = _PROLOGUE_TRAP + program.prologue + b'\ntrap - EXIT\nexec "$@"'
    return [b"bash", b"-c", text, b"bash", *program.argv]


def find_program(name: bytes, env: dict[bytes, bytes]) -> bytes | None:
    """Return the path of a program as `execvp` would find it, or `None`; a path stays as it is."""
    if b"/" in name:
        return name
    places = env.get(b"PATH", os.defpath.encode())
    for folder in places.split(b":") if places else ():
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return None


_ORIGINAL_FILE_LIMITS: list[tuple[int, int]] = []
"""The limits for open files that we were started with, where we have changed them."""


def raise_file_limit() -> None:
    """Let this process and its forks have as many files open as may be; a program gets back what it would have had."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    if usual[0] != usual[1]:
        _ORIGINAL_FILE_LIMITS[:] = [usual]
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual[1], usual[1]))


_ORIGINAL_CORE_LIMITS: list[tuple[int, int]] = []
"""The limits for core dumps that we were started with, where we have changed them."""


def disable_core_dumps() -> None:
    """Leave no core dump of this process and its forks, which see secrets; a program may leave one as before."""
    usual = resource.getrlimit(resource.RLIMIT_CORE)
    if usual[0]:
        _ORIGINAL_CORE_LIMITS[:] = [usual]
        resource.setrlimit(resource.RLIMIT_CORE, (0, usual[1]))


def _restore_limits() -> None:
    for usual in _ORIGINAL_FILE_LIMITS:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    for usual in _ORIGINAL_CORE_LIMITS:
        resource.setrlimit(resource.RLIMIT_CORE, usual)


def _raise_worker_file_limit() -> None:
    """Let this process open as many files as its hard limit allows: the soft one is 1024 for the sake of `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def close_descriptors(keep: Iterable[int]) -> None:
    """Close every descriptor above 2 but those."""
    keep_fds = set(keep)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep_fds:
            try:
                os.close(fd)
            except OSError:
                continue


def reset_signals() -> None:
    """Undo what Python and our loop did to signals: dispositions are default, nothing is blocked."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) is not signal.SIG_DFL:
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError, RuntimeError):
                continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def set_tag(value: int) -> None:
    """Put the surviving marker on this process and all that will come of it."""
    for limit in (_RLIMIT_LOCKS, resource.RLIMIT_RSS):
        try:
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (value, hard))
        except (OSError, ValueError):
            continue
        return


def exec_program(program: Program) -> NoReturn:
    """Turn this process into the program; if that fails, say so on descriptor 2 and end with 127 or 126."""
    argv = build_command_line(program)
    try:
        if program.tag is not None:
            set_tag(program.tag)
        reset_signals()
        _restore_limits()
        if program.tag is not None:
            # What a launcher of the user starts has the limits that it was given.
            _raise_worker_file_limit()
        _change_directory(program.cwd)
        path = find_program(argv[0], program.env)
        if path is None:
            _exit_with_error(EXIT_NOT_FOUND, argv[0], "no such program on PATH")
        os.execve(path, argv, program.env)
    except OSError as error:
        code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE
        path = argv[0] if argv else b""
        missing = isinstance(error, FileNotFoundError) and b"/" in path and os.path.exists(path)
        _exit_with_error(code, path, "its interpreter is missing" if missing else error.strerror or str(error))
    except BaseException as error:
        _exit_with_error(EXIT_NOT_EXECUTABLE, argv[0] if argv else b"", repr(error))


def _change_directory(folder: bytes) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        _exit_with_error(EXIT_NOT_EXECUTABLE, folder, f"cannot work there: {error.strerror}")


def _exit_with_error(code: int, what: bytes | str, why: str) -> NoReturn:
    name = what if isinstance(what, bytes) else encode_peer_text(what)
    try:
        syscalls.write_all(2, b"clusterctl: cannot run `" + name + b"`: " + why.encode() + b"\n")
    finally:
        os._exit(code)
