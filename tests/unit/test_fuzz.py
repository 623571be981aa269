"""Whatever arrives, each reader of it ends soon, with a value or with the error that it promises.

`FUZZ_INPUTS` is how many inputs there are in all; `make fuzz` takes 200,000. An input is under 64 KiB and costs under
50 ms of this thread's CPU time; one that costs more is tried again, and the least of five counts, as a machine with
too much to do, or a collection of garbage, is nobody's fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterctl.agent.inject import shim_files
from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.protocol.frames import FrameDecoder, FrameError
from clusterctl.agent.protocol.record_types import WorkerStatusSample
from clusterctl.config.spec import ClusterSpec, HostSpec, StallSpec
from clusterctl.errors import ClusterctlError, ConfigError
from clusterctl.logs.time_index import TimeIndex
from clusterctl.render.status_report import activity_from_sample
from clusterctl.run.nodes.network_probe import build_node_facts
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.health_observer import HealthObserver
from clusterctl.run.rules.stall_detection import StallObserver
from clusterctl.run.rules.state import RunState
from clusterctl.run.rules.state_updates import apply_controller_event, apply_node_event
from clusterctl.session.request_definitions import REQUESTS
from clusterctl.transport.bootstrap import PreambleParser
from clusterctl.transport.ssh import known_hosts, ssh_options
from clusterctl.validation import journal_lines, message_validators, node_samples, session_quota
from clusterctl.validation.derived_validators import derive_object_validator
from tests.unit.config.conftest import _parse as parse_config
from tests.unit.config.hostile import PIECES

INPUTS = int(os.environ.get("FUZZ_INPUTS", "5000"))
MOST_SECONDS = 0.05
TRIES = 5

NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, 1, -1, 255, 1 << 31, 1 << 53, 1 << 63, 10**30, 0.5, 1e308, float("inf"), float("nan")]),
)
TEXTS = st.one_of(st.text(max_size=40), st.sampled_from(["", "0", "7", "\u001b]52;c;x\u0007", "x" * 9000, "\udc80"]))
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn, good: Any) -> Any:
    """Draw something like `good`, with a few of its values, or names, replaced."""
    value = json.loads(json.dumps(draw(st.sampled_from(good)) if isinstance(good, list) else good))
    for _ in range(draw(st.integers(0, 3))):
        holder: Any = {"root": value}
        key: Any = "root"
        while isinstance(holder[key], (dict, list)) and holder[key] and draw(st.integers(0, 3)):
            holder = holder[key]
            key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        if key == "root":
            value = draw(VALUES)
        elif isinstance(holder, dict) and draw(st.booleans()) and draw(st.booleans()):
            del holder[key]
        else:
            holder[key] = draw(VALUES)
    return value


STAMP = {"seq": 1, "wall": 1.0, "mono": 2.0, "boot": "b"}
EVENTS = [
    {**STAMP, "kind": event.KIND, **asdict(event)}
    for event in (
        node_events.Prepared(0, [29500]),
        node_events.Started(0, 0, 0, 7, 8),
        node_events.Exited(
            0, 0, 1, earliest=1.0, latest=2.0, error={"message": "m", "traceback": "t"}, tail="Traceback"
        ),
        node_events.Stopping(0, "cancelled", 1.0, [0]),
        node_events.Swept(0, 1, [{"pid": 1, "start_time": 2, "command": "c", "why": "w"}]),
        node_events.Finished("failed", 1),
        node_events.RunAdopted(0, 7),
        node_events.OutputDropped(0, 0, 1, 2, "why"),
        node_events.Alarm(0, node_events.GPU_MEMORY, "m", gpu=0),
    )
]
INSIDE = {
    "pid": 7,
    "step": 3,
    "source": "user",
    "beats": 3,
    "looks": 4,
    "held": 1,
    "seq": {"g": [1, 2]},
    "backend": "nccl",
    "timeout_s": 600.0,
    "frameworks": ["torch"],
    "facts": {"loss": 1.0},
    "degraded": {},
    "age_s": 0.1,
    "progress_age_s": 0.2,
    "main_age_s": 0.3,
    "phase": {"name": "p", "age_s": 1.0, "limit_s": 60.0},
}
STATUS = {
    **{
        name: INSIDE[name]
        for name in ("pid", "step", "source", "beats", "seq", "backend", "timeout_s", "looks", "held", "facts")
    },
    "start_time": 8,
    "tid": 7,
    "time": 1.0,
    "progress_time": 1.0,
    "main_time": 1.0,
    "phase": {"name": "p", "since": 1.0, "limit_s": 60.0},
    "frameworks": [],
    "degraded": {},
}
RANK = {"alive": True, "pid": 7, "state": "S", "wchan": None, "procs": 1, "cpu_s": 1.0, "read": 1, "written": 1}
STAMPS = {"t": 1.0, "m": 1.0, "attempt": 0}
GPU = {
    "gpu": 0,
    "vendor": "nvidia",
    "temp_c": 30,
    "throttle": 8,
    "ecc_unc": 1,
    "err": {"x": "lost"},
    "codes": {"x": 15},
}
SAMPLES: list[Any] = [
    {
        **STAMPS,
        "kind": "activity",
        "gpus": True,
        "ranks": {"0": {**RANK, "output": 1, "inside": INSIDE}},
        "watched": {"/a": [1, 2]},
    },
    {
        **STAMPS,
        "kind": "health",
        "status": "ok",
        "disk": [{"path": "/", "free": 1, "total": 9}],
        "gpus": [GPU, {**GPU, "vendor": "amd", "links_lost": 1, "slowdown": ["hot"]}],
        "xids": [{"gpu": 0, "xid": 79}],
    },
]
HELLO = {
    "protocol": 1,
    "boot_id": "b",
    "net_ns": "n",
    "cores": 4,
    "gpus": {"count": 1, "vendor": "nvidia"},
    "addresses": [{"interface": "eth0", "address": "10.0.0.1", "family": "inet", "up": True, "loopback": False}],
    "reached_at": "10.0.0.1",
    "rdma": False,
}
ANSWERS: dict[Command, Any] = {
    Command.STATUS: {
        "supervisor": True,
        "epoch": 1,
        "attempt": 0,
        "state": "started",
        "workers": [{"rank": 0, "pid": 1, "start_time": 2, "alive": True}],
        "remaining": [],
    },
    Command.ROUTES: {"routes": {"10.0.0.1": {"source": "10.0.0.2", "interface": "eth0"}}},
    Command.PROBE: {"groups": {"host": {"status": "ok", "reason": None, "data": {"a": [1]}, "ms": 1.0}}, "time": 1.0},
    Command.READ: {"offset": 0, "size": 1, "first_valid": 0, "data": "eA=="},
    Command.FETCH: {"files": [["a", 1, 420]]},
    Command.CHECKPOINTS: {"found": [{"path": "a", "mtime": 1.0, "size": 1}], "versions": [[1.0, 1]]},
    Command.ENVIRONMENT: {
        "id": "a",
        "made": ["py1"],
        "python": None,
        "reachable": False,
        "free": 1,
        "size": 0,
        "removed": 0,
    },
    Command.RUNS: {"runs": [{"run": "r", "live": True}]},
    Command.EXEC: {"exit_code": 0, "signal": None},
    Command.MANIFEST: {"need": [1]},
    Command.COPY: {"need": [1], "folder": "/a", "name": None},
    Command.EVIDENCE: {"ranks": {"0": {"rank": 0}}},
}
HEAD = [
    controller_events.RunCreated(run="r", name="n", path="p"),
    controller_events.AttemptStarted(
        attempt=0,
        world_size=1,
        master_addr=None,
        master_port=None,
        nodes=[{"node": "n", "node_rank": 0, "ranks": [0]}],
    ),
    controller_events.LinkChanged(node="n", link="lost"),
    controller_events.RunEnded(state="failed", exit_code=1),
]
BEGUN = apply_controller_event(apply_controller_event(RunState(), 1.0, HEAD[0]), 1.0, HEAD[1])


def line_of(value: Any) -> bytes:
    return json.dumps(value).encode()


def frames(data: bytes) -> None:
    decoder = FrameDecoder(lambda: session_quota.MAX_MESSAGE_BYTES)
    for place in range(0, len(data), 7):
        list(decoder.feed(data[place : place + 7]))


def folded(records: list[Any]) -> None:
    state = BEGUN
    for seq, record in enumerate(records, 1):
        with contextlib.suppress(FrameError):
            told = journal_lines.parse_event_record({**record, "seq": seq} if isinstance(record, dict) else record)
            if told is not None:
                state = apply_node_event(state, "n", *told)
    assert state.cause is None or state.causes


def head_folded(value: Any) -> None:
    decoded = controller_events.decode(line_of(value))
    if decoded is not None:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, LookupError):
            apply_controller_event(BEGUN, *decoded[1:])


SPEC = ClusterSpec(name="r", path="c.yaml", hosts=(HostSpec(name="n", host="h"),), job=None)


def sampled(values: list[Any]) -> None:
    lines = node_samples.SampleLineSplitter().split("n", b"".join(line_of(value) + b"\n" for value in values))
    stall, health = StallObserver(0, [0], StallSpec(), 0.0), HealthObserver(SPEC)
    stall.add_sample_lines("n", lines, 1.0)
    stall.list_new_warnings(stall.judge(2.0), 2.0)
    stall.measure_idle_s(["n"])
    stall.replay_samples({"n": lines}, 3.0)
    health.add_sample_lines("n", lines, 1.0)
    health.find_silent_nodes(["n"], 1e6)
    health.find_unhealthy_nodes(["n"])
    for sample in node_samples.parse_samples(lines, "activity"):
        activity_from_sample(sample, 1.0)


def status_file(value: Any) -> None:
    told = shim_files.sanitize_status(value)
    derive_object_validator(WorkerStatusSample)(shim_files._convert_times(told, 5.0))


def answered(pair: tuple[Command, Any]) -> None:
    command, value = pair
    REQUESTS[command].validate_answer(value)


def hello(value: Any) -> None:
    build_node_facts(SPEC.hosts[0], REQUESTS[Command.HELLO].validate_answer(value))


def indexed(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:
        file.write(data)
        file.flush()
        index = TimeIndex(file.name)
        for moment in (0.0, 1.0, 2e9):
            index.find_size_before(moment)
            index.find_size_until(moment)
        index.find_position_of_size(7)


def preamble(data: bytes) -> None:
    parser = PreambleParser("n0nce")
    found = parser.feed(b"clusterctl:n0nce:have " + data) or parser.feed(data)
    if found:
        with contextlib.suppress(RecursionError):
            message_validators.PREAMBLE(json.loads(found[1]))


def ssh_answer(lines: list[tuple[str, str]]) -> None:
    ssh_options.parse_options("n", "\n".join(" ".join(pair) for pair in lines), ssh_options.Destination(host="h"))


def cluster_file(text: str | bytes) -> None:
    parse_config(text, require_job=True)


@dataclass(frozen=True)
class Reader:
    """One reader of what others say.

    Attributes:
        inputs: What it is given.
        read: It.
        promised: What it may raise.
        share: How many of a hundred inputs are for it.
    """

    inputs: st.SearchStrategy[Any]
    read: Callable[[Any], object]
    promised: tuple[type[Exception], ...] = ()
    share: int = 7


RECORD = st.tuples(st.integers(0, 1 << 40), st.floats()).map(lambda pair: struct.pack("<Qd", *pair))
KEYS = ("hostname", "port", "user", "proxyjump", "identityfile", "userknownhostsfile", "identityagent", "proxycommand")
SSH = st.lists(st.tuples(st.sampled_from(KEYS), st.text(max_size=30) | st.sampled_from(["none", "22", "%h", "a"])))
KNOWN = st.lists(
    st.sampled_from(["h", ",", " ", "ssh-rsa", "AAAA", "|1|a|b", "@revoked", "\n", "#", "[h]:22", "*", "!"])
)
FRAMES = st.lists(
    st.one_of(
        st.binary(max_size=30),
        VALUES.filter(lambda v: isinstance(v, dict)).map(lambda v: raw(line_of(v))),
        st.tuples(st.integers(0, 1 << 32), st.integers(0, 255), st.binary(max_size=20)).map(
            lambda t: struct.pack(">IB", t[0] & 0xFFFFFFFF, t[1]) + t[2]
        ),
    ),
    max_size=6,
).map(b"".join)


def raw(body: bytes) -> bytes:
    return struct.pack(">IB", len(body), 0) + body


def pictured(line: bytes) -> object:
    return node_samples.parse_rank_steps(line), node_samples.parse_host_usage(line)


READERS: dict[str, Reader] = {
    "frames": Reader(FRAMES, frames, (FrameError,), 10),
    "a line of a journal": Reader(
        mutated(EVENTS).map(line_of) | st.binary(max_size=200), journal_lines.parse_event_line, (FrameError,), 10
    ),
    "the fold of a journal": Reader(st.lists(mutated(EVENTS), max_size=6), folded, (), 11),
    "a line of samples": Reader(
        mutated(SAMPLES).map(line_of) | st.binary(max_size=200), node_samples.parse_sample, (FrameError,), 6
    ),
    "what pictures take": Reader(mutated(SAMPLES).map(line_of) | st.binary(max_size=200), pictured, (), 3),
    "the rules over samples": Reader(st.lists(mutated(SAMPLES), max_size=4), sampled, (), 10),
    "a status file": Reader(mutated(STATUS), status_file, (FrameError,), 10),
    "an answer": Reader(
        st.one_of(*(st.tuples(st.just(command), mutated(good)) for command, good in ANSWERS.items())),
        answered,
        (FrameError,),
        10,
    ),
    "a hello": Reader(mutated(HELLO), hello, (FrameError,), 7),
    "the first words": Reader(
        st.binary(max_size=200) | mutated({"python": "p", "version": "3.11"}).map(lambda v: line_of(v) + b"\n"),
        preamble,
        (ValueError,),
        5,
    ),
    "a journal of the head": Reader(
        mutated([json.loads(controller_events.encode(1, 1.0, event)) for event in HEAD]), head_folded, (FrameError,), 5
    ),
    "an index": Reader(st.lists(RECORD | st.binary(max_size=20), max_size=20).map(b"".join), indexed, (), 3),
    "a cluster file": Reader(
        st.lists(PIECES, max_size=30).map("".join) | st.binary(max_size=200),
        cluster_file,
        (ConfigError,),
        4,
    ),
    "known hosts": Reader(KNOWN.map("".join) | st.text(max_size=200), known_hosts.parse_known_hosts, (), 3),
    "an answer of ssh -G": Reader(SSH, ssh_answer, (ClusterctlError,), 3),
}


def test_the_shares_are_all_inputs() -> None:
    assert sum(reader.share for reader in READERS.values()) == 100


@pytest.mark.parametrize("name", READERS)
def test_no_input_makes_a_reader_break_its_promise_or_take_long(name: str) -> None:
    reader = READERS[name]

    def once(value: Any) -> float:
        began = time.thread_time()
        with contextlib.suppress(*reader.promised):
            reader.read(value)
        return time.thread_time() - began

    @settings(
        max_examples=max(1, INPUTS * reader.share // 100),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(value=reader.inputs)
    def every(value: Any) -> None:
        if once(value) > MOST_SECONDS:
            assert min(once(value) for _ in range(TRIES)) < MOST_SECONDS

    every()


LONG = 63 * 1024
LARGE: dict[str, tuple[str, Any]] = {
    "a journal line of lists": ("a line of a journal", b"[" * LONG),
    "a journal line of digits": ("a line of a journal", b'{"kind":"exited","seq":' + b"1" * LONG + b"}"),
    "a tail of traceback heads": (
        "the fold of a journal",
        [{**EVENTS[2], "error": None, "tail": ("Traceback (most recent call last):\n" * 300)[:8192]}] * 6,
    ),
    "a tail of peers": ("the fold of a journal", [{**EVENTS[2], "error": None, "tail": ("peer " * 2000)[:8192]}] * 6),
    "a tail of blanks": ("the fold of a journal", [{**EVENTS[2], "error": None, "tail": " " * 8192}] * 6),
    "pictures of a rank without an end": (
        "what pictures take",
        b'{"t":1.0,' + b'"1":{"alive":true,' * (LONG // 40) + b'"' * (LONG // 2) + b'"kind":"activity"}',
    ),
    "samples of lists": ("a line of samples", b'{"kind":"health","gpus":' + b"[" * LONG),
    "a sample of ranks": (
        "the rules over samples",
        [{**SAMPLES[0], "ranks": {str(rank): {**RANK, "inside": None} for rank in range(400)}}],
    ),
    "frames of headers": ("frames", struct.pack(">IB", 0, 1) * (LONG // 5)),
    "first words without an end": ("the first words", b"clusterctl:n0nce:old " * 3000),
    "known hosts of commas": ("known hosts", "," * LONG),
    "an index of noise": ("an index", b"\xff" * LONG),
}


@pytest.mark.parametrize("case", LARGE)
def test_no_large_input_takes_long(case: str) -> None:
    name, value = LARGE[case]
    seconds = []
    for _ in range(TRIES):
        began = time.thread_time()
        with contextlib.suppress(*READERS[name].promised):
            READERS[name].read(value)
        seconds.append(time.thread_time() - began)
    assert min(seconds) < MOST_SECONDS
