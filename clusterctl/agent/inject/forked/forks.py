"""Forking a rank and its waiter, each of which says why where it cannot go on.

A request comes with descriptors: a file with the request as JSON, one with what the waiter is told, where to report,
the worker's output, and what the waiter is to hold. Who fails before the gate opens has started nothing of the user's:
the reason is reported, and the rank starts anew.
"""

from __future__ import annotations

import contextlib
import json
import os

from . import cannot, late, marks, rank, state
from .cannot import CannotForkError
from .target import Target

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_MOST_REASON = 1000


def content(fd: int) -> Any:
    """Return what a file holds, as JSON. Waiter and rank read theirs at once, so it has no offset in common."""
    return json.loads(os.pread(fd, os.fstat(fd).st_size, 0))


def reason(error: BaseException) -> str:
    """Say what went wrong, and where, if that is no refusal of ours."""
    if isinstance(error, CannotForkError):
        return str(error)
    import traceback

    last = traceback.extract_tb(error.__traceback__)[-1:]
    places = [f" ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in last]
    return f"{type(error).__name__}: {error}"[:_MOST_REASON] + "".join(places)


def _refuse(descriptors: list[int], error: BaseException) -> bool:
    """Report why there is no such rank; false where nobody listens any more."""
    try:
        os.write(descriptors[2], json.dumps({"refused": reason(error)}).encode() + b"\n")
    except OSError:
        return False
    return True


def fork(descriptors: list[int]) -> bool:
    """Fork a rank and its waiter; true in the rank, whose gate and where to say that it is ready are added."""
    try:
        cannot.check_now()
        settled, settling = os.pipe()
        between = os.fork()
    except (CannotForkError, OSError) as error:
        _refuse(descriptors, error)
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
    except BaseException as error:
        _refuse(descriptors, error)
        os._exit(1)


def _part(descriptors: list[int]) -> bool:
    """Fork the rank; true there, and a waiter here."""
    os.setsid()
    gate, go = os.pipe()
    ready, readying = os.pipe()
    worker = os.fork()
    if worker:
        _wait(descriptors, go, ready, worker)
    os.setsid()
    os.close(go)
    os.close(ready)
    descriptors += [gate, readying]
    return True


def _wait(descriptors: list[int], go: int, ready: int, worker: int) -> NoReturn:
    """Become the agent's waiter: a small process that knows nothing of all this."""
    request, told, report, _, *keep = descriptors
    argv = content(request)["waiter"]
    marks.untag()
    null = os.open(os.devnull, os.O_RDWR)
    # A Python that cannot start says why on its stderr.
    for source, target in ((null, 0), (null, 1), (report, 2)):
        os.dup2(source, target)
    held = [told, report, go, ready, *keep]
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), int(name) in held)
            except OSError:
                continue
    os.execve(argv[0], [*argv, *map(str, [*held[:4], worker, *keep])], {})


def become(descriptors: list[int]) -> Callable[[], None]:
    """Get ready behind the gate; return what to run once it opens."""
    request, told, report, output, *keep, gate, readying = descriptors
    try:
        os.close(state.control)
        asked = content(request)
        words = os.pread(1, os.fstat(1).st_size, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if asked["cgroup"]:
            _join(asked["cgroup"])
        target = Target(asked["argv"])
        target.enter()
        rank.prepare(target, late.of_text(asked["env"]), asked["cwd"])
    except BaseException as error:
        if not _refuse(descriptors, error) and os.read(gate, 1):
            # The waiter did not wait for us so long: this is a rank that has started.
            _print()
        os._exit(126)
    return _enter(target, gate, words, readying, [request, told, report, output, *keep])


def _enter(target: Target, gate: int, words: bytes, readying: int, spare: list[int]) -> Callable[[], None]:
    try:
        with contextlib.suppress(BrokenPipeError):
            os.write(readying, b"r")
        for fd in (*spare, readying):
            os.close(fd)
        if not os.read(gate, 1):
            # The waiter has said why, or was killed.
            os._exit(1)
        os.close(gate)
        # What the imports of a fresh start would have said.
        os.write(1, words)
        rank.arm()
    except BaseException:
        _print()
        os._exit(126)
    return target.run


def _print() -> None:
    import traceback

    traceback.print_exc()


def _join(procs: str) -> None:
    try:
        with open(procs, "w") as file:
            file.write("0")
    except OSError:
        return
