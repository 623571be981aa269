"""Which exit came first, and whether it is to blame."""

from __future__ import annotations

import pytest

from clusterctl.run.blame import Cause, Exit, first_failure, is_secondary, verdict

PEER = "RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:34211"
TRACE = 'Traceback (most recent call last):\n  File "{}", line 3, in step\n    {}\n{}'
OWN = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    step()\nValueError: bad batch'


def exited(
    rank: int,
    at: float,
    *,
    error: float = 0.0,
    code: int | None = 1,
    number: int | None = None,
    tail: str = "",
    oom: str | None = None,
) -> Exit:
    return Exit(
        rank=rank,
        node=f"n{rank}",
        exit_code=code,
        signal=number,
        oom=oom,
        error=None,
        tail=tail,
        earliest=at - error,
        latest=at + error,
    )


def cause(exit_: Exit) -> Cause:
    return verdict(exit_).cause


@pytest.mark.parametrize(
    ("exits", "rank", "certain"),
    [
        pytest.param([exited(0, 2.0), exited(1, 1.0)], 1, True, id="the earlier one"),
        pytest.param(
            [exited(0, 1.0, tail=PEER), exited(1, 1.4, tail=OWN)], 1, True, id="a later one that explains itself"
        ),
        pytest.param(
            [exited(0, 1.0, tail=PEER), exited(1, 1.1, tail=PEER)],
            0,
            True,
            id="the first of those that all lost a peer",
        ),
        pytest.param(
            [exited(0, 1.0, error=0.3), exited(1, 1.2, error=0.3)], 0, False, id="ambiguous where intervals overlap"
        ),
        pytest.param(
            [exited(0, 1.0, error=0.3, tail=OWN), exited(1, 1.1, error=0.3, tail=PEER)],
            0,
            True,
            id="overlap decided by what they wrote",
        ),
        pytest.param([exited(0, 1.0, tail=PEER), exited(1, 1.3, code=None, number=9)], 1, True, id="a killed one"),
        pytest.param(
            [exited(0, 1.0, code=None, number=6, tail=PEER), exited(1, 1.3, tail=OWN)],
            1,
            True,
            id="an abort after a lost peer is secondary",
        ),
    ],
)
def test_first_observed_failure_is(exits: list[Exit], rank: int, certain: bool) -> None:
    top = first_failure([verdict(one) for one in exits])[0]

    assert (top.rank, top.certain) == (rank, certain)


@pytest.mark.parametrize(
    ("tail", "secondary"),
    [
        pytest.param(PEER, True, id="gloo peer"),
        pytest.param("RuntimeError: Connection reset by peer", True, id="reset"),
        pytest.param("torch.distributed.DistNetworkError: The client socket has timed out", True, id="store gone"),
        pytest.param("ncclRemoteError: A call failed possibly due to a network error", True, id="nccl"),
        pytest.param("OSError: [Errno 110] Connection timed out", True, id="connection timed out"),
        pytest.param("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", True, id="nccl watchdog"),
        pytest.param("BrokenPipeError: [Errno 32] Broken pipe", True, id="broken pipe"),
        pytest.param("ConnectionRefusedError: [Errno 111] Connection refused", True, id="connection refused"),
        pytest.param("F0101 client.h:80] Terminating: heartbeat of task 3 has timed out", True, id="jax heartbeat"),
        pytest.param("UNAVAILABLE: the coordination service has shut down", True, id="jax coordination service"),
        pytest.param("peer /job:worker/task:3 was disconnected", True, id="jax peer"),
        pytest.param(TRACE.format("heartbeat.py", "beat()", "KeyError: 3"), False, id="a frame in a file of that name"),
        pytest.param(
            TRACE.format("a.py", 'raise Retry("connection reset")', "KeyError: 3"),
            False,
            id="a line of source in a frame",
        ),
        pytest.param(
            "\n".join(
                f"[rank3]: {line}" for line in TRACE.format("heartbeat.py", "beat()", "KeyError: 3").splitlines()
            ),
            False,
            id="frames behind the name of a rank",
        ),
        pytest.param(
            TRACE.format("a.py", "recv()", "RuntimeError: connection reset by peer"), True, id="the exception itself"
        ),
        pytest.param(OWN, False, id="own exception"),
        pytest.param(PEER + "\nretrying\n" + OWN, False, id="own exception after an old network line"),
        pytest.param("", False, id="said nothing"),
    ],
)
def test_secondary_death_by_last_words(tail: str, secondary: bool) -> None:
    assert is_secondary(exited(0, 1.0, tail=tail)) is secondary


def test_the_traceback_ends_with_its_exception() -> None:
    found = cause(exited(0, 1.0, tail="hello\n" + OWN + "\nmore output"))

    assert found.traceback == OWN
    assert found.message == "ValueError: bad batch"


def test_a_signal_is_named() -> None:
    assert cause(exited(0, 1.0, code=None, number=11)).signal == "SIGSEGV"


def test_out_of_memory_is_said_with_its_evidence() -> None:
    found = cause(exited(0, 1.0, code=None, number=9, oom="cgroup"))

    assert (found.kind, found.message) == ("oom", "killed by the kernel for lack of memory (cgroup)")


def test_an_exit_that_nobody_saw_is_unknown() -> None:
    assert cause(exited(0, 1.0, code=None)).kind == "unknown"
