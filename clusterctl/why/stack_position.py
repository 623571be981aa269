"""Finds a rank's position from its stack: the line of user code, the operation, and what the rank waits for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from clusterctl.why.verdict import MAX_NAMED, Culprit

if TYPE_CHECKING:
    from clusterctl.why.evidence_types import Rank, RankSnapshot, StackFrame

_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<|/_clusterctl_shim/|/clusterctl/agent/")
_COLLECTIVE = re.compile(r"torch/distributed/|torch/nn/parallel/|horovod/|jax/|tensorflow/|mpi4py|deepspeed/comm")
_RENDEZVOUS = re.compile(r"torch/distributed/(?:rendezvous|elastic/rendezvous)")
_BACKWARD = re.compile(r"torch/autograd/|torch/_tensor\.py$")
_MULTIPROCESSING = re.compile(r"multiprocessing/(?:connection|queues|pool)\.py$")
_LOADER = re.compile(rf"torch/utils/data/|keras/src/trainers/data_adapters/|{_MULTIPROCESSING.pattern}")
_INNER = frozenset(
    {"wrapper", "inner", "_wrapped_call_impl", "_call_impl", "__call__", "_fn", "wait", "work", "decorate"}
)
"""Functions whose names do not describe an operation."""
_SETTING_UP = frozenset({"init_process_group", "rendezvous", "_create_c10d_store", "new_group", "_store_based_barrier"})


_BUSY_CORES = 0.5
_MAX_PAUSE_S = 4.0
"""The longest pause between two checks of a rank that polls."""


class Activity(str, Enum):
    """The kind of code that a rank executes."""

    COLLECTIVE = "collective"
    BACKWARD = "backward"
    SETTING_UP = "setting_up"
    LOADING = "loading"
    OWN = "own"
    UNKNOWN = "unknown"


ELSEWHERE = (Activity.OWN, Activity.LOADING)
"""Activities in which a rank does not communicate with its peers by the framework."""
WAITS = (Activity.COLLECTIVE, Activity.BACKWARD, Activity.SETTING_UP)
"""Activities in which a rank waits for its peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPosition:
    """The position of a rank in its code.

    Attributes:
        where: The innermost line of user code, `file:line`; without user code, the innermost line.
        op: The collective or function that this line calls.
    """

    activity: Activity
    where: str | None
    op: str | None


UNKNOWN_POSITION = StackPosition(activity=Activity.UNKNOWN, where=None, op=None)


def locate_rank(snapshot: RankSnapshot | None) -> StackPosition:
    """Return the position of a rank's main thread. Without a stack, the position is unknown."""
    frames = snapshot.frames if snapshot is not None else None
    return _locate_in_frames(frames) if frames else UNKNOWN_POSITION


@lru_cache(maxsize=1024)
def _locate_in_frames(frames: tuple[StackFrame, ...]) -> StackPosition:
    """Return the position of a thread. Results are cached, because many ranks have the same stack."""
    own = next((frame for frame in frames if is_user_code(frame.file)), None)
    shown = own or frames[0]
    where = f"{shorten_path(shown.file)}:{shown.line}"
    below = frames[: frames.index(own)] if own is not None else frames
    doing = _classify_activity(below)
    if doing is Activity.BACKWARD or (doing is Activity.LOADING and not _MULTIPROCESSING.search(below[-1].file)):
        op = "backward" if doing is Activity.BACKWARD else "next batch"
        return StackPosition(activity=doing, where=where, op=op)
    functions = [
        frame.function for frame in below if doing in (Activity.OWN, Activity.LOADING) or _COLLECTIVE.search(frame.file)
    ]
    op = next((name for name in reversed(functions) if name not in _INNER), shown.function)
    return StackPosition(activity=doing, where=where, op=op)


def list_user_lines(snapshot: RankSnapshot) -> tuple[str, ...]:
    """Return the lines of user code on the stack of a rank's main thread, `file:line`, innermost first."""
    frames = (frame for frame in snapshot.frames or () if is_user_code(frame.file))
    return tuple(f"{shorten_path(frame.file)}:{frame.line}" for frame in frames)


def is_user_code(file: str) -> bool:
    """Return whether a file is the user's code, not a package or part of Python."""
    return _LIBRARY.search(file) is None


def shorten_path(file: str) -> str:
    """Return the path of a file relative to the work folder; the name of a file outside of the work folder."""
    parts = re.split(r"/clusterctl/work/[^/]+/", file)
    return parts[-1] if len(parts) > 1 else file.rpartition("/")[2]


def _classify_activity(below: tuple[StackFrame, ...]) -> Activity:
    """Return the activity of the calls below the line of user code."""
    if any(frame.function in _SETTING_UP or _RENDEZVOUS.search(frame.file) for frame in below):
        return Activity.SETTING_UP
    if any(_COLLECTIVE.search(frame.file) for frame in below):
        return Activity.COLLECTIVE
    if any(_LOADER.search(frame.file) for frame in below):
        return Activity.LOADING
    if any(_BACKWARD.search(frame.file) for frame in below):
        return Activity.BACKWARD
    return Activity.OWN


