"""Whose end began it: the first that leaves or breaks the group, whatever its exit code. Its peers die of it.

If all that failed say that they lost a peer: whom they missed, what that one said itself, what was counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterctl.config.worker_variables import OWNED_NAMES, find_launcher, find_substitute
from clusterctl.formatting import fold_ranks
from clusterctl.why import headline_patterns
from clusterctl.why.evidence import Evidence, Rank, RankExit
from clusterctl.why.headline import find_last_words
from clusterctl.why.stack_position import is_user_code, short_path
from clusterctl.why.verdict import MAX_NAMED, Class, Confidence, Culprit, Kind, Verdict, Waiting, ranks_phrase, shorten

_OUT_OF_MEMORY = "a kernel that lacked memory has `oom-kill` or `Out of memory: Killed process` in its log of that time"
_GPU_MEMORY = re.compile(r"\b(?:CUDA|HIP|ROCm|CUBLAS\w*)\b|\bGPU \d", re.I)
_MISSING_VARIABLE = re.compile(
    r"KeyError: ['\"](\w+)['\"]|[Ee]nvironment variable ['\"`]?(\w+)['\"`]? (?:expected|not found|is not set)"
    r"|\b(\w+): unbound variable"
)
_BUS_ERROR = "/dev/shm was full, or a file that was mapped into memory was cut short or is gone"
_TRACEBACK_FRAME = re.compile(
    r'^(?:> )?\s*(?:\[?rank\d+\]?:?\s*)?File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$', re.M
)


def classify_exit(end: RankExit) -> Class:
    """Return the class of what ended a rank by itself."""
    if end.oom:
        return Class.OUT_OF_MEMORY
    if end.well:
        return Class.EXITED_EARLY
    if end.secondary and end.cls in (None, Class.UNKNOWN):
        return Class.PEER_LOST
    return end.cls or Class.UNKNOWN


def is_certain_cause(end: RankExit) -> bool:
    """Return whether it is known why a rank ended; lines of its output before that may speak of anything."""
    return bool(end.oom or (end.signal and end.signal != "SIGBUS") or end.is_recognised)


def innermost_user_line(traceback: str | None) -> tuple[str | None, str | None]:
    """Return the innermost line of the user's code in a traceback, and the function there."""
    frames = list(_TRACEBACK_FRAME.finditer(traceback or ""))
    own = [frame for frame in frames if is_user_code(frame["file"])] or frames
    if not own:
        return None, None
    return f"{short_path(own[-1]['file'])}:{own[-1]['line']}", own[-1]["function"]


def describe_exit(end: RankExit) -> str:
    """Return in words how a rank ended."""
    if end.oom:
        return end.message
    if end.signal is not None:
        return f"ended by {end.signal}" + (f": {end.message}" if end.message and end.signal not in end.message else "")
    if end.exit_code is None:
        return "it ended, and nobody saw how"
    if end.well:
        last = find_last_words(end.tail)
        words = f"; its last words: {shorten(last)}" if last else ""
        if end.message:
            words = f", and its last output is a traceback: {shorten(end.message)}"
        return f"it ended with 0 while others went on{words}"
    if end.failed_inside:
        return f"{shorten(end.message)}, although its command ended with 0"
    return shorten(end.message) or f"exit {end.exit_code} without a word"


def find_advice(end: RankExit) -> str:
    """Return what the words of an end do not say, and a person should know; empty where there is nothing."""
    if classify_exit(end) is Class.SHARED_MEMORY and not headline_patterns.SHARED_MEMORY.search(end.message):
        return _BUS_ERROR
    found = _MISSING_VARIABLE.search(end.message)
    name = next(filter(None, found.groups()), "") if found is not None else ""
    launcher = find_launcher(name)
    if name in OWNED_NAMES:
        return (
            f"clusterctl sets `{name}` for every worker: `job.command`, `job.prologue`, `sudo` or a container "
            "has replaced or removed it"
        )
    if launcher is None:
        return ""
    own = find_substitute(name)
    remedy = f"read `{own}` instead" if own is not None else "set it in `env`"
    return f"`{name}` is a variable of {launcher.name}, and nobody sets it here: {remedy}"


