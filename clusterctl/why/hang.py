"""Judges a hang: finds the ranks that the others wait for.

The first rules use the kernel's process states. The next rules use the collective numbers of process groups. Without
these numbers, later rules compare connections between ranks, stacks, and wait channels of the kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from clusterctl.agent.protocol.record_types import TcpConnection
from clusterctl.formatting import fold_ranks
from clusterctl.why import collectives
from clusterctl.why.collectives import LateRanks
from clusterctl.why.evidence_types import Evidence, Rank, RankSnapshot
from clusterctl.why.stack_position import (
    ELSEWHERE,
    WAITS,
    Activity,
    describe_kernel_wait,
    describe_wchan,
    has_lock_wait,
    is_computing,
    is_listening,
    is_polling,
    is_user_code,
    is_waiting_for_child,
    is_waiting_for_network,
    is_waiting_for_peers,
    is_waiting_for_storage,
    is_waiting_outside,
    list_user_lines,
    locate_rank,
    name_culprits,
)
from clusterctl.why.verdict import MAX_NAMED, Confidence, Culprit, Fault, ProblemKind, Verdict, Waiting, format_ranks

_STUCK_SHIM_S = 4.0
"""The shim's thread writes a status every second. If the status is older, a thread holds the interpreter lock."""
_NO_SHIM = "no rank reports its state, as with `job.inject: false`: only stacks and the kernel show its position"
_MIN_RETRANSMISSIONS = 2
"""The smallest number of retransmissions that counts as a failure. A single retransmission may be chance."""
_LOOPBACK = ("127.", "::1")
_IDLE_CORES = 0.02
_AWAITED_KEY = "the awaited key"
_NO_ROUND = re.compile(r"(?:[._]|\b)(?:fd|fileno|pid|port|seed|rank|src|dst|peer)$")
"""Names of numbers that differ between ranks in the same round."""
_NEW_GROUP = "_new_process_group_helper"
"""The function of `torch.distributed` that creates each process group."""
_MAX_ERROR = 200
_ERROR = re.compile(r"\w(?:Error|Exception)\b:|\[Errno \d|\bERROR\b|(?<!\b0 )(?<!\bno )\bfailed\b")
_NUMBER = re.compile(r"\d+")


class HangAnalysis:
    """The ranks of a hang, and for each rank its snapshot and its position in the code."""

    def __init__(self, evidence: Evidence, ranks: Sequence[Rank], snapshots: Mapping[int, RankSnapshot]) -> None:
        self.evidence, self.snapshots = evidence, snapshots
        self.nodes = {rank.rank: rank.node for rank in ranks}
        self.positions = {rank: locate_rank(snapshot) for rank, snapshot in snapshots.items()}
        # Several nodes with `transport: local` are one machine, and have the same addresses.
        self.machines = {r: ",".join(evidence.nodes[node].addresses) or node for r, node in self.nodes.items()}
        unobserved = [rank for rank in ranks if rank.rank not in snapshots]
        self.unobserved = tuple(rank.rank for rank in unobserved)
        missing = [f"rank {rank.rank}: {rank.snapshot_error}" for rank in unobserved]
        missing += [f"rank {rank}: no stack" for rank, snapshot in snapshots.items() if snapshot.frames is None]
        if not any(s.seq or s.entries or s.status_age is not None for s in snapshots.values()):
            missing.append(_NO_SHIM)
        by_text: dict[str, list[int]] = {}
        for rank, snapshot in snapshots.items():
            by_text.setdefault(snapshot.blindness, []).append(rank)
        missing += [f"{format_ranks(blind)}: {text}" for text, blind in by_text.items() if text]
        self.is_blind = any(by_text)
        self.missing_evidence = tuple(missing)

    @cached_property
    def sockets(self) -> list[tuple[int, TcpConnection, int | None]]:
        """The connections of each rank, each with the rank at the other end if that is known."""
        sockets = [(rank, socket) for rank, snapshot in self.snapshots.items() for socket in snapshot.sockets]
        nodes = self.evidence.nodes
        owners = {_socket_key(socket, self.machines[rank]): rank for rank, socket in sockets}
        listeners: dict[tuple[str, int], set[int]] = {}
        for rank, one in sockets:
            if one["state"] == "listen":
                listeners.setdefault((self.machines[rank], one["port"]), set()).add(rank)
        at = {address: self.machines[rank] for rank, node in self.nodes.items() for address in nodes[node].addresses}

        def find_peer(rank: int, one: TcpConnection) -> int | None:
            machine = self.machines[rank]
            owner = owners.get(_socket_key(one, machine, swapped=True))
            # A connection that no process has accepted belongs to the rank that listens.
            server = machine if one["peer"].startswith(_LOOPBACK) else at.get(one["peer"], "")
            listening = listeners.get((server, one["peer_port"]), set())
            return next(iter(listening)) if owner is None and len(listening) == 1 else owner

        return [(rank, one, find_peer(rank, one)) for rank, one in sockets]

    @cached_property
    def awaited_sockets(self) -> dict[int, tuple[TcpConnection, int | None]]:
        """The connection from which the main thread of a rank waits to read, with the rank at the other end."""
        return {rank: (socket, peer) for rank, socket, peer in self.sockets if socket["awaited"]}

    def build_verdict(
        self,
        cls: Fault,
        confidence: Confidence,
        summary: str,
        ranks: Iterable[int],
        describe: Callable[[int], str] | None = None,
    ) -> Verdict:
        """Return a verdict that blames these ranks, and lists all others as waiting.

        Args:
            cls: The class of the problem.
            confidence: The confidence of the verdict.
            summary: One sentence for people.
            ranks: The culprits.
            describe: Returns the reason to blame a rank. The default reason is what the rank does instead of joining.
        """
        named, run = set(ranks), self.evidence.run
        reason = describe or partial(describe_missing_rank, self)
        culprits = [rank for rank in self.evidence.ranks if rank.rank in named]
        return Verdict(
            kind=ProblemKind.HANG,
            cls=cls,
            confidence=confidence,
            summary=summary,
            culprits=name_culprits(culprits, lambda rank: reason(rank.rank), lambda rank: locate_rank(rank.snapshot)),
            waiting=self.list_waiting(self.snapshots.keys() - named),
            missing_evidence=self.missing_evidence,
            next_commands=(f"clusterctl stacks {run}", f"clusterctl logs {run} --rank {fold_ranks(named)}"),
        )

    def build_undetermined_verdict(self, summary: str) -> Verdict:
        """Return a verdict without a culprit, because some ranks could not be examined."""
        unobserved = f"; {format_ranks(self.unobserved)} could not be examined" if self.unobserved else ""
        return Verdict(
            kind=ProblemKind.HANG,
            cls=Fault.NOT_JOINED,
            confidence=Confidence.UNKNOWN,
            summary=summary + unobserved,
            waiting=self.list_waiting(self.snapshots),
            missing_evidence=self.missing_evidence,
            next_commands=(f"clusterctl stacks {self.evidence.run}",),
        )

    def holds_interpreter_lock(self, rank: int) -> bool:
        """Return whether a rank seems to hold the interpreter lock; false if waiting ranks on its node do, too."""
        return has_outdated_status(self.snapshots[rank]) and not any(
            has_outdated_status(self.snapshots[other]) and self.is_in_collective(other)
            for other in self._list_neighbours(rank)
        )

    def certainly_holds_interpreter_lock(self, rank: int) -> bool:
        """Return whether a rank holds the interpreter lock while its node writes the status of other ranks."""
        others = [self.snapshots[other] for other in self._list_neighbours(rank)]
        fresh = any(other.status_age is not None and not has_outdated_status(other) for other in others)
        return self.holds_interpreter_lock(rank) and (fresh or is_computing(self.snapshots[rank]))

    def _list_neighbours(self, rank: int) -> list[int]:
        return [other for other in self.snapshots if other != rank and self.nodes[other] == self.nodes[rank]]

    def is_in_collective(self, rank: int) -> bool:
        """Return whether a rank waits for its peers in a collective, by its stack."""
        collective = self.positions[rank].activity in (Activity.COLLECTIVE, Activity.BACKWARD)
        return collective and not is_computing(self.snapshots[rank])

    def list_waiting(self, ranks: Iterable[int]) -> tuple[Waiting, ...]:
        """Return the waiting ranks, grouped by position, largest group first."""
        groups: dict[tuple[str | None, str | None], list[int]] = {}
        for rank in sorted(ranks):
            position = self.positions[rank]
            op = collectives.find_current_operation(self.snapshots[rank]) or position.op
            groups.setdefault((position.where, op), []).append(rank)
        ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
        return tuple(Waiting(ranks=fold_ranks(ranks), where=where, op=op) for (where, op), ranks in ordered)

    def describe(self, ranks: Iterable[int]) -> str:
        """Return ranks for a sentence, with their node and position if these are equal for all ranks."""
        named = sorted(ranks)
        positions = {self.positions[rank].where for rank in named if rank in self.positions}
        at = next(iter(positions)) if len(positions) == 1 else None
        return self.evidence.name_ranks(named) + (f" ({at})" if at else "")

    def describe_reason(self, ranks: Iterable[int]) -> str:
        """Return the common reason why ranks are missing, as the end of a sentence; "" if there is none."""
        reasons = {_describe_activity(self, rank) for rank in ranks}
        reason = reasons.pop() if len(reasons) == 1 else ""
        return f": {reason}" if reason else ""


