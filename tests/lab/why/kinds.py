"""What may go wrong, and what is to be said of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final


class Who(Enum):
    """Which ranks are to be named."""

    CULPRIT = "the culprit"
    TWO = "the culprit and the next rank"
    RANK_0 = "rank 0"
    ALL = "all ranks"
    NODE = "all ranks on the node of the culprit"
    LOST = "the node of the culprit, and no rank"
    NOBODY = "no rank"


class Place(Enum):
    """What the nodes of a kind are."""

    PLAIN = "nodes of root, with the Python of the tests"
    FRAMEWORKS = "the same with Accelerate and Lightning"
    UNTRACED = "nodes of an ordinary user, on which nobody may trace a process"


@dataclass(frozen=True)
class Expected:
    """What is right to say.

    Attributes:
        kind: What went wrong, at large.
        classes: Any of these.
        who: Whom to name.
        more: More of the cluster file.
        command: The script, and what it is given before the number of the culprit; none: `job.py KIND`.
        place: On which nodes it is played.
        after: Ask so many seconds after the start; 0: as soon as it is called stalled or is over.
    """

    kind: str
    classes: tuple[str, ...]
    who: Who = Who.CULPRIT
    more: dict[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    place: Place = Place.PLAIN
    after: float = 0.0

    def ranks(self, culprit: int, world: int, stopped: frozenset[int] = frozenset(), per_node: int = 2) -> set[int]:
        """Return the ranks that are to be named; of several, those that were not stopped before."""
        wanted = {
            Who.CULPRIT: {culprit},
            Who.TWO: {culprit, (culprit + 1) % world},
            Who.RANK_0: {0},
            Who.ALL: set(range(world)),
            Who.NODE: {rank for rank in range(world) if rank // per_node == culprit // per_node},
            Who.LOST: set(),
            Who.NOBODY: set(),
        }[self.who]
        return wanted - stopped if self.who in (Who.ALL, Who.TWO, Who.NODE) else wanted


def _hang(*classes: str, who: Who = Who.CULPRIT) -> Expected:
    return Expected("hang", classes or ("NOT_JOINED",), who)


def _crash(*classes: str, who: Who = Who.CULPRIT) -> Expected:
    return Expected("crash", classes, who)


def _refused(more: dict[str, Any]) -> Expected:
    return Expected("refused", ("REFUSED",), Who.NOBODY, more)


def _slow(who: Who = Who.CULPRIT) -> Expected:
    return Expected("slow", ("SLOW",), who, after=120.0)


def _program(program: str, fault: str, expected: Expected, place: Place = Place.PLAIN) -> Expected:
    return replace(expected, command=("programs.py", program, fault), place=place)


def _job(kind: str, expected: Expected, *, inject: bool = True, place: Place = Place.PLAIN) -> Expected:
    more = {} if inject else {"job": {"inject": False}}
    return replace(expected, command=("job.py", kind), more=more, place=place)


PROGRAMS: Final[dict[str, Expected]] = {
    "plain_sleeps": _program("plain", "sleeps", _hang()),
    "plain_spins": _program("plain", "spins", _hang()),
    "plain_stops": _program("plain", "stops", _hang("STOPPED")),
    "plain_raises": _program("plain", "raises", _crash("EXCEPTION")),
    "plain_ends": _program("plain", "ends", _crash("EXITED_EARLY")),
    "ring_sleeps": _program("ring", "sleeps", _hang()),
    "wrapper_sleeps": _program("wrapper", "sleeps", _hang()),
    "torch_wrapper_sleeps": _program("torch_wrapper", "sleeps", _hang()),
    "fsdp2_sleeps": _program("fsdp2", "sleeps", _hang()),
    "fsdp2_raises": _program("fsdp2", "raises", _crash("EXCEPTION")),
    "keras_sleeps": _program("keras_fit", "sleeps", _hang()),
    "keras_raises": _program("keras_fit", "raises", _crash("EXCEPTION")),
    "lightning_sleeps": _program("lightning_fit", "sleeps", _hang(), Place.FRAMEWORKS),
    "lightning_raises": _program("lightning_fit", "raises", _crash("EXCEPTION"), Place.FRAMEWORKS),
    "accelerate_sleeps": _program("accelerate_loop", "sleeps", _hang(), Place.FRAMEWORKS),
    "accelerate_raises": _program("accelerate_loop", "raises", _crash("EXCEPTION"), Place.FRAMEWORKS),
    "uninjected_sleeps": _job("sleeps", _hang(), inject=False),
    "uninjected_lock": _job("lock_taken_twice", _hang(), inject=False),
    "uninjected_stops": _job("stops_itself", _hang("STOPPED"), inject=False),
    "uninjected_raises": _job("raises", _crash("EXCEPTION"), inject=False),
    "untraced_sleeps": _job("sleeps", _hang(), place=Place.UNTRACED),
    "untraced_skips_one": _job("skips_one", _hang("MISMATCH"), place=Place.UNTRACED),
    "untraced_stops": _job("stops_itself", _hang("STOPPED"), place=Place.UNTRACED),
    "untraced_uninjected_sleeps": _job("sleeps", _hang(), inject=False, place=Place.UNTRACED),
}
SLOW: Final[dict[str, Expected]] = {
    "each_slow_computes": _slow(),
    "each_slow_sleeps": _slow(),
    "each_slow_data": _slow(),
    "each_slow_starved": _slow(),
    "each_slow_node": _slow(Who.NODE),
    "slow_import_first": Expected(
        "start", ("SLOW",), more={"stall": {"timeout": "10m", "startup_timeout": "10m"}}, after=100.0
    ),
}
KINDS: Final[dict[str, Expected]] = {
    "sleeps": _hang(),
    "spins": _hang(),
    "prints_for_ever": _hang(),
    "sends_metrics_for_ever": _hang(),
    "regex_holds_gil": _hang("GIL_HELD"),
    "c_call_holds_gil": _hang("GIL_HELD"),
    "lock_taken_twice": _hang(),
    "threads_lock_each_other": _hang(),
    "joins_a_thread": _hang(),
    "empty_queue": _hang(),
    "event_never_set": _hang(),
    "empty_pipe": _hang(),
    "full_pipe": _hang(),
    "fifo_without_writer": _hang(),
    "silent_socket": _hang(),
    "nobody_connects": _hang(),
    "selects_for_ever": _hang(),
    "asyncio_never_done": _hang(),
    "waits_for_a_program": _hang(),
    "pool_never_answers": _hang(),
    "forked_child_inherits_a_lock": _hang(),
    "file_is_locked": _hang("NOT_JOINED", "STORAGE"),
    "stops_itself": _hang("STOPPED"),
    "in_a_library": _hang(),
    "loader_stops": _hang(),
    "rank_0_evaluates_for_ever": _hang(who=Who.RANK_0),
    "all_sleep": _hang(who=Who.ALL),
    "two_sleep": _hang(who=Who.TWO),
    "thread_raises": _hang(),
    "debugger_holds_it": _hang("STOPPED"),
    "program_is_never_started": _hang("DSTATE", "NOT_JOINED"),
    "mount_hangs": _hang("STORAGE", "DSTATE"),
    "rank_0_saves_for_ever": _hang(who=Who.RANK_0),
    "catches_and_skips_the_last": Expected("", ("EXITED_EARLY",)),
    "misses_a_barrier": _hang("MISMATCH"),
    "halves": _hang("MISMATCH", who=Who.ALL),
    "sends_to_nobody": _hang("MISMATCH", "NOT_JOINED"),
    "each_node_is_lost": Expected("", ("NODE_LOST",), Who.LOST, {"network": {"node_lost_after": "10s"}}),
    "skips_one": _hang("MISMATCH"),
    "another_operation": _hang("MISMATCH"),
    "another_source": _hang("MISMATCH"),
    "more_batches": _hang("MISMATCH"),
    "barrier_too_many": _hang("MISMATCH"),
    "groups_in_another_order": _hang("MISMATCH", "DEADLOCK"),
    "groups_one_is_left_out": _hang(),
    "receives_from_nobody": _hang("MISMATCH", "NOT_JOINED"),
    "waits_for_a_key": _hang("NOT_JOINED", "STORE_LOST"),
    "skips_a_key": _hang(),
    "polls_for_another_file": _hang("MISMATCH"),
    "all_poll_for_a_file": _hang("EXTERNAL_WAIT", who=Who.NOBODY),
    "members_only_make_a_group": _hang("MISMATCH"),
    "ddp_skips_backward": _hang(),
    "ddp_hook_sleeps": _hang(),
    "each_network_is_cut": _hang("NETWORK", who=Who.NOBODY),
    "another_port_first": _hang("MISMATCH"),
    "world_too_large_first": _hang("MISMATCH"),
    "sleeps_first": _hang("NOT_JOINED", "NOT_STARTED"),
    "waits_elsewhere_first": _hang("NOT_JOINED", "NOT_STARTED"),
    "module_is_missing_first": _crash("MISSING_MODULE"),
    "file_is_missing_first": _crash("MISSING_FILE"),
    "module_is_missing_on_a_node_first": _crash("MISSING_MODULE", who=Who.NODE),
    "file_is_missing_on_a_node_first": _crash("MISSING_FILE", who=Who.NODE),
    "argument_is_wrong_first": _crash("WRONG_ARGUMENT", who=Who.ALL),
    "port_is_taken_first": _crash("PORT_TAKEN"),
    "raises": _crash("EXCEPTION"),
    "raises_in_a_library": _crash("EXCEPTION"),
    "raises_from_another": _crash("EXCEPTION"),
    "all_raise": _crash("EXCEPTION", who=Who.ALL),
    "recurses_for_ever": _crash("EXCEPTION"),
    "loader_raises": _crash("EXCEPTION"),
    "gpu_memory_ends": _crash("OUT_OF_MEMORY"),
    "loses_its_links_then_raises": _crash("EXCEPTION"),
    "watchdog_aborts_its_peers": _crash("NOT_JOINED"),
    "two_raise": _crash("EXCEPTION", who=Who.TWO),
    "another_size": _crash("MISMATCH", who=Who.NOBODY),
    "exits_with_3": _crash("UNKNOWN"),
    "exits_with_a_word": _crash("UNKNOWN", "EXCEPTION"),
    "exits_with_0": _crash("EXITED_EARLY"),
    "exits_at_once_with_0": _crash("EXITED_EARLY"),
    "out_of_memory": _crash("OUT_OF_MEMORY"),
    "address_space_ends": _crash("OUT_OF_MEMORY"),
    "disk_is_full": _crash("DISK_FULL"),
    "segfaults": _crash("SIGNAL"),
    "aborts": _crash("SIGNAL"),
    "is_killed": _crash("KILLED"),
    "is_terminated": _crash("KILLED"),
    "divides_by_zero_in_c": _crash("SIGNAL"),
    "ddp_hook_raises": _crash("EXCEPTION"),
    "loader_is_killed": _crash("KILLED"),
    "barrier_gives_up": _crash("NOT_JOINED"),
    "peers_give_up": _crash("NOT_JOINED"),
    "prologue_fails": Expected("start", ("NOT_STARTED",), Who.ALL, {"job": {"prologue": "module load no-such-cuda"}}),
    "python_is_missing": _refused({"defaults": {"python": "/no/such/python"}}),
    "another_torch_is_promised": _refused({"health": {"expect": {"torch": "99.*"}}}),
    "mount_is_missing": _refused({"health": {"expect": {"mounts": ["/no/such/mount"]}}}),
    **PROGRAMS,
    **SLOW,
}
CONTROLS: Final = (
    "control_validates",
    "control_rank_0_validates",
    "control_compiles_first",
    "control_one_is_late_first",
    "control_saves",
    "control_reads",
    "control_prints",
    "control_program_works",
    "each_control_uneven",
    "each_control_slow_steps",
    "each_control_pauses",
    "each_control_many_short",
    "control_ends",
    "control_one_ends_later",
    "control_member_of_no_group_ends",
    "control_last_words",
    "control_child_dies",
)
STRAGGLES: Final = ("each_control_uneven", "each_control_pauses")
"""Healthy runs in which one rank takes longer in every step: that it is slower may be said of it, and nothing else."""