def next_command(cls: Class, run: str, rank: int | None, node: str | None, message: str = "") -> tuple[str, ...]:
    """Return what to type next; `message` is what the rank said."""
    logs = f"clusterctl logs {run} --rank {rank}" if rank is not None else f"clusterctl logs {run}"
    at = f" --nodes {node}" if node is not None else ""
    match cls:
        case Class.OUT_OF_MEMORY if _GPU_MEMORY.search(message):
            return (f"clusterctl exec{at} -- {_gpu_tool(message)}", _MORE_GPU_MEMORY, logs)
        case Class.OUT_OF_MEMORY:
            return (logs, f"clusterctl exec{at} -- free -h")
        case Class.DISK_FULL:
            return (f"clusterctl exec{at} -- df -h", "clusterctl clean")
        case Class.NO_INPUT:
            return ("answer it beforehand, by an option in `job.args` or a variable in `env`", logs)
        case Class.SHARED_MEMORY:
            return (f"clusterctl exec{at} -- df -h /dev/shm", logs)
        case Class.COMMAND_NOT_FOUND:
            return (f"clusterctl exec{at} --in-job --shell 'echo $PATH'", logs)
        case Class.KILLED:
            return (
                f"clusterctl exec{at} --shell 'dmesg -T | grep -iE \"oom|out of memory\" | tail'",
                _OUT_OF_MEMORY,
                logs,
            )
        case Class.MISSING_MODULE:
            return (f"clusterctl health{at} version.python", logs)
        case Class.MISSING_FILE | Class.NO_PERMISSION:
            return (logs, f"clusterctl exec{at} -- ls -la")
        case Class.GPU | Class.UNHEALTHY | Class.NODE_LOST:
            return (f"clusterctl health{at}",)
        case Class.PORT_TAKEN:
            return (f"clusterctl exec{at} -- ss -ltnp",)
        case _:
            return (logs,)


_MORE_GPU_MEMORY = (
    "if nobody else uses the GPU: a smaller batch, or `env: {PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True}` "
    "where much is reserved and not allocated"
)


def _gpu_tool(message: str) -> str:
    return "rocm-smi" if re.search(r"\bHIP\b|ROCm", message) else "nvidia-smi"


_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")


def describe_ranks(ranks: Sequence[Rank]) -> str:
    """Return ranks for a sentence, with the node where it is one."""
    return ranks_phrase((rank.rank for rank in ranks), (rank.node for rank in ranks))


def make_culprits(named: Sequence[tuple[Rank, RankExit]]) -> tuple[Culprit, ...]:
    """Return ranks as those that began it, each with its line and its words."""
    found = []
    for rank, end in sorted(named, key=lambda each: each[0].rank)[:MAX_NAMED]:
        line, function = innermost_user_line(end.traceback)
        found.append(Culprit(rank=rank.rank, node=rank.node, where=line, op=function, evidence=describe_exit(end)))
    return tuple(found)


def list_peer_victims(ranks: Sequence[Rank]) -> tuple[Waiting, ...]:
    """Return ranks as those that ended because of others."""
    if not ranks:
        return ()
    return (Waiting(ranks=fold_ranks([rank.rank for rank in ranks]), where=None, op="lost a peer"),)


def normalize_message(message: str) -> str:
    """Return a message without what differs between ranks that fail alike: numbers and addresses."""
    return _DIGITS.sub("#", message)


_NOTICED_S = 120.0
"""Peers of a rank that ends notice it at their next collective: later than this, another reason may be theirs."""


