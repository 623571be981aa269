"""Finds the exit that caused the end of a run. Pure.

If one rank dies, its peers die within a second and report a closed connection. An exit with such a report is secondary:
it is not the cause if another exit came earlier or is not secondary. The time of an exit is an interval. Exits on one
node are compared by the clock of the node, other exits by the clock of the head. If the intervals overlap and the error
texts do not decide, the cause is not certain.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clusterctl.agent.protocol.events import Exited
from clusterctl.agent.protocol.record_types import LeftoverProcess, WorkerError
from clusterctl.formatting import describe_duration, signal_name
from clusterctl.why import failure_headline
from clusterctl.why.crash import find_user_position
from clusterctl.why.headline_patterns import PEER_LOSS, WORKER_DEATH
from clusterctl.why.verdict import Confidence, Fault

_ADDRESS = re.compile(r"(?:\[(?P<in>[0-9a-fA-F.:%\w]+)\]|(?P<plain>\d+\.\d+\.\d+\.\d+)):\d+")
_WARNING = re.compile(r"\[[IW]\d{3,4} ")
"""Information and warnings of C++ runtimes in the format of glog. These lines do not explain an exit."""
_PREFIX = re.compile(r"^\[?rank\d+\]?:? ?")
"""The prefix of torch before each line of a traceback."""
_TRACEBACK = re.compile(r"^(?:\[?rank\d+\]?:? ?)?Traceback \(most recent call last\):", re.MULTILINE)

BACKGROUND_MAX_S = 30.0
"""If a rank ends with 0 within this many seconds and leaves a working process, its job runs in the background."""
_OF_A_LAUNCHER = re.compile(
    r"\b(?:ChildFailedError|CalledProcessError|ProcessExitedException)\b|: exit code \d+ of its local"
)
_BARE_EXIT = re.compile(r"(?:SystemExit: -?\d+|os\._exit\(-?\d+\))$|(?P<inside>exit code -?\d+ of )")
_UNSET_NOTE = re.compile(r"(?m)^clusterctl: (`\$\w+`) is not set on this node: ")
_IDLE = ("bash", "sh", "dash", "zsh", "sleep", "tail", "tee", "cat", "watch", "ssh", "sshd")
"""Names of programs that only wait for other programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The cause of the end of a run.

    Attributes:
        kind: exit, signal, oom, unknown (lost exit status), exited_early (a rank ended with 0 too early), failed_inside
            (Python failed inside a shell that ended with 0), stopped (the rank printed its error before the controller
            stopped it), left_work (the rank ended, and its work continued in the background), node_lost, start_failed;
            or the rule that ended the run: stalled, time_limit, idle, unhealthy, port_taken.
        message: One line, the headline of the worker's error or output (see `why.failure_headline`).
        traceback: The worker's own traceback, if there is one.
        cls: The class of the failure in `why`; `None` if the cause is no exit of a worker.
        is_recognised: `why` knows the message as a fatal error. Otherwise the message is the last line of the output.
        certain: No other exit can have come first.
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
    cls: Fault | None = None
    is_recognised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitAnalysis:
    """The result of the analysis of one exit.

    Attributes:
        on_node_clock: The earliest and latest time of the exit on the clock of its node.
        peers: The addresses of lost peers that the error texts of the rank name.
        output: The last output of a rank that ended with 0. This output is examined only if this exit is the cause.
    """

    cause: Cause
    earliest: float
    latest: float
    on_node_clock: tuple[float, float] | None = None
    peers: frozenset[str] = frozenset()
    output: str = ""

    def may_precede(self, other: ExitAnalysis) -> bool:
        """Return whether this exit may have come before another exit."""
        if self.on_node_clock is not None and other.on_node_clock is not None and self.cause.node == other.cause.node:
            return self.on_node_clock[0] <= other.on_node_clock[1]
        return self.earliest <= other.latest


def analyse_exit(node: str, exited: Exited, clock: tuple[float, float] = (0.0, 0.0)) -> ExitAnalysis:
    """Return the analysis of the exit of a worker that the controller did not stop.

    Args:
        node: The node of the worker.
        exited: The exit.
        clock: The offset of the head's clock from the node's monotonic clock, and the error of this offset, in seconds.
    """
    output = exited.tail if exited.exit_code == 0 else ""
    if output and not exited.error:
        exited = replace(exited, tail="")
    own = _find_headline(exited)
    heading = _find_child_failure(exited, own)
    cause = _build_cause(node, exited, heading)
    cause = cause if heading is own else replace(cause, traceback=None)
    places = _ADDRESS.finditer(_find_reason_text(exited, heading)) if cause.secondary else ()
    return ExitAnalysis(
        cause=cause,
        earliest=exited.earliest + clock[0] - clock[1],
        latest=exited.latest + clock[0] + clock[1],
        on_node_clock=(exited.earliest, exited.latest),
        peers=frozenset((match["in"] or match["plain"]).removeprefix("::ffff:") for match in places),
        output=output,
    )


