"""Judges a crash: finds the rank that failed first. The other ranks usually end because they lose this peer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from clusterctl.config.worker_variables import RESERVED_NAMES, find_clusterctl_equivalent, find_launcher_of_variable
from clusterctl.formatting import fold_ranks
from clusterctl.why import headline_patterns
from clusterctl.why.failure_headline import find_last_words
from clusterctl.why.stack_position import (
    Activity,
    StackPosition,
    is_user_code,
    locate_rank,
    name_culprits,
    shorten_path,
)
from clusterctl.why.verdict import Confidence, Culprit, Fault, ProblemKind, Verdict, Waiting, format_ranks, shorten

if TYPE_CHECKING:
    from clusterctl.why.evidence_types import Evidence, Rank, RankExit

_OUT_OF_MEMORY = "a kernel that lacked memory has `oom-kill` or `Out of memory: Killed process` in its log of that time"
_WHO_SENDS = (
    "find who sent the signal: a script that ends its other processes if one has failed, a scheduler, or a person; "
    "the kernel sends SIGKILL alone if memory is short"
)
_GPU_MEMORY = re.compile(r"\b(?:CUDA|HIP|ROCm|CUBLAS\w*)\b|\bGPU \d", re.I)
_MISSING_VARIABLE = re.compile(
    r"KeyError: ['\"](\w+)['\"]|[Ee]nvironment variable ['\"`]?(\w+)['\"`]? (?:expected|not found|is not set)"
    r"|\b(\w+): unbound variable"
)
_BUS_ERROR = "/dev/shm was full, or a file mapped into memory was truncated or deleted"
_TRACEBACK_FRAME = re.compile(
    r'^(?:> )?\s*(?:\[?rank\d+\]?:?\s*)?File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$', re.M
)


def classify_exit(end: RankExit) -> Fault:
    """Return the problem class of the exit of a rank."""
    if end.oom:
        return Fault.OUT_OF_MEMORY
    if end.ended_well:
        return Fault.EXITED_EARLY
    if end.secondary and end.cls in (None, Fault.UNKNOWN):
        return Fault.PEER_LOST
    return end.cls or Fault.UNKNOWN


def is_end_explained(end: RankExit) -> bool:
    """Return whether the reason of a rank's end is known. Last lines of an unknown form are no reason."""
    return bool(end.oom or (end.signal and end.signal != "SIGBUS") or end.is_recognised)


def find_user_position(traceback: str | None) -> StackPosition:
    """Return the position of the innermost line of the user's code in a traceback."""
    frames = list(_TRACEBACK_FRAME.finditer(traceback or ""))
    own = [frame for frame in frames if is_user_code(frame["file"])] or frames
    where = f"{shorten_path(own[-1]['file'])}:{own[-1]['line']}" if own else None
    return StackPosition(activity=Activity.UNKNOWN, where=where, op=own[-1]["function"] if own else None)


def describe_exit(end: RankExit) -> str:
    """Return how a rank ended, as a part of a sentence."""
    if end.oom:
        return end.message
    if end.signal is not None:
        return f"ended by {end.signal}" + (f": {end.message}" if end.message and end.signal not in end.message else "")
    if end.exit_code is None:
        return "it ended with an unknown exit code"
    if end.ended_well:
        last = find_last_words(end.tail)
        words = f"; its last output: {shorten(last)}" if last else ""
        if end.message:
            words = f", and its last output is a traceback: {shorten(end.message)}"
        return f"it ended with 0 while others went on{words}"
    if end.failed_inside:
        return f"{shorten(end.message)}, although its command ended with 0"
    return shorten(end.message) or f"exit {end.exit_code} without an error message"