def judge_crash(case: Evidence) -> Verdict | None:
    """Return who failed by itself first; `None` where nobody did."""
    ended = [(rank, rank.end) for rank in case.ranks if rank.end is not None and not rank.end.stopped]
    failed = [(rank, end) for rank, end in ended if not end.well]
    alive = [rank for rank in case.ranks if rank.end is None]
    if not failed:
        return None  # those that ended with 0 while others wait are another matter: `left`
    left = [(rank, end) for rank, end in ended if end.well]
    own = [(rank, end) for rank, end in failed if not end.secondary and classify_exit(end) is not Class.PEER_LOST]
    if own:
        return _of_own(case, own, failed)
    if left:
        return _left_early(case, left, failed, alive)
    return judge_peer_losses(case, failed)


def _of_own(case: Evidence, own: Sequence[tuple[Rank, RankExit]], failed: Sequence[tuple[Rank, RankExit]]) -> Verdict:
    """Ranks that failed for a reason of their own: the first; or all, where they failed alike."""
    first, end = min(own, key=lambda each: (each[1].latest, each[0].rank))
    cls = classify_exit(end)
    if cls is Class.MISMATCH:
        return _unlike(case, first, [rank for rank, _ in failed])
    alike = [
        (r, e)
        for r, e in own
        if classify_exit(e) is cls and normalize_message(e.message) == normalize_message(end.message)
    ]
    rivals = [r for r, e in own if r.rank != first.rank and _may_precede((r, e), (first, end))]
    strangers = [r for r in rivals if r.rank not in {a.rank for a, _ in alike}]
    named = alike if len(alike) > 1 and len(alike) == len(own) else [(first, end)]
    confidence = _confidence(
        cls,
        certain=(not rivals or len(named) == len(own)) and is_certain_cause(end),
        doubtful=bool(strangers),
    )
    if confidence is Confidence.AMBIGUOUS:
        named = [(r, e) for r, e in own if r.rank == first.rank or r in strangers]
    who = describe_ranks([rank for rank, _ in named])
    others = [r for r, _ in failed if r.rank not in {n.rank for n, _ in named}]
    summary = f"{who} {'failed alike' if len(named) > 1 and confidence is not Confidence.AMBIGUOUS else 'failed first'}"
    return Verdict(
        kind=Kind.START if cls is Class.NOT_STARTED else Kind.CRASH,
        cls=cls,
        confidence=confidence,
        summary="; ".join(filter(None, (f"{summary}: {describe_exit(end)}", find_advice(end)))),
        culprits=make_culprits(named),
        waiting=list_peer_victims(others),
        next=next_command(cls, case.run, first.rank, first.node, end.message),
    )


def _may_precede(one: tuple[Rank, RankExit], other: tuple[Rank, RankExit]) -> bool:
    """Whether one end may have come before the other: by the clock of their node where they share one."""
    (rank, end), (other_rank, other_end) = one, other
    if rank.node == other_rank.node and end.on_node_clock is not None and other_end.on_node_clock is not None:
        return end.on_node_clock[0] <= other_end.on_node_clock[1]
    return end.earliest <= other_end.latest


def _unlike(case: Evidence, first: Rank, failed: Sequence[Rank]) -> Verdict:
    """A rank got what does not fit what it brought: it is one of two, and which is wrong is not told by its end."""
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.MISMATCH,
        confidence=Confidence.AMBIGUOUS,
        summary=f"ranks brought to one collective what does not fit; {describe_ranks([first])} noticed it first",
        waiting=(Waiting(ranks=fold_ranks([rank.rank for rank in failed]), where=None, op="noticed it"),),
        next=("clusterctl up --set env.TORCH_DISTRIBUTED_DEBUG=DETAIL", f"clusterctl logs {case.run}"),
    )


