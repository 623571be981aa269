"""Where a rank is: the line of the user's code, the operation below it, and what it waits for there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from clusterctl.why.evidence import RankSnapshot, StackFrame

_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<|/_clusterctl_shim/|/clusterctl/agent/")
_COLLECTIVE = re.compile(r"torch/distributed/|torch/nn/parallel/|horovod/|jax/|tensorflow/|mpi4py|deepspeed/comm")
_RENDEZVOUS = re.compile(r"torch/distributed/(?:rendezvous|elastic/rendezvous)")
_BACKWARD = re.compile(r"torch/autograd/|torch/_tensor\.py$")
_LOADER = re.compile(
    r"torch/utils/data/|keras/src/trainers/data_adapters/|multiprocessing/(?:connection|queues|pool)\.py$"
)
_INNER = frozenset(
    {"wrapper", "inner", "_wrapped_call_impl", "_call_impl", "__call__", "_fn", "wait", "work", "decorate"}
)
"""Calls that say nothing of what is done."""
_SETTING_UP = frozenset({"init_process_group", "rendezvous", "_create_c10d_store", "new_group", "_store_based_barrier"})
_OFTEN_LOADS = ("next", "__next__", "_try_get_data", "_get_data")


class Activity(str, Enum):
    """What a rank does."""

    COLLECTIVE = "collective"
    BACKWARD = "backward"
    SETTING_UP = "setting_up"
    LOADING = "loading"
    OWN = "own"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPosition:
    """Where a rank is.

    Attributes:
        where: The innermost line of the user's code, `file:line`; else the innermost line of all.
        op: The collective, or the function that it is in.
    """

    doing: Activity
    where: str | None
    op: str | None


UNKNOWN_POSITION = StackPosition(doing=Activity.UNKNOWN, where=None, op=None)


def locate_rank(look: RankSnapshot | None) -> StackPosition:
    """Return where the main thread of a rank is."""
    frames = look.frames if look is not None else None
    return _locate_in_frames(frames) if frames else UNKNOWN_POSITION


@lru_cache(maxsize=1024)
def _locate_in_frames(frames: tuple[StackFrame, ...]) -> StackPosition:
    """Return where a thread with these calls is; thousands of ranks are at the same place."""
    own = next((frame for frame in frames if is_user_code(frame.file)), None)
    shown = own or frames[0]
    where = f"{short_path(shown.file)}:{shown.line}"
    below = frames[: frames.index(own)] if own is not None else frames
    doing = _doing(below)
    return StackPosition(doing=doing, where=where, op=_op(doing, below, shown))


def is_user_code(file: str) -> bool:
    """Return whether a file is the user's code: of no package and not of Python itself."""
    return _LIBRARY.search(file) is None


def short_path(file: str) -> str:
    """Return how people know a file of code: its name, with that of a folder below the work folder."""
    parts = re.split(r"/clusterctl/work/[^/]+/", file)
    return parts[-1] if len(parts) > 1 else file.rpartition("/")[2]


def _doing(below: tuple[StackFrame, ...]) -> Activity:
    """Return what the calls below the user's line do."""
    if any(frame.function in _SETTING_UP or _RENDEZVOUS.search(frame.file) for frame in below):
        return Activity.SETTING_UP
    if any(_COLLECTIVE.search(frame.file) for frame in below):
        return Activity.COLLECTIVE
    if any(_LOADER.search(frame.file) for frame in below):
        return Activity.LOADING
    if any(_BACKWARD.search(frame.file) for frame in below):
        return Activity.BACKWARD
    return Activity.OWN


def _op(doing: Activity, below: tuple[StackFrame, ...], shown: StackFrame) -> str:
    if doing is Activity.BACKWARD:
        return "backward"
    if doing is Activity.LOADING:
        return "next batch"
    named = [frame.function for frame in below if doing is Activity.OWN or _COLLECTIVE.search(frame.file)]
    return next((name for name in reversed(named) if name not in _INNER), shown.function)


_WAITS = (
    (r"^hrtimer_nanosleep|^do_nanosleep", "it sleeps"),
    (r"^(?:anon_)?pipe_(?:read|wait_readable)", "it reads a pipe that nobody writes to"),
    (r"^(?:anon_)?pipe_(?:write|wait_writable)", "it writes to a pipe that nobody reads"),
    (r"^wait_for_partner|^fifo_open", "it opens a FIFO that nobody has open"),
    (r"^unix_stream_(?:read|data_wait)|^unix_wait_for_peer", "it waits for a local socket"),
    (r"^(?:sk_wait_data|inet_|tcp_|wait_woken|__skb_wait)", NETWORK := "it waits for a network socket"),
    (r"^(?:do_wait|kernel_wait4|wait_consider_task)", "it waits for a process that it started"),
    (r"^(?:locks_lock|flock_lock|posix_lock|fcntl_setlk|do_lock_file)", "it waits for the lock of a file"),
    (r"^(?:poll_schedule_timeout|do_poll|ep_poll|do_epoll|do_select)", "it polls"),
    (
        r"^(?:rpc_|nfs|request_wait_answer|fuse_|ceph|lustre|ll_|cl_sync|folio_wait|io_schedule)",
        STORAGE := "it waits for a file system",
    ),
    (r"^futex", "it waits for a lock"),
    (r"^(?:do_signal_stop|ptrace_stop)", "it is stopped"),
)
"""Places in the kernel, and what they mean. Compiled when one is asked for: most commands ask for none."""


def describe_kernel_wait(look: RankSnapshot) -> str:
    """Return in words what the kernel says that a rank waits for; "" where it says nothing that tells."""
    return describe_wchan(look.wchan) or ("it computes" if (look.cpu or 0.0) >= 0.5 else "")


def describe_wchan(wchan: str | None) -> str:
    """Return in words what the place in the kernel at which a process waits says; "" where it says nothing."""
    return next((words for pattern, words in _WAITS if re.match(pattern, wchan or "")), "")


def is_waiting_for_network(look: RankSnapshot) -> bool:
    """Return whether a rank waits for a network socket."""
    return describe_kernel_wait(look) == NETWORK


def is_waiting_for_storage(look: RankSnapshot) -> bool:
    """Return whether a rank waits for a file system."""
    return describe_kernel_wait(look) == STORAGE