def find_extra_advice(end: RankExit) -> str:
    """Return advice beyond the message of a rank; "" if there is none."""
    if classify_exit(end) is Fault.SHARED_MEMORY and not re.search(headline_patterns.SHARED_MEMORY, end.message):
        return _BUS_ERROR
    if " of its local rank " in end.message:
        return "its error is in the output, or with `--redirects` in a file below the `--log-dir` of torchrun"
    found = _MISSING_VARIABLE.search(end.message)
    name = next(filter(None, found.groups()), "") if found is not None else ""
    launcher = find_launcher_of_variable(name)
    if name in RESERVED_NAMES:
        return (
            f"clusterctl sets `{name}` for every worker: `job.command`, `job.prologue`, `sudo` or a container "
            "has replaced or removed it"
        )
    if launcher is None:
        is_of_environment = not end.message.startswith("KeyError") or "os.environ[" in f"{end.traceback}{end.tail}"
        if not (name.isupper() and is_of_environment):
            return ""
        return f"ranks have no `{name}`: set it in `env`; variables of a node's `.bashrc` may not reach them"
    own = find_clusterctl_equivalent(name)
    remedy = f"read `{own}` instead" if own is not None else "set it in `env`"
    return f"`{name}` is a variable of {launcher.name}, which clusterctl does not set: {remedy}"


def list_next_commands(cls: Fault, run: str, rank: int | None, node: str | None, message: str = "") -> tuple[str, ...]:
    """Return the commands to run next; `message` is the error message of the rank."""
    logs = f"clusterctl logs {run} --rank {rank}" if rank is not None else f"clusterctl logs {run}"
    at = f" --nodes {node}" if node is not None else ""
    match cls:
        case Fault.OUT_OF_MEMORY if _GPU_MEMORY.search(message):
            tool = "rocm-smi" if re.search(r"\bHIP\b|ROCm", message) else "nvidia-smi"
            return (f"clusterctl exec{at} -- {tool}", _MORE_GPU_MEMORY, logs)
        case Fault.OUT_OF_MEMORY:
            return (logs, f"clusterctl exec{at} -- free -h")
        case Fault.DISK_FULL:
            return (f"clusterctl exec{at} -- df -h", "clusterctl clean")
        case Fault.NO_INPUT:
            return ("give the answer in advance: by an option in `job.args`, or a variable in `env`", logs)
        case Fault.SHARED_MEMORY:
            return (f"clusterctl exec{at} -- df -h /dev/shm", logs)
        case Fault.COMMAND_NOT_FOUND:
            return (f"clusterctl exec{at} --in-job --shell 'echo $PATH'", logs)
        case Fault.KILLED if not re.search(r"SIGKILL|\b9\b", message):
            return (_WHO_SENDS, logs)
        case Fault.KILLED:
            return (
                f"clusterctl exec{at} --shell 'dmesg -T | grep -iE \"oom|out of memory\" | tail'",
                _OUT_OF_MEMORY,
                logs,
            )
        case Fault.MISSING_MODULE:
            return (f"clusterctl health{at} version.python", logs)
        case Fault.NO_PERMISSION if script := _NOT_EXECUTABLE.search(message):
            return (f"`chmod +x {script[1]}` here, or `bash {script[1]}` in `job.command`", logs)
        case Fault.MISSING_FILE | Fault.NO_PERMISSION:
            return (logs, f"clusterctl exec{at} -- ls -la")
        case Fault.GPU | Fault.UNHEALTHY | Fault.NODE_LOST:
            return (f"clusterctl health{at}",)
        case Fault.PORT_TAKEN:
            return (f"clusterctl exec{at} -- ss -ltnp",)
        case _:
            return (logs,)


_NOT_EXECUTABLE = re.compile(r"sh: line \d+: (\S+\.sh): Permission denied")
_MORE_GPU_MEMORY = (
    "if no other process uses the GPU: a smaller batch, or `env: {PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True}` "
    "if much memory is reserved and not allocated"
)


_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_PEERS_NOTICE_S = 120.0
"""Seconds within which peers notice the end of a rank. A peer that ends later may have another reason."""
_BARRIER_MISSED = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
_TIMEOUT = re.compile(r"timed out|timeout", re.IGNORECASE)

RankEnd: TypeAlias = "tuple[Rank, RankExit]"
"""A rank, and the end of this rank."""


