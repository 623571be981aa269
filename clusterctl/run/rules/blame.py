"""Which of several exits came first, and is it to blame? Pure.

When one rank dies, its peers die within a second, saying that a connection closed. Those texts mark a secondary death;
it is never blamed while an earlier or an unexplained one is there. Exits are compared as intervals, on the clock of
their node where they are of one node, else on the head's; where they overlap and the texts do not decide, the answer is
"ambiguous".
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clusterctl.agent.protocol.record_types import LeftoverProcess, WorkerError
from clusterctl.formatting import duration_text, signal_name
from clusterctl.why import headline
from clusterctl.why.crash import find_user_position
from clusterctl.why.headline_patterns import PEER_LOSS
from clusterctl.why.verdict import Class, Confidence

_ADDRESS = re.compile(r"(?:\[(?P<in>[0-9a-fA-F.:%\w]+)\]|(?P<plain>\d+\.\d+\.\d+\.\d+)):\d+")
_WARNING = re.compile(r"\[[IW]\d{3,4} ")
"""What runtimes in C++ print of no consequence, in the form of glog: no reason for an end."""
_PREFIX = re.compile(r"^\[?rank\d+\]?:? ?")
"""What torch sets before each line of a traceback."""
_TRACEBACK = re.compile(r"^(?:\[?rank\d+\]?:? ?)?Traceback \(most recent call last\):", re.MULTILINE)

BACKGROUND_MAX_S = 30.0
"""A rank that ends with 0 in this time and leaves something at work has put its job into the background."""
_OF_A_LAUNCHER = re.compile(r"\b(?:ChildFailedError|CalledProcessError|ProcessExitedException)\b|: exit code \d+$")
_BARE_EXIT = re.compile(r"(?:SystemExit: -?\d+|os\._exit\(-?\d+\))$")
_IDLE = ("bash", "sh", "dash", "zsh", "sleep", "tail", "tee", "cat", "watch", "ssh", "sshd")
"""Programs that only wait for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """A worker's end that was not asked for.

    Attributes:
        earliest: The head's clock (seconds) before which it was still alive, by the least that this clock may show.
        latest: When it was gone, by the most that the head's clock may show.
        on_node_clock: The same two on the clock of its node, which no doubt about the head's makes wider.
    """

    rank: int
    node: str
    exit_code: int | None
    signal: int | None
    oom: str | None
    error: WorkerError | None
    tail: str
    earliest: float
    latest: float
    on_node_clock: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What ended a run.

    Attributes:
        kind: exit, signal, oom, unknown (nobody saw it), exited_early, failed_inside (its Python, below a shell that
            ended with 0), stopped (we ended it, after it had printed why it fails), left_work (what it left running was
            the work), node_lost, start_failed; or the rule that ended the run: stalled, time_limit, unhealthy,
            port_taken.
        message: One line: the headline of the worker's last words (`why.headline`).
        traceback: The worker's own, where it left one.
        cls: What `why` calls it; `None` where no worker's end is the cause.
        is_recognised: The message was recognised as the cause of an end; else it is what was said last.
        certain: No other exit may have come first.
    """

    kind: str
    node: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    message: str = ""
    traceback: str | None = None
    certain: bool = False
    secondary: bool = False
    cls: Class | None = None
    is_recognised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitAnalysis:
    """What one exit says for itself, worked out once: its texts are searched for it.

    Attributes:
        on_node_clock: When it ended by the clock of its node, as `Exit.on_node_clock`.
        peers: Addresses of those to whom it lost its connection, as far as it names them.
        output: The end of the output of a rank that ended with 0: nobody searches it unless that end is to blame.
    """

    cause: Cause
    earliest: float
    latest: float
    on_node_clock: tuple[float, float] | None = None
    peers: frozenset[str] = frozenset()
    output: str = ""

    def may_precede(self, other: ExitAnalysis) -> bool:
        """Return whether this end may have come before another one."""
        if self.on_node_clock is not None and other.on_node_clock is not None and self.cause.node == other.cause.node:
            return self.on_node_clock[0] <= other.on_node_clock[1]
        return self.earliest <= other.latest


def analyse_exit(exit_: WorkerExit) -> ExitAnalysis:
    """Return what an exit says for itself."""
    heading = _find_headline(exit_)
    cause = _build_cause(exit_, heading)
    peers = _find_peer_addresses(_find_reason_text(exit_, heading)) if cause.secondary else frozenset[str]()
    return ExitAnalysis(
        cause=cause, earliest=exit_.earliest, latest=exit_.latest, on_node_clock=exit_.on_node_clock, peers=peers
    )


def sort_causes(analyses: Sequence[ExitAnalysis]) -> tuple[Cause, ...]:
    """Return the causes of all exits (one at least), the first observed failure on top.

    The top is certain when every other exit is secondary or surely later.
    """
    first, *rest = sorted(analyses, key=lambda v: (v.cause.secondary, v.latest, v.cause.rank))
    rivals = any(v.cause.secondary == first.cause.secondary and v.may_precede(first) for v in rest)
    message = headline.find_last_words(first.output) or first.cause.message
    return (replace(first.cause, message=message, certain=not rivals), *(v.cause for v in rest))


def find_early_exit(
    failed: Sequence[ExitAnalysis], succeeded: Sequence[ExitAnalysis], addresses: Mapping[str, str | None]
) -> Cause | None:
    """Return the rank that ended well and thereby took its peers down, or `None`.

    It must have gone before the first of them failed, they must all have lost a peer, and where they name whom, it must
    be its node. Of several that could be it nobody is blamed.

    Args:
        failed: What the exits of ranks that failed say.
        succeeded: What those of ranks that ended well say.
        addresses: Node to the address at which its peers know it.
    """
    if not failed or not all(v.cause.secondary for v in failed):
        return None
    first = min(failed, key=lambda v: v.latest)
    named = {node for node, address in addresses.items() if any(address in v.peers for v in failed)}
    candidates = [v for v in succeeded if v.may_precede(first) and (not named or v.cause.node in named)]
    if len(candidates) != 1:
        return None
    lost = f"{len(failed)} ranks" if len(failed) > 1 else f"rank {failed[0].cause.rank}"
    message = f"{lost} lost {'their' if len(failed) > 1 else 'its'} connection to it"
    if last := headline.find_last_words(candidates[0].output):
        message = f"{last} ({message})"
    return replace(candidates[0].cause, message=message, traceback=None, certain=not first.may_precede(candidates[0]))


def find_cause_in_output(rank: int, node: str, output: str) -> Cause | None:
    """Return what a rank says of itself that was stopped, by the traceback with which its output ends; else `None`.

    After one that was caught the output goes on: that one says nothing. Behind the last one a rank may tell how it
    cleans up. `output` is the end of what the rank wrote before anybody asked for its end.
    """
    if not _ends_with_traceback(output):
        return None
    exit_ = WorkerExit(
        rank=rank,
        node=node,
        exit_code=1,
        signal=None,
        oom=None,
        error=None,
        tail=output,
        earliest=0.0,
        latest=0.0,
    )
    return _build_cause(exit_, _find_headline(exit_))


def find_failed_before_stop(stopped: Sequence[Cause], failed: Sequence[tuple[ExitAnalysis, str]]) -> tuple[Cause, ...]:
    """Return the ranks that had printed why they fail before they were stopped; none where a failure tells for itself.

    Their peers lost them before they were gone. A traceback that a rank which lost its peer has printed as well was
    caught there, and says nothing.

    Args:
        stopped: What stopped ranks had printed of themselves (`find_cause_in_output`).
        failed: What the exits of ranks that failed say, and their output.
    """
    if not failed or not all(analysis.cause.secondary for analysis, _ in failed):
        return ()
    own = [cause for cause in stopped if not cause.secondary and cause.cls is not Class.PEER_LOST]
    own = [cause for cause in own if not any(cause.message in output for _, output in failed)]
    return tuple(replace(cause, kind="stopped", exit_code=None) for cause in own)


def reports_another_process(error: WorkerError) -> bool:
    """Return whether an error is the one of a launcher: it tells that another process failed, which has said why."""
    return bool(_OF_A_LAUNCHER.search(f"{error.get('message')}\n{error.get('traceback')}"))


def _ends_with_traceback(output: str) -> bool:
    """Return whether a traceback is the last thing that an output tells, but for the end of the program itself."""
    starts = [match.start() for match in _TRACEBACK.finditer(output)]
    lines = output[starts[-1] :].splitlines() if starts else []
    prefix = _rank_prefix_length(lines[0]) if lines else 0
    last = next((i for i, line in enumerate(lines) if i and re.match(r"\S", _strip_rank_prefix(line))), None)
    if starts and last is None:
        return False
    if last is not None and all(_belongs_to_traceback(each, lines[0][:prefix].strip()) for each in lines[last + 1 :]):
        return True
    heading = headline.find_headline(output, exit_code=1)
    return heading.is_recognised and heading.traceback is not None


def find_swallowed_exception(output: str) -> str:
    """Return the exception with whose traceback an output ends, and its line; "" where it ends otherwise."""
    told = headline.find_closing_traceback(output) if output else None
    if told is None:
        return ""
    where = find_user_position(told.traceback).where
    return told.text + (f" ({where})" if where is not None else "")


def _belongs_to_traceback(line: str, prefix: str) -> bool:
    """Return whether a line below an exception belongs to it: torch marks all of them, other lines are warnings."""
    return not line.strip() or bool(prefix and line.startswith(prefix)) or bool(_WARNING.match(line))


def _find_peer_addresses(text: str) -> frozenset[str]:
    places = _ADDRESS.finditer(text)
    return frozenset((match["in"] or match["plain"]).removeprefix("::ffff:") for match in places)


def is_secondary(exit_: WorkerExit) -> bool:
    """Return whether a worker died only because a peer did, by what it wrote last.

    A signal that nobody of ours sent, other than the abort with which runtimes react to a lost peer, is a death of its
    own, whatever was printed before it.
    """
    return _is_secondary(exit_, _find_reason_text(exit_, _find_headline(exit_)))


def is_peer_loss(text: str) -> bool:
    """Return whether an error tells that a peer was lost."""
    return bool(PEER_LOSS.search(text))


def _is_secondary(exit_: WorkerExit, words: str) -> bool:
    if exit_.oom or exit_.signal not in (None, signal.SIGABRT):
        return False
    return is_peer_loss(words)


def _find_headline(exit_: WorkerExit) -> headline.Headline:
    """Return what a worker says of its end: in the error that it left before all it printed."""
    record = exit_.error or {}
    code, number = exit_.exit_code, exit_.signal
    if not record.get("message"):
        return headline.find_headline(exit_.tail, exit_code=code, signal=number)
    if exit_.tail and reports_another_process(record):
        heading = headline.find_headline(exit_.tail, exit_code=code or 1)
        if heading.is_recognised and not _OF_A_LAUNCHER.search(heading.text):
            return heading
    if _BARE_EXIT.match(str(record["message"])) and headline.find_last_words(exit_.tail):
        # The Python has printed why it ends, and then ended by a number.
        heading = headline.find_headline(exit_.tail, exit_code=code or 1)
        return heading if heading.cls is not Class.UNKNOWN else replace(heading, cls=Class.EXCEPTION)
    traced = headline.find_headline(str(record.get("traceback") or ""))
    heading = traced if traced.traceback else headline.find_headline(str(record["message"]))
    heading = headline.add_detail(heading, exit_.tail)
    if heading.cls is Class.UNKNOWN:
        # `torch.distributed.elastic` writes down nothing but exceptions.
        return replace(heading, cls=Class.EXCEPTION, confidence=Confidence.CERTAIN)
    return heading


def _find_reason_text(exit_: WorkerExit, heading: headline.Headline) -> str:
    """Return the text that says why: what was recognised, or the last lines."""
    if exit_.error and exit_.error.get("message") and not _BARE_EXIT.match(str(exit_.error["message"])):
        return str(exit_.error["message"])
    lines = [] if heading.traceback else [line for line in exit_.tail.splitlines() if line.strip()][-6:]
    return "\n".join([heading.words, *lines])


def _build_cause(exit_: WorkerExit, heading: headline.Headline) -> Cause:
    name = None if exit_.signal is None else signal_name(exit_.signal)
    kind = "exit"
    if exit_.oom:
        kind = "oom"
    elif exit_.signal is not None:
        kind = "signal"
    elif exit_.exit_code is None:
        kind = "unknown"
    elif exit_.exit_code == 0:
        kind = "exited_early" if exit_.error is None else "failed_inside"
    return Cause(
        kind=kind,
        node=exit_.node,
        rank=exit_.rank,
        exit_code=exit_.exit_code,
        signal=name,
        message=_build_message(exit_, heading),
        traceback=_find_traceback(exit_, heading),
        secondary=_is_secondary(exit_, _find_reason_text(exit_, heading)),
        cls=Class.OUT_OF_MEMORY if exit_.oom else heading.cls,
        is_recognised=bool(exit_.oom) or heading.is_recognised,
    )


def _build_message(exit_: WorkerExit, heading: headline.Headline) -> str:
    if exit_.oom and not (exit_.error and exit_.error.get("message")):
        doubt = "probably " if exit_.oom == "probably" else ""
        return f"{doubt}killed by the kernel for lack of memory ({exit_.oom})"
    if exit_.exit_code is None and exit_.signal is None and not heading.is_recognised:
        return "exit status unknown: supervisor and waiter were both gone"
    return heading.text


def _find_traceback(exit_: WorkerExit, heading: headline.Headline) -> str | None:
    """Return the traceback that a worker left, or printed."""
    if exit_.error and heading.traceback and reports_another_process(exit_.error):
        return heading.traceback
    if exit_.error and exit_.error.get("traceback"):
        return str(exit_.error["traceback"])
    return headline.find_headline(exit_.tail).traceback if exit_.error else heading.traceback


def _strip_rank_prefix(line: str) -> str:
    return line[_rank_prefix_length(line) :]


def _rank_prefix_length(line: str) -> int:
    """Return how long what torch sets before a line is."""
    match = _PREFIX.match(line)
    return 0 if match is None else match.end()


# --- leftover processes


def is_idle_process(leftover: LeftoverProcess) -> bool:
    """Return whether a process does no work of its own."""
    return leftover["command"].strip("[]").split(" ")[0].rpartition("/")[2] in _IDLE


def build_left_work_cause(node: str, leftover: LeftoverProcess) -> Cause:
    """Return as what a run counts whose ranks ended within seconds and left this at work."""
    message = f"{describe_leftover(leftover)} was still at work, and was ended"
    return Cause(kind="left_work", node=node, rank=leftover["rank"], exit_code=0, message=message, certain=True)


def describe_leftover(leftover: LeftoverProcess) -> str:
    """Return its command, pid and age."""
    return f"`{leftover['command']}` (pid {leftover['pid']}, {duration_text(leftover['age_s'])} old)"
