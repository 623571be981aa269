"""Who may command a run: the highest epoch, kept in a file that never shrinks and is never left half written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterctl.agent.node_state import fencing
from clusterctl.agent.protocol.command_messages import ErrorKind, RequestError


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "epoch")


def test_before_the_first_command_there_is_no_epoch(path: str) -> None:
    assert fencing.read_epoch(path) == 0


def test_the_highest_epoch_is_kept(path: str) -> None:
    for epoch in (1, 9, 10, 10):
        fencing.check_epoch(path, epoch)
        assert fencing.read_epoch(path) == epoch
    assert Path(path).read_bytes() == b"00000000000000000010\n"
    assert Path(path).stat().st_mode & 0o777 == 0o600


def test_a_controller_that_was_replaced_is_refused_and_changes_nothing(path: str) -> None:
    fencing.check_epoch(path, 12)

    with pytest.raises(RequestError) as caught:
        fencing.check_epoch(path, 11)

    assert caught.value.kind is ErrorKind.STALE_EPOCH
    assert str(caught.value) == "another controller has taken over the run: its epoch 12 is higher than 11"
    assert fencing.read_epoch(path) == 12


@pytest.mark.parametrize("text", ["", "torn", "-3", "\n"])
def test_a_file_that_says_nothing_is_no_epoch(path: str, text: str) -> None:
    Path(path).write_text(text)

    assert fencing.read_epoch(path) == 0


def test_an_empty_file_of_a_full_disk_is_no_epoch(path: str) -> None:
    Path(path).touch()

    fencing.check_epoch(path, 3)

    assert fencing.read_epoch(path) == 3


def test_the_lease_is_one_line_of_one_length_and_never_goes_back(path: str) -> None:
    said = []
    for _ in range(2):
        fencing.renew_lease(path)
        said.append(Path(path).read_bytes())

    assert [(len(text), text[-1:]) for text in said] == [(21, b"\n")] * 2
    assert 0 < float(said[0]) <= float(said[1])
    assert Path(path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "torn", "\n"])
def test_a_lease_that_says_nothing_is_none(path: str, text: str) -> None:
    assert fencing.read_last_renewal(path) is None
    Path(path).write_text(text)
    assert fencing.read_last_renewal(path) is None


def test_a_lease_says_when_a_controller_was_heard(path: str) -> None:
    before = fencing.read_lease_clock()
    fencing.renew_lease(path)
    heard = fencing.read_last_renewal(path)

    assert heard is not None
    # It is written down in milliseconds.
    assert before - 0.001 <= heard <= fencing.read_lease_clock() + 0.001


def test_neither_file_leaves_anything_open(path: str) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    fencing.check_epoch(path, 3)
    with pytest.raises(RequestError):
        fencing.check_epoch(path, 2)
    fencing.renew_lease(path)

    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_lease_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    fencing.renew_lease(str(tmp_path / "missing" / "lease"))
    fencing.renew_lease(str(tmp_path))

    assert list(tmp_path.iterdir()) == []