def _left_early(
    case: Evidence,
    left: Sequence[tuple[Rank, RankExit]],
    failed: Sequence[tuple[Rank, RankExit]],
    alive: Sequence[Rank],
) -> Verdict:
    """Ranks that ended with 0 while others were not through: these lost their peers, or wait for them."""
    first_loss = min((end.latest for _, end in failed), default=None)
    early = [(r, e) for r, e in left if first_loss is None or e.earliest <= first_loss]
    named = early or list(left)
    certain = bool(early) and (
        first_loss is None or all(e.latest < first_loss <= e.latest + _NOTICED_S for _, e in named)
    )
    # One that goes on where most are through may have done a step too many.
    many = len(named) > len(failed) + len(alive)
    rest = [(r, e) for r, e in failed] if many else []
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.EXITED_EARLY,
        confidence=Confidence.AMBIGUOUS if many else Confidence.CERTAIN if certain else Confidence.LIKELY,
        summary=f"{describe_ranks([rank for rank, _ in named])} ended with 0 while others were not through",
        culprits=make_culprits([*named, *rest]),
        waiting=list_peer_victims([r for r, _ in failed] or alive),
        next=next_command(Class.EXITED_EARLY, case.run, named[0][0].rank, None),
    )


def _confidence(cls: Class, *, certain: bool, doubtful: bool) -> Confidence:
    if doubtful:
        return Confidence.AMBIGUOUS
    if cls in (Class.UNKNOWN,):
        return Confidence.LIKELY
    return Confidence.CERTAIN if certain else Confidence.LIKELY


_ABSENT_CLASSES = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
_GAVE_UP_TEXT = re.compile(r"timed out|timeout", re.IGNORECASE)


def judge_peer_losses(case: Evidence, failed: Sequence[tuple[Rank, RankExit]]) -> Verdict:
    """Return whom ranks lost that all say that they lost a peer.

    That one may have been stopped with them before it could end by itself: then its own last words tell, or whom the
    others missed, or who had begun nothing while the others waited; else the node whose address they name.
    """
    unended = [(rank, rank.end) for rank in case.ranks if rank.end is not None and rank.end.stopped]
    own = [(rank, end) for rank, end in unended if _has_a_reason(end)]
    if own:
        return _stopped_before_it_ended(case, own, failed)
    bereft = [*failed, *((rank, end) for rank, end in unended if end.secondary)]
    missed = _find_missed_ranks(case, bereft)
    return _not_joined(case, missed, bereft) if missed else _blame_node(case, failed)


def _has_a_reason(end: RankExit) -> bool:
    """Whether what a rank had written before it was stopped is the end of a rank that fails by itself."""
    return bool(end.traceback) and not end.secondary and classify_exit(end) is not Class.PEER_LOST


def _stopped_before_it_ended(
    case: Evidence, own: Sequence[tuple[Rank, RankExit]], failed: Sequence[tuple[Rank, RankExit]]
) -> Verdict:
    """Ranks that had said why they fail, and whose peers noticed before they were gone."""
    first, end = own[0]
    alike = all(normalize_message(other.message) == normalize_message(end.message) for _, other in own)
    return Verdict(
        kind=Kind.CRASH,
        cls=classify_exit(end),
        confidence=Confidence.LIKELY if alike else Confidence.AMBIGUOUS,
        summary=f"{describe_ranks([rank for rank, _ in own])} failed: {describe_exit(end)}; "
        f"{'it was' if len(own) == 1 else 'they were'} stopped with its peers, which lost it, before it was gone",
        culprits=make_culprits(own),
        waiting=list_peer_victims([rank for rank, _ in failed]),
        next=next_command(classify_exit(end), case.run, first.rank, first.node, end.message),
    )


def _find_missed_ranks(case: Evidence, bereft: Sequence[tuple[Rank, RankExit]]) -> list[Rank]:
    """Return for whom ranks waited until the first of them gave up, and thereby ended the others.

    Whom they name; else who has lost nobody; else who, when last counted, was in no collective while the others were.
    """
    texts = [f"{end.message}\n{end.tail}" for _, end in bereft]
    heard = [*texts, *(rank.end.tail for rank in case.ranks if rank.end is not None and rank.end.stopped)]
    numbers = {
        int(number) for text in heard for found in _ABSENT_CLASSES.findall(text) for number in re.findall(r"\d+", found)
    }
    named = [rank for rank in case.ranks if rank.rank in numbers]
    if named or not any(map(_GAVE_UP_TEXT.search, texts)):
        return named
    known = {rank.rank for rank, _ in bereft}
    others = [rank for rank in case.ranks if rank.rank not in known]
    return others if len(others) < len(known) else _find_idle_ranks(case, known)


