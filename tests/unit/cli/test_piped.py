"""What a command takes for its input."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from clusterctl.cli.node_command_runs import MAX_INPUT_BYTES, read_piped_input
from clusterctl.errors import RefusedError


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def test_all_that_is_piped_in_is_taken(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"one\ntwo")
    os.close(writer)
    said: list[str] = []

    assert read_piped_input(reader, said.append) == b"one\ntwo"
    assert said == []


def test_a_pipe_that_nobody_ends_is_given_up_after_a_word(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    said: list[str] = []

    with pytest.raises(RefusedError, match="standard input does not end"):
        read_piped_input(reader, said.append, notice_after_s=0.0, give_up_after_s=0.0)

    os.close(writer)
    assert said == ["waiting for the end of standard input; `< /dev/null` gives an empty input"]


def test_a_device_gives_nothing() -> None:
    with open("/dev/zero", "rb") as device:
        assert read_piped_input(device.fileno(), print) == b""


def test_a_descriptor_that_is_closed_gives_nothing(pipe: tuple[int, int]) -> None:
    _, writer = pipe
    os.close(writer)

    assert read_piped_input(writer, print) == b""


def test_what_is_too_long_is_refused() -> None:
    fd = os.memfd_create("input")
    os.ftruncate(fd, MAX_INPUT_BYTES + 1)
    try:
        with pytest.raises(RefusedError, match="longer than 2 MiB"):
            read_piped_input(fd, print)
    finally:
        os.close(fd)