def sort_causes(analyses: Sequence[ExitAnalysis]) -> tuple[Cause, ...]:
    """Return the causes of one or more exits; the first observed failure comes first.

    The first cause is certain if every other exit is secondary or surely later.
    """
    first, *rest = sorted(analyses, key=lambda v: (v.cause.secondary, v.latest, v.cause.rank))
    rivals = any(v.cause.secondary == first.cause.secondary and v.may_precede(first) for v in rest)
    message = failure_headline.find_last_words(first.output) or first.cause.message
    return (replace(first.cause, message=message, certain=not rivals), *(v.cause for v in rest))


def find_early_exit(
    failed: Sequence[ExitAnalysis], succeeded: Sequence[ExitAnalysis], addresses: Mapping[str, str | None]
) -> Cause | None:
    """Return the cause if a rank ended with 0 while its peers still needed it, else `None`.

    The rank must have ended before the first failure, and all failed ranks must have lost a peer. If failed ranks name
    the address of a lost peer, it must be the address of the rank's node. If several ranks qualify, none is the cause.

    Args:
        failed: The exits of the ranks that failed.
        succeeded: The exits of the ranks that ended well.
        addresses: The address at which peers reach each node.
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
    if last := failure_headline.find_last_words(candidates[0].output):
        message = f"{last} ({message})"
    return replace(candidates[0].cause, message=message, traceback=None, certain=not first.may_precede(candidates[0]))


def find_cause_in_output(rank: int, node: str, output: str) -> Cause | None:
    """Return the cause in the traceback at the end of a stopped rank's output; `None` without a traceback.

    Output after a traceback shows that the program caught the exception. `output` is the last output before the stop.
    """
    if not _ends_with_traceback(output):
        return None
    exited = Exited(attempt=0, rank=rank, exit_code=1, tail=output)
    return _build_cause(node, exited, _find_headline(exited))


def find_errors_before_stop(stopped: Sequence[Cause], failed: Sequence[tuple[ExitAnalysis, str]]) -> tuple[Cause, ...]:
    """Return the causes of ranks that had printed their error before they were stopped.

    The result is empty if the exit of a failed rank is not secondary. An error does not count if a failed rank printed
    it as well, because that rank caught the error.

    Args:
        stopped: The causes in the output of stopped ranks (`find_cause_in_output`).
        failed: The exits of the ranks that failed, and their output.
    """
    if not failed or not all(analysis.cause.secondary for analysis, _ in failed):
        return ()
    own = [cause for cause in stopped if not cause.secondary and cause.cls is not Fault.PEER_LOST]
    own = [cause for cause in own if not any(cause.message in output for _, output in failed)]
    return tuple(replace(cause, kind="stopped", exit_code=None) for cause in own)


def reports_another_failure(error: WorkerError) -> bool:
    """Return whether an error reports the failure of another process, which has printed the reason itself."""
    return bool(
        _OF_A_LAUNCHER.search(f"{error.get('message')}\n{error.get('traceback')}")
        or re.match(WORKER_DEATH, str(error.get("message")))
    )


def _ends_with_traceback(output: str) -> bool:
    """Return whether an output ends with a traceback, apart from messages about the end of the program."""
    starts = [match.start() for match in _TRACEBACK.finditer(output)]
    lines = output[starts[-1] :].splitlines() if starts else []
    last = next((i for i, line in enumerate(lines) if i and re.match(r"\S", _PREFIX.sub("", line))), None)
    if starts and last is None:
        return False
    if last is not None:
        # torch puts a prefix before each line of a traceback. Other lines below the traceback may only be warnings.
        match = _PREFIX.match(lines[0])
        prefix = match[0].strip() if match is not None else ""
        rest = [line for line in lines[last + 1 :] if line.strip() and not (prefix and line.startswith(prefix))]
        if all(map(_WARNING.match, rest)):
            return True
    heading = failure_headline.find_headline(output, exit_code=1)
    return heading.is_recognised and heading.traceback is not None


def find_swallowed_exception(output: str) -> str:
    """Return exception and code line of the traceback at the end of an output; "" without a traceback."""
    told = failure_headline.find_final_traceback(output) if output else None
    if told is None:
        return ""
    where = find_user_position(told.traceback).where
    return told.text + (f" ({where})" if where is not None else "")


def is_peer_loss(text: str) -> bool:
    """Return whether an error text reports a lost peer."""
    return bool(re.search(PEER_LOSS, text))


def _find_headline(exited: Exited) -> failure_headline.Headline:
    """Return the headline of a worker's failure, from its error file or else from its output."""
    record = exited.error or {}
    code, number = exited.exit_code, exited.signal
    if not record.get("message"):
        return failure_headline.find_headline(exited.tail, exit_code=code, signal=number)
    if exited.tail and reports_another_failure(record):
        heading = failure_headline.find_headline(exited.tail, exit_code=code or 1)
        is_of_worker = re.match(WORKER_DEATH, str(record["message"])) is not None
        is_known = heading.is_recognised or (is_of_worker and heading.traceback is not None)
        if is_known and not (_OF_A_LAUNCHER.search(heading.text) or re.match(WORKER_DEATH, heading.text)):
            return heading
    bare = _BARE_EXIT.match(str(record["message"]))
    if bare is not None and failure_headline.find_last_words(exited.tail):
        # The program has printed its error and then called `exit` with a number.
        heading = failure_headline.find_headline(exited.tail, exit_code=code or 1)
        text = f"{record['message']}; last words: {heading.text}" if bare["inside"] else heading.text
        return heading if heading.cls is not Fault.UNKNOWN else replace(heading, text=text, cls=Fault.EXCEPTION)
    traced = failure_headline.find_headline(str(record.get("traceback") or ""))
    heading = traced if traced.traceback else failure_headline.find_headline(str(record["message"]))
    heading = failure_headline.add_detail_from_output(heading, exited.tail)
    if heading.cls is Fault.UNKNOWN:
        # `torch.distributed.elastic` records only exceptions.
        return replace(heading, cls=Fault.EXCEPTION, confidence=Confidence.CERTAIN)
    return heading