def _find_idle_ranks(case: Evidence, bereft: set[int]) -> list[Rank]:
    """Return who was in no collective while most were, and all that lost somebody; nobody where not all are counted."""
    if any(rank.counted is None for rank in case.ranks):
        return []
    idle = [rank for rank in case.ranks if all(ended >= begun for begun, ended in (rank.counted or {}).values())]
    return idle if 2 * len(idle) < len(case.ranks) and bereft.isdisjoint(rank.rank for rank in idle) else []


def _not_joined(case: Evidence, missed: Sequence[Rank], bereft: Sequence[tuple[Rank, RankExit]]) -> Verdict:
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.NOT_JOINED,
        confidence=Confidence.LIKELY if len(missed) == 1 else Confidence.AMBIGUOUS,
        summary=f"{describe_ranks(missed)} did not join a collective, and "
        f"{ranks_phrase(rank.rank for rank, _ in bereft)} gave up waiting",
        culprits=tuple(
            Culprit(rank=rank.rank, node=rank.node, evidence="its peers waited for it in vain") for rank in missed
        ),
        waiting=list_peer_victims([rank for rank, _ in bereft]),
        next=next_command(Class.NOT_JOINED, case.run, missed[0].rank, missed[0].node),
    )


def _blame_node(case: Evidence, failed: Sequence[tuple[Rank, RankExit]]) -> Verdict:
    """Nothing tells whom they lost, but perhaps where it was."""
    accused = _find_accused_node(case, failed)
    first, end = min(failed, key=lambda each: (each[1].latest, each[0].rank))
    if accused is not None:
        return Verdict(
            kind=Kind.CRASH,
            cls=Class.PEER_LOST,
            confidence=Confidence.AMBIGUOUS,
            summary=f"all ranks lost a peer; they name {accused}, and nobody there says why",
            culprits=_list_ranks_on(case, accused),
            waiting=list_peer_victims([r for r, _ in failed if r.node != accused]),
            next=next_command(Class.NODE_LOST, case.run, None, accused),
        )
    # A victim is never named alone: whom it lost may have been stopped by us before it ended by itself.
    named = failed if len(failed) > 1 else []
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.PEER_LOST,
        confidence=Confidence.AMBIGUOUS,
        summary=f"{describe_ranks([first])} was the first to lose a peer: {describe_exit(end)}",
        culprits=make_culprits(named),
        waiting=() if named else list_peer_victims([first]),
        next=next_command(Class.PEER_LOST, case.run, first.rank, first.node),
    )


def _list_ranks_on(case: Evidence, node: str) -> tuple[Culprit, ...]:
    """Return all ranks of a node, also those that we stopped before they could say a word; the node where it is one."""
    there = [rank for rank in case.ranks if rank.node == node]
    if len(there) < 2:
        return (Culprit(rank=None, node=node, evidence="its peers lost it"),)
    return tuple(
        Culprit(
            rank=rank.rank,
            node=node,
            evidence="its peers lost its node"
            if rank.end is None or rank.end.stopped or rank.end.well
            else describe_exit(rank.end),
        )
        for rank in there[:MAX_NAMED]
    )


def _find_accused_node(case: Evidence, failed: Sequence[tuple[Rank, RankExit]]) -> str | None:
    """Return the one node of which ranks of other nodes say that they lost it."""
    by_address = {address: node.node for node in case.nodes.values() for address in node.addresses}
    named: set[str] = set()
    for rank, end in failed:
        text = f"{end.message}\n{end.tail}"
        named |= {node for address, node in by_address.items() if node != rank.node and f"[{address}]" in text}
    return named.pop() if len(named) == 1 else None