def has_outdated_status(snapshot: RankSnapshot) -> bool:
    """Return whether the shim's thread has written no status for seconds, although the rank is not stopped."""
    age = snapshot.status_age
    return age is not None and age > _STUCK_SHIM_S and snapshot.state not in ("T", "t", "D", "Z")


def classify_missing_ranks(hang: HangAnalysis, ranks: Iterable[int]) -> Fault:
    """Return the problem class of a hang in which these ranks are missing."""
    named = list(ranks)
    if any(hang.holds_interpreter_lock(rank) for rank in named):
        return Fault.GIL_HELD
    return Fault.STORAGE if any(is_waiting_for_storage(hang.snapshots[r]) for r in named) else Fault.NOT_JOINED


def format_waiting(ranks: Iterable[int]) -> str:
    """Return "rank 3 waits", or "ranks 0-2 wait"."""
    numbers = sorted(ranks)
    return f"{format_ranks(numbers)} wait{'s' if len(numbers) == 1 else ''}"


def _describe_activity(hang: HangAnalysis, rank: int) -> str:
    if hang.holds_interpreter_lock(rank):
        return "it holds the interpreter lock"
    position = hang.positions[rank]
    if position.activity is Activity.COLLECTIVE and position.op and not is_computing(hang.snapshots[rank]):
        return f"it waits in {position.op}"
    socket = hang.awaited_sockets.get(rank)
    return describe_kernel_wait(hang.snapshots[rank]) + (f" ({_name_peer(*socket)})" if socket else "")


def _name_peer(socket: TcpConnection, peer: int | None) -> str:
    return f"{socket['peer']}:{socket['peer_port']}" if peer is None else f"rank {peer}"


def describe_missing_rank(hang: HangAnalysis, rank: int) -> str:
    """Return what a rank does instead of joining the others."""
    snapshot = hang.snapshots[rank]
    parts = [_describe_activity(hang, rank)]
    if hang.positions[rank].activity is Activity.LOADING and snapshot.children:
        children = [f"{c['pid']} ({c['state']}, {c['wchan'] or 'running'})" for c in snapshot.children[:4]]
        parts.append(f"its child processes: {', '.join(children)}")
    text = "; ".join(part for part in parts if part)
    return text or f"state {snapshot.state or 'unknown'}" + (f" in {snapshot.wchan}" if snapshot.wchan else "")


def judge_hang(evidence: Evidence) -> Verdict | None:
    """Return a verdict on the ranks that the others wait for; `None` if no rank was examined.

    Each role is judged alone, because its collectives are its own. A role that waits for a role that it needs is not
    to blame.
    """
    found = {role: _judge_ranks(own) for role, own in evidence.split_by_role().items()}
    verdicts = {role: verdict for role, verdict in found.items() if verdict is not None}
    if not verdicts:
        return None
    role = next(iter(verdicts))
    awaited = _find_awaited_role(evidence, role, verdicts[role]) if len(found) > 1 else None
    if awaited is not None:
        verdict = verdicts.get(awaited)
        if verdict is not None and verdict.culprits:
            return replace(verdict, summary=f"{verdict.summary}; role `{role}` waits for role `{awaited}`")
        hang = _build_analysis(evidence)
        ranks = [rank.rank for rank in evidence.ranks if rank.role == awaited and rank.rank in hang.snapshots]
        summary = f"{hang.describe(ranks)} sent no answer, and role `{role}` waits for it"
        return hang.build_verdict(Fault.NOT_JOINED, Confidence.LIKELY, summary, ranks) if ranks else verdicts[role]
    services = {rank.role for rank in evidence.ranks if rank.is_service}
    # A service that waits for requests looks like one that hangs.
    own = (
        verdict
        for name, verdict in verdicts.items()
        if verdict.cls is not Fault.EXTERNAL_WAIT and (name not in services or verdict.confidence is Confidence.CERTAIN)
    )
    return next(own, verdicts[role])


def _find_awaited_role(evidence: Evidence, role: str, verdict: Verdict) -> str | None:
    """Return the role from whose sockets the culprits in `role`, or all its ranks, read; `None` if there is none."""
    blamed = {culprit.rank for culprit in verdict.culprits} or {rank.rank for rank in evidence.ranks}
    roles = {rank.rank: rank.role for rank in evidence.ranks}
    at: dict[str, set[str]] = {}
    for one in evidence.ranks:
        for address in evidence.nodes[one.node].addresses:
            at.setdefault(address, set()).add(one.role)
    # Local nodes have the same address, which then belongs to no role.
    by_address = {address: min(names) for address, names in at.items() if len(names) == 1}
    found = (
        by_address.get(socket["peer"]) if peer is None else roles[peer]
        for rank, socket, peer in _build_analysis(evidence).sockets
        if rank in blamed and roles[rank] == role and socket["awaited"]
    )
    return next((other for other in found if other not in (None, role)), None)


def _build_analysis(evidence: Evidence) -> HangAnalysis:
    snapshots = {r.rank: r.snapshot for r in evidence.ranks if r.snapshot is not None and not r.snapshot.error}
    return HangAnalysis(evidence, evidence.ranks, snapshots)


def _judge_ranks(evidence: Evidence) -> Verdict | None:
    # Ranks that lost a peer after the stall are included: their snapshots show where they waited.
    ranks = [rank for rank in evidence.ranks if rank.end is None or rank.end.stopped or rank.end.secondary]
    if (verdict := _judge_missing_nodes_or_starts(evidence, ranks)) is not None:
        return verdict
    snapshots = {r.rank: r.snapshot for r in ranks if r.snapshot is not None and not r.snapshot.error}
    if not snapshots:
        return None
    hang = HangAnalysis(evidence, ranks, snapshots)
    rules: tuple[Callable[[HangAnalysis], Verdict | None], ...] = (
        _judge_stopped,
        _judge_kernel_waits,
        _judge_setups,
        _judge_new_groups,
        _judge_mismatches,
        _judge_late_ranks,
        _judge_gil,
        _judge_by_store_keys,
        _judge_by_sockets,
        _judge_by_stacks,
        _judge_by_kernel,
        _judge_ranks_at_one_place,
    )
    return next((verdict for rule in rules if (verdict := rule(hang)) is not None), None)