def _find_child_failure(exited: Exited, heading: failure_headline.Headline) -> failure_headline.Headline:
    """Return the headline of the first failed child process if the worker's own headline gives no reason."""
    child = exited.failed_child
    is_victim = heading.cls in (Fault.UNKNOWN, Fault.KILLED) and not heading.is_recognised
    if child is None or child["message"].startswith("SIGTERM") or exited.signal is not None or not is_victim:
        return heading
    found = failure_headline.find_headline(child["message"])
    text = f"{found.text or child['message']} (in its child process {child['pid']}, which failed first)"
    cls = Fault.EXCEPTION if found.cls is Fault.UNKNOWN else found.cls
    return replace(found, text=text, cls=cls, confidence=Confidence.LIKELY)


def _find_reason_text(exited: Exited, heading: failure_headline.Headline) -> str:
    """Return the text with the reason: the recognised message, or the last lines."""
    if exited.error and exited.error.get("message") and not _BARE_EXIT.match(str(exited.error["message"])):
        return str(exited.error["message"])
    lines = [] if heading.traceback else [line for line in exited.tail.splitlines() if line.strip()][-6:]
    return "\n".join([heading.words, *lines])


def _build_cause(node: str, exited: Exited, heading: failure_headline.Headline) -> Cause:
    name = None if exited.signal is None else signal_name(exited.signal)
    kind = "exit"
    if exited.oom:
        kind = "oom"
    elif exited.signal is not None:
        kind = "signal"
    elif exited.exit_code is None:
        kind = "unknown"
    elif exited.exit_code == 0:
        kind = "exited_early" if exited.error is None else "failed_inside"
    return Cause(
        kind=kind,
        node=node,
        rank=exited.rank,
        exit_code=exited.exit_code,
        signal=name,
        message=_build_message(exited, heading),
        traceback=_find_traceback(exited, heading),
        # A runtime that loses a peer aborts with SIGABRT. Any other signal has a reason of its own.
        secondary=not exited.oom
        and exited.signal in (None, signal.SIGABRT)
        and is_peer_loss(_find_reason_text(exited, heading)),
        cls=Fault.OUT_OF_MEMORY if exited.oom else heading.cls,
        is_recognised=bool(exited.oom) or heading.is_recognised,
    )


def _build_message(exited: Exited, heading: failure_headline.Headline) -> str:
    if exited.oom and not (exited.error and exited.error.get("message")):
        doubt = "probably " if exited.oom == "probably" else ""
        return f"{doubt}killed by the kernel for lack of memory ({exited.oom})"
    if exited.exit_code is None and exited.signal is None and not heading.is_recognised:
        return "exit status unknown: supervisor and waiter had both ended"
    unset = dict.fromkeys(_UNSET_NOTE.findall(exited.tail)) if exited.exit_code else {}
    return heading.text + (f" ({', '.join(unset)} not set on this node)" if unset else "")


def _find_traceback(exited: Exited, heading: failure_headline.Headline) -> str | None:
    """Return the traceback from the worker's error file or output."""
    if exited.error and heading.traceback and reports_another_failure(exited.error):
        return heading.traceback
    if exited.error and exited.error.get("traceback"):
        return str(exited.error["traceback"])
    return failure_headline.find_headline(exited.tail).traceback if exited.error else heading.traceback


# --- leftover processes


def is_waiting_program(leftover: LeftoverProcess) -> bool:
    """Return whether a process runs a program that only waits for other programs."""
    return leftover["command"].strip("[]").split(" ")[0].rpartition("/")[2] in _IDLE


def build_left_work_cause(node: str, leftover: LeftoverProcess) -> Cause:
    """Return the cause of a failure in which all ranks ended within seconds and left this process running."""
    message = f"{describe_leftover_process(leftover)} was still at work, and was ended"
    return Cause(kind="left_work", node=node, rank=leftover["rank"], exit_code=0, message=message, certain=True)


def describe_leftover_process(leftover: LeftoverProcess) -> str:
    """Return command, pid and age of a process as a phrase."""
    return f"`{leftover['command']}` (pid {leftover['pid']}, {describe_duration(leftover['age_s'])} old)"
