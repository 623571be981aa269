"""Who uses a node: from the claims and the processes that the node reports."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.run.rules.node_use import Holder, HolderKind, IdleRecord, NodeUse, build_node_use, update_idle

NOW, AHEAD, H = 1_000_000.0, 500.0, 3600.0
ANNA, BEN = 1001, 1002


def claim(user: int = ANNA, run: str = "llama-1", gpus: tuple[int, ...] = (), **details: Any) -> dict[str, Any]:
    return {"user": user, "user_name": {ANNA: "anna", BEN: "ben"}[user], "run": run, "gpus": list(gpus), **details}


def process(pid: int = 7, user: int = ANNA, command: str = "python x.py", **more: Any) -> dict[str, Any]:
    seen = {"visible": True, "user": user, "user_name": f"u{user}", "command": command, "comm": "python", "run": None}
    return {"pid": pid, "used": 10, "agent": False, "since": NOW + AHEAD - H, "start": 5, "cpu_s": H, **seen, **more}


def hidden(pid: int) -> dict[str, Any]:
    return {"pid": pid, "used": 10, "agent": False, "visible": False, "user": None}


def gpu(index: int, *procs: dict[str, Any], util: float | None = 50.0, used: int = 0, **more: Any) -> dict[str, Any]:
    device = {"gpu": index, "util": util, "used": used, "version": 2, "err": [], "left_out": 0, "procs": list(procs)}
    return {**device, **more}


def use(
    *devices: dict[str, Any], claims: list[dict[str, Any]] | None = None, users: dict[str, Any] | None = None
) -> NodeUse:
    """What a node whose clock is 500 s ahead reports."""
    groups = {
        "claims": {"status": "ok", "data": {"claims": claims or [], "left_out": 0}},
        "gpu_users": users or {"status": "ok", "data": {"status": "ok", "gpus": list(devices)}},
    }
    return build_node_use("n1", {"time": NOW + AHEAD, "groups": groups}, {"mine-1"}, {}, NOW)[0]


def short(found: NodeUse) -> list[tuple[str, tuple[int, ...], str | None, str]]:
    return [(holder.kind.value, holder.gpus, holder.user, holder.name) for holder in found.holders]


@pytest.mark.parametrize(
    ("devices", "claims", "holders", "free"),
    [
        pytest.param([gpu(0), gpu(1)], [], [], (0, 1), id="nobody"),
        pytest.param(
            [gpu(0), gpu(1)],
            [claim(gpus=(1,))],
            [("run", (1,), "anna", "llama-1")],
            (0,),
            id="a run before its processes",
        ),
        pytest.param(
            [gpu(0, process(7)), gpu(1, process(8))],
            [claim(gpus=(0, 1))],
            [("run", (0, 1), "anna", "llama-1")],
            (),
            id="processes of the run's user on its GPUs",
        ),
        pytest.param(
            [gpu(0, process(7), process(9, BEN, "evil"))],
            [claim(gpus=(0,))],
            [("process", (0,), "u1002", "evil"), ("run", (0,), "anna", "llama-1")],
            (),
            id="a stranger on the GPU of a run",
        ),
        pytest.param(
            [gpu(0, process(7)), gpu(1, process(7)), gpu(2)],
            [claim(gpus=(2,))],
            [("process", (0, 1), "u1001", "python x.py"), ("run", (2,), "anna", "llama-1")],
            (),
            id="a process outside of the run's GPUs",
        ),
        pytest.param(
            [gpu(0, process(7)), gpu(1, process(8))],
            [],
            [("process", (0, 1), "u1001", "python x.py")],
            (),
            id="processes with one command",
        ),
        pytest.param([gpu(0, process(7, agent=True))], [], [], (0,), id="a monitor uses nothing"),
        pytest.param([gpu(0, hidden(7))], [], [("hidden", (0,), None, "")], (), id="a process without a name"),
        pytest.param(
            [gpu(0, hidden(7))],
            [claim(gpus=(0,))],
            [("run", (0,), "anna", "llama-1")],
            (),
            id="a process without a name on a claimed GPU",
        ),
        pytest.param([gpu(0, used=2**30)], [], [("hidden", (0,), None, "")], (), id="memory without a process"),
        pytest.param(
            [], [claim(BEN, kind="reservation")], [("reservation", (), "ben", "llama-1")], (), id="a node without GPUs"
        ),
        pytest.param(
            [gpu(0)],
            [claim(gpus=(0,), node="n1"), claim(gpus=(0,), node="n1")],
            [("run", (0,), "anna", "llama-1")],
            (),
            id="two claims of one run after a restart of its supervisor",
        ),
    ],
)
def test_each_gpu_is_free_or_has_its_holders(
    devices: list[dict[str, Any]],
    claims: list[dict[str, Any]],
    holders: list[tuple[str, tuple[int, ...], str | None, str]],
    free: tuple[int, ...],
) -> None:
    found = use(*devices, claims=claims)
    assert (short(found), found.free_gpus, found.is_free) == (holders, free, not holders)


def test_a_holder_has_its_own_times_memory_and_head_by_the_clock_of_this_head() -> None:
    told = claim(run="mine-1", gpus=(0, 1), since=NOW + AHEAD - 60, step=7, step_at=NOW + AHEAD - 1, head="desk")
    (holder,) = use(gpu(0, process(7), util=3), gpu(1, process(7), util=90), claims=[told]).holders
    assert (holder.since, holder.step_at, holder.step, holder.head, holder.is_here) == (
        NOW - 60,
        NOW - 1,
        7,
        "desk",
        True,
    )
    assert (holder.memory, holder.util, holder.pids) == (20, 90, (7,))


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(claim(gpus=(0,), until=1e15), id="a time that no calendar has"),
        pytest.param(claim(gpus=(0,), since=float("nan")), id="no time"),
        pytest.param(claim(gpus=(0,), workers=float("inf")), id="no number"),
        pytest.param({"user": ANNA}, id="no fields"),
        pytest.param(["x"], id="no claim"),
    ],
)
def test_an_answer_that_means_nothing_is_an_error_of_its_node(told: Any) -> None:
    with pytest.raises((TypeError, ValueError, LookupError, AttributeError, ArithmeticError)):
        use(gpu(0), claims=[told])


def test_a_run_that_only_waits_leaves_its_node_free() -> None:
    found = use(gpu(0), claims=[claim(kind="waiting")])
    assert (found.is_free, found.free_gpus, found.holders[0].kind) == (True, (0,), HolderKind.WAITING)


NOT_LISTED = "the processes on GPUs cannot be listed: "


@pytest.mark.parametrize(
    ("users", "notes"),
    [
        pytest.param({"status": "absent", "reason": "no driver", "data": {}}, (), id="no GPUs"),
        pytest.param({"status": "timeout", "reason": "no answer", "data": {}}, (f"{NOT_LISTED}no answer",), id="hung"),
        pytest.param(
            {"status": "ok", "data": {"status": "error", "reason": "code 9", "gpus": []}},
            (f"{NOT_LISTED}code 9",),
            id="a sick driver",
        ),
        pytest.param(
            {"status": "ok", "data": {"status": "ok", "gpus": [gpu(0, err=["lost"]), gpu(1, left_out=2)]}},
            ("GPU 0: lost", "GPU 1: 2 processes more"),
            id="a lost GPU, and many processes",
        ),
        pytest.param(
            {"status": "ok", "data": {"status": "ok", "gpus": [gpu(0, hidden(7)), gpu(1, hidden(7), hidden(8))]}},
            ("2 processes on GPUs 0-1 cannot be named: of other users, or in containers",),
            id="processes without a name",
        ),
    ],
)
def test_what_cannot_be_seen_is_said(users: dict[str, Any], notes: tuple[str, ...]) -> None:
    found = use(users=users)
    assert found.notes == notes
    assert found.is_known is not any(note.startswith(NOT_LISTED) for note in notes)


def test_a_node_whose_gpus_cannot_be_seen_is_not_free() -> None:
    users = {"status": "timeout", "reason": "the driver does not answer", "data": {}}
    found = use(claims=[claim(kind="waiting", gpus=(0,))], users=users)
    assert (found.is_free, found.free_gpus) == (False, ())
    assert not use(users=users).is_free


SECOND = IdleRecord(NOW - H, 100.0, NOW - 2 * H)


@pytest.mark.parametrize(
    ("before", "cpu_s", "util", "since"),
    [
        pytest.param(None, H, 0, NOW, id="the first look, after work"),
        pytest.param(None, 10.0, 0, NOW - 9 * H, id="never worked"),
        pytest.param(None, 10.0, 5, None, id="works on a GPU"),
        pytest.param(None, 10.0, None, None, id="a GPU that reports nothing"),
        pytest.param(SECOND, 110.0, 0, NOW - 2 * H, id="quiet between two looks"),
        pytest.param(SECOND, 100.0 + H, 0, NOW, id="worked between two looks"),
        pytest.param(IdleRecord(NOW - H, 100.0, None), 100.0, 0, NOW, id="worked at the last look"),
    ],
)
def test_a_process_is_idle_since_it_was_quiet_at_every_look(
    before: IdleRecord | None, cpu_s: float, util: float | None, since: float | None
) -> None:
    assert update_idle(before, cpu_s, util, NOW - 9 * H, NOW) == IdleRecord(NOW, cpu_s, since)


def test_a_holder_is_idle_after_half_an_hour_with_memory() -> None:
    holder = Holder(kind=HolderKind.PROCESS, memory=1, idle_since=NOW - 1800)
    assert holder.is_idle(NOW)
    assert not holder.is_idle(NOW - 1)


def test_a_process_of_which_one_gpu_works_is_not_idle() -> None:
    quiet = process(7, cpu_s=0.0)
    (busy,) = use(gpu(0, quiet, util=0), gpu(1, quiet, util=90)).holders
    (idle,) = use(gpu(0, quiet, util=0), gpu(1, quiet, util=0)).holders
    assert (busy.idle_since, idle.idle_since) == (None, NOW - H)


MADE = st.builds(lambda pid, user, known: process(pid, user, f"c{pid}") if known else hidden(pid), st.integers(1, 5), st.sampled_from([ANNA, BEN]), st.booleans())  # fmt: skip


@given(
    st.lists(st.lists(MADE, max_size=3, unique_by=lambda one: one["pid"]), max_size=4),
    st.lists(st.builds(claim, st.sampled_from([ANNA, BEN]), st.sampled_from(["a", "b"]), st.sets(st.integers(0, 3)).map(tuple)), max_size=3),
)  # fmt: skip
def test_every_gpu_is_either_free_or_held_and_no_process_is_lost(
    devices: list[list[dict[str, Any]]], claims: list[dict[str, Any]]
) -> None:
    found = use(*(gpu(index, *procs) for index, procs in enumerate(devices)), claims=claims)
    held = {index for holder in found.holders for index in holder.gpus}
    assert held.isdisjoint(found.free_gpus)
    assert held | set(found.free_gpus) == set(found.gpus)
    seen = {one["pid"] for procs in devices for one in procs if one["visible"]}
    assert seen <= {pid for holder in found.holders for pid in holder.pids}