def judge_missing_nodes(evidence: Evidence) -> Verdict | None:
    """Return a verdict on lost nodes or on ranks that never started; `None` if there are none."""
    return _judge_missing_nodes_or_starts(evidence, [rank for rank in evidence.ranks if rank.end is None])


def _judge_missing_nodes_or_starts(evidence: Evidence, ranks: Sequence[Rank]) -> Verdict | None:
    """Judge lost nodes; without lost nodes, judge ranks that have not started."""
    lost = sorted({rank.node for rank in ranks if evidence.nodes[rank.node].link == "lost"})
    if lost:
        return Verdict(
            kind=ProblemKind.HANG,
            cls=Fault.NODE_LOST,
            confidence=Confidence.CERTAIN,
            summary=f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost: {evidence.nodes[lost[0]].why}",
            culprits=tuple(Culprit(rank=None, node=node, evidence=evidence.nodes[node].why) for node in lost),
            next_commands=tuple(f"clusterctl health --nodes {node}" for node in lost[:3]),
        )
    absent = [rank for rank in ranks if not rank.started]
    if not absent or len(absent) == len(evidence.ranks):
        return None
    # An unreachable node may have started its ranks. Also, a start takes some time.
    connected = all(evidence.nodes[rank.node].link == "connected" for rank in absent)
    known = evidence.has_ended or (evidence.stalled and connected)
    waiting = f"{'has' if len(absent) == 1 else 'have'} not started yet"
    never = evidence.has_ended or evidence.stalled
    return Verdict(
        kind=ProblemKind.START,
        cls=Fault.NOT_STARTED,
        confidence=Confidence.CERTAIN if known else Confidence.LIKELY,
        summary=f"{format_ranks(rank.rank for rank in absent)} {'never started' if never else waiting}",
        culprits=name_culprits(absent, lambda _: "its node has not reported its start"),
        next_commands=(f"clusterctl status {evidence.run}",),
    )


# --- rules that use process states of the kernel


def _judge_stopped(hang: HangAnalysis) -> Verdict | None:
    """Judge ranks that a signal or a debugger has stopped."""
    found = [rank for rank, snapshot in hang.snapshots.items() if (snapshot.state or "") in ("T", "t")]
    if not found:
        return None
    if others := find_root_ranks(hang) - set(found):
        return _judge_ambiguous(hang, Fault.STOPPED, found, others)
    are = "is" if len(found) == 1 else "are"
    return hang.build_verdict(
        Fault.STOPPED,
        Confidence.CERTAIN,
        f"{hang.describe(found)} {are} stopped (state T) by a signal or a debugger",
        found,
        lambda _: "stopped by SIGSTOP, or by a debugger",
    )


def _judge_ambiguous(hang: HangAnalysis, cls: Fault, found: Sequence[int], others: Iterable[int]) -> Verdict:
    """Judge ranks that the kernel holds while other ranks are missing. Either group of ranks may be the cause."""
    return hang.build_verdict(
        cls,
        Confidence.AMBIGUOUS,
        f"{hang.describe(found)} {'is' if len(found) == 1 else 'are'} held by the kernel, "
        f"and {format_ranks(sorted(others))} did not join either",
        {*found, *others},
    )


def _judge_kernel_waits(hang: HangAnalysis) -> Verdict | None:
    """Judge ranks in an uninterruptible wait, and ranks that wait for a file system."""
    # A rank that waits for its peers may wait for a disk briefly, to read a page or to write a line of output.
    snapshots = {rank: snapshot for rank, snapshot in hang.snapshots.items() if not hang.is_in_collective(rank)}
    uninterruptible = {rank for rank, snapshot in snapshots.items() if snapshot.state == "D"}
    storage = [rank for rank, snapshot in snapshots.items() if is_waiting_for_storage(snapshot)]
    late = collectives.find_late_ranks(hang.snapshots)
    found = storage or sorted(uninterruptible)
    if not found or (late and late.isdisjoint(found)):
        return None
    cls = Fault.STORAGE if storage else Fault.DSTATE
    if others := find_root_ranks(hang) - set(found):
        return _judge_ambiguous(hang, cls, found, others)
    if len(found) == len(hang.snapshots) > 1 and not storage:
        return None
    # A rank that uses a CPU does work, so its wait was short.
    idle = all((snapshots[rank].cpu or 0.0) < _IDLE_CORES for rank in found)
    is_sure = idle and not hang.unobserved and not hang.is_blind
    return hang.build_verdict(
        cls,
        Confidence.CERTAIN if set(found) <= uninterruptible & late and is_sure else Confidence.LIKELY,
        f"{hang.describe(found)} "
        + ("waits for a file system" if storage else "is in an uninterruptible wait (state D)"),
        found,
        lambda rank: f"state {snapshots[rank].state}, in {snapshots[rank].wchan or 'an unknown place'}",
    )


# --- rules that use collective numbers


def _judge_setups(hang: HangAnalysis) -> Verdict | None:
    """Judge ranks that set up the process group with another world size or store than most ranks, or a wrong rank."""
    setups = {rank: snapshot.setup for rank, snapshot in hang.snapshots.items() if snapshot.setup is not None}
    if all(position.activity is not Activity.SETTING_UP for position in hang.positions.values()):
        return None
    sizes = {rank: f"world size {setup['world_size']}" for rank, setup in setups.items()}
    stores = {rank: f"the store at {address}" for rank, setup in setups.items() if (address := setup["address"])}
    if len(set(sizes.values())) > 1:
        return _judge_differing_values(hang, sizes, f"world size {len(hang.evidence.ranks)}")
    if len(set(stores.values())) > 1:
        return _judge_differing_values(hang, stores, "")
    counts = Counter(setup["rank"] for setup in setups.values())
    wrong = [rank for rank, setup in setups.items() if counts[setup["rank"]] > 1 and setup["rank"] != rank]
    if not wrong or len(wrong) > len(setups) // 2:
        return None
    return hang.build_verdict(
        Fault.MISMATCH,
        Confidence.LIKELY,
        f"{hang.describe(wrong)} set up the process group as rank {setups[wrong[0]]['rank']}, as another rank does",
        wrong,
        lambda rank: f"it joins as rank {setups[rank]['rank']}",
    )


def _judge_differing_values(hang: HangAnalysis, values: Mapping[int, str], planned: str) -> Verdict:
    """Judge ranks whose value differs from the most frequent one. If two are equally frequent, `planned` is right."""
    counted = Counter(values.values()).most_common()
    right = planned if counted[0][1] == counted[1][1] else counted[0][0]
    wrong = [rank for rank, value in values.items() if value != right]
    others = f", the others with {right}" if len(wrong) < len(values) else ""
    return hang.build_verdict(
        Fault.MISMATCH,
        Confidence.LIKELY if others else Confidence.AMBIGUOUS,
        f"ranks set up the process group with different values: {hang.describe(wrong)} with "
        f"{' and '.join(sorted({values[rank] for rank in wrong}))}{others}",
        wrong,
        lambda rank: f"it uses {values[rank]}",
    )


