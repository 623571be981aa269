"""Whose end began it, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.why.evidence_types import RankExit, RunError
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import Confidence, Fault, ProblemKind
from tests.unit.why.cases import case, ended, lost_peer, raised, waiting

CHAIN = """Traceback (most recent call last):
  File "train.py", line 7, in load
FileNotFoundError: [Errno 2] No such file or directory: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 9, in load
RuntimeError: no data"""


def test_the_rank_that_failed_for_a_reason_of_its_own_is_to_blame_and_its_peers_are_victims() -> None:
    verdict = judge_run(case(lost_peer(), lost_peer(), raised("FileNotFoundError: /d/shard-3"), lost_peer()))

    assert (verdict.kind, verdict.cls, verdict.confidence) == (
        ProblemKind.CRASH,
        Fault.MISSING_FILE,
        Confidence.CERTAIN,
    )
    assert [(culprit.rank, culprit.node, culprit.where) for culprit in verdict.culprits] == [(2, "gpu02", "train.py:7")]
    assert [waiting.ranks for waiting in verdict.waiting] == ["0-1,3"]


def test_a_rank_that_left_with_0_while_others_trained_is_to_blame_for_those_that_lost_it() -> None:
    verdict = judge_run(case(lost_peer(), lost_peer(), ended(0, 10.0), lost_peer()))

    assert (verdict.cls, verdict.confidence) == (Fault.EXITED_EARLY, Confidence.CERTAIN)
    assert [culprit.rank for culprit in verdict.culprits] == [2]


def test_a_rank_that_left_with_0_while_others_still_wait_for_it_is_why_they_hang() -> None:
    verdict = judge_run(case(waiting(), waiting(), ended(0), waiting()))

    assert (verdict.kind, verdict.cls, verdict.culprits[0].rank) == (ProblemKind.HANG, Fault.EXITED_EARLY, 2)


def test_a_rank_that_ended_well_after_its_peers_broke_is_not_named_for_certain() -> None:
    verdict = judge_run(case(lost_peer(5.0), ended(0, 20.0)))

    assert verdict.confidence is not Confidence.CERTAIN


def test_ranks_that_fail_alike_are_named_together_whatever_numbers_their_messages_hold() -> None:
    verdict = judge_run(case(*(raised(f"ValueError: bad batch {n} at 0x{n:x}f", 10.0 + n / 50) for n in range(4))))

    assert (verdict.cls, verdict.confidence) == (Fault.EXCEPTION, Confidence.CERTAIN)
    assert [culprit.rank for culprit in verdict.culprits] == [0, 1, 2, 3]
    assert "failed alike" in verdict.summary


def test_a_prologue_that_fails_is_a_start_that_failed_and_no_exception() -> None:
    verdict = judge_run(case(*(ended(127, message="the prologue failed with status 127") for _ in range(4))))

    assert (verdict.kind, verdict.cls) == (ProblemKind.START, Fault.NOT_STARTED)


def test_two_that_fail_at_once_for_different_reasons_are_both_named_and_none_alone() -> None:
    verdict = judge_run(case(raised("ValueError: bad batch"), raised("KeyError: 'lr'")))

    assert verdict.confidence is Confidence.AMBIGUOUS
    assert [culprit.rank for culprit in verdict.culprits] == [0, 1]


def test_of_two_ranks_of_one_node_the_first_by_its_clock_is_named() -> None:
    first = raised("ValueError: bad batch", 10.0, on_node_clock=(4.0, 4.01))
    later = raised("KeyError: 'lr'", 10.05, on_node_clock=(4.05, 4.06))

    verdict = judge_run(case(first, later))

    assert (verdict.confidence, [culprit.rank for culprit in verdict.culprits]) == (Confidence.CERTAIN, [0])


def test_where_everybody_lost_a_peer_the_node_that_all_name_is_told_but_not_as_a_fact() -> None:
    verdict = judge_run(case(lost_peer(address="10.0.0.2"), lost_peer(address="10.0.0.2"), lost_peer(), lost_peer()))

    assert (verdict.cls, verdict.confidence) == (Fault.PEER_LOST, Confidence.AMBIGUOUS)
    assert {culprit.node for culprit in verdict.culprits} == {"gpu02"}


@pytest.mark.parametrize(
    ("end", "cls"),
    [
        pytest.param(ended(None, signal="SIGKILL", oom="cgroup", message="killed"), Fault.OUT_OF_MEMORY, id="cgroup"),
        pytest.param(raised("torch.OutOfMemoryError: CUDA out of memory."), Fault.OUT_OF_MEMORY, id="memory of a GPU"),
        pytest.param(raised("OSError: [Errno 28] No space left on device"), Fault.DISK_FULL, id="full disk"),
        pytest.param(raised("ModuleNotFoundError: No module named 'einops'"), Fault.MISSING_MODULE, id="no module"),
        pytest.param(raised("PermissionError: [Errno 13] Permission denied: '/d'"), Fault.NO_PERMISSION, id="no right"),
        pytest.param(
            ended(2, message="train.py: error: unrecognized arguments: -x"), Fault.WRONG_ARGUMENT, id="argument"
        ),
        pytest.param(raised("RuntimeError: Address already in use"), Fault.PORT_TAKEN, id="port"),
        pytest.param(ended(None, signal="SIGSEGV", message="ended by SIGSEGV"), Fault.SIGNAL, id="a signal"),
        pytest.param(raised("RuntimeError: CUDA error: an illegal memory access"), Fault.GPU, id="GPU"),
        pytest.param(ended(None), Fault.UNKNOWN, id="nobody saw it"),
        pytest.param(raised("AssertionError: a MemoryError was due"), Fault.EXCEPTION, id="only spoken of"),
        pytest.param(raised("OSError: Caught FileNotFoundError in DataLoader worker"), Fault.MISSING_FILE, id="loader"),
        pytest.param(
            ended(1, message="RuntimeError: no data", traceback=CHAIN),
            Fault.MISSING_FILE,
            id="what it was made of",
        ),
        pytest.param(raised("AssertionError"), Fault.EXCEPTION, id="any other exception"),
    ],
)
def test_the_last_words_of_a_rank_tell_the_class(end: object, cls: Fault) -> None:
    assert judge_run(case(end, lost_peer(), lost_peer())).cls is cls  # type: ignore[arg-type]


def test_what_we_stopped_is_nobodys_fault() -> None:
    stopped = ended(None, signal="SIGTERM", stopped=True)

    assert judge_run(case(stopped, stopped, reason="cancelled", has_ended=True)).kind is ProblemKind.NONE


def test_a_run_that_a_person_ended_is_not_blamed_on_a_rank_that_was_through() -> None:
    stopped, other = (
        ended(None, signal="SIGTERM", stopped=True),
        RunError(kind="cancelled", message="a person ended it"),
    )

    assert (
        judge_run(case(stopped, ended(0), reason="cancelled", has_ended=True, run_error=other)).cls is Fault.CANCELLED
    )


def gave_up(message: str = "Timed out waiting 4000ms for recv operation to complete") -> RankExit:
    return raised(f"RuntimeError: {message}", secondary=True)


STOPPED = ended(None, 11.0, signal="SIGTERM", stopped=True)


def test_a_rank_that_did_not_join_is_named_with_the_line_at_which_it_was_seen() -> None:
    made = case(gave_up(), gave_up(), gave_up(), STOPPED)
    ranks = (*made.ranks[:3], replace(made.ranks[3], snapshot=waiting("sleep", line=7)))
    (culprit,) = judge_run(replace(made, ranks=ranks)).culprits
    assert (culprit.rank, culprit.where) == (3, "train.py:7")


def test_whom_a_barrier_names_is_to_blame_and_not_the_rank_that_says_so() -> None:
    said = gave_up("[Rank 0]: Rank 2 failed to pass monitoredBarrier in 4000 ms")
    verdict = judge_run(case(said, lost_peer(), STOPPED, STOPPED))

    assert (verdict.cls, verdict.confidence) == (Fault.NOT_JOINED, Confidence.LIKELY)
    assert [culprit.rank for culprit in verdict.culprits] == [2]


def test_the_one_that_did_not_give_up_is_for_whom_the_others_waited() -> None:
    verdict = judge_run(case(gave_up(), STOPPED, gave_up(), gave_up()))

    assert (verdict.cls, verdict.confidence) == (Fault.NOT_JOINED, Confidence.LIKELY)
    assert [culprit.rank for culprit in verdict.culprits] == [1]


def test_where_one_alone_gave_up_before_all_were_stopped_nobody_is_named_for_it() -> None:
    verdict = judge_run(case(gave_up(), STOPPED, STOPPED, STOPPED))

    assert verdict.cls is Fault.PEER_LOST


def test_a_rank_that_got_another_size_than_it_expected_is_not_named_as_the_one_that_is_wrong() -> None:
    tail = "  what():  [enforce fail at pair.cc:456] 32 vs 16. Received data size doesn't match expected size."
    verdict = judge_run(case(lost_peer(), ended(None, signal="SIGABRT", tail=tail), lost_peer(), lost_peer()))

    assert (verdict.cls, verdict.confidence, verdict.culprits) == (Fault.MISMATCH, Confidence.AMBIGUOUS, ())


def test_an_exit_without_a_word_is_of_a_class_that_nobody_knows() -> None:
    assert judge_run(case(lost_peer(), ended(3))).cls is Fault.UNKNOWN


def test_of_a_killed_rank_it_says_what_to_look_for_in_the_kernel_log() -> None:
    verdict = judge_run(
        case(ended(137, message="killed by SIGKILL: python train.py", cls=Fault.KILLED), ended(0, 90.0))
    )

    assert (
        verdict.next_commands[0]
        == "clusterctl exec --nodes gpu01 --shell 'dmesg -T | grep -iE \"oom|out of memory\" | tail'"
    )
    assert "`oom-kill` or `Out of memory: Killed process`" in verdict.next_commands[1]


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        pytest.param(
            "KeyError: 'SLURM_PROCID'", "a variable of Slurm, which clusterctl does not set: read `RANK`", id="slurm"
        ),
        pytest.param("KeyError: 'OMPI_COMM_WORLD_LOCAL_RANK'", "read `LOCAL_RANK` instead", id="mpi"),
        pytest.param("KeyError: 'PMI_SIZE'", "read `WORLD_SIZE` instead", id="pmi"),
        pytest.param("KeyError: 'SLURM_SUBMIT_DIR'", "set it in `env`", id="nothing like it"),
        pytest.param("run.sh: line 3: SLURM_NODEID: unbound variable", "read `GROUP_RANK` instead", id="bash"),
        pytest.param(
            "run.sh: line 3: DATA_DIR: unbound variable", "ranks have no `DATA_DIR`: set it in `env`", id="own"
        ),
        pytest.param("run.sh: line 3: outdir: unbound variable", None, id="a slip of the script"),
        pytest.param("X: Environment variable 'LWS_LEADER_ADDRESS' not found", "read `MASTER_ADDR`", id="omegaconf"),
        pytest.param(
            "ValueError: Error initializing: environment variable RANK expected, but not set",
            "clusterctl sets `RANK` for every worker: `job.command`, `job.prologue`, `sudo` or a container has",
            id="one that was there",
        ),
        pytest.param("KeyError: 'lr'", None, id="any other key"),
        pytest.param("KeyError: 'MY_RANK'", None, id="any other variable"),
        pytest.param("RuntimeError: SLURM_PROCID is 3", None, id="only spoken of"),
    ],
)
def test_of_a_variable_that_is_not_there_it_is_said_which_one_is(message: str, advice: str | None) -> None:
    summary = judge_run(case(raised(message), lost_peer())).summary
    assert summary.endswith(message) if advice is None else f"{message}; " in summary
    assert advice is None or advice in summary


def test_of_a_key_of_the_environment_it_is_said_who_sets_it() -> None:
    end = ended(
        1, message="KeyError: 'DATA_DIR'", traceback='  File "t.py", line 3, in f\n    os.environ["DATA_DIR"]\n'
    )
    assert "ranks have no `DATA_DIR`: set it in `env`" in judge_run(case(end, lost_peer())).summary


def test_of_a_script_that_may_not_be_executed_it_is_said_how_to_run_it() -> None:
    end = ended(126, message="bash: line 1: ./run.sh: Permission denied", cls=Fault.NO_PERMISSION)
    assert judge_run(case(end, lost_peer())).next_commands[0].startswith("`chmod +x ./run.sh` here")


@pytest.mark.parametrize(
    ("end", "is_certain"),
    [
        pytest.param(ended(None, signal="SIGBUS", message="killed by SIGBUS"), False, id="signal"),
        pytest.param(
            ended(135, message="killed by SIGBUS (exit code 135 of the shell): python3 x.py"), False, id="shell"
        ),
        pytest.param(
            ended(
                None, signal="SIGBUS", message="Fatal Python error: Bus error", tail="Fatal Python error: Bus error\n"
            ),
            False,
            id="faulthandler",
        ),
        pytest.param(
            raised(
                "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It may be out of shared memory"
            ),
            True,
            id="a loader that says so",
        ),
        pytest.param(raised("RuntimeError: unable to allocate shared memory(shm) for file </torch_1>"), True, id="shm"),
    ],
)
def test_a_bus_error_alone_has_two_causes(end: RankExit, is_certain: bool) -> None:
    told = judge_run(case(end, lost_peer()))
    assert told.cls is Fault.SHARED_MEMORY
    assert (told.confidence is Confidence.CERTAIN) is is_certain
    assert ("/dev/shm was full, or a file mapped into memory was truncated" in told.summary) is not is_certain


@pytest.mark.parametrize(
    ("message", "tool"),
    [
        pytest.param("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", "nvidia-smi", id="cuda"),
        pytest.param("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "nvidia-smi", id="cublas"),
        pytest.param("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB.", "rocm-smi", id="hip"),
        pytest.param("MemoryError: Unable to allocate 5.0 GiB for an array", "free -h", id="host"),
    ],
)
def test_memory_is_looked_at_where_it_was_short(message: str, tool: str) -> None:
    steps = "\n".join(judge_run(case(raised(message), lost_peer())).next_commands)
    assert tool in steps
    assert ("PYTORCH_CUDA_ALLOC_CONF" in steps and "batch" in steps) is (tool != "free -h")
