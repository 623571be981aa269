"""What is piped into `exec` reaches each node whole, and hosts are named without a cluster file."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from clusterctl.cli.node_command_runs import MAX_INPUT_BYTES
from tests.documented import typed

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

ODD = bytes(range(256)) * 16


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    head.write_local({"command": "true"}, workers=(1, 1))
    return head


def given(head: LocalHead, data: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run `exec` with something piped into it."""
    words = [sys.executable, "-m", "clusterctl", "exec", *arguments]
    return subprocess.run(
        words, cwd=head.folder, env=dict(head.env), input=data, capture_output=True, timeout=60, check=False
    )


def test_what_is_piped_in_reaches_every_node(head: LocalHead) -> None:
    done = given(head, b"x\n", "--", "cat")

    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == ["localhost.[0-1] (2)  x"]


@pytest.mark.parametrize(
    "data", [ODD, bytes(MAX_INPUT_BYTES), b"\xff" * MAX_INPUT_BYTES], ids=["every byte", "zeros", "no text"]
)
def test_input_arrives_byte_by_byte(head: LocalHead, data: bytes) -> None:
    done = given(head, data, "--", "sh", "-c", f"cat > {head.folder}/got-$$")

    got = list(head.folder.glob("got-*"))
    assert done.returncode == 0, done.stderr
    assert [path.read_bytes() == data for path in got] == [True, True]
    for path in got:
        path.unlink()


def test_a_file_is_given_as_what_is_piped_is(head: LocalHead) -> None:
    (head.folder / "list").write_text("one\n")
    with open(head.folder / "list", "rb") as file:
        words = [sys.executable, "-m", "clusterctl", "exec", "--", "cat"]
        done = subprocess.run(
            words, cwd=head.folder, env=dict(head.env), stdin=file, capture_output=True, timeout=60, check=False
        )

    assert done.stdout.decode().splitlines() == ["localhost.[0-1] (2)  one"]


def test_input_that_is_too_long_is_refused_and_nothing_runs(head: LocalHead) -> None:
    done = given(head, bytes(MAX_INPUT_BYTES + 1), "--", "touch", str(head.folder / "ran"))

    assert done.returncode == 6
    assert b"standard input is longer than 2 MiB" in done.stderr
    assert not (head.folder / "ran").exists()


@pytest.mark.parametrize("closed", ["</dev/null", "<&-"], ids=["nothing", "closed"])
def test_without_input_a_command_reads_its_end(head: LocalHead, closed: str) -> None:
    script = f'"$0" -m clusterctl exec -- sh -c "cat; echo end" {closed}'
    done = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable],
        cwd=head.folder,
        env=dict(head.env),
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert done.stdout.decode().splitlines() == ["localhost.[0-1] (2)  end"]


def test_who_waits_for_the_end_of_input_says_so(head: LocalHead) -> None:
    words = [sys.executable, "-m", "clusterctl", "exec", "--", "cat"]
    with subprocess.Popen(
        words,
        cwd=head.folder,
        env=dict(head.env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as waiting:
        assert waiting.stderr is not None
        assert (
            waiting.stderr.readline() == "waiting for the end of standard input; `< /dev/null` gives an empty input\n"
        )
        assert waiting.communicate("late\n", timeout=60)[0].splitlines() == ["localhost.[0-1] (2)  late"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-w", "gpu[1"), "`[` is not closed"),
        (("-w", "-oProxyCommand=x"), "a host name must not begin with `-`"),
        (("-w", "$(reboot)"), "`$(reboot)` is not a host name"),
        (("-w", "gpu01", "cluster.yaml"), "`-w` cannot be used together with `FILE`"),
    ],
    ids=["no range", "an option", "shell", "with a file"],
)
def test_what_names_no_hosts_is_a_mistake_of_usage(head: LocalHead, arguments: tuple[str, ...], said: str) -> None:
    done = head.run("exec", *arguments, "--", "true")

    assert done.returncode == 2
    assert said in done.stderr


def test_in_the_job_a_command_finds_folder_environment_and_prologue_of_it(make_head: MakeHead) -> None:
    head = make_head()
    (head.folder / "torch.py").write_text("print(__file__)")
    head.write_local({"command": "true", "prologue": "export SAID=before"}, workers=(1,), env={"OF_JOB": "yes"})

    said = head.run("exec", "--in-job", "--shell", "--", 'echo "$OF_JOB $SAID $PWD"')
    run = head.run(*typed("clusterctl exec --in-job -- python -c 'import torch'"))

    assert said.stdout.splitlines()[-1].endswith(f"yes before {head.folder}")
    assert run.stdout.splitlines()[-1].endswith(f"{head.folder}/torch.py")


def test_in_the_job_needs_a_job(head: LocalHead) -> None:
    done = head.run("exec", "--in-job", "-w", "localhost", "--", "true")

    assert done.returncode == 2
    assert "`-w` cannot be used together with `--in-job`" in done.stderr