def _judge_new_groups(hang: HangAnalysis) -> Verdict | None:
    """Judge the rank that creates other process groups than the others, as after a `new_group` by its members only.

    Torch numbers new groups on each rank. Two ranks contradict each other if they create groups of one number and of
    different sizes, or of one size and with different numbers.
    """
    groups = {
        rank: (values[f"{_NEW_GROUP}.group_name"], values[f"{_NEW_GROUP}.group_size"])
        for rank, snapshot in hang.snapshots.items()
        if {f"{_NEW_GROUP}.group_name", f"{_NEW_GROUP}.group_size"} <= (values := snapshot.call_values).keys()
    }
    names, sizes = Counter(name for name, _ in groups.values()), Counter(size for _, size in groups.values())
    alike = Counter(groups.values())
    conflicts = {rank: names[group[0]] + sizes[group[1]] - 2 * alike[group] for rank, group in groups.items()}
    wrong = [rank for rank, count in conflicts.items() if count > 1 and count == max(conflicts.values())]
    if len(wrong) != 1:
        return None
    return hang.build_verdict(
        Fault.MISMATCH,
        Confidence.LIKELY,
        f"{hang.describe(wrong)} creates another process group than the others: every rank has to call `new_group` "
        "for every group, also for groups without this rank",
        wrong,
        lambda rank: f"it creates a group of {groups[rank][1]} ranks",
    )


def _judge_mismatches(hang: HangAnalysis) -> Verdict | None:
    """Judge ranks of one group that have begun different collectives with the same number."""
    first = next(iter(collectives.find_mismatches(hang.snapshots)), None)
    if first is None:
        return None
    names = {rank: name for name, ranks in first.ranks_by_operation.items() for rank in ranks}
    begun = ", ".join(f"{format_ranks(ranks)} {name}" for name, ranks in first.ranks_by_operation.items())
    odd = first.contradicted or first.minority_ranks
    confidence = Confidence.LIKELY if odd else Confidence.AMBIGUOUS
    if len(odd) == 1 and odd == first.minority_ranks:
        confidence = Confidence.CERTAIN
    return hang.build_verdict(
        Fault.MISMATCH,
        confidence,
        f"ranks have begun different collectives as number {first.number}: {begun}",
        odd or names,
        lambda rank: f"began {names[rank]}",
    )


def _judge_late_ranks(hang: HangAnalysis) -> Verdict | None:
    """Judge ranks that have not begun a collective in which others wait. Ranks that wait in no group are the cause."""
    found = collectives.find_late_by_group(hang.snapshots)
    if not found:
        return None
    waiting = {rank for group in found for rank in group.waiting}
    late = {rank for group in found for rank in group.ranks}
    roots = [rank for rank in sorted(late - waiting) if not _is_in_operation(hang, rank)]
    blocked = {rank for rank, one in hang.snapshots.items() if rank in waiting or is_waiting_for_peers(one)}
    if all(group.is_message for group in found) and blocked.issuperset(roots) and blocked != hang.snapshots.keys():
        return None  # These ranks exchange messages, and a rank without messages may be the one for which all wait.
    if not roots:
        return _judge_cycle(hang, found, late | waiting)
    at_peers = [rank for rank in roots if is_waiting_for_peers(hang.snapshots[rank])]
    if len(roots) > len(waiting) and (at_peers == roots or all(is_polling(hang.snapshots[rank]) for rank in roots)):
        return _judge_advanced_ranks(hang, roots, waiting, is_at_peers=at_peers == roots)
    if len(at_peers) == len(roots) < len(hang.snapshots):
        # These ranks wait too: in another collective, or in a collective without a number.
        cls, certain = Fault.MISMATCH, False
    else:
        # A rank that could not be examined may be missing too.
        is_idle = collectives.find_current_operation(hang.snapshots[roots[0]]) is None
        # The other end of a socket may be the cause.
        is_at_socket = is_waiting_for_network(hang.snapshots[roots[0]])
        certain = len(roots) == 1 and is_idle and not is_at_socket and not hang.unobserved and not hang.is_blind
        # A rank in an operation without a number (such as a wait for a key of the store) may wait for another of these
        # ranks.
        roots = [rank for rank in roots if rank not in at_peers] or roots
        roots = _remove_polling(hang, roots)
        cls = classify_missing_ranks(hang, roots)
        certain = certain and (cls is not Fault.GIL_HELD or hang.certainly_holds_interpreter_lock(roots[0]))
    named = [group for group in found if not set(roots).isdisjoint(group.ranks)]
    op = next((group.op for group in named if group.op), None) or "a collective"
    if all(group.is_message for group in named):
        # These ranks may be right, and the others may wait for a message too many.
        waiting = {rank for group in named for rank in group.waiting}
        return hang.build_verdict(
            cls,
            Confidence.LIKELY,
            f"{hang.describe(roots)} did not answer the `{op}` of {format_ranks(waiting)}{hang.describe_reason(roots)}",
            roots,
        )
    if (verdict := _judge_blocker(hang, roots, f", and did not join {op}")) is not None:
        return replace(verdict, cls=cls)
    reason = hang.describe_reason(roots)
    return hang.build_verdict(
        cls,
        Confidence.CERTAIN if certain else Confidence.LIKELY,
        f"{hang.describe(roots)} did not join {op}, in which {format_waiting(waiting - set(roots))}{reason}",
        roots,
    )


def _judge_blocker(hang: HangAnalysis, ranks: Collection[int], effect: str = "") -> Verdict | None:
    """Judge the rank for which all these ranks wait by the kernel's tables: it locked a file, or it is their server."""
    blocker, what = _find_lock_holder(hang, ranks), "the lock that {} took on a file"
    if blocker is None or [blocker] == list(ranks):
        blocker, what = _find_common_server(hang, ranks), "an answer of {}"
    if blocker is None:
        return None
    if (client := _find_awaited_client(hang, blocker)) is not None:
        return _judge_client(hang, client, blocker, effect)
    return hang.build_verdict(
        Fault.NOT_JOINED,
        Confidence.LIKELY,
        f"{format_waiting(ranks)} for {what.format(hang.describe([blocker]))}{effect}",
        [blocker],
        lambda _: f"{format_waiting(ranks)} for {what.format('this rank')}",
    )


def _judge_advanced_ranks(
    hang: HangAnalysis, others: Sequence[int], ranks: Collection[int], *, is_at_peers: bool
) -> Verdict:
    """Judge a few ranks that have gone on to a collective, while most ranks still wait for something else.

    The others wait for their peers, or check something again and again.
    """
    op = next(filter(None, (collectives.find_current_operation(hang.snapshots[rank]) for rank in ranks)), "")
    have, it = ("has", "it") if len(ranks) == 1 else ("have", "they")
    wait, check = ("waits for its peers", "checks") if len(others) == 1 else ("wait for their peers", "check")
    return hang.build_verdict(
        Fault.MISMATCH,
        Confidence.LIKELY if is_at_peers and len(ranks) == 1 else Confidence.AMBIGUOUS,
        f"{format_ranks(sorted(ranks))} {have} gone on to {op or 'a collective'}, and {hang.describe(others)} "
        f"{wait if is_at_peers else f'{check} something again and again'}: "
        f"{it} may have left out a part that the others wait for",
        ranks,
        lambda _: "it has gone on without the others",
    )