def is_computing(snapshot: RankSnapshot) -> bool:
    """Return whether a rank uses a CPU."""
    return (snapshot.cpu or 0.0) >= _BUSY_CORES and snapshot.state == "R"


def is_waiting_for_peers(snapshot: RankSnapshot) -> bool:
    """Return whether a rank waits for its peers, by its stack."""
    return locate_rank(snapshot).activity in WAITS and not is_computing(snapshot)


def name_culprits(
    ranks: Iterable[Rank],
    describe: Callable[[Rank], str],
    locate: Callable[[Rank], StackPosition] = lambda _: UNKNOWN_POSITION,
) -> tuple[Culprit, ...]:
    """Return the first ranks as culprits.

    Args:
        ranks: The ranks to blame.
        describe: Returns the reason to blame a rank.
        locate: Returns the position of a rank.
    """
    named = [(rank, locate(rank)) for rank in sorted(ranks, key=lambda rank: rank.rank)[:MAX_NAMED]]
    return tuple(
        Culprit(rank=rank.rank, node=rank.node, where=at.where, op=at.op, evidence=describe(rank)) for rank, at in named
    )


_WAITS = (
    (r"^hrtimer_nanosleep|^do_nanosleep", SLEEP := "it sleeps"),
    (r"^(?:anon_)?pipe_(?:read|wait_readable)", "it reads from an empty pipe"),
    (r"^(?:anon_)?pipe_(?:write|wait_writable)", "it writes to a full pipe"),
    (r"^wait_for_partner|^fifo_open", "it opens a FIFO that no other process has open"),
    (r"^unix_stream_(?:read|data_wait)|^unix_wait_for_peer", "it waits for a local socket"),
    (r"^(?:sk_wait_data|inet_|tcp_|wait_woken|__skb_wait)", NETWORK := "it waits for a network socket"),
    (r"^(?:do_wait|kernel_wait4|wait_consider_task)", CHILD := "it waits for a process that it started"),
    (r"^(?:locks_lock|flock_lock|posix_lock|fcntl_setlk|do_lock_file)", FILE_LOCK := "it waits for the lock of a file"),
    (r"^(?:poll_schedule_timeout|do_poll|ep_poll|do_epoll|do_select)", POLL := "it polls"),
    (
        r"^(?:rpc_|nfs|request_wait_answer|fuse_|ceph|lustre|ll_|cl_sync|folio_wait|io_schedule)",
        STORAGE := "it waits for a file system",
    ),
    (r"^futex", LOCK := "it waits for a lock"),
    (r"^(?:do_signal_stop|ptrace_stop)", "it is stopped"),
)
"""Wait channels of the kernel and their meanings. The patterns are not compiled, because most commands use none."""


def describe_kernel_wait(snapshot: RankSnapshot) -> str:
    """Return a description of what a rank waits for in the kernel; "" if unknown."""
    return describe_wchan(snapshot.wchan) or ("it computes" if (snapshot.cpu or 0.0) >= _BUSY_CORES else "")


def is_waiting_for_child(snapshot: RankSnapshot) -> bool:
    """Return whether a rank waits for the end of a process that it started."""
    return describe_kernel_wait(snapshot) == CHILD and bool(snapshot.children)


def is_polling(snapshot: RankSnapshot) -> bool:
    """Return whether a rank checks something again and again, with short sleeps."""
    return (
        describe_kernel_wait(snapshot) in (SLEEP, POLL)
        and snapshot.main_age is not None
        and snapshot.main_age < _MAX_PAUSE_S
    )


def has_lock_wait(snapshot: RankSnapshot) -> bool:
    """Return whether a rank waits for the lock of a file."""
    return describe_kernel_wait(snapshot) == FILE_LOCK


def is_waiting_in_handle(snapshot: RankSnapshot) -> bool:
    """Return whether a rank waits for another thread in a C function that a line of user code calls.

    The `wait` of the handle of an operation is such a function. Queues and threads of Python wait in Python functions.
    """
    frames = snapshot.frames or ()
    return bool(frames) and is_user_code(frames[0].file) and describe_kernel_wait(snapshot) == LOCK


def is_waiting_outside(snapshot: RankSnapshot) -> bool:
    """Return whether a rank waits for something that need not be of this run: a socket, a lock file, an event."""
    return describe_kernel_wait(snapshot) in (NETWORK, FILE_LOCK, POLL) or is_polling(snapshot)


def is_listening(snapshot: RankSnapshot) -> bool:
    """Return whether a rank waits for a new connection, or for any of several."""
    return describe_kernel_wait(snapshot) == POLL or (snapshot.wchan or "").startswith("inet_csk_accept")


def describe_wchan(wchan: str | None) -> str:
    """Return the meaning of a wait channel of the kernel; "" if unknown."""
    return next((words for pattern, words in _WAITS if re.match(pattern, wchan or "")), "")


def is_waiting_for_network(snapshot: RankSnapshot) -> bool:
    """Return whether a rank waits for a network socket."""
    return describe_kernel_wait(snapshot) == NETWORK


def is_waiting_for_storage(snapshot: RankSnapshot) -> bool:
    """Return whether a rank waits for a file system."""
    return describe_kernel_wait(snapshot) == STORAGE
