"""What travels between head and node, byte by byte: frames, requests, and the words of `docs/protocol.md`."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.protocol import command_messages, run_files
from clusterctl.agent.protocol import frames as frames_module
from clusterctl.agent.protocol.command_messages import Command, ErrorKind
from clusterctl.agent.protocol.frames import FrameDecoder, FrameError, StreamData
from clusterctl.agent.serve.main import IDLE_TIMEOUT_S
from clusterctl.session.heartbeat import HEARTBEAT_INTERVAL_S

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
MIB = 1024 * 1024


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def frames(*chunks: bytes) -> list[Any]:
    decoder = FrameDecoder()
    return [frame for chunk in chunks for frame in decoder.feed(chunk)]


# --- frames


def test_a_message_that_no_frame_holds_is_refused_with_its_size_and_the_most() -> None:
    with pytest.raises(
        frames_module.FrameTooLargeError, match=r"^the message has 17\.0 MiB and may have at most 16 MiB$"
    ):
        frames_module.encode_message({"x": "a" * (17 * MIB)})


def test_a_message_is_a_header_and_a_json_object() -> None:
    body = '{"id":7,"text":"größe"}'.encode()

    assert frames_module.encode_message({"id": 7, "text": "größe"}) == struct.pack(">IB", len(body), 0) + body


def test_data_is_a_header_its_stream_its_offset_and_the_bytes() -> None:
    frame = struct.pack(">IB", 12 + 3, 1) + struct.pack(">IQ", 2**31, 2**40) + b"a\nb"

    assert frames_module.encode_data(2**31, 2**40, b"a\nb") == frame
    assert frames(frame) == [StreamData(2**31, 2**40, b"a\nb")]


def test_names_of_files_that_are_no_utf_8_travel() -> None:
    assert frames(frames_module.encode_message({"path": "caf\udce9"})) == [{"path": "caf\udce9"}]


@given(st.lists(st.binary(max_size=50), max_size=5), st.lists(st.integers(1, 20), max_size=40))
def test_frames_arrive_however_the_stream_was_split(payloads: list[bytes], cuts: list[int]) -> None:
    sent = [StreamData(number, 3 * number, payload) for number, payload in enumerate(payloads)]
    stream = b"".join(frames_module.encode_data(d.stream, d.offset, d.payload) for d in sent)
    stream += frames_module.encode_message({"last": True})
    chunks, start = [], 0
    for cut in cuts:
        chunks.append(stream[start : start + cut])
        start += cut

    assert frames(*chunks, stream[start:]) == [*sent, {"last": True}]


def test_nothing_is_given_out_before_it_is_whole() -> None:
    frame = frames_module.encode_message({"id": 1})
    decoder = FrameDecoder()

    assert [list(decoder.feed(frame[i : i + 1])) for i in range(len(frame))] == [[]] * (len(frame) - 1) + [[{"id": 1}]]


def test_an_empty_object_and_no_bytes_are_frames() -> None:
    assert frames(frames_module.encode_message({}) + frames_module.encode_data(0, 0, b"")) == [
        {},
        StreamData(0, 0, b""),
    ]


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        pytest.param(struct.pack(">IB", 2, 2) + b"{}", r"^not a frame: b'\\x00\\x00\\x00\\x02\\x02\{\}'$", id="kind 2"),
        pytest.param(b"Last login: today", "^not a frame: b'Last login: today'$", id="a greeting"),
        pytest.param(b"x" * 200, f"^not a frame: b'{'x' * 80}'$", id="a long greeting"),
        pytest.param(struct.pack(">IB", 16 * MIB + 1, 1), "^not a frame: ", id="longer than a frame may be"),
        pytest.param(struct.pack(">IB", 2, 0) + b"[]", r"^not a message: b'\[\]'$", id="a list"),
        pytest.param(struct.pack(">IB", 2, 0) + b"{{", r"^not a message: b'\{\{'$", id="no json"),
        pytest.param(struct.pack(">IB", 90, 0) + b"y" * 90, f"^not a message: b'{'y' * 80}'$", id="long, and no json"),
        pytest.param(
            struct.pack(">IB", 92, 0) + b'"%s"' % (b"y" * 90), "^not a message: b'\"y{79}'$", id="a long text"
        ),
    ],
)
def test_what_is_no_frame_of_ours_is_refused_and_quoted(stream: bytes, said: str) -> None:
    with pytest.raises(FrameError, match=said):
        frames(stream)


def test_the_frames_before_the_noise_were_given_out() -> None:
    decoder = FrameDecoder()
    feed = decoder.feed(frames_module.encode_message({"id": 1}) + b"noise!")

    assert next(feed) == {"id": 1}
    with pytest.raises(FrameError, match="noise"):
        next(feed)


@pytest.mark.parametrize("more", [0, 1], ids=["as many as may be", "one more"])
def test_a_message_of_millions_of_values_is_refused_before_they_are_made(more: int) -> None:
    # An object, a list, and what is in it: one mark for each.
    body = b'{"a":[' + b",".join([b"0"] * (frames_module.MAX_MESSAGE_VALUES - 1 + more)) + b"]}"
    stream = struct.pack(">IB", len(body), 0) + body
    if more:
        with pytest.raises(FrameError, match=r"^a message with over 2097152 values$"):
            frames(stream)
    else:
        (message,) = frames(stream)
        assert len(message["a"]) == frames_module.MAX_MESSAGE_VALUES - 1  # type: ignore[index]


def test_the_largest_frame_is_waited_for() -> None:
    assert frames(struct.pack(">IB", 16 * MIB, 1)) == []


# --- requests and answers


def test_requests_and_answers_have_their_shapes() -> None:
    assert command_messages.make_request(7, Command.STOP, {"grace": 1}, 3) == {
        "id": 7,
        "cmd": "stop",
        "args": {"grace": 1},
        "epoch": 3,
    }
    assert command_messages.make_answer(7, {"ports": []}) == {"id": 7, "result": {"ports": []}}
    assert command_messages.make_refused_error("no", "so").make_answer(7) == {
        "id": 7,
        "error": {"kind": "refused", "message": "no", "hint": "so"},
    }
    assert command_messages.make_failed_error("no").make_answer(7)["error"]["hint"] is None
    assert command_messages.make_heartbeat(4) == {"beat": 4}
    assert command_messages.make_heartbeat_answer(4, 1.5, 2.5, "b") == {
        "beat": 4,
        "wall": 1.5,
        "mono": 2.5,
        "boot": "b",
    }


# --- the page


def test_the_commands_are_those_of_the_page() -> None:
    told = re.findall(r"^\| `([a-z_]+)` \|", section("Requests"), re.MULTILINE)

    assert sorted(told) == sorted(command.value for command in Command)


def test_what_is_not_answered_is_what_the_page_says() -> None:
    (told,) = re.findall(r"exactly one answer with its id, except (.*?), which get no answer", section("Requests"))

    assert {command.value for command in command_messages.COMMANDS_WITHOUT_ANSWER} == set(
        re.findall("`([a-z]+)`", told)
    )


def test_the_kinds_of_errors_are_those_of_the_page() -> None:
    told = section("Requests").partition("The kinds of errors are ")[2].partition(".")[0]

    assert re.findall("`([a-z_]+)`", told) == [kind.value for kind in ErrorKind]


def test_the_numbers_are_those_of_the_page() -> None:
    assert f"at most {frames_module.MAX_FRAME_BYTES // MIB} MiB" in section("Frames")
    assert f"every {HEARTBEAT_INTERVAL_S:g} s" in section("Heartbeats")
    assert f"receives nothing for {IDLE_TIMEOUT_S:g} s" in section("Heartbeats")
    assert f"{frames_module.INITIAL_CREDIT_BYTES // 1024} KiB at first" in section("Pushes and streams")
    assert "streams from 2^31" in section("Pushes and streams")
    assert command_messages.FIRST_AGENT_STREAM == 2**31
    assert f"Version {command_messages.PROTOCOL_VERSION}." in PAGE
    assert frames_module.MAX_FRAME_BYTES % MIB == frames_module.INITIAL_CREDIT_BYTES % 1024 == 0
    assert frames_module.CHUNK_BYTES < frames_module.INITIAL_CREDIT_BYTES < frames_module.MAX_FRAME_BYTES


# --- names


def test_the_files_of_a_run_have_their_names() -> None:
    assert run_files.format_output_path(2, 7) == "attempt-2/rank-7.log"
    assert run_files.format_index_path(2, 7) == "attempt-2/rank-7.idx"
    assert (run_files.JOURNAL_FILE, run_files.SAMPLES_FILE) == ("journal.jsonl", "samples.jsonl")
    assert run_files.INDEX_RECORD.pack(1, 2.0) == struct.pack("<Qd", 1, 2.0)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("attempt-3/rank-12.log", (3, 12)),
        ("attempt-0/rank-0.log", (0, 0)),
        ("attempt-3/rank-12.idx", None),
        ("attempt-03/rank-1.log", None),
        ("attempt-x/rank-1.log", None),
        ("attempt-\u00b2/rank-0.log", None),
        ("attempt-\u0661/rank-0.log", None),
        ("samples.jsonl", None),
    ],
)
def test_the_output_of_a_worker_is_known_by_its_name(name: str, place: tuple[int, int] | None) -> None:
    assert run_files.parse_attempt_and_rank(name) == place


def test_as_much_of_its_samples_is_kept_as_the_page_says() -> None:
    assert run_files.MAX_SAMPLES_BYTES == 64 * MIB
