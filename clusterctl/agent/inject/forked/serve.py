"""The zygote's own work: import what is asked for, say so, and fork a rank at each request until the supervisor ends.

A request is one byte with descriptors: a file with the request as JSON, one with what the waiter is told, where to
report, the worker's output, and what the waiter is to hold.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

from . import cannot, image, imports, late, rank, state
from .cannot import CannotForkError
from .target import Target

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_MOST_DESCRIPTORS = 250
_RLIMIT_LOCKS = 10


def main(control: int) -> Callable[[], None]:
    """Be the zygote until the supervisor ends; return only in a rank, what is left to do there."""
    state.control = control
    sock = socket.socket(fileno=control)
    spec = _content(socket.recv_fds(sock, 1, 1)[1][0])
    image.name(b"clusterctl-zygote"[:15])
    try:
        told = _import(spec)
    except CannotForkError as error:
        _say(sock, {"cannot": str(error)})
        os._exit(0)
    _say(sock, told)
    files = cannot.imported_files()
    while True:
        word, descriptors, _, _ = socket.recv_fds(sock, 1, _MOST_DESCRIPTORS)
        if not word:
            os._exit(0)
        if word == b"?":
            _say(sock, {"changed": _changed(files)})
        elif _fork(descriptors):
            sock.detach()
            os.close(control)
            return _rank(descriptors)
        for fd in descriptors:
            os.close(fd)


def _content(fd: int) -> Any:
    with open(fd, "rb") as file:
        file.seek(0)
        return json.loads(file.read())


def _say(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode())


def _import(spec: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    cannot.check_python()
    if not getattr(sys.flags, "safe_path", False) and sys.path[:1] == [""]:
        del sys.path[0]
    target = Target(spec["argv"])
    target.enter()
    target.enter_path()
    # Tried now: a kernel that does not allow it is no surprise to a rank then.
    image.show([b"clusterctl-agent zygote " + os.fsencode(spec["title"])], dict(os.environb))
    before = dict(os.environb)
    watched = late.watch(spec["late"])
    names = spec["preload"]
    if names is None and target.script is None:
        raise CannotForkError("what a module imports is not looked for: name it in `job.preload`")
    wanted = imports.Reader().script(target.script or "") if names is None else list(imports.named(names))
    if not wanted:
        raise CannotForkError("the script begins with nothing that could be imported once for all ranks")
    imports.bring(wanted)
    late.end(watched)
    state.changes = late.changes(before)
    cannot.check(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.stdout.flush()
    sys.stderr.flush()
    rank.settle_memory()
    modules = sorted({name.partition(".")[0] for name, _ in wanted})
    return {"modules": modules, "seconds": time.monotonic() - began, "kilobytes": _memory()}


def _memory() -> int:
    """Return the memory that a rank shares with us, in KiB."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
    return 0


def _changed(files: dict[str, tuple[int, int]]) -> str | None:
    now = cannot.imported_files()
    return next((file for file, known in files.items() if now.get(file) != known), None)


# --- forking


def _fork(descriptors: list[int]) -> bool:
    """Fork a rank and its waiter; true in the rank."""
    try:
        cannot.check_now()
        settled, settling = os.pipe()
        between = os.fork()
    except CannotForkError as error:
        os.write(descriptors[2], json.dumps({"refused": str(error)}).encode())
        return False
    except OSError as error:
        os.write(descriptors[2], json.dumps({"refused": error.strerror}).encode())
        return False
    if between:
        os.close(settled)
        os.waitpid(between, 0)
        os.close(settling)
        return False
    try:
        if os.fork():
            # Whoever remains has the supervisor for a parent, which takes in all orphans.
            os._exit(0)
        os.close(settling)
        # Nobody is an orphan before its parent has been waited for, however late that is.
        os.read(settled, 1)
        os.close(settled)
        return _part(descriptors)
    except BaseException:
        os._exit(1)


def _part(descriptors: list[int]) -> bool:
    """Fork the rank; true there, and a waiter here."""
    os.setsid()
    gate, go = os.pipe()
    worker = os.fork()
    if worker:
        _wait(descriptors, go, worker)
    os.setsid()
    os.close(go)
    descriptors.append(gate)
    return True


def _wait(descriptors: list[int], go: int, worker: int) -> NoReturn:
    """Become the agent's waiter: a small process that knows nothing of all this."""
    import resource

    request, told, report, _, *keep = descriptors
    argv = _content(request)["waiter"]
    resource.setrlimit(_RLIMIT_LOCKS, (resource.getrlimit(_RLIMIT_LOCKS)[1],) * 2)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    held = [told, report, go, *keep]
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), int(name) in held)
            except OSError:
                continue
    os.execve(argv[0], [*argv, *map(str, [*held[:3], worker, *keep])], {})


def _rank(descriptors: list[int]) -> Callable[[], None]:
    """Get ready behind the gate; return what to run once it opens."""
    request, told, report, output, *keep, gate = descriptors
    try:
        asked = _content(os.dup(request))
        words = os.pread(1, os.fstat(1).st_size, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if asked["cgroup"]:
            _join(asked["cgroup"])
        target = Target(asked["argv"])
        target.enter()
        env = {_bytes(name): _bytes(value) for name, value in asked["env"].items()}
        rank.prepare(target, env, asked["cwd"])
        for fd in (request, told, report, output, *keep):
            os.close(fd)
        if not os.read(gate, 1):
            os._exit(1)
        os.close(gate)
        # What the imports of a fresh start would have said.
        os.write(1, words)
        rank.arm()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(126)
    return target.run


def _join(procs: str) -> None:
    try:
        with open(procs, "w") as file:
            file.write("0")
    except OSError:
        return


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
