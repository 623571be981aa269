"""Which exit came first, and whether it is to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.agent.protocol.events import Exited
from clusterctl.run.rules import failure_causes
from clusterctl.run.rules.failure_causes import Cause, ExitAnalysis, find_early_exit, sort_causes
from clusterctl.why.verdict import Fault

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
    left: dict[str, str | None] | None = None,
) -> Exited:
    return Exited(
        attempt=0,
        rank=rank,
        exit_code=code,
        signal=number,
        oom=oom,
        error=left,
        tail=tail,
        earliest=at - error,
        latest=at + error,
    )


def analyse_exit(exit_: Exited) -> ExitAnalysis:
    return failure_causes.analyse_exit(f"n{exit_.rank}", exit_)


def cause(exit_: Exited) -> Cause:
    return analyse_exit(exit_).cause


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
        pytest.param([exited(0, 1.0), exited(1, 2.0, error=1.0)], 0, False, id="ambiguous where intervals touch"),
        pytest.param([exited(0, 1.0, error=0.5), exited(1, 2.0)], 0, True, id="certain where they do not"),
        pytest.param([exited(1, 1.0), exited(0, 1.0)], 0, False, id="the lower rank of two at once"),
        pytest.param([exited(1, 1.0, error=0.5), exited(0, 1.4)], 0, False, id="who was surely dead first"),
    ],
)
def test_first_observed_failure_is(exits: list[Exited], rank: int, certain: bool) -> None:
    top = sort_causes([analyse_exit(one) for one in exits])[0]

    assert (top.rank, top.certain) == (rank, certain)


@pytest.mark.parametrize(
    ("node", "certain"), [pytest.param("a", True, id="one node"), pytest.param("b", False, id="two")]
)
def test_ends_of_one_node_are_compared_by_its_clock_however_unsure_the_head_is_of_it(node: str, certain: bool) -> None:
    first = failure_causes.analyse_exit("a", replace(exited(0, 0.0), earliest=100.0, latest=100.01), (-99.0, 0.5))
    later = failure_causes.analyse_exit(node, replace(exited(1, 0.0), earliest=100.02, latest=100.03), (-99.0, 0.5))

    top, *_ = sort_causes([later, first])

    assert (top.rank, top.certain) == (0, certain)


@pytest.mark.parametrize(
    ("tail", "secondary"),
    [
        pytest.param(PEER, True, id="gloo peer"),
        pytest.param(
            "\n".join(f"[rank3]: {line}" for line in TRACE.format("t.py", "all_reduce(t)", PEER).splitlines()),
            True,
            id="a traceback of which torch has begun each line with the rank",
        ),
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
        pytest.param("Timed out waiting 1800000ms for recv operation to complete", True, id="gloo timeout"),
        pytest.param("DistStoreError: wait timeout after 60000ms", True, id="store timeout"),
        pytest.param("Socket Timeout", True, id="socket timeout"),
        pytest.param("Timed out after 901 milliseconds waiting for tasks", True, id="jax barrier"),
        pytest.param("remote process exited or there was a network error", True, id="nccl remote"),
        pytest.param("torch.distributed.DistStoreError: 3/4 clients joined", True, id="store error"),
        pytest.param("RuntimeError: failed to recv, got 0 bytes", True, id="store bytes"),
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
        pytest.param(PEER + "\n\nnote" * 5, True, id="one of the last six lines"),
        pytest.param(PEER + "\nnote" * 6, False, id="a line before the last six"),
        pytest.param("connection\nreset", False, id="words of two lines"),
        pytest.param(
            "terminate called after throwing an instance of 'c10::Error'\n  what():  NCCL error: remote process exited\n"
            + "frame #0: c10::Error::Error() + 0x96 (0x7f5a9616c1b6 in /v/libc10.so)\n" * 9,
            True,
            id="what C++ threw, above its frames",
        ),
        pytest.param(
            "F1126 client.h:80] Terminating process because the JAX distributed service detected fatal errors. "
            "This most likely indicates that another task died\nFatal Python error: Aborted\n\nThread 0x7f (most recent",
            True,
            id="jax tells that another died",
        ),
        pytest.param(
            f"Traceback (most recent call last):\n{PEER}" + "\n\nnote" * 11, True, id="the end of a traceback"
        ),
        pytest.param(f"Traceback (most recent call last):\n{PEER}" + "\nnote" * 12, False, id="long after a traceback"),
        pytest.param("Traceback (most recent call last):\nE: connection\nreset", False, id="two lines of a traceback"),
        pytest.param(f"{TRACE.format('a.py', 'f()', PEER)}\n{OWN}", False, id="the last of two tracebacks"),
    ],
)
def test_secondary_death_by_last_words(tail: str, secondary: bool) -> None:
    assert analyse_exit(exited(0, 1.0, tail=tail)).cause.secondary is secondary


def test_the_traceback_ends_with_its_exception() -> None:
    found = cause(exited(0, 1.0, tail="hello\n" + OWN + "\nmore output"))

    assert found.traceback == OWN
    assert found.message == "ValueError: bad batch"


@pytest.mark.parametrize(
    ("left", "secondary"),
    [
        pytest.param({"message": PEER}, True, id="it says that a peer was lost"),
        pytest.param({"message": "ValueError: bad batch"}, False, id="it explains itself"),
        pytest.param({"message": ""}, True, id="it says nothing"),
    ],
)
def test_what_a_worker_left_as_its_error_goes_before_what_it_printed(
    left: dict[str, str | None], secondary: bool
) -> None:
    assert analyse_exit(exited(0, 1.0, tail=PEER, left=left)).cause.secondary is secondary


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(exited(0, 1.0, code=None, number=9, tail=PEER), id="killed by somebody else"),
        pytest.param(exited(0, 1.0, code=1, tail=PEER, oom="kernel log"), id="out of memory"),
    ],
)
def test_a_death_from_outside_is_never_secondary_whatever_was_printed_before_it(ended: Exited) -> None:
    assert not analyse_exit(ended).cause.secondary


@pytest.mark.parametrize(
    ("ended", "kind", "message"),
    [
        pytest.param(exited(0, 1.0, tail="step 1\n  giving up \n\n"), "exit", "giving up", id="its last line"),
        pytest.param(exited(0, 1.0), "exit", "", id="not a word"),
        pytest.param(exited(0, 1.0, code=0, tail="done"), "exited_early", "done", id="ended well"),
        pytest.param(exited(0, 1.0, code=None, number=11, tail="x"), "signal", "killed by SIGSEGV", id="a signal"),
        pytest.param(exited(0, 1.0, code=None, number=50), "signal", "killed by signal 50", id="a real-time signal"),
        pytest.param(
            exited(0, 1.0, code=None, tail="x"),
            "unknown",
            "exit status unknown: supervisor and waiter had both ended",
            id="nobody saw it",
        ),
        pytest.param(
            exited(0, 1.0, code=None, number=9, oom="probably"),
            "oom",
            "probably killed by the kernel for lack of memory (probably)",
            id="out of memory, by the looks of it",
        ),
        pytest.param(
            exited(0, 1.0, tail=OWN, left={"message": " a\nCUDA error \n", "traceback": None}),
            "exit",
            "CUDA error",
            id="the last line of the error that it left",
        ),
        pytest.param(
            exited(0, 1.0, tail=OWN, left={"message": ""}), "exit", "ValueError: bad batch", id="an empty error"
        ),
        pytest.param(
            exited(0, 1.0, tail="\n".join(f"[rank3]: {line}" for line in OWN.splitlines())),
            "exit",
            "ValueError: bad batch",
            id="without the name of the rank before it",
        ),
    ],
)
def test_what_an_exit_says_for_itself(ended: Exited, kind: str, message: str) -> None:
    found = sort_causes([analyse_exit(ended)])[0]

    assert (found.kind, found.message) == (kind, message)
    assert (found.node, found.rank, found.exit_code) == ("n0", 0, ended.exit_code)


def test_the_traceback_that_a_worker_left_goes_before_one_that_it_printed() -> None:
    left: dict[str, str | None] = {"message": "boom", "traceback": "the worker's own"}

    assert cause(exited(0, 1.0, tail=OWN, left=left)).traceback == "the worker's own"
    assert cause(exited(0, 1.0, tail=OWN, left={"message": "boom", "traceback": None})).traceback == OWN
    assert cause(exited(0, 1.0, tail="no such thing", left={"message": "boom"})).traceback is None


def test_a_traceback_without_a_frame_ends_with_its_exception_too() -> None:
    found = cause(exited(0, 1.0, tail="Traceback (most recent call last):\nMemoryError\nmore output"))

    assert (found.traceback, found.message) == ("Traceback (most recent call last):\nMemoryError", "MemoryError")


def test_of_several_tracebacks_the_last_is_the_one() -> None:
    found = cause(exited(0, 1.0, tail=f"{TRACE.format('a.py', 'f()', 'KeyError: 3')}\n\nDuring handling:\n\n{OWN}"))

    assert (found.traceback, found.message) == (OWN, "ValueError: bad batch")


def test_a_signal_is_named() -> None:
    assert cause(exited(0, 1.0, code=None, number=11)).signal == "SIGSEGV"
    assert cause(exited(0, 1.0)).signal is None


def test_out_of_memory_is_said_with_its_evidence() -> None:
    found = cause(exited(0, 1.0, code=None, number=9, oom="cgroup"))

    assert (found.kind, found.message) == ("oom", "killed by the kernel for lack of memory (cgroup)")


ADDRESSES: dict[str, str | None] = {f"n{n}": f"10.0.0.{n + 1}" for n in range(4)}
"""As in `PEER`, whose peer is on n1."""
UNNAMED = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"


@pytest.mark.parametrize(
    ("failed", "well", "rank", "certain"),
    [
        pytest.param(
            [exited(0, 2.0, tail=PEER), exited(2, 2.1, tail=PEER)], [exited(1, 1.9, code=0)], 1, True, id="named"
        ),
        pytest.param(
            [exited(0, 2.0, tail=UNNAMED)], [exited(1, 1.9, code=0)], 1, True, id="the only one that had gone"
        ),
        pytest.param(
            [exited(0, 2.0, tail=PEER)],
            [exited(1, 1.9, code=0), exited(3, 1.0, code=0)],
            1,
            True,
            id="one of two, named",
        ),
        pytest.param([exited(0, 2.0, tail=PEER)], [exited(1, 2.0, code=0)], 1, False, id="as early"),
        pytest.param(
            [exited(0, 2.0, error=0.3, tail=PEER)],
            [exited(1, 1.9, error=0.3, code=0)],
            1,
            False,
            id="not surely before",
        ),
    ],
)
def test_a_rank_that_ended_well_is_to_blame_where_its_peers_lost_their_connection_to_it(
    failed: list[Exited], well: list[Exited], rank: int, certain: bool
) -> None:
    found = find_early_exit([analyse_exit(e) for e in failed], [analyse_exit(e) for e in well], ADDRESSES)

    assert found is not None
    assert (found.kind, found.rank, found.certain) == ("exited_early", rank, certain)


@pytest.mark.parametrize(
    ("failed", "well"),
    [
        pytest.param([exited(0, 2.0, tail=PEER)], [], id="nobody has gone"),
        pytest.param([exited(0, 2.0, tail=OWN)], [exited(1, 1.9, code=0)], id="an error of its own"),
        pytest.param(
            [exited(0, 2.0, tail=OWN), exited(2, 2.5, tail=PEER)],
            [exited(1, 1.9, code=0)],
            id="one with an error of its own",
        ),
        pytest.param([exited(0, 2.0, tail=PEER)], [exited(3, 1.9, code=0)], id="another peer is named"),
        pytest.param([exited(0, 2.0, tail=PEER)], [exited(1, 2.5, code=0)], id="it went later"),
        pytest.param(
            [exited(0, 2.0, tail=UNNAMED)], [exited(1, 1.9, code=0), exited(3, 1.8, code=0)], id="it could be either"
        ),
        pytest.param([exited(0, 2.0, number=9, tail=PEER)], [exited(1, 1.9, code=0)], id="killed"),
    ],
)
def test_no_rank_that_ended_well_is_to_blame(failed: list[Exited], well: list[Exited]) -> None:
    assert find_early_exit([analyse_exit(e) for e in failed], [analyse_exit(e) for e in well], ADDRESSES) is None


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        pytest.param(1, "rank 0 lost its connection to it", id="one"),
        pytest.param(2, "2 ranks lost their connection to it", id="two"),
    ],
)
def test_whose_connection_broke_is_said(failures: int, message: str) -> None:
    failed = [analyse_exit(exited(rank, 2.0, tail=PEER)) for rank in (0, 2)[:failures]]

    found = find_early_exit(failed, [analyse_exit(exited(1, 1.9, code=0, tail="step 12"))], ADDRESSES)

    assert found is not None
    assert found.message == message


def test_a_warning_of_a_runtime_is_no_reason_for_an_end() -> None:
    tail = (
        "loading\n[W1123 22:06:38.2738 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved\n"
    )

    assert analyse_exit(exited(0, 2.0, code=3, tail=tail)).cause.message == "loading"


def test_the_condition_that_failed_on_a_gpu_is_taken_from_the_output_of_a_rank_with_an_error_of_its_own() -> None:
    said = "RuntimeError: CUDA error: device-side assert triggered"
    kernel = "Loss.cu:250: nll_loss: block: [0,0,0], thread: [{},0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
    left = {"message": said, "traceback": TRACE.format("t.py", "step()", said)}

    found = cause(exited(0, 1.0, tail=kernel.format(3) + kernel.format(4) + OWN, left=left))

    assert found.message == f"{said}: Assertion `t >= 0 && t < n_classes` failed (Loss.cu:250)"
    assert found.cls is Fault.EXCEPTION


@pytest.mark.parametrize(
    ("message", "tail", "headline"),
    [
        pytest.param(
            "SystemExit: 1",
            "Could not override 'trainer'.\nIn 'train': Could not find 'trainer/typo'\n\nuploading logs\n",
            "Could not override 'trainer'.",
            id="a_cause",
        ),
        pytest.param("os._exit(1)", "no GPU for me\n", "no GPU for me", id="last_words"),
        pytest.param(
            "exit code 42 of a.py", "no GPU\n", "exit code 42 of a.py; last words: no GPU", id="below_a_shell"
        ),
        pytest.param("exit code 42 of a.py", "step 4 loss 2.0\n", "exit code 42 of a.py", id="a_step_below_a_shell"),
        pytest.param("SystemExit: 1", "step 4 loss 2.0\n", "SystemExit: 1", id="a_step"),
        pytest.param("SystemExit: 1", "", "SystemExit: 1", id="no_output"),
        pytest.param("SystemExit: no data", "loading\n", "SystemExit: no data", id="an_exit_with_words"),
    ],
)
def test_a_mere_exit_status_is_no_headline_of_a_rank_that_said_why(message: str, tail: str, headline: str) -> None:
    found = cause(exited(0, 1.0, code=0, tail=tail, left={"message": message, "traceback": None}))

    assert (found.message, found.cls) == (
        headline,
        Fault.WRONG_ARGUMENT if "override" in headline else Fault.EXCEPTION,
    )


@pytest.mark.parametrize(
    "said",
    [
        "RuntimeError: workers are gone, please check the print statements above",
        "RuntimeError: One of the subprocesses has abruptly died during map operation.",
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly",
    ],
)
def test_an_error_that_reports_the_end_of_a_worker_gives_way_to_the_exception_above_it(said: str) -> None:
    again = TRACE.format("t.py", "raise_it()", said)
    left: dict[str, str | None] = {"message": said, "traceback": again}

    found = cause(exited(0, 1.0, tail=f"{OWN}\nepoch 6\n{again}\n", left=left))
    alone = cause(exited(0, 1.0, tail=f"epoch 6\n{again}\n", left=left))

    assert (found.message, found.traceback, found.is_recognised) == ("ValueError: bad batch", OWN, False)
    assert (alone.message, alone.traceback) == (said, again)


def test_a_variable_that_a_node_does_not_set_is_named_with_the_failure() -> None:
    note = "clusterctl: `$MODEL_ARGS` is not set on this node: bash takes it as empty\n"
    left: dict[str, str | None] = {"message": "ValueError: bad batch", "traceback": OWN}

    found = cause(exited(0, 1.0, tail=note + OWN, left=left))

    assert found.message == "ValueError: bad batch (`$MODEL_ARGS` not set on this node)"


ENDED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12693 got signal: 15"


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        pytest.param(
            TRACE.format("api.py", "raise", ENDED), "RuntimeError: no memory (in its child process 7", id="sigterm"
        ),
        pytest.param("", "RuntimeError: no memory (in its child process 7", id="no_output"),
        pytest.param(OWN, "ValueError: bad batch", id="a_reason_of_its_own"),
    ],
)
def test_a_child_that_failed_is_the_cause_of_a_rank_that_tells_of_none(tail: str, message: str) -> None:
    failed = replace(exited(0, 1.0, tail=tail), failed_child={"pid": 7, "message": "RuntimeError: no memory"})
    assert cause(failed).message.startswith(message)


def test_a_launcher_that_was_ended_by_a_signal_is_no_certain_cause() -> None:
    found = cause(exited(0, 1.0, tail=TRACE.format("api.py", "raise", ENDED)))
    assert (found.cls, found.is_recognised) == (Fault.KILLED, False)