def normalize_message(message: str) -> str:
    """Return a message without numbers and addresses, which differ between ranks with the same failure."""
    return _DIGITS.sub("#", message)


def _name(evidence: Evidence, ends: Iterable[RankEnd]) -> str:
    return evidence.name_ranks(rank.rank for rank, _ in ends)


def _name_failed(ends: Sequence[RankEnd]) -> tuple[Culprit, ...]:
    """Return ranks as culprits, each with the code line of its failure and its message."""
    by_rank = {rank.rank: end for rank, end in ends}
    return name_culprits(
        (rank for rank, _ in ends),
        lambda rank: describe_exit(by_rank[rank.rank]),
        lambda rank: find_user_position(by_rank[rank.rank].traceback),
    )


def _list_victims(ranks: Iterable[Rank]) -> tuple[Waiting, ...]:
    """Return ranks that ended because of the failure of other ranks."""
    numbers = fold_ranks(rank.rank for rank in ranks)
    return (Waiting(ranks=numbers, where=None, op="lost a peer"),) if numbers else ()


def judge_crash(evidence: Evidence) -> Verdict | None:
    """Return a verdict on the rank that failed first for a reason of its own; `None` if no rank failed."""
    ended = [(rank, rank.end) for rank in evidence.ranks if rank.end is not None and not rank.end.stopped]
    failed = [(rank, end) for rank, end in ended if not end.ended_well]
    if not failed:
        return None  # `run_verdict` judges ranks that ended with 0 while others wait.
    early = [(rank, end) for rank, end in ended if end.ended_well]
    own = [(rank, end) for rank, end in failed if not end.secondary and classify_exit(end) is not Fault.PEER_LOST]
    if own:
        return _judge_own_failures(evidence, own, failed)
    return _judge_exits_before_peers(evidence, early, failed) if early else _judge_peer_losses(evidence, failed)


def _judge_own_failures(evidence: Evidence, own: Sequence[RankEnd], failed: Sequence[RankEnd]) -> Verdict:
    """Judge ranks that failed for a reason of their own. Blame the first rank, or all if they failed alike."""
    first, end = min(own, key=lambda each: (each[1].latest, each[0].rank))
    cls = classify_exit(end)
    if cls is Fault.MISMATCH:
        # The rank that noticed the mismatch may have passed the right tensor.
        name = evidence.name_ranks([first.rank])
        return Verdict(
            kind=ProblemKind.CRASH,
            cls=cls,
            confidence=Confidence.AMBIGUOUS,
            summary=f"ranks passed tensors that do not match to a collective; {name} noticed it first",
            waiting=(Waiting(ranks=fold_ranks(rank.rank for rank, _ in failed), where=None, op="noticed it"),),
            next_commands=("clusterctl up --set env.TORCH_DISTRIBUTED_DEBUG=DETAIL", f"clusterctl logs {evidence.run}"),
        )
    message = normalize_message(end.message)
    alike = [(r, e) for r, e in own if classify_exit(e) is cls and normalize_message(e.message) == message]
    alike_ranks = {rank.rank for rank, _ in alike}
    rivals = [r.rank for r, e in own if r.rank != first.rank and _may_precede((r, e), (first, end))]
    named = alike if 1 < len(alike) == len(own) else [(first, end)]
    confidence = Confidence.LIKELY
    if not alike_ranks.issuperset(rivals):
        confidence = Confidence.AMBIGUOUS
        named = [(r, e) for r, e in own if r.rank == first.rank or r.rank in set(rivals) - alike_ranks]
    elif cls is not Fault.UNKNOWN and (not rivals or len(named) == len(own)) and is_end_explained(end):
        confidence = Confidence.CERTAIN
    how = "failed alike" if len(named) > 1 and confidence is not Confidence.AMBIGUOUS else "failed first"
    named_ranks = {rank.rank for rank, _ in named}
    advice = find_extra_advice(end)
    return Verdict(
        kind=ProblemKind.START if cls is Fault.NOT_STARTED else ProblemKind.CRASH,
        cls=cls,
        confidence=confidence,
        summary=f"{_name(evidence, named)} {how}: {describe_exit(end)}{advice and f'; {advice}'}",
        culprits=_name_failed(named),
        waiting=_list_victims(rank for rank, _ in failed if rank.rank not in named_ranks),
        next_commands=list_next_commands(cls, evidence.run, first.rank, first.node, end.message),
    )


