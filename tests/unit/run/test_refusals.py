"""What is refused before it does harm, from facts as nodes tell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.linux import logind_and_nccl_files
from clusterctl.agent.node_state import run_dir
from clusterctl.errors import ExitCode, RefusedError
from clusterctl.run.rules.logout_check import describe_head_logout_warning, refuse_kill_at_logout

KILLS = {"kill_user_processes": True, "linger": False}


@pytest.mark.parametrize(
    "logind",
    [
        pytest.param(None, id="no logind"),
        pytest.param({"kill_user_processes": False, "linger": False}, id="as distributions ship it"),
        pytest.param({"kill_user_processes": True, "linger": True}, id="lingering is on"),
    ],
)
def test_a_machine_that_lets_processes_live_is_not_refused(logind: dict[str, Any] | None) -> None:
    refuse_kill_at_logout({"gpu01": {"user": "ann", "logind": logind}})

    assert describe_head_logout_warning(logind, "ann") is None


def test_machines_that_end_processes_at_logout_are_refused_with_the_command_that_changes_it() -> None:
    hellos = {f"gpu{i:02}": {"user": "ann", "logind": KILLS if i != 2 else None} for i in range(1, 5)}

    with pytest.raises(RefusedError) as caught:
        refuse_kill_at_logout(hellos)

    assert caught.value.exit_code is ExitCode.REFUSED
    assert str(caught.value).startswith("gpu[01,03-04]: ")
    assert caught.value.hint == "on these nodes: `loginctl enable-linger ann`"


def test_a_head_that_ends_processes_at_logout_is_warned_of() -> None:
    assert "`loginctl enable-linger ann`" in (describe_head_logout_warning(KILLS, "ann") or "")


def machine(root: Path, *files: tuple[str, str]) -> str:
    for place in ("run/systemd/system", "run/systemd/sessions"):
        (root / place).mkdir(parents=True)
    for name, text in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


LATER = "etc/systemd/logind.conf.d/50-site.conf"


@pytest.mark.parametrize(
    ("files", "user", "expected"),
    [
        pytest.param([], "ann", (False, False), id="nothing is set"),
        pytest.param([("etc/systemd/logind.conf", "[Login]\nKillUserProcesses=yes\n")], "ann", (True, False), id="set"),
        pytest.param(
            [("etc/systemd/logind.conf", "[Login]\n#KillUserProcesses=yes\n")], "ann", (False, False), id="a comment"
        ),
        pytest.param(
            [("etc/systemd/logind.conf", "KillUserProcesses=no\n"), (LATER, "[Login]\nKillUserProcesses = true\n")],
            "ann",
            (True, False),
            id="a later file wins",
        ),
        pytest.param([(LATER, "KillUserProcesses=yes\n")], "root", (False, False), id="root is spared"),
        pytest.param(
            [(LATER, "KillUserProcesses=yes\nKillExcludeUsers=bob ann\n")], "ann", (False, False), id="spared by name"
        ),
        pytest.param(
            [(LATER, "KillUserProcesses=yes\nKillOnlyUsers=bob\n")], "ann", (False, False), id="only others are meant"
        ),
        pytest.param(
            [(LATER, "KillUserProcesses=yes\n"), ("var/lib/systemd/linger/ann", "")], "ann", (True, True), id="lingers"
        ),
    ],
)
def test_what_logind_was_told(
    tmp_path: Path, files: list[tuple[str, str]], user: str, expected: tuple[bool, bool]
) -> None:
    found = logind_and_nccl_files.read_logind_settings(user, machine(tmp_path, *files))

    assert found == {"kill_user_processes": expected[0], "linger": expected[1]}


def test_without_logind_there_is_nothing_to_judge(tmp_path: Path) -> None:
    assert logind_and_nccl_files.read_logind_settings("ann", str(tmp_path)) is None


@pytest.mark.parametrize(
    ("kind", "told", "expected"),
    [
        pytest.param(None, None, "home/.local/state/clusterctl", id="a home of its own"),
        pytest.param("nfs4", None, "/var/tmp/clusterctl-1000", id="a home that other machines share"),
        pytest.param("fuse.of-tomorrow", None, "/var/tmp/clusterctl-1000", id="a home that some program serves"),
        pytest.param("nfs4", "scratch", "scratch/clusterctl", id="told where to keep state"),
    ],
)
def test_the_state_root_is_never_on_a_network_file_system(
    tmp_path: Path, kind: str | None, told: str | None, expected: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    mounts = tmp_path / "proc/self/mounts"
    mounts.parent.mkdir(parents=True)
    mounts.write_text("/dev/sda / ext4 rw 0 0\n" + (f"server:/x {home} {kind} rw 0 0\n" if kind else ""))
    environ = {"XDG_STATE_HOME": str(tmp_path / told)} if told else {}

    assert run_dir.choose_state_root(environ, str(home), 1000, str(tmp_path)) == str(tmp_path / expected)