def _remove_polling(hang: HangAnalysis, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that do not wait for another of these ranks, or all of them.

    A rank that checks something again and again, or waits for the lock of a file, may wait for a rank that does
    neither. That rank must not read from another rank.
    """
    reads = {rank for rank, (_, peer) in hang.awaited_sockets.items() if peer not in (None, rank)}
    others = [
        rank for rank in ranks if not is_polling(hang.snapshots[rank]) and not has_lock_wait(hang.snapshots[rank])
    ]
    return list(ranks) if not others or reads.intersection(others) else others


def find_root_ranks(hang: HangAnalysis) -> set[int]:
    """Return the ranks that others wait for, and that wait for no rank themselves."""
    late = collectives.find_late_ranks(hang.snapshots)
    return {rank for rank in late if not hang.is_in_collective(rank) and not _is_in_operation(hang, rank)}


def _is_in_operation(hang: HangAnalysis, rank: int) -> bool:
    """Return whether a rank is in an operation that has not ended, and does not run other code at the same time."""
    begun = collectives.find_current_operation(hang.snapshots[rank]) is not None
    return begun and hang.positions[rank].activity not in ELSEWHERE


def _judge_cycle(hang: HangAnalysis, found: Sequence[LateRanks], blocked: Collection[int]) -> Verdict | None:
    """Judge a hang in which each late rank waits too. The ranks wait in a cycle, or for ranks that are in no group."""
    operations = {rank: collectives.find_current_operation(snapshot) for rank, snapshot in hang.snapshots.items()}
    if (verdict := _judge_messages(hang, found)) is not None:
        return verdict
    cycle = _find_cycle({(rank, late) for group in found for rank in group.waiting for late in group.ranks})
    if cycle:
        fewer = _find_smaller_side([group for group in found if not group.is_message], cycle)
        order = f": {format_ranks(fewer)} used the groups in another order" if fewer else ""
        if not fewer and (fewer := collectives.find_odd_receivers(hang.snapshots, found, cycle)):
            order = f": only {format_ranks(fewer)} expects messages in this direction"
        at = "messages" if all(group.is_message for group in found) else "several process groups"
        return hang.build_verdict(
            Fault.DEADLOCK,
            Confidence.LIKELY,
            f"ranks {fold_ranks(cycle)} wait for each other in {at}{order}",
            fewer or cycle,
            lambda rank: f"in {operations[rank] or hang.positions[rank].op}",
        )
    free = [rank for rank, at in hang.positions.items() if at.activity in ELSEWHERE and operations[rank] is None]
    if free and not hang.unobserved:
        reason = hang.describe_reason(free)
        return hang.build_verdict(
            classify_missing_ranks(hang, free),
            Confidence.LIKELY if len(free) == 1 else Confidence.AMBIGUOUS,
            f"{hang.describe(free)} waits in no process group, and {format_waiting(blocked)}{reason}",
            free,
        )
    in_message = {rank for rank, snapshot in hang.snapshots.items() if collectives.is_in_point_to_point(snapshot)}
    late = {rank for group in found for rank in group.ranks if not group.is_message}
    if len(in_message) == 1 and late == in_message and not hang.unobserved:
        return hang.build_verdict(
            Fault.MISMATCH,
            Confidence.LIKELY,
            f"no rank answers the message of {hang.describe(late)}, and {format_waiting(set(blocked) - late)} "
            "in a collective",
            late,
            lambda rank: f"in {operations[rank]}, and no other rank is in a message",
        )
    return hang.build_undetermined_verdict(f"{format_waiting(blocked)}, and no examined rank is missing")


def _judge_messages(hang: HangAnalysis, found: Sequence[LateRanks]) -> Verdict | None:
    """Judge ranks that wait for messages while others wait in collectives; `None` if the messages do not show why."""
    messages = [group for group in found if group.is_message]
    highest = collectives.find_highest_message(hang.snapshots, {group.group for group in messages})
    late = {rank for group in found if not group.is_message for rank in group.ranks}
    # Of the other pairs of ranks, none has reached such a number.
    ahead = late & {rank for group in messages if group.number > highest > 0 for rank in group.waiting}
    if ahead and 2 * len(ahead) < len(hang.snapshots):
        others = {rank for group in found if not group.is_message for rank in group.waiting}
        return _judge_advanced_ranks(hang, sorted(others), ahead, is_at_peers=True)
    awaiting = {rank for rank, one in hang.snapshots.items() if collectives.list_awaited_messages(one)}
    absent = {rank for group in messages for rank in group.ranks} - awaiting
    if absent:
        return _judge_absent_partners(hang, messages, awaiting, absent, highest)
    differing = collectives.find_differing_messages(hang.snapshots)
    if not differing:
        return None
    values = " and ".join(sorted(set(differing.values())))
    summary = f"{hang.describe(differing)} wait for each other in a message with different sizes or tags: {values}"
    if len(differing) == 1:
        summary = f"{hang.describe(differing)} waits in a message with {values}, its peer with another size or tag"
    return hang.build_verdict(
        Fault.MISMATCH,
        Confidence.LIKELY if len(differing) == 1 else Confidence.AMBIGUOUS,
        summary,
        differing,
        lambda rank: f"its message has {differing[rank]}",
    )


def _judge_absent_partners(
    hang: HangAnalysis,
    messages: Sequence[LateRanks],
    awaiting: Collection[int],
    partners: Collection[int],
    highest: int,
) -> Verdict:
    """Judge ranks that have gone on to a collective while others wait for their messages. Either may be wrong.

    Args:
        hang: The hang.
        messages: The messages that some ranks have not begun.
        awaiting: The ranks that wait for a message.
        partners: The ranks that have not begun a message, and wait for none.
        highest: The highest number of messages between two ranks that lack none.
    """
    missing = [group for group in messages if not set(partners).isdisjoint(group.ranks)]
    waiting = {rank for group in missing for rank in group.waiting}
    if len(set(collectives.count_messages(hang.snapshots).values())) == 1:
        return hang.build_verdict(
            Fault.MISMATCH,
            Confidence.LIKELY if len(waiting) == 1 else Confidence.AMBIGUOUS,
            f"{hang.describe(waiting)} waited for a message of {format_ranks(partners)}, but all ranks have exchanged "
            "the same number of messages: perhaps another partner was meant",
            waiting,
        )
    has_usual_number = any(group.number == highest for group in missing)
    others = hang.snapshots.keys() - set(awaiting)
    if has_usual_number or len(awaiting) > len(others):
        return _judge_advanced_ranks(hang, sorted(awaiting), partners, is_at_peers=True)
    if len(awaiting) == 1 < len(others):
        return hang.build_verdict(
            Fault.MISMATCH,
            Confidence.LIKELY,
            f"no rank answers the message of {hang.describe(waiting)}, and {format_waiting(others)} for their peers",
            waiting,
        )
    return hang.build_verdict(
        Fault.MISMATCH,
        Confidence.AMBIGUOUS,
        f"{hang.describe(waiting)} waited for a message of {format_ranks(partners)}, and they went on without it",
        {*waiting, *partners},
    )


def _find_smaller_side(found: Sequence[LateRanks], cycle: Collection[int]) -> list[int]:
    """Return the ranks of a cycle that wait in a different group than most ranks; none if there is no majority."""
    sides = sorted((sorted(set(group.waiting) & set(cycle)) for group in found), key=len)
    smaller = [side for side in sides[:-1] if side]
    if len(smaller) != 1 or not len(smaller[0]) < len(sides[-1]):
        return []
    return smaller[0] if set(smaller[0]).isdisjoint(sides[-1]) else []


def _find_cycle(edges: set[tuple[int, int]]) -> list[int]:
    """Return the ranks that wait for each other in a cycle; none without a cycle."""
    while True:
        inner = {rank for rank, _ in edges} & {late for _, late in edges}
        remaining = {(rank, late) for rank, late in edges if rank in inner and late in inner}
        if remaining == edges:
            return sorted(inner)
        edges = remaining


def _judge_gil(hang: HangAnalysis) -> Verdict | None:
    """Judge ranks in which one thread holds the interpreter lock."""
    found = [rank for rank in hang.snapshots if hang.holds_interpreter_lock(rank)]
    if not found or len(found) == len(hang.snapshots) > 1:
        return None
    return hang.build_verdict(
        Fault.GIL_HELD,
        Confidence.LIKELY,
        f"{hang.describe(found)} holds the interpreter lock: none of its other threads runs",
        found,
        lambda rank: f"its status is {hang.snapshots[rank].status_age:.0f} s old while it runs",
    )


# --- rules that use keys of torch's stores, and values of the calls


def _judge_by_store_keys(hang: HangAnalysis) -> Verdict | None:
    """Judge ranks that wait for keys of a store. The rank that has not set an awaited key is the cause.

    A rank that has set later keys of this kind has skipped the key. If no rank has skipped a key, the cause is a rank
    that waits for no key itself, or for its own.
    """
    set_by_any = {key for snapshot in hang.snapshots.values() for key in snapshot.set_keys}
    awaited = {
        rank: next((key for key in snapshot.awaited_keys if key not in set_by_any), snapshot.awaited_keys[-1])
        for rank, snapshot in hang.snapshots.items()
        if snapshot.awaited_keys
    }
    set_keys = {rank: tuple(map(_split_key, snapshot.set_keys)) for rank, snapshot in hang.snapshots.items()}
    skipped, late = {}, {}
    for key in awaited.values():
        owner, has_passed = _find_key_owner(key, set_keys)
        if owner is None or owner not in hang.snapshots or key in hang.snapshots[owner].set_keys:
            continue
        if has_passed:
            skipped[owner] = key
        elif awaited.get(owner, key) == key:
            late[owner] = key
    found = skipped or late
    if not found:
        return None
    waiting = [rank for rank in awaited if rank not in found]
    return hang.build_verdict(
        classify_missing_ranks(hang, found),
        Confidence.LIKELY if len(found) == 1 else Confidence.AMBIGUOUS,
        f"{hang.describe(found)} did not set {', '.join(sorted(found.values()))}, and {format_waiting(waiting)} in a "
        f"store{'; it has set later keys' if skipped else ''}",
        found,
        lambda rank: f"it did not set {found[rank]}",
    )


def _split_key(key: str) -> tuple[str, tuple[int, ...]]:
    """Return a key with "#" for each of its numbers, and these numbers."""
    return _NUMBER.sub("#", key), tuple(int(number) for number in _NUMBER.findall(key))


def _find_key_owner(key: str, set_keys: Mapping[int, Sequence[tuple[str, tuple[int, ...]]]]) -> tuple[int | None, bool]:
    """Return the rank that is to set a key, and whether this rank has set a later key of the same kind.

    It is the rank whose own keys of this kind have the same numbers, apart from the numbers that ranks change. If one
    number is the rank in most of such keys, it is the rank in this key too. Otherwise the rank is known only if it is
    the only one that sets such keys.
    """
    kind, numbers = _split_key(key)
    by_rank = {rank: [each for name, each in keys if name == kind] for rank, keys in set_keys.items()}
    by_rank = {rank: keys for rank, keys in by_rank.items() if keys}
    places = range(len(numbers))
    lasting = [i for i in places if all(len({each[i] for each in keys}) == 1 for keys in by_rank.values())]
    owners = [rank for rank, keys in by_rank.items() if all(keys[0][i] == numbers[i] for i in lasting)]
    at = [i for i in places if 2 * sum(keys[-1][i] == rank for rank, keys in by_rank.items()) > len(by_rank)]
    if len(by_rank) == 1:
        at, owner = [], next(iter(by_rank))
    elif len(owners) == 1:
        at, owner = lasting, owners[0]
    elif len(at) == 1:
        owner = numbers[at[0]]
    else:
        return None, False
    counters = [tuple(n for i, n in enumerate(each) if i not in at) for each in (*by_rank.get(owner, ()), numbers)]
    return owner, max(counters) > counters[-1]


def _find_differing_value(hang: HangAnalysis) -> tuple[int, str] | None:
    """Return the only rank whose calls have another value than all other ranks, and this value as words.

    Several values may differ if they name the same rank. Numbers of libraries do not count: they may differ at any
    time, such as the number of batches that a loader has ready. Rank 0 often has 0 where others have another number, or
    the other way round, so such numbers of rank 0 do not count.

    If ranks wait for each other in rounds, a rank that has skipped its part of a round is the last one that waits, and
    has the highest number.
    """
    frames = next(iter(hang.snapshots.values())).frames or ()
    own = next((f"{frame.function}." for frame in frames if is_user_code(frame.file)), "-")
    values_by_rank = {
        rank: {**snapshot.call_values, **({_AWAITED_KEY: " ".join(keys)} if (keys := snapshot.awaited_keys) else {})}
        for rank, snapshot in hang.snapshots.items()
    }
    found: dict[int, str] = {}
    for name in sorted(set.intersection(*map(set, values_by_rank.values())), reverse=True):
        values = {rank: each[name] for rank, each in values_by_rank.items()}
        (usual, most), *rest = Counter(values.values()).most_common()
        if len(rest) != 1 or most != len(values) - 1 or len(values) < 3:
            continue
        rank = next(rank for rank, value in values.items() if value == rest[0][0])
        is_hash = values[rank].startswith("#")
        is_telling = rank != 0 or (name != _AWAITED_KEY and "0" not in values.values())
        if is_hash or (name.startswith((own, _AWAITED_KEY)) and is_telling and not _NO_ROUND.search(name)):
            found[rank] = f"`{name}`" if is_hash else f"`{name}` ({values[rank]}, the others {usual})"
    found = found or (_find_leaders(values_by_rank, own) if len(values_by_rank) > 2 else {})
    return next(iter(found.items())) if len(found) == 1 else None


def _find_leaders(values_by_rank: Mapping[int, Mapping[str, str]], own: str) -> dict[int, str]:
    """Return the ranks that are ahead of all others by a number of their code, each with this number as words.

    Numbers that may be ranks, and numbers that are further apart than ranks in rounds can be, do not count.
    """
    world, found = len(values_by_rank), dict[int, str]()
    for name in sorted(set.intersection(*map(set, values_by_rank.values()))):
        values = {rank: each[name] for rank, each in values_by_rank.items()}
        if not name.startswith(own) or not all(map(str.isdecimal, values.values())):
            continue
        *_, second, highest = sorted(map(int, values.values()))
        lowest = min(map(int, values.values()))
        if second < highest <= lowest + world and lowest >= world and not _NO_ROUND.search(name):
            rank = next(rank for rank, value in values.items() if int(value) == highest)
            found[rank] = f"`{name}` ({highest}, the others at most {second})"
    return found


# --- rules that use connections between ranks


def _socket_key(socket: TcpConnection, machine: str, *, swapped: bool = False) -> tuple[str, ...]:
    """Return both ends of a connection, and the machine if the connection is a loopback connection."""
    here, there = f"{socket['address']}:{socket['port']}", f"{socket['peer']}:{socket['peer_port']}"
    inside = machine if socket["peer"].startswith(_LOOPBACK) else ""
    return (there, here, inside) if swapped else (here, there, inside)


def _find_reads(hang: HangAnalysis) -> dict[int, int]:
    """Return the rank from which each rank reads on a connection without data."""
    return {
        rank: peer
        for rank, (socket, peer) in hang.awaited_sockets.items()
        if peer is not None and peer != rank and not socket["unread"]
    }


def _find_common_server(hang: HangAnalysis, ranks: Collection[int]) -> int | None:
    """Return the rank from which several ranks read; `None` if they do not all read from the same other rank."""
    reads = _find_reads(hang)
    servers = {reads.get(rank) for rank in ranks}
    server = servers.pop() if len(ranks) > 1 and len(servers) == 1 else None
    return None if server in ranks else server


def _find_awaited_client(hang: HangAnalysis, server: int) -> int | None:
    """Return the only rank for whose data a thread of a rank waits; `None` if there is no such rank, or several."""
    clients = {
        peer: socket
        for rank, socket, peer in hang.sockets
        if rank == server != peer and "awaited_by_thread" in socket and not socket["unread"]
    }
    client, socket = clients.popitem() if len(clients) == 1 else (None, None)
    if client is None or socket is None or is_computing(hang.snapshots[server]):
        return None
    awaited, peer = hang.awaited_sockets.get(client, (None, None))
    if awaited is None or peer != server:
        return client
    # This client may have sent its whole request. If the server accepts no other client, it wants more of this one.
    is_same = (awaited["port"], awaited["peer_port"]) == (socket["peer_port"], socket["port"])
    has_others = any(other == server and rank != client for rank, other in _find_reads(hang).items())
    return client if is_same and has_others else None


def _judge_client(hang: HangAnalysis, client: int, server: int, effect: str = "") -> Verdict:
    """Judge the rank for whose data the server of the others waits."""
    waiting = hang.snapshots.keys() - {client}
    return hang.build_verdict(
        Fault.NOT_JOINED,
        Confidence.LIKELY,
        f"{hang.describe([client])} has not sent all data for which a thread of rank {server} waits, "
        f"and {format_waiting(waiting)}{effect}",
        [client],
    )


def _find_lock_holder(hang: HangAnalysis, ranks: Collection[int]) -> int | None:
    """Return the rank that took the lock of a file for which all these ranks wait; `None` if there is none.

    The rank itself may wait for the lock too, if a process that it started has inherited the file.
    """
    owners = {
        (hang.machines[rank], pid): rank
        for rank, snapshot in hang.snapshots.items()
        for pid in (snapshot.pid, *(child["pid"] for child in snapshot.children))
    }
    holders = {(hang.machines[rank], hang.snapshots[rank].lock_holder) for rank in ranks}
    machine, pid = holders.pop() if len(holders) == 1 else ("", None)
    return None if pid is None else owners.get((machine, pid))


def _find_sends(hang: HangAnalysis) -> dict[int, int]:
    """Return the rank to which each rank sends on a full connection, whose other end does not read."""
    sockets = hang.sockets
    unread = {(peer, rank) for rank, socket, peer in sockets if socket["unread"]}
    full = ((rank, peer) for rank, socket, peer in sockets if socket["unacked"])
    return {rank: peer for rank, peer in full if peer is not None and (rank, peer) in unread}


def _judge_by_sockets(hang: HangAnalysis) -> Verdict | None:
    """Judge ranks that communicate by their own sockets. Other ranks read from the culprit, which reads from none."""
    if collectives.has_collective_counts(hang.snapshots):
        return None
    sockets, reads = hang.sockets, _find_reads(hang)
    for verb, peers in (("read from", reads), ("send to", _find_sends(hang))):
        cycle = sorted(rank for rank in peers if _is_in_cycle(peers, rank))
        if cycle:
            texts = {rank: f"it waits to {verb} rank {peers[rank]}" for rank in cycle}
            summary = f"{format_ranks(cycle)} wait to {verb} each other"
            return hang.build_verdict(Fault.DEADLOCK, Confidence.LIKELY, summary, cycle, texts.__getitem__)
    if not set(reads.values()) - set(reads):
        return None
    free = sorted(rank for rank in hang.snapshots if rank not in reads)
    # A server that waits for a connection misses the ranks that have none to it.
    servers = [rank for rank in free if rank in reads.values() and is_listening(hang.snapshots[rank])]
    linked = {rank for rank, _, peer in sockets if peer in servers} | {
        peer for rank, _, peer in sockets if rank in servers
    }
    absent = [rank for rank in free if servers and rank not in servers and rank not in linked]
    # A rank that reads from an unknown peer is not the rank that others wait for.
    busy = [rank for rank in free if not is_waiting_for_network(hang.snapshots[rank])]
    named = absent or [rank for rank in busy if rank not in servers] or busy or free
    client = _find_awaited_client(hang, named[0]) if len(named) == 1 else None
    if client is not None:
        return _judge_client(hang, client, named[0])
    missed = f"has no connection to {format_ranks(servers)}" if absent else "sent no data"
    for_it = "" if absent else " for it"
    return hang.build_verdict(
        classify_missing_ranks(hang, named),
        Confidence.LIKELY if len(named) == 1 else Confidence.AMBIGUOUS,
        f"{hang.describe(named)} {missed}, and {format_waiting(reads)}{for_it}{hang.describe_reason(named)}",
        named,
    )


def _is_in_cycle(reads: Mapping[int, int], rank: int) -> bool:
    """Return whether a rank waits, directly or through other ranks, for itself."""
    at: int | None = rank
    for _ in reads:
        at = reads.get(at) if at is not None else None
        if at == rank:
            return True
    return False


# --- rules that use stacks and wait channels


def _judge_by_stacks(hang: HangAnalysis) -> Verdict | None:
    """Judge without collective numbers. Most ranks wait in the same operation, and a few are in other code."""
    counted = collectives.has_collective_counts(hang.snapshots)
    waits = [rank for rank, snapshot in hang.snapshots.items() if is_waiting_for_peers(snapshot)]
    if not waits and not counted:
        waits = [rank for rank, snapshot in hang.snapshots.items() if is_waiting_for_network(snapshot)]
    others = [r for r, at in hang.positions.items() if r not in waits and at.activity is not Activity.UNKNOWN]
    if waits and others and len(others) <= len(waits):
        others = _remove_polling(hang, others)
        few = len(others) == 1 or 2 * len(others) < len(waits)
        reason = hang.describe_reason(others)
        return hang.build_verdict(
            classify_missing_ranks(hang, others),
            Confidence.LIKELY if few else Confidence.AMBIGUOUS,
            f"{hang.describe(others)} is at another position than all other ranks; {format_waiting(waits)}{reason}",
            others,
        )
    places: dict[int, tuple[str | None, ...]] = {
        rank: (position.where, position.op) for rank, position in hang.positions.items()
    }
    if len(set(places.values())) == 1:  # Then the calls that lead to this line may differ.
        places = {rank: list_user_lines(snapshot) for rank, snapshot in hang.snapshots.items()}
    counts = Counter(places.values())
    rare = [rank for rank, place in places.items() if counts[place] == 1]
    if len(places) < 3 or len(rare) != 1 or max(counts.values()) < len(places) - 1:
        return None
    waits_too = hang.positions[rare[0]].activity in WAITS
    if waits_too and counted:
        return None  # The collective numbers agree. The rank may be in an operation of another group.
    if rare == [0] and all(map(is_polling, hang.snapshots.values())):
        return hang.build_verdict(
            Fault.NOT_JOINED,
            Confidence.AMBIGUOUS,
            "all ranks check something again and again, rank 0 at another position than the others: "
            "it may wait for one of them, or they for it",
            hang.snapshots,
        )
    return hang.build_verdict(
        Fault.MISMATCH if waits_too else classify_missing_ranks(hang, rare),
        Confidence.LIKELY,
        f"{hang.describe(rare)} is at another position than all other ranks{hang.describe_reason(rare)}",
        rare,
    )


def _judge_by_kernel(hang: HangAnalysis) -> Verdict | None:
    """Judge without collective numbers. Most ranks have one kernel wait channel, and a few have another.

    Ranks with stacks are judged only if all of them wait for a process that they started. The first such process
    counts then.
    """
    snapshots = hang.snapshots
    has_children = all(map(is_waiting_for_child, snapshots.values()))
    is_clear = has_children or not any(snapshot.frames for snapshot in snapshots.values())
    if len(snapshots) < 3 or not is_clear or collectives.has_collective_counts(snapshots):
        return None
    describe_wait = _describe_child if has_children else describe_kernel_wait
    waits = {rank: describe_wait(snapshot) or snapshot.wchan or "" for rank, snapshot in snapshots.items()}
    (usual, most), *rest = Counter(waits.values()).most_common()
    odd = [rank for rank, wait in waits.items() if wait != usual]
    if not rest or most < 2 or most < len(odd):
        return None
    what, reason = "another wait channel", hang.describe_reason(odd)
    if has_children:
        what, reason = "a child process in another state", f": {waits[odd[0]]}" if len(odd) == 1 else ""
    return hang.build_verdict(
        classify_missing_ranks(hang, odd),
        Confidence.LIKELY if len(odd) == 1 and describe_wait(snapshots[odd[0]]) else Confidence.AMBIGUOUS,
        f"{format_ranks(odd)} has {what} than the others{reason}",
        odd if most > len(odd) else waits,
        (lambda rank: waits[rank]) if has_children else None,
    )


def _describe_child(snapshot: RankSnapshot) -> str:
    child = snapshot.children[0]
    wait = describe_wchan(child["wchan"]).removeprefix("it ") or child["wchan"] or "runs"
    return f"its child process {wait}"


# --- rules for hangs in which no rank is missing


def _judge_ranks_at_one_place(hang: HangAnalysis) -> Verdict | None:
    """Judge ranks that are all at one position, or all wait for peers."""
    cut = sorted({node.node for node in hang.evidence.nodes.values() if node.link == "unreachable"})
    activities = {position.activity for position in hang.positions.values()}
    if hang.unobserved and not cut and activities <= set(WAITS):
        return hang.build_undetermined_verdict("all examined ranks wait for the others")
    positions = {(position.where, position.op) for position in hang.positions.values()}
    differing = _find_differing_value(hang) if len(positions) == 1 and not hang.unobserved else None
    if differing is not None and (activities <= set(ELSEWHERE) or activities == {Activity.SETTING_UP}):
        rank, value = differing
        return hang.build_verdict(
            Fault.MISMATCH,
            Confidence.LIKELY,
            f"all ranks are at {positions.pop()[0]}, {hang.evidence.name_ranks([rank])} with another value of {value} "
            "than the others",
            [rank],
        )
    if len(positions) == 1 and activities <= set(ELSEWHERE):
        if all(map(is_waiting_outside, hang.snapshots.values())):
            return _judge_blocker(hang, hang.snapshots) or _describe_external_wait(hang)
        return hang.build_verdict(
            classify_missing_ranks(hang, hang.snapshots),
            Confidence.LIKELY,
            f"all ranks are at {positions.pop()[0]}{hang.describe_reason(hang.snapshots)}",
            hang.snapshots,
        )
    return _judge_links(hang, activities, cut) if activities & set(WAITS) else None


def _find_printed_error(tail: Sequence[str]) -> str:
    """Return the last line of an output that reports an error; "" without such a line."""
    return next((line.strip()[:_MAX_ERROR] for line in reversed(tail) if _ERROR.search(line)), "")


def _describe_external_wait(hang: HangAnalysis) -> Verdict:
    """Return a verdict on ranks that all wait at one line for the same thing outside of the run.

    No rank is named, unless a single rank has printed an error.
    """
    if hang.unobserved:
        return hang.build_undetermined_verdict("all examined ranks wait at the same line")
    peers = {_name_peer(socket, peer) for socket, peer in hang.awaited_sockets.values()}
    awaited = f"for an answer of {peers.pop()}" if len(peers) == 1 else "for something"
    polls = all(map(is_polling, hang.snapshots.values()))
    reasons = {"it polls" if polls else describe_kernel_wait(snapshot) for snapshot in hang.snapshots.values()}
    how = f" ({reasons.pop()})" if len(reasons) == 1 else ""
    position = next(iter(hang.positions.values()))
    wait = f"all ranks wait at {position.where} in {position.op} {awaited}{how}"
    errors = {rank: error for rank, snapshot in hang.snapshots.items() if (error := _find_printed_error(snapshot.tail))}
    has_other_output = any(snapshot.tail for rank, snapshot in hang.snapshots.items() if rank not in errors)
    if len(errors) == 1 and has_other_output:
        (error,) = errors.values()
        summary = f"{wait}, and only {hang.evidence.name_ranks(errors)} has printed an error: {error}"
        return hang.build_verdict(
            Fault.EXTERNAL_WAIT, Confidence.LIKELY, summary, errors, lambda _: f"it has printed: {error}"
        )
    return Verdict(
        kind=ProblemKind.HANG,
        cls=Fault.EXTERNAL_WAIT,
        confidence=Confidence.LIKELY,
        summary=f"{wait}, and no rank differs: look for its cause outside of the ranks, such as a server or a file",
        waiting=hang.list_waiting(hang.snapshots),
        missing_evidence=hang.missing_evidence,
        next_commands=(f"clusterctl stacks {hang.evidence.run}", f"clusterctl logs {hang.evidence.run}"),
    )


def _judge_links(hang: HangAnalysis, activities: Collection[Activity], cut: Sequence[str]) -> Verdict:
    """Judge the network. Connections without acknowledgements show between which nodes the network fails."""
    by_address = {address: node.node for node in hang.evidence.nodes.values() for address in node.addresses}
    lost: Counter[tuple[str, str]] = Counter()
    worst: dict[tuple[str, str], TcpConnection] = {}
    for rank, socket, peer in [] if set(activities) == {Activity.SETTING_UP} else hang.sockets:
        node, other = hang.nodes[rank], hang.nodes[peer] if peer is not None else by_address.get(socket["peer"])
        if socket["lost"] >= _MIN_RETRANSMISSIONS and other is not None and other != node:
            pair = (min(node, other), max(node, other))
            lost[pair] += socket["lost"]
            worst[pair] = max(worst.get(pair, socket), socket, key=lambda one: one["lost"])
    pairs = [pair for pair, _ in lost.most_common()]
    in_step = collectives.are_in_same_collective(hang.snapshots)
    cls = Fault.NETWORK
    if pairs:
        socket = worst[pairs[0]]
        more = f", and between {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
        sent = f"{socket['unacked']} bytes were resent {socket['lost']} times without an acknowledgement"
        summary = f"no data passes between {' and '.join(pairs[0])}{more}: {sent}; no rank is missing"
    elif set(activities) == {Activity.SETTING_UP}:
        cls = Fault.STORE_LOST
        summary = "all ranks wait while they set up the process group: the store, or a peer, does not answer"
    elif cut:
        summary = f"all ranks wait in the same operation, and {', '.join(cut)} cannot be reached"
    elif in_step:
        summary = "all ranks have joined the same collective, and it does not end: check the network"
    else:
        cls, summary = Fault.ALL_JOINED, "all ranks wait in collectives, and none is missing"
    reasons = {
        node: "the other node does not acknowledge data of its ranks" for pair in pairs[:MAX_NAMED] for node in pair
    }
    reasons |= {node: hang.evidence.nodes[node].why for node in cut}
    return Verdict(
        kind=ProblemKind.HANG,
        cls=cls,
        confidence=Confidence.LIKELY if len(pairs) == 1 and in_step else Confidence.AMBIGUOUS,
        summary=summary,
        culprits=tuple(Culprit(rank=None, node=node, evidence=why) for node, why in reasons.items()),
        waiting=hang.list_waiting(hang.snapshots),
        missing_evidence=hang.missing_evidence,
        next_commands=("clusterctl health --check net", f"clusterctl stacks {hang.evidence.run}"),
    )