def _may_precede(one: RankEnd, other: RankEnd) -> bool:
    """Return whether the first rank may have ended before the other. Ranks of one node are compared by its clock."""
    (rank, end), (other_rank, other_end) = one, other
    if rank.node == other_rank.node and end.on_node_clock is not None and other_end.on_node_clock is not None:
        return end.on_node_clock[0] <= other_end.on_node_clock[1]
    return end.earliest <= other_end.latest


def _judge_exits_before_peers(evidence: Evidence, ended: Sequence[RankEnd], failed: Sequence[RankEnd]) -> Verdict:
    """Judge ranks that ended with 0 while others were still working, so that the others lost their peers."""
    first_loss = min(end.latest for _, end in failed)
    early = [(rank, end) for rank, end in ended if end.earliest <= first_loss]
    named = early or list(ended)
    certain = bool(early) and all(end.latest < first_loss <= end.latest + _PEERS_NOTICE_S for _, end in named)
    # If most ranks have ended, a rank that still works may be the wrong one: it may have done a step too many.
    is_majority = len(named) > len(failed) + sum(rank.end is None for rank in evidence.ranks)
    sure = Confidence.CERTAIN if certain else Confidence.LIKELY
    return Verdict(
        kind=ProblemKind.CRASH,
        cls=Fault.EXITED_EARLY,
        confidence=Confidence.AMBIGUOUS if is_majority else sure,
        summary=f"{_name(evidence, named)} ended with 0 while others were still working",
        culprits=_name_failed([*named, *(failed if is_majority else ())]),
        waiting=_list_victims(rank for rank, _ in failed),
        next_commands=list_next_commands(Fault.EXITED_EARLY, evidence.run, named[0][0].rank, None),
    )


def _judge_peer_losses(evidence: Evidence, failed: Sequence[RankEnd]) -> Verdict:
    """Judge failed ranks that all report that they lost a peer.

    The lost peer may have been stopped together with these ranks before it ended. So this function searches for it in
    this order: stopped ranks with tracebacks, ranks that the others name, ranks in no collective, and ranks of the node
    whose address the others name.
    """
    stopped = [(rank, rank.end) for rank in evidence.ranks if rank.end is not None and rank.end.stopped]
    own = [(r, e) for r, e in stopped if e.traceback and not e.secondary and classify_exit(e) is not Fault.PEER_LOST]
    if own:
        first, end = own[0]
        alike = all(normalize_message(other.message) == normalize_message(end.message) for _, other in own)
        were = "it was" if len(own) == 1 else "they were"
        return Verdict(
            kind=ProblemKind.CRASH,
            cls=classify_exit(end),
            confidence=Confidence.LIKELY if alike else Confidence.AMBIGUOUS,
            summary=f"{_name(evidence, own)} failed: {describe_exit(end)}; "
            f"{were} stopped with the peers that lost it, before it ended",
            culprits=_name_failed(own),
            waiting=_list_victims(rank for rank, _ in failed),
            next_commands=list_next_commands(classify_exit(end), evidence.run, first.rank, first.node, end.message),
        )
    victims = [*failed, *((rank, end) for rank, end in stopped if end.secondary)]
    missed = _find_missed_ranks(evidence, victims)
    if not missed:
        return _judge_accused_node(evidence, failed)
    names, gave_up = evidence.name_ranks(r.rank for r in missed), format_ranks(rank.rank for rank, _ in victims)
    return Verdict(
        kind=ProblemKind.CRASH,
        cls=Fault.NOT_JOINED,
        confidence=Confidence.LIKELY if len(missed) == 1 else Confidence.AMBIGUOUS,
        summary=f"{names} did not join a collective, and {gave_up} gave up waiting",
        culprits=name_culprits(
            missed, lambda _: "its peers waited for it until a timeout", lambda rank: locate_rank(rank.snapshot)
        ),
        waiting=_list_victims(rank for rank, _ in victims),
        next_commands=list_next_commands(Fault.NOT_JOINED, evidence.run, missed[0].rank, missed[0].node),
    )


