"""The last steps of a forked child before it executes a program. A user's text travels as data, never as shell text."""

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
# Linux has not enforced this limit since 2.4.25. It shows it in /proc/PID/limits and keeps it over fork and exec.
_RLIMIT_LOCKS = 10

MAX_OPEN_FILES = 524288
"""Open files that a program may have: as many as systemd allows by default. Some programs visit every number."""

PYTHON_PLACEHOLDER = "{python}"
"""As `argv[0]`: the interpreter that `Prepare` found."""

_OWN_VARIABLE_PREFIXES = (b"CLUSTERCTL_",)
_SYSTEM_FOLDERS = (b"/usr/local/sbin", b"/usr/local/bin", b"/usr/sbin", b"/usr/bin", b"/sbin", b"/bin")


def encode_peer_text(text: str) -> bytes:
    """Return the bytes that the text of a peer stands for."""
    return text.encode("utf-8", "surrogateescape")


def build_base_environment() -> dict[bytes, bytes]:
    """Return the environment in which a user's program starts: our own without our variables."""
    return {k: v for k, v in os.environb.items() if not k.startswith(_OWN_VARIABLE_PREFIXES)}


def prepend_program_folder(python: bytes, env: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return an environment with the folder of an interpreter first on PATH, as if its `venv` were active."""
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
        argv: The words to execute.
        env: The whole environment.
        cwd: The working directory; it must exist.
        prologue: A bash text that runs first in the same process. If a command of it fails, nothing else runs.
        tag: The limit value that marks its processes, or `None`.
    """

    argv: list[bytes]
    env: dict[bytes, bytes]
    cwd: bytes = b"/"
    prologue: bytes | None = None
    tag: int | None = None


_PROLOGUE_TRAP = (
    b"trap 'status=$?; echo \"the prologue failed with status $status\" >&2; exit $status' EXIT; set -eo pipefail; "
)
"""Precedes a prologue on its first line, so that no program runs with half of the requested environment."""


def build_command_line(program: Program) -> list[bytes]:
    """Return the words to execute: the argv, or a bash that runs the prologue and then becomes the argv."""
    if program.prologue is None:
        return program.argv
    text = _PROLOGUE_TRAP + program.prologue + b'\ntrap - EXIT\nexec "$@"'
    # Below sshd, bash reads .bashrc even for -c, and its exports would replace the environment of the program.
    return [b"bash", b"--norc", b"-c", text, b"bash", *program.argv]


def find_program(name: bytes, env: dict[bytes, bytes]) -> bytes | None:
    """Return the path of a program as `execvp` finds it, or `None`; a name with a slash is returned as it is."""
    if b"/" in name:
        return name
    places = env.get(b"PATH", os.defpath.encode())
    for folder in places.split(b":") if places else ():
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return None


_ORIGINAL_LIMITS: dict[int, tuple[int, int]] = {}
"""The limits that we were started with and have changed; `exec_program` restores them for programs."""


def raise_file_limit() -> None:
    """Raise the file limit of this process and its forks."""
    _set_soft_limit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def disable_core_dumps() -> None:
    """Turn off core dumps of this process and its forks, which hold secrets."""
    _set_soft_limit(resource.RLIMIT_CORE, 0)


def _set_soft_limit(limit: int, value: int) -> None:
    usual = resource.getrlimit(limit)
    if usual[0] != value:
        _ORIGINAL_LIMITS[limit] = usual
        resource.setrlimit(limit, (value, usual[1]))


def _raise_worker_file_limit() -> None:
    """Raise the soft file limit to the hard one: the soft default of 1024 exists for `select` only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_files = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < max_files:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, hard))


def redirect_stdio(stdin: int | None = None, stdout: int | None = None, stderr: int | None = None) -> None:
    """Connect the standard streams to these descriptors; `None` means /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in enumerate((stdin, stdout, stderr)):
        os.dup2(null if source is None else source, target)
    if null > 2:
        os.close(null)


def close_descriptors(keep: Iterable[int]) -> None:
    """Close all descriptors above 2 except `keep`."""
    keep_fds = set(keep)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep_fds:
            try:
                os.close(fd)
            except OSError:
                continue


def reset_signals() -> None:
    """Restore default signal handling, which Python and our event loop have changed; block no signal."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) is not signal.SIG_DFL:
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError, RuntimeError):
                continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def set_process_tag(value: int) -> None:
    """Mark this process and all its descendants, by the value of a resource limit."""
    for limit in (_RLIMIT_LOCKS, resource.RLIMIT_RSS):
        try:
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (value, hard))
        except (OSError, ValueError):
            continue
        return


def exec_program(program: Program) -> NoReturn:
    """Replace this process by the program; on failure write the error to descriptor 2 and exit with 127 or 126."""
    argv = build_command_line(program)
    try:
        if program.tag is not None:
            set_process_tag(program.tag)
        reset_signals()
        for limit, usual in _ORIGINAL_LIMITS.items():
            resource.setrlimit(limit, usual)
        if program.tag is not None:
            # The processes of a user's launcher inherit the limits of the launcher.
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


def _exit_with_error(code: int, name: bytes, why: str) -> NoReturn:
    try:
        syscalls.write_all(2, b"clusterctl: cannot run `" + name + b"`: " + why.encode() + b"\n")
    finally:
        os._exit(code)
