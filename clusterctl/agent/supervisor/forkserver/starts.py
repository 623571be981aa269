"""Starting the workers of an attempt: each forked from the forkserver where there is one that can, else anew."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Callable, cast

from clusterctl.agent.protocol import request_errors
from clusterctl.agent.supervisor import workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clusterctl.agent.protocol import requests
    from clusterctl.agent.protocol.process_types import SpawnRecord
    from clusterctl.agent.supervisor.forkserver.server import ForkServer
    from clusterctl.agent.supervisor.waiter import Post
    from clusterctl.agent.supervisor.workers import Worker

    Wanted = tuple[requests.WorkerStart, Post]
    BeginAll = Callable[[Sequence[Wanted]], Iterator[Worker]]
    Say = Callable[[str], None]


def anew(wanted: Sequence[Wanted]) -> Iterator[Worker]:
    """Start workers, none of them from a forkserver; see `begin_all`."""
    return begin_all(None, wanted, lambda _why: None)


def begin_all(server: ForkServer | None, wanted: Sequence[Wanted], say: Say) -> Iterator[Worker]:
    """Start workers, all at once; yield each as it is there.

    Args:
        server: What they may be forked from.
        wanted: What each is, and what its waiter is told.
        say: Called with the reason where one is not forked, although there is a forkserver.

    Raises:
        RequestError: One could not be started.
    """
    forks = [_fork(server, post, say) for _, post in wanted]
    reports = [fork if fork is not None else workers.begin(one.rank, post) for fork, (one, post) in zip(forks, wanted)]
    for (one, post), report, fork in zip(wanted, reports, forks):
        found = None if fork is None or server is None else _forked(server, one, report, say)
        if found is None:
            again = report if fork is None else workers.begin(one.rank, post)
            found = workers.begun(one.rank, one.local_rank, again)
        yield found


def _fork(server: ForkServer | None, post: Post, say: Say) -> int | None:
    if server is None:
        return None
    why = server.why_not(post.program.env)
    if why is None:
        try:
            return server.begin(post)
        except OSError as error:
            why = f"what a fork needs is not to be had: {error.strerror}"
    say(why)
    return None


def _forked(server: ForkServer, one: requests.WorkerStart, report: int, say: Say) -> Worker | None:
    """Return the worker that was forked, or `None` where none was, and nothing was started."""
    try:
        said = workers.report(report)
    finally:
        os.close(report)
    if said is None:
        say(server.last_word() or f"rank {one.rank} was killed while it was forked, or its waiter was")
        return None
    if "refused" in said:
        say(f"rank {one.rank} could not be forked: {said['refused']}")
        return None
    if "error" in said:
        raise request_errors.make_failed_error(f"cannot start rank {one.rank}: {said['error']}")
    return workers.from_spawn(one.rank, one.local_rank, cast("SpawnRecord", said))