def _find_missed_ranks(evidence: Evidence, victims: Sequence[RankEnd]) -> list[Rank]:
    """Return the ranks that others waited for until a timeout.

    These are the ranks that the messages name. If the messages name no rank, these are the ranks that did not report a
    lost peer, or the ranks that were in no collective while most ranks were in one.
    """
    texts = [f"{end.message}\n{end.tail}" for _, end in victims]
    outputs = [*texts, *(rank.end.tail for rank in evidence.ranks if rank.end is not None and rank.end.stopped)]
    numbers = {int(n) for text in outputs for found in _BARRIER_MISSED.findall(text) for n in re.findall(r"\d+", found)}
    named = [rank for rank in evidence.ranks if rank.rank in numbers]
    if named or not any(map(_TIMEOUT.search, texts)):
        return named
    known = {rank.rank for rank, _ in victims}
    others = [rank for rank in evidence.ranks if rank.rank not in known]
    if len(others) < len(known):
        return others
    if any(rank.collective_counts is None for rank in evidence.ranks):
        return []
    counts = {rank.rank: (rank.collective_counts or {}).values() for rank in evidence.ranks}
    idle = [rank for rank in evidence.ranks if all(ended >= begun for begun, ended in counts[rank.rank])]
    return idle if 2 * len(idle) < len(evidence.ranks) and known.isdisjoint(rank.rank for rank in idle) else []


def _judge_accused_node(evidence: Evidence, failed: Sequence[RankEnd]) -> Verdict:
    """Blame the node whose address ranks of other nodes name. Without such a node, name all ranks that lost a peer."""
    by_address = {address: node.node for node in evidence.nodes.values() for address in node.addresses}
    accused: set[str] = set()
    for rank, end in failed:
        text = f"{end.message}\n{end.tail}"
        accused |= {node for address, node in by_address.items() if node != rank.node and f"[{address}]" in text}
    if len(accused) == 1:
        node = accused.pop()
        # These ranks include ranks that were stopped before they could print an error.
        there = [rank for rank in evidence.ranks if rank.node == node]
        return Verdict(
            kind=ProblemKind.CRASH,
            cls=Fault.PEER_LOST,
            confidence=Confidence.AMBIGUOUS,
            summary=f"all ranks lost a peer; they name {node}, whose ranks give no reason",
            culprits=name_culprits(there, _describe_accused)
            if len(there) > 1
            else (Culprit(rank=None, node=node, evidence="its peers lost it"),),
            waiting=_list_victims(rank for rank, _ in failed if rank.node != node),
            next_commands=list_next_commands(Fault.NODE_LOST, evidence.run, None, node),
        )
    # A single victim is not named as culprit: the rank that it lost may have been stopped before it ended.
    first, end = min(failed, key=lambda each: (each[1].latest, each[0].rank))
    return Verdict(
        kind=ProblemKind.CRASH,
        cls=Fault.PEER_LOST,
        confidence=Confidence.AMBIGUOUS,
        summary=f"{_name(evidence, [(first, end)])} was the first to lose a peer: {describe_exit(end)}",
        culprits=_name_failed(failed) if len(failed) > 1 else (),
        waiting=() if len(failed) > 1 else _list_victims([first]),
        next_commands=list_next_commands(Fault.PEER_LOST, evidence.run, first.rank, first.node),
    )


def _describe_accused(rank: Rank) -> str:
    is_silent = rank.end is None or rank.end.stopped or rank.end.ended_well
    return "its peers lost its node" if rank.end is None or is_silent else describe_exit(rank.end)
