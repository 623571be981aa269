"""The lab proves itself, with the system's ssh client: every control does what it says."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.keys import make_key
from tests.lab.lab import REPOSITORY, Lab
from tests.lab.spec import NOISE, SHARED, NodeSpec
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

QUICK = ("-o", "ConnectTimeout=2", "-o", "ConnectionAttempts=1")


def answers(lab: Lab, node: Node | str, *options: str) -> bool:
    return lab.ssh(node, "true", *QUICK, *options).returncode == 0


def test_every_node_is_a_machine_of_its_own_and_shares_one_directory(lab: Lab, nodes: NodeFactory) -> None:
    some = nodes(4)
    (lab.shared / "hello").write_text("from the head")
    seen = [
        lab.ssh(
            node,
            "hostname; cat /proc/sys/kernel/random/boot_id /etc/machine-id; ls /sys/class/net | grep -v lo;"
            f"hostname -i; cat {SHARED}/hello; touch {SHARED}/$(hostname) /tmp/x /var/tmp/x /dev/shm/x ~/x /run/x",
        ).stdout.splitlines()
        for node in some
    ]
    for node, (hostname, boot_id, _, interface, own_address, shared) in zip(some, seen, strict=True):
        assert (hostname, boot_id, interface) == (node.name, node.boot_id, node.interface)
        assert (own_address, shared) == ("127.0.1.1", "from the head")
        assert node.leftovers() == []
    assert {path.name for path in lab.shared.iterdir()} >= {node.name for node in some}
    for column in range(4):
        assert len({row[column] for row in seen}) == 4
    assert not os.path.exists("/run/x")


def test_a_node_sees_its_own_processes_only(lab: Lab, nodes: NodeFactory) -> None:
    first, second = nodes(2)
    decoy = first.start(["sleep", "1234"])
    pid = first.wait_for(lambda: first.pid_of("^sleep 1234$"), what="the decoy")
    assert [p.pid for p in first.leftovers()] == [pid]
    assert first.environ(pid)["HOME"] == "/root"
    assert second.leftovers() == []
    assert "sleep 1234" not in lab.ssh(second, "cat /proc/*/cmdline | tr '\\0' ' '").stdout
    first.signal(pid, signal.SIGKILL)
    assert decoy.wait(timeout=10) != 0


def test_thirty_two_nodes_take_sixty_four_connections_at_once(nodes: NodeFactory) -> None:
    many = nodes(32)
    with ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection((node.address, 22), 10)) for node in many * 2]
        assert [link.recv(8) for link in links] == [b"SSH-2.0-"] * 64


def test_nodes_reach_each_other_and_no_other_network(nodes: NodeFactory) -> None:
    first, second = nodes(2)
    assert (
        first.run(["python3", "-c", f"import socket; socket.create_connection(('{second.address}', 22), 5)"]).returncode
        == 0
    )
    outside = "import socket; socket.create_connection(('192.0.2.1', 53), 1)"
    assert first.run(["python3", "-c", outside]).returncode != 0


def test_the_system_ssh_client_finds_the_labs_files_by_itself(
    lab: Lab, nodes: NodeFactory, head_env: dict[str, str]
) -> None:
    (node,) = nodes()
    done = subprocess.run(
        ["ssh", "-o", "BatchMode=yes", node.name, "hostname"], env=head_env, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{node.name}\n"
    settings = subprocess.run(["ssh", "-G", node.name], env=head_env, capture_output=True, text=True, check=True).stdout
    assert f"userknownhostsfile {lab.head_home}/.ssh/known_hosts" in settings


def test_a_killed_node_is_gone_without_a_word(lab: Lab, nodes: NodeFactory) -> None:
    first, second = nodes(2)
    with socket.create_connection((first.address, 22), timeout=5) as link:
        assert link.recv(64).startswith(b"SSH-2.0")
        first.kill()
        link.settimeout(0.5)
        with pytest.raises(TimeoutError):
            link.recv(64)
    assert not first.alive
    assert first.processes() == []
    assert not answers(lab, first)
    assert answers(lab, second)


@pytest.mark.parametrize("carrier", [pytest.param(False, id="silent"), pytest.param(True, id="link down")])
def test_a_cut_link_comes_back_with_its_connections(lab: Lab, nodes: NodeFactory, carrier: bool) -> None:
    (node,) = nodes()
    argv = ["ssh", "-F", str(lab.ssh_config), node.name, "cat"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=lab.head_env()
    ) as session:
        assert session.stdin is not None
        assert session.stdout is not None
        session.stdin.write("before\n")
        session.stdin.flush()
        assert session.stdout.readline() == "before\n"
        node.cut(carrier=carrier)
        assert not answers(lab, node)
        assert node.run(["hostname"]).stdout == f"{node.name}\n"
        session.stdin.write("during\n")
        session.stdin.flush()
        node.restore()
        assert session.stdout.readline() == "during\n"
        session.stdin.close()
    wait_for(lambda: answers(lab, node), what="the link to be back")


def test_a_cut_head_leaves_the_nodes_together(lab: Lab, nodes: NodeFactory) -> None:
    first, second = nodes(2)
    connect = ["python3", "-c", f"import socket; socket.create_connection(('{second.address}', 22), 5)"]
    lab.cut_head()
    assert not answers(lab, first)
    assert first.run(connect).returncode == 0
    lab.restore_head()
    assert answers(lab, first)


def test_two_nodes_can_be_parted_while_the_head_reaches_both(lab: Lab, nodes: NodeFactory) -> None:
    first, second = nodes(2)
    connect = ["python3", "-c", f"import socket; socket.create_connection(('{second.address}', 22), 1)"]
    first.block(second)
    assert first.run(connect).returncode != 0
    assert answers(lab, first)
    first.unblock(second)
    assert first.run(connect).returncode == 0
    first.block("head")
    assert not answers(lab, first)


def test_sshd_dies_alone_and_comes_back(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes()
    lab.ssh(node, "setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
    pid = node.wait_for(lambda: node.pid_of("^sleep 1000"), what="the sleeper")
    node.kill_sshd()
    assert node.alive
    assert node.sshd_pids() == []
    assert node.pid_of("^sleep 1000") == pid
    assert "refused" in lab.ssh(node, "true", *QUICK).stderr
    node.restart_sshd()
    assert answers(lab, node)


def test_a_stopped_sshd_accepts_and_says_nothing(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes()
    node.stop_sshd()
    with socket.create_connection((node.address, 22), timeout=5) as link:
        link.settimeout(0.5)
        with pytest.raises(TimeoutError):
            link.recv(64)
        node.cont_sshd()
        link.settimeout(10)
        assert link.recv(64).startswith(b"SSH-2.0")
    assert answers(lab, node)


def test_a_full_disk_is_full_until_it_is_freed(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes(1, disk="64m")
    assert (
        lab.ssh(node, "head -c 1000000 /dev/zero > ~/some && df --output=size ~ | tail -n 1").stdout.strip() == "65536"
    )
    node.fill_disk()
    assert "No space left" in lab.ssh(node, "head -c 100000 /dev/zero > ~/more").stderr
    assert lab.ssh(node, "echo fine > /tmp/elsewhere").returncode == 0
    node.free_disk()
    assert lab.ssh(node, "head -c 100000 /dev/zero > ~/more").returncode == 0


def test_a_skewed_clock_shifts_wall_time_only(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes()
    node.skew_clock(3600)
    program = "import time; print(time.time(), time.monotonic())"
    wall, monotonic = map(float, lab.ssh(node, f'python3 -c "{program}"').stdout.split())
    assert abs(wall - time.time() - 3600) < 30
    assert abs(monotonic - time.monotonic()) < 30
    node.skew_clock(0)
    assert abs(float(lab.ssh(node, "date +%s").stdout) - time.time()) < 30


def test_a_firewalled_port_is_silent_and_a_rejected_one_resets(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes()
    node.firewall(22)
    assert "timed out" in lab.ssh(node, "true", *QUICK).stderr
    node.firewall(22, action="reject with tcp reset")
    assert "refused" in lab.ssh(node, "true", *QUICK).stderr
    node.open_firewall()
    assert answers(lab, node)


def test_a_node_behind_another_is_reached_by_a_jump_only(lab: Lab, nodes: NodeFactory) -> None:
    _, inner = nodes([NodeSpec(), NodeSpec(via="n1")])
    assert lab.ssh(inner, "hostname").stdout == f"{inner.name}\n"
    assert not answers(lab, inner, "-o", "ProxyJump=none")


@pytest.mark.parametrize(
    "shell", ["/bin/sh", "/bin/bash", "/bin/csh", "/usr/bin/tcsh", "/usr/bin/fish", "/usr/bin/zsh"]
)
def test_login_shell_and_account_are_the_ones_asked_for(lab: Lab, nodes: NodeFactory, shell: str) -> None:
    (node,) = nodes(1, shell=shell, user="train")
    said = lab.ssh(node, "id -un; id -u; echo $HOME; touch ~/mine; touch /root/x; true").stdout.split()
    assert said == ["train", "2000", "/home/train"]
    assert node.run(["getent", "passwd", "train"]).stdout.strip().endswith(f":{shell}")
    assert node.path("mine").stat().st_uid == 2000
    assert not node.path("/root/x").exists()


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/csh", "/usr/bin/fish", "/usr/bin/zsh"])
def test_a_noisy_node_prints_before_the_command_does(lab: Lab, nodes: NodeFactory, shell: str) -> None:
    (node,) = nodes(1, shell=shell, noisy=True)
    done = lab.ssh(node, "echo done")
    assert NOISE in done.stdout
    assert done.stdout.endswith("done\n")
    assert done.stderr != ""


def test_a_node_without_python_has_none_anywhere(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes(1, python=None)
    done = lab.ssh(node, f"command -v python3 python; ls {sys.executable} /usr/bin/python3*; ls /usr/bin/env")
    assert done.stdout == "/usr/bin/env\n"


def test_another_python_comes_first_on_the_path_and_its_library_with_it(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes(1, python="/usr/bin/python3", user="train")
    done = lab.ssh(node, "command -v python3; python3 -c 'import json, sys; print(sys.executable)'")
    assert done.stdout.split() == ["/usr/local/bin/python3", "/usr/local/bin/python3"]


def test_programs_and_environment_of_a_node_are_its_own(lab: Lab, nodes: NodeFactory) -> None:
    strange = {"ODD": "a b $(id) 'x'"}
    first, second = nodes([NodeSpec(programs={"nvidia-smi": "#!/bin/sh\necho fake\n"}, env=strange), NodeSpec()])
    assert lab.ssh(first, "nvidia-smi; printenv ODD").stdout == "fake\na b $(id) 'x'\n"
    assert lab.ssh(second, "nvidia-smi").returncode == 127


def test_limits_reach_the_sessions(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes(1, limits={"memlock": "65536", "nofile": "512"})
    assert lab.ssh(node, "ulimit -l; ulimit -n").stdout.split() == ["64", "512"]
    node.restart_sshd()
    assert lab.ssh(node, "ulimit -l; ulimit -n").stdout.split() == ["64", "512"]


def test_ways_to_authenticate_are_those_of_the_spec(lab: Lab, nodes: NodeFactory, tmp_path: Path) -> None:
    password, two_steps, certified, refused = nodes(
        [
            NodeSpec(password="secret", sshd=("PubkeyAuthentication no",)),
            NodeSpec(password="secret", sshd=("AuthenticationMethods publickey,password",)),
            NodeSpec(authorized=False, user_ca=True),
            NodeSpec(authorized=False),
        ]
    )
    assert "Permission denied (password)" in lab.ssh(password, "true").stderr
    assert "Permission denied (password)" in lab.ssh(two_steps, "true").stderr
    assert "Permission denied (publickey)" in lab.ssh(refused, "true").stderr
    assert "Permission denied (publickey)" in lab.ssh(certified, "true").stderr
    asking = tmp_path / "ask"
    asking.write_text("#!/bin/sh\necho secret\n")
    asking.chmod(0o700)
    env = lab.head_env(SSH_ASKPASS=str(asking), SSH_ASKPASS_REQUIRE="force")
    for node in (password, two_steps):
        assert subprocess.run(["ssh", node.name, "true"], env=env, check=False, capture_output=True).returncode == 0
    key = make_key(tmp_path / "key")
    lab.certify(key)
    assert answers(lab, certified, "-i", str(key))


def test_host_keys_are_known_changed_unknown_or_certified(lab: Lab, nodes: NodeFactory) -> None:
    plain, unknown, certified, legacy = nodes(
        [
            NodeSpec(),
            NodeSpec(known=False),
            NodeSpec(host_certificate=True),
            NodeSpec(host_key="rsa", sshd=("HostKeyAlgorithms ssh-rsa",)),
        ]
    )
    assert answers(lab, plain)
    assert "Host key verification failed" in lab.ssh(unknown, "true").stderr
    assert answers(lab, certified)
    assert "no matching host key type" in lab.ssh(legacy, "true").stderr
    plain.new_host_key()
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in lab.ssh(plain, "true").stderr


def test_names_and_ports_may_be_chosen(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes(1, name="gpu-a", port=2222)
    assert lab.ssh("gpu-a", "hostname").stdout == "gpu-a\n"
    assert (node.listens(2222), node.listens(22)) == (True, False)


def test_a_shared_home_is_one_home(lab: Lab, nodes: NodeFactory) -> None:
    first, second = nodes(2, shared_home=True)
    lab.ssh(first, "echo here > ~/note")
    assert lab.ssh(second, "cat ~/note").stdout == "here\n"


def test_nodes_cannot_change_the_machine_they_run_on(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes()
    done = lab.ssh(node, f"touch /usr/x /etc/x /var/x {sys.prefix}/x; mkdir /sys/fs/cgroup/x; ls -A {REPOSITORY}")
    assert len(re.findall("Read-only file system", done.stderr)) == 5
    exposed = [part for part in Path(sys.prefix).parts if REPOSITORY / part == Path(sys.prefix)]
    assert done.stdout.split() == exposed


def test_cgroups_of_a_node_are_its_own_and_go_with_it(lab: Lab, nodes: NodeFactory) -> None:
    (node,) = nodes(1, cgroup=True)
    top = lab.ssh(node, "grep -m 1 ' cgroup2 ' /proc/self/mounts").stdout.split()[1]
    made = lab.ssh(
        node, f"cat /proc/self/cgroup | tail -n 1; mkdir {top}/run && echo 1 > {top}/run/cgroup.kill && echo yes"
    )
    assert made.stdout == "0::/\nyes\n"
    assert all(Path(folder).is_dir() for folder in node.cgroups)
    lab.remove([node])
    assert not any(Path(folder).exists() for folder in node.cgroups)


def test_memory_of_a_node_can_run_out(lab: Lab, nodes: NodeFactory) -> None:
    if not Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists():
        pytest.skip("no memory controller of cgroup version 1 here")
    (node,) = nodes(1, cgroup=True, memory="200M")
    eater = "python3 -c 'x = bytearray(400_000_000)'"
    assert lab.ssh(node, f"{eater}; echo $?; cat /sys/fs/cgroup/memory/memory.oom_control").stdout.startswith("137")
    assert answers(lab, node)


OWNER = """
import json, sys
from tests.lab.lab import Lab
lab = Lab()
lab.start()
made = lab.add(3)
made[0].start(["setsid", "sleep", "4321"])
made[0].wait_for(lambda: made[0].pid_of("sleep 4321"))
host = [pid for node in made for pid in (node.guard_pid, node.init_pid)]
print(json.dumps({"root": str(lab.root), "pids": host}), flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_a_lab_whose_process_was_killed(tmp_path: Path) -> None:
    reason = Lab.unavailable()
    if reason:
        pytest.skip(reason)
    argv = [sys.executable, "-c", OWNER]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        told = json.loads(owner.stdout.readline())
        network = os.readlink(f"/proc/{owner.pid}/ns/net")
        owner.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in told["pids"]), what="the nodes to be gone")
    wait_for(lambda: network not in _networks_in_use(), what="the lab's network to be gone")
    with Lab():
        pass
    assert not Path(told["root"]).exists()


def _networks_in_use() -> set[str]:
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    return found
